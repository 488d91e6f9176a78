"""A run's own programs, a layer in a shipped config's shapes, compiled by libtpu for slices that are not here.

cli/test_plan.py compiles two and four layers, in small shapes, for v7x."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from tpu_grpo.config import load_config
from tpu_grpo.hosts import hosts_of
from tpu_grpo.launching.tpus import GENERATIONS
from tpu_grpo.learner.output_head import CHUNK_BYTES
from tpu_grpo.models.checkpoint import abstract_checkpoint
from tpu_grpo.planning.compiled_programs import (
    FAST_COMPILE_OPTIONS,
    GRADIENTS,
    OPTIMIZER_STEP,
    SUM,
    TRAIN_STEP,
    compiled_figures,
    programs_to_lower,
)
from tpu_grpo.planning.costs import STEP_INPUTS, EngineSizes
from tpu_grpo.planning.slice_plan import PUBLISHED, _growth_of_a_layer
from tpu_grpo.planning.slices import open_slice, replica_devices
from tpu_grpo.planning.stage_memory import resident_bytes
from tpu_grpo.planning.step_seconds import StepWork
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.run.abstract import AbstractRun
from tpu_grpo.run.meshes import build_meshes

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DENSE = "qwen3_0p6b_v5e_8.yaml", "Qwen3-0.6B"
LAYERS, WIDTH, VOCABULARY = 1, 1024, 151936
EXPERTS = "qwen3_30b_a3b_v5p_32.yaml", "Qwen3-30B-A3B"
SMALLER = {
    "num_hidden_layers": 1,
    "vocab_size": 2048,
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 32,
    "num_attention_heads": 8,
}

pytestmark = [pytest.mark.slices, pytest.mark.timeout(1800)]  # up to half a minute each


@pytest.fixture(
    scope="module",
    params=["v5e-8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("v6e-8", "v7x-8", "v5p-8", "v4-8"))],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AbstractRun]:
    with open_run(request.param, tmp_path_factory.mktemp("model")) as found:
        yield found


@contextmanager
def open_run(
    name: str,
    directory: Path,
    *overrides: str,
    shipped: tuple[str, str] = DENSE,
    changes: Mapping[str, int] = {"num_hidden_layers": LAYERS},
) -> Iterator[AbstractRun]:
    """A shipped config on a slice, with its model changed."""
    config = load_config(CONFIGS / shipped[0], overrides)
    target = open_slice(name, config.meshes.slices)
    published = json.loads((PUBLISHED / shipped[1] / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(published | dict(changes or {"num_hidden_layers": LAYERS})))
    checkpoint = abstract_checkpoint(directory)
    with target.as_jax_devices():
        meshes = build_meshes(
            config.meshes, config.model, config.environment, config.row_tokens, checkpoint, target.devices
        )
        yield AbstractRun(config, checkpoint, meshes, (0,), replica_devices(target, meshes.tensor))


class Compiled:
    """A lowered program that keeps what it was compiled to."""

    text = ""

    def __init__(self, lowered: Any):
        self._lowered = lowered

    def compile(self, **options: Any) -> Any:
        compiled = self._lowered.compile(**options)
        self.text = compiled.as_text()
        return compiled


def arrays_with(columns: int, text: str) -> list[int]:
    """Return the sizes of all arrays in a program that have an axis of so many columns."""
    shapes = [tuple(map(int, found.split(","))) for found in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text)]
    return [math.prod(shape) for shape in set(shapes) if columns in shape]


def kernels_of_a_pass(run: AbstractRun) -> int:
    """Forward, again under remat, and backward: one for all on v6e, else one for queries and one for keys."""
    return LAYERS * (3 if "v6" in run.meshes.trainer.devices.flat[0].device_kind else 4)


def test_every_program_compiles_and_holds_what_it_is_given(run: AbstractRun) -> None:
    programs: dict[str, Any] = {name.split()[0]: Compiled(lower()) for name, _, lower in programs_to_lower(run)}
    found = {name: compiled_figures(program, FAST_COMPILE_OPTIONS) for name, program in programs.items()}
    resident, devices = resident_bytes(run), run.meshes.trainer.size
    logits = [size for part in (1, devices) for size in arrays_with(VOCABULARY // part, programs["gradients"].text)]
    assert max(logits) <= max(CHUNK_BYTES / 4, VOCABULARY * WIDTH)  # of a chunk, or the head
    assert max(logits) < run.learner.batch.weights.size * VOCABULARY / devices  # which all tokens' would be
    attention = WIDTH * 128 * (16 + 8 + 8 + 16) + 2 * 128
    parameters = 2 * (LAYERS * (attention + 3 * WIDTH * 3072 + 2 * WIDTH) + VOCABULARY * WIDTH + WIDTH)
    norms = 2 * (LAYERS * (2 * WIDTH + 2 * 128) + WIDTH)  # whole on every device
    assert resident.parameters == (parameters - norms) / devices + norms
    assert resident.sampler + resident.shared == parameters
    assert resident.cache == (run.options.cache_tokens + 64) * 2 * 8 * 128 * 2 * LAYERS
    for name in ("decode", "prefill"):
        assert found[name]["kernels"] == LAYERS  # flash attention, for the rows of one new token or for the others
        assert found[name]["argument_bytes"] == pytest.approx(parameters + resident.cache, rel=0.02)
    gradients, step = found["gradients"], found["optimizer"]
    assert gradients["kernels"] == 2 * kernels_of_a_pass(run)  # for a segment's tokens, and the prompt's that it shares
    assert gradients["argument_bytes"] == pytest.approx(3 * resident.parameters, rel=0.05)  # with their float32 sums
    assert gradients["output_bytes"] < 2**20  # sums are added to in place
    assert resident.optimizer == pytest.approx(6 * resident.parameters, rel=0.01)  # float32 copies and two moments
    assert step["argument_bytes"] == pytest.approx(9 * resident.parameters, rel=0.05)
    assert step["output_bytes"] == pytest.approx(resident.shared, rel=0.05, abs=2**20)  # new ones beside the old
    assert all(figures["fits"] for figures in found.values())
    sizes = EngineSizes.of(run.checkpoint, tensor=1, itemsize=2, split_vocabulary=False, cache_bytes=0.0)
    assert sizes.weight_bytes == resident.sampler + resident.shared
    assert sizes.arrays == len(run.engine.weight_specs) + len(jax.tree.leaves(run.engine.cache_specs)) + STEP_INPUTS
    assert run.sync.temporary_bytes <= run.config.meshes.sync_temporary_mib * 2**20


def test_a_layer_adds_its_input_and_at_most_half_of_its_gathered_weights(tmp_path: Path) -> None:
    """2 rows a device, of 1,920 tokens each: what `test_every_program_compiles_and_holds_what_it_is_given` compiles."""
    with open_run("v5e-8", tmp_path) as run:
        kept, most = _growth_of_a_layer(run)
    assert kept == 2 * 1920 * WIDTH * 2
    weights = WIDTH * 128 * (16 + 8 + 8 + 16) + 2 * 128 + 3 * WIDTH * 3072 + 2 * WIDTH
    assert most == kept + 0.5 * weights * 2


@pytest.mark.slow
def test_gemma_3s_logits_exist_for_a_chunk_or_for_the_rows_that_are_sampled(tmp_path: Path) -> None:
    """On one chip, where the vocabulary is not split. Adapters leave out the gradient of the head."""
    shipped, rows, width = ("gemma3_1b_v5e_1.yaml", "gemma-3-1b-it"), 262_144, 1152
    with open_run("v5e-1", tmp_path, shipped=shipped) as run:
        programs: dict[str, Any] = {name.split()[0]: Compiled(lower()) for name, _, lower in programs_to_lower(run)}
        most = {"gradients": CHUNK_BYTES // 4, "decode": run.options.max_running_requests * rows}
        most["prefill"] = most["decode"]
        for name, size in most.items():
            compiled_figures(programs[name], FAST_COMPILE_OPTIONS)
            found = set(arrays_with(rows, programs[name].text))
            assert max(found - {rows * width}) == size, name
        assert f"f32[{rows},{width}]" not in programs["gradients"].text
        assert run.learner.batch.weights.size * rows > CHUNK_BYTES // 4


@pytest.mark.parametrize(("name", "slices"), [("v5e-16", 2), ("v6e-16", 4)])
def test_gradients_of_slices_are_added_in_their_buffers(name: str, slices: int, tmp_path: Path) -> None:
    """By a program on all slices; the others of an update are those of one slice."""
    with open_run(name, tmp_path, f"meshes.slices={slices}") as run:
        lowered = {name: lower() for name, stage, lower in programs_to_lower(run) if stage == "update"}
        lowered[SUM] = run.learner.lower_sum_over_slices()
        partitions = {
            name: re.findall(r"mhlo.num_partitions = (\d+)", each.as_text()) for name, each in lowered.items()
        }
        assert partitions == {GRADIENTS: ["16"], OPTIMIZER_STEP: ["16"], SUM: [str(16 * slices)]}
        found = compiled_figures(lowered[SUM], FAST_COMPILE_OPTIONS)
        assert found["argument_bytes"] == VOCABULARY * WIDTH * 4 / 16  # the largest group: embedding and head are tied
        assert found["output_bytes"] < 2**20
        assert found["temporary_bytes"] < 1.1 * found["argument_bytes"]


@pytest.mark.parametrize("name", ["v6e-16", pytest.param("v5e-16", marks=pytest.mark.slow)])
def test_a_split_by_whole_hosts_compiles(name: str, tmp_path: Path) -> None:
    """The trainer's programs on the first half of the hosts, the engine's on the second half, and the sync on all.

    On a half of every host's devices, libtpu refuses sums over them. One step off, the trainer keeps the parameters of
    the step before. Rows hold a sequence, which shares no prompt, so that there are half as many kernels to compile.
    """
    ahead = "meshes.layout=split", "meshes.sampler.tensor=8", "algorithm.staleness=1", "algorithm.row_tokens=1024"
    with open_run(name, tmp_path, *ahead) as opened:
        resident = resident_bytes(opened)
        assert resident.reference == resident.trained == resident.parameters > 0
        assert [program for program, _, _ in programs_to_lower(opened)][2] == "log-probabilities"
        run = replace(opened, engine_devices=opened.replicas[0].devices)
        assert hosts_of(run.meshes.trainer.devices.flat) == (0, 1)
        assert hosts_of(run.replicas[0].devices) == (2, 3)
        found = {name: compiled_figures(lower(), FAST_COMPILE_OPTIONS) for name, _, lower in programs_to_lower(run)}
        assert [program for program, figures in found.items() if not figures["fits"]] == []
        assert found[GRADIENTS]["kernels"] == kernels_of_a_pass(run)
        assert run.sync.temporary_bytes <= run.config.meshes.sync_temporary_mib * 2**20


@pytest.mark.parametrize(
    "name", ["v5e-8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("v6e-8", "v7x-8"))]
)
def test_a_cache_in_fp8_compiles_and_is_half_as_large(name: str, tmp_path: Path) -> None:
    with open_run(name, tmp_path, "rollout.kv_dtype=fp8") as run:
        programs = {found.split()[0]: lower for found, _, lower in programs_to_lower(run)}
        for program in ("decode", "prefill"):
            compiled: Any = Compiled(programs[program]())
            assert compiled_figures(compiled, FAST_COMPILE_OPTIONS)["kernels"] == LAYERS
            assert "f8e4m3fn" in compiled.text
        assert resident_bytes(run).cache == (run.options.cache_tokens + 64) * 2 * 8 * 128 * LAYERS


@pytest.mark.full
@pytest.mark.parametrize("name", ["v5e-8", pytest.param("v6e-8", marks=pytest.mark.slow)])
def test_layers_with_a_window_have_a_pool_of_their_own_in_rows_of_8k(name: str, tmp_path: Path) -> None:
    """Gemma 3 1B with 3 layers, 2 of which have a window of 512 tokens: 8 + 1 + 2 pages of 64 tokens for each of 64
    rows and 9 prompts, and 32 pages for a prefill. Without the pool, layers would have the same pages."""
    rows = "rollout.max_new_tokens=7936", "rollout.max_running_requests=64", "data.prompts_per_step=64"
    gemma, few = ("gemma3_1b_v5e_8.yaml", "gemma-3-1b-it"), {"num_hidden_layers": 3, "sliding_window_pattern": 3}
    with open_run(name, tmp_path, *rows, shipped=gemma, changes=few) as run:
        resident, programs = (
            resident_bytes(run),
            {found.split()[0]: lower for found, _, lower in programs_to_lower(run)},
        )
        assert resident.cache == (2 * ((64 + 9) * 11 + 32 + 1) + (64 * 129 + 1)) * 64 * 2 * 256 * 2
        sizes = StepWork.of(run, GENERATIONS[0], resident, ()).engine
        token = 2 * 256 * 2  # bytes in a layer, and page 0 is divided among the others
        assert sizes.cache_bytes == pytest.approx(token * (1 + 1 / (64 * 129)))
        assert sizes.windows == {512: pytest.approx(2 * token * (1 + 1 / ((64 + 9) * 11 + 32)))}
        for program in ("decode", "prefill"):
            found = compiled_figures(programs[program](), FAST_COMPILE_OPTIONS)
            weights = resident.sampler + resident.shared
            assert found["argument_bytes"] == pytest.approx(weights + resident.cache, rel=0.02)
            assert found["kernels"] == 3
            assert found["fits"]


def test_a_cache_in_fp8_is_refused_where_the_kernel_cannot_read_it(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match="needs a TPU from v5 on, got TPU v4")
    with open_run("v4-8", tmp_path, "rollout.kv_dtype=fp8") as run, refused:
        _ = run.engine


def test_tunix_train_step_compiles_and_holds_what_it_is_given(tmp_path: Path) -> None:
    """It has float32 sums of gradients beside what ours keeps, and its results are new parameters."""
    options = ("algorithm.name=tunix:grpo", "algorithm.options={beta: 0.0}")
    with open_run("v5e-8", tmp_path, *options) as run:
        programs = {name: lower for name, stage, lower in programs_to_lower(run) if stage == "update"}
        resident, figures = resident_bytes(run), compiled_figures(programs[TRAIN_STEP](), FAST_COMPILE_OPTIONS)
    assert list(programs) == [TRAIN_STEP]
    assert resident.optimizer == pytest.approx(8 * resident.parameters, rel=0.01)
    assert figures["kernels"] == 4 * LAYERS
    assert figures["argument_bytes"] == pytest.approx(resident.parameters + resident.optimizer, rel=0.01)
    assert figures["output_bytes"] == pytest.approx(resident.parameters, rel=0.01)


def test_the_update_of_experts_compiles(tmp_path: Path) -> None:
    """Attention has 4 kernels. Experts have 3 products. Their backward pass has 2 of them again, 2 of gradients of its
    values and 3 of gradients of weights. Rows are gathered in parts of 128 numbers, not in tiles of 8 rows."""
    row = "algorithm.row_tokens=1024"  # of one sequence, which shares no prompt
    with open_run("v5e-16", tmp_path, row, shipped=EXPERTS, changes=SMALLER) as run:
        compiled = run.learner.lower_gradients().compile(compiler_options=dict(FAST_COMPILE_OPTIONS))
    text = compiled.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 4 + 3 + 2 + 2 + 3
    of_copies = r"gather_fusion\S* = bf16\[(?:8192|16384),([\d,]+)\].*/shard_map/(?:while/body/)?gather\""
    gathered = set(re.findall(of_copies, text))  # a device's 1,024 tokens have 8 copies each, the buffer twice as many
    assert gathered == {"4,128"}


def test_the_engines_experts_compile_and_return_their_numbers(tmp_path: Path) -> None:
    """Attention has 1 kernel, and experts have 3 products and what these share."""
    settings = ["algorithm.routing_replay=true", "meshes.sampler.tensor=4"]
    with open_run("v5e-16", tmp_path, *settings, shipped=EXPERTS, changes=SMALLER) as run:
        lowered = run.engine.lower("decode", run.options.shapes.batch[-1])
        assert compiled_figures(lowered, FAST_COMPILE_OPTIONS)["kernels"] == 1 + 3 + 1
