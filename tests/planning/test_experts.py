"""The update of a small mixture of experts, compiled by libtpu: the kernels of Tunix, and the repair they need."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tpu_grpo.config import load_config
from tpu_grpo.models.abstract import abstract_checkpoint
from tpu_grpo.planning.plan import PUBLISHED
from tpu_grpo.planning.programs import FAST_COMPILE_OPTIONS, compiled_figures
from tpu_grpo.planning.slices import open_slice, replica_devices
from tpu_grpo.run.abstract import AbstractRun
from tpu_grpo.run.meshes import build_meshes

SHIPPED = Path(__file__).resolve().parents[2] / "configs" / "qwen3_30b_a3b_v5p_32.yaml"
SMALLER = {
    "num_hidden_layers": 1,
    "vocab_size": 2048,
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 32,
    "num_attention_heads": 8,
}
LIKE_TUNIX = """
import sys
from pathlib import Path
from tpu_grpo.models import repairs
repairs.fitted_config = lambda config, mesh: config
from tests.planning.test_experts import compiled_kernels
compiled_kernels(Path(sys.argv[1]))
"""

pytestmark = [pytest.mark.slices, pytest.mark.timeout(1800)]


def compiled_kernels(directory: Path) -> int:
    """Pallas kernels in the update's program, compiled for 16 chips."""
    published = json.loads((PUBLISHED / "Qwen3-30B-A3B" / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(published | SMALLER))
    target, config, checkpoint = open_slice("v5e-16"), load_config(SHIPPED, []), abstract_checkpoint(directory)
    with target.as_jax_devices():
        run = AbstractRun(config, checkpoint, build_meshes(config, checkpoint, target.devices), (0,))
        return compiled_figures(run.learner.lower_gradients(), FAST_COMPILE_OPTIONS)["kernels"]


def test_the_update_of_experts_compiles(tmp_path: Path) -> None:
    """Attention has 4 kernels (see test_compiled); of experts three products run twice, and each has two gradients."""
    assert compiled_kernels(tmp_path) == 4 + 3 * (2 + 2)


@pytest.mark.parametrize(("experts", "kernels"), [("fused", 2 + 1), ("ragged", 2 + 1 + 3)])
def test_the_engines_experts_compile_and_return_their_numbers(tmp_path: Path, experts: str, kernels: int) -> None:
    """Attention has 2 kernels, and experts 1, or 3 products and what they share. The fused kernel takes wide models."""
    published = json.loads((PUBLISHED / "Qwen3-30B-A3B" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(published | SMALLER | {"hidden_size": 1024}))
    settings = [f"rollout.experts={experts}", "algorithm.routing_replay=true", "meshes.sampler.tensor=4"]
    target, config, checkpoint = open_slice("v5e-16"), load_config(SHIPPED, settings), abstract_checkpoint(tmp_path)
    with target.as_jax_devices():
        meshes = build_meshes(config, checkpoint, target.devices)
        run = AbstractRun(config, checkpoint, meshes, (0,), replica_devices(target, meshes.tensor))
        lowered = run.engine.lower("decode", run.options.shapes.batch[-1])
        assert compiled_figures(lowered, FAST_COMPILE_OPTIONS)["kernels"] == kernels


def test_libtpu_still_aborts_at_an_axis_of_one_device(tmp_path: Path) -> None:
    """When this fails, remove the repair of experts."""
    done = subprocess.run(
        [sys.executable, "-c", LIKE_TUNIX, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -6
    assert "rotated_pincer" in done.stderr
