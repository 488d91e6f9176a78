"""Rows about numbers and speeds on a small model over four devices, with faults put in by hand: each is named."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.random_checkpoint import write_random_qwen3
from tests.several.runs import settings
from tpu_grpo.checking import measured_rates, numerics
from tpu_grpo.checking.findings import Finding
from tpu_grpo.checking.numerics import Shared
from tpu_grpo.config import parse_config
from tpu_grpo.engine import gather_attention
from tpu_grpo.engine.options import EngineOptions
from tpu_grpo.hosts import Hosts
from tpu_grpo.launching.tpus import parse_slice
from tpu_grpo.run.abstract import open_abstract_checkpoint
from tpu_grpo.weights.sync import WeightSync

V5E = parse_slice("v5e-4").generation


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    directory = tmp_path_factory.mktemp("check")
    model = write_random_qwen3(directory / "model", layers=3)
    rollout = {"batch_paddings": [8], "max_running_requests": 8}
    meshes = {"sampler": {"tensor": 4}}  # one engine to compile
    config = parse_config(settings(directory / "run", model={"path": str(model)}, rollout=rollout, meshes=meshes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_GRPO_CACHE", str(directory / "cache"))
        patch.setattr(numerics, "LAYERS", 1)
        yield Shared(config, directory, Hosts)


def works(shared: Shared, *rows: Callable[[Shared], Finding]) -> list[Finding]:
    found = [row(shared) for row in rows]
    assert [finding.verdict for finding in found] == ["works"] * len(rows), found
    return found


@pytest.mark.full
def test_rows_about_numbers_work(small: Shared) -> None:
    rows = numerics.log_probabilities("float32"), numerics.decode_loop, numerics.update, numerics.weight_sync
    works(small, *rows)
    assert small.build("float32").checkpoint.config.num_hidden_layers == 1  # of the model's three
    assert small.rates["launch_seconds"] > 0


@pytest.mark.slow
def test_the_other_rows_work(small: Shared) -> None:
    first = numerics.compile_programs, numerics.attention, numerics.log_probabilities("bfloat16"), numerics.decode_loop
    speeds = measured_rates.products, measured_rates.bandwidth, measured_rates.links, measured_rates.kernel
    works(small, *first, numerics.filters, numerics.sampler, *speeds, measured_rates.prefill)
    assert "a launch, plans assume" in measured_rates.host_time(small).text
    *_, plan = works(small, measured_rates.learner, measured_rates.plan)
    assert plan.figures.keys() == {"decode_step", "rollout", "update", "sync"}
    assert all(value > 0 for value in plan.figures.values())


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_kernel_that_is_off_is_named(small: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = gather_attention.decode_attention
    monkeypatch.setattr(gather_attention, "decode_attention", lambda *given: attend(*given) + 1e-3)
    finding = numerics.attention(small)
    assert finding.verdict == "broken"
    assert finding.text.startswith("gather attention in float32 off by 0.001, must be within 2e-05")


def test_a_filter_that_drops_a_token_is_named(small: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    right = numerics.filter_logits

    def wrong(logits_BV: Any, columns: Any) -> Any:
        kept_BV = right(logits_BV, columns)
        return kept_BV.at[4, jnp.argmax(kept_BV[4])].set(-jnp.inf)

    monkeypatch.setattr(numerics, "filter_logits", wrong)
    finding = numerics.filters(small)
    assert finding.verdict == "broken"
    assert "1 tokens of 300 were wrongly dropped" in finding.text
    assert finding.text.startswith("with {'top_k': 50.0, 'top_p': 0.8")


@pytest.mark.full
def test_another_noise_is_named(small: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    right = numerics.sample_tokens
    monkeypatch.setattr(
        numerics,
        "sample_tokens",
        lambda logits, columns: right(logits, columns._replace(position=columns.position + 1)),
    )
    assert "drawn tokens are not those of their keys" in numerics.sampler(small).text


def test_a_wrong_type_is_named(small: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    right: Callable[..., EngineOptions] = EngineOptions.from_config
    monkeypatch.setattr(EngineOptions, "from_config", lambda *a, **k: replace(right(*a, **k), dtype="bfloat16"))
    finding = numerics.log_probabilities("float32")(Shared(small.config, small.directory, Hosts))
    assert finding.verdict == "broken"
    assert finding.text.startswith("all numbers must be float32, got the engine's ")


@pytest.mark.full
def test_a_sync_that_forgets_a_leaf_is_named(small: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    numerics.update(small)
    right = WeightSync._is_done
    forgotten: list[str] = []

    def forget(self: WeightSync, group: Any) -> bool:
        if not forgotten:
            forgotten.extend(move.target for move in group)
        return group[0].target in forgotten or right(self, group)

    monkeypatch.setattr(WeightSync, "_is_done", forget)
    finding = numerics.weight_sync(small)
    assert finding.verdict == "broken"
    assert any(f"the sampler's {name} is off by up to" in finding.text for name in forgotten)


@pytest.mark.full
def test_an_update_of_other_gradients_is_named(small: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = small.build("float32").learner
    right = learner.gradients

    def doubled(scored: Any) -> dict[str, np.ndarray]:
        return {name: value * (2 if name.endswith("q_proj.w") else 1) for name, value in right(scored).items()}

    monkeypatch.setattr(learner, "gradients", doubled)
    assert numerics.update(small).verdict == "broken"


@pytest.mark.full
def test_a_slow_link_is_named(small: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    right = measured_rates.all_reduce

    def slow(devices: Any, numbers: int) -> Callable[[], Any]:
        add = right(devices, numbers)
        return lambda: time.sleep(0.05) or add()

    monkeypatch.setattr(measured_rates, "all_reduce", slow)
    monkeypatch.setattr(small, "rates", {"flops_per_second": 1e10, "memory_bytes_per_second": 1e10})
    finding = measured_rates.links(small)
    assert finding.verdict == "works but slow"
    assert finding.text.startswith("each of 4 devices sends 0.0")
    assert "of one slice" in finding.remedy


@pytest.mark.parametrize(("share", "verdict"), [(0.9, "works"), (0.5, "works but slow")])
def test_a_slow_chip_is_named(share: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 2 * 4096**3 * 64 / (share * V5E.chip.flops_per_second)
    monkeypatch.setattr(measured_rates, "seconds_of", lambda call: seconds)
    given: Any = SimpleNamespace(generation=V5E, rates={})
    finding: Finding = measured_rates.products(given)
    assert finding.verdict == verdict
    assert f"{share:.0%} of the 197 of v5e" in finding.text


def test_noise_is_that_of_the_sampler() -> None:
    """One key, by jax's own functions."""
    key = np.array([1, 2, 3, 2**32 - 1], np.uint32)
    words = jax.random.key(key[0])
    for part in (*key[1:], 7):
        words = jax.random.fold_in(words, part)
    bits = jax.random.key_data(jax.random.fold_in(words, 0))
    found = numerics._threefry(
        tuple(np.asarray(jax.random.key_data(words))[:, None]), np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    )
    assert [int(found[0][0]), int(found[1][0])] == np.asarray(bits).tolist()


def test_the_models_directory_is_written_once(small: Shared, tmp_path: Path) -> None:
    with open_abstract_checkpoint(small.known.model) as whole:
        path = numerics.small_model(small.known.model, whole, None)
        before = (path / "model.safetensors").stat().st_mtime_ns
        assert numerics.small_model(small.known.model, whole, None) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before
