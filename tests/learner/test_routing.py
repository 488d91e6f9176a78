"""Replayed routing in the trainer, against a float64 forward pass in NumPy that is forced to the same experts."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.learner.test_programs import assert_lowers_the_same, described
from tests.learner.toy import (
    NEW_TOKENS,
    PROMPT_TOKENS,
    flat_params,
    make_config,
    make_learner,
    make_mesh,
    make_model,
    make_scored,
    with_completion,
)
from tests.models.forward import reference_experts
from tests.models.random_checkpoint import GEMMA4_EXPERTS, write_random
from tpu_grpo.learner import LearnerInputs
from tpu_grpo.learner.forward import ModelRows, run_model
from tpu_grpo.learner.rows import ReplayShape, RowShape, train_rows
from tpu_grpo.models import reference
from tpu_grpo.models.checkpoint import read_checkpoint
from tpu_grpo.models.tunix_model import load_model
from tpu_grpo.records.stages import Completion, ScoredRollout

LAYERS, EXPERTS, PER_TOKEN = 2, 8, 3
PROMPTS = [(5, 9, 11, 40), (7, 8), (50, 51, 52, 53, 54, 55)]
SAMPLED = [(12, 13, 14, 15, 16), (20, 21, 22), (30,)]
AGREE = 3e-4
"""The bound that test_families.py has for float32 against the reference."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random("qwen3_moe", tmp_path_factory.mktemp("routing") / "model", scale=0.3)


def load(checkpoint: Path, fsdp: int = 1, remat: Any = "none") -> Any:
    return load_model(read_checkpoint(checkpoint), make_mesh(fsdp), dtype=jnp.dtype("float32"), remat=remat)


def planted(prompt: Any, tokens: Any, seed: int) -> np.ndarray:
    """Experts that no router chose: a random set for every token and layer."""
    rng, computed = np.random.default_rng(seed), len(prompt) + len(tokens) - 1
    drawn = [rng.permutation(EXPERTS)[:PER_TOKEN] for _ in range(computed * LAYERS)]
    return np.array(drawn, np.uint8).reshape(computed, LAYERS, PER_TOKEN)


def completions_with_planted_experts() -> list[Completion]:
    return [
        Completion(np.array(t, np.int32), np.zeros(len(t), np.float32), "length", 0, planted(p, t, seed=row))
        for row, (p, t) in enumerate(zip(PROMPTS, SAMPLED, strict=True))
    ]


def forced(checkpoint: Path, prompt: Any, completion: Completion, changed: Any = None) -> np.ndarray:
    """The reference's log-probability of every sampled token; without experts, its own routing's."""
    ids, first = np.array([[*prompt, *completion.token_ids]]), len(prompt) - 1
    choice: Any = nullcontext()
    if completion.experts is not None:
        layers = [completion.experts[None, :, layer] for layer in range(LAYERS)]
        choice = mock.patch.object(reference, "_routed", side_effect=layers)
    with choice:
        full = reference.reference_logprobs(checkpoint, ids[:, :-1], changed=changed)[0, first:]
    return full[np.arange(len(completion.token_ids)), completion.token_ids]


def packed(completions: list[Completion]) -> ModelRows:
    """The first sequence in a row of its own, the others together in the second."""
    shape = RowShape(PROMPT_TOKENS, NEW_TOKENS, 16, 2, ReplayShape(_Sizes))
    return jax.tree.map(jnp.asarray, train_rows(PROMPTS, completions, np.zeros(3), shape)[0].rows)


class _Sizes:
    class config:
        num_layers, num_experts_per_tok, num_experts = LAYERS, PER_TOKEN, EXPERTS


def total(model: Any, rows: ModelRows) -> jax.Array:
    """The sum of the log-probabilities of all sampled tokens."""
    return run_model(model, rows, temperature=1.0, mesh=make_mesh(1)).logprobs_RS.sum()


# --- log-probabilities and gradients ---------------------------------------------------------------------------------


def test_rows_by_hand() -> None:
    """What was not computed, the last sampled token too, has expert 255: none."""
    rows = packed(completions_with_planted_experts())
    assert rows.segments.tolist() == [[1] * 9 + [0] * 7, [1] * 5 + [2] * 7 + [0] * 4]
    found = np.asarray(rows.experts)
    assert (found.shape, found.dtype) == ((2, LAYERS * PER_TOKEN, 16), np.uint8)
    known = (found != 255).all(axis=1)
    assert known.tolist() == (found != 255).any(axis=1).tolist()
    assert (1 * known).tolist() == [[1] * 8 + [0] * 8, [1] * 4 + [0] + [1] * 6 + [0] * 5]
    experts = planted(PROMPTS[1], SAMPLED[1], seed=1)
    assert found[1, :, 1].tolist() == experts[1].reshape(-1).tolist()  # the second token, layer by layer


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("gemma4_text", marks=pytest.mark.slow)])
def test_the_trainer_computes_what_the_reference_does_with_these_experts(family: str, tmp_path: Path) -> None:
    experts: dict[str, Any] = GEMMA4_EXPERTS if family == "gemma4_text" else {}
    checkpoint = write_random(family, tmp_path / "model", scale=0.3, **experts)
    config = make_config(tmp_path, {"algorithm": {"routing_replay": True}})
    learner = make_learner(config, make_mesh(1), model=load(checkpoint))
    completions = completions_with_planted_experts()
    found = learner.logprobs(PROMPTS, completions)
    for row, prompt, completion in zip(found, PROMPTS, completions, strict=True):
        np.testing.assert_allclose(row[: len(completion.token_ids)], forced(checkpoint, prompt, completion), atol=AGREE)
        own = forced(checkpoint, prompt, replace(completion, experts=None))
        assert np.abs(row[: len(completion.token_ids)] - own).max() > 0.02  # the planted experts matter
    reversed_order = [replace(c, experts=c.experts[..., ::-1]) for c in completions if c.experts is not None]
    np.testing.assert_array_equal(learner.logprobs(PROMPTS, reversed_order), found)


@pytest.mark.full
def test_tokens_without_experts_are_routed_as_ever(checkpoint: Path) -> None:
    model = load(checkpoint)
    rows = packed(completions_with_planted_experts())
    nothing = rows._replace(experts=jnp.full_like(rows.experts, 255))
    assert float(total(model, nothing)) == float(total(model, rows._replace(experts=None)))
    chosen = [
        replace(c, experts=reference_experts(checkpoint, np.array([[*p, *c.token_ids][:-1]]))[0].astype(np.uint8))
        for p, c in zip(PROMPTS, completions_with_planted_experts(), strict=True)
    ]
    own = float(total(model, packed(chosen)))
    assert own == pytest.approx(float(total(model, rows._replace(experts=None))), abs=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    "remat", [*(pytest.param(remat, marks=pytest.mark.slow) for remat in ("none", "block")), "decoder"]
)
def test_gradients_are_those_of_the_reference(checkpoint: Path, remat: str) -> None:
    """By central differences in float64, of a router's and of an expert's weights."""
    model, completions = load(checkpoint, remat=remat), completions_with_planted_experts()
    grads = jax.device_get(nnx.jit(nnx.grad(total))(model, packed(completions)))
    layer, kernel_DE = grads.layers[1].mlp, grads.layers[0].mlp.router.kernel.get_value()
    assert np.abs(kernel_DE).max() > 0.01

    def difference(name: str, index: tuple[int, int], step: float = 1e-4) -> float:
        def at(change: float) -> float:
            changed = weights[name].copy()
            changed[index] += change
            rows = zip(PROMPTS, completions, strict=True)
            return sum(forced(checkpoint, p, c, {name: changed}).sum() for p, c in rows)

        return (at(step) - at(-step)) / (2 * step)

    weights = _weights(checkpoint)
    for expert in (0, 3, 6):
        expected = difference("model.layers.0.mlp.gate.weight", (expert, 10))
        assert kernel_DE[10, expert] == pytest.approx(expected, abs=2e-4 * max(1.0, abs(expected)))
    expected = difference("model.layers.1.mlp.experts.2.up_proj.weight", (4, 7))
    assert layer.up_proj.get_value()[2, 7, 4] == pytest.approx(expected, abs=2e-4 * max(1.0, abs(expected)))


def _weights(checkpoint: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return {n: w.astype(np.float64) for f in checkpoint.glob("*.safetensors") for n, w in load_file(f).items()}


# --- a learner -------------------------------------------------------------------------------------------------------


def scored_with_planted_experts(checkpoint: Path, config: Any) -> ScoredRollout:
    """Rows whose engine's log-probabilities are the reference's with experts that no router chose."""
    scored = make_scored(make_model(make_mesh()), config)
    for row, (prompt, completion) in enumerate(
        zip(scored.rollout.row_prompts, scored.rollout.completions, strict=True)
    ):
        experts = planted(prompt.token_ids, completion.token_ids, seed=row)
        completion = replace(completion, experts=experts)
        logprobs = forced(checkpoint, prompt.token_ids, completion).astype(np.float32)
        scored = with_completion(scored, row, experts=experts, logprobs=logprobs)
    return scored


@pytest.mark.full
@pytest.mark.parametrize(
    "algorithm",
    [
        {"routing_replay": True, "micro_batch_prompts": 2},
        pytest.param({"routing_replay": False}, marks=pytest.mark.slow),
        pytest.param({"routing_replay": True, "old_policy": "trainer"}, marks=pytest.mark.slow),
        pytest.param({"routing_replay": True, "iterations": 2, "beta": 0.1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_update_agrees_with_the_engines_experts(checkpoint: Path, tmp_path: Path, algorithm: dict[str, Any]) -> None:
    config, mesh = make_config(tmp_path, {"algorithm": {"group_size": 2, **algorithm}}), make_mesh(2)
    learner = make_learner(config, mesh, model=load(checkpoint, 2), reference=load(checkpoint, 2))
    before = flat_params(learner)
    metrics = learner.update(scored_with_planted_experts(checkpoint, config)).metrics
    after, router = flat_params(learner), "layers.0.mlp.router.kernel"
    assert after.keys() == before.keys()  # what is saved has no trace of replaying
    assert (after[router] != before[router]).any()
    assert np.isfinite(list(metrics.values())).all()
    agrees = metrics["agreement/logprob_abs_diff_max"] <= AGREE
    assert agrees == config.algorithm.routing_replay
    assert agrees or metrics["agreement/logprob_abs_diff_max"] > 0.05
    if config.algorithm.beta:  # the reference, the same model, routes by itself: the divergence is not 0
        assert metrics["update/kl"] > 1e-3


@pytest.mark.full
def test_a_described_learner_lowers_the_same_programs(checkpoint: Path, tmp_path: Path) -> None:
    """With what is replayed as an argument, which a plan counts."""
    config = make_config(tmp_path, {"algorithm": {"routing_replay": True, "group_size": 2, "old_policy": "trainer"}})
    mesh, abstract = make_mesh(), described(load(checkpoint, 2))
    programs = assert_lowers_the_same(config, mesh, load(checkpoint, 2), LearnerInputs(abstract, None, mesh))
    assert programs.batch.rows.experts is not None
    assert "ui8" in programs.lower_logprobs().as_text()
