"""Fast plans: a line through two models of few layers; and what the compiler's refusals mean."""

from pathlib import Path

import pytest

from tests.models.random_checkpoint import write_random
from tests.planning.figures import program
from tpu_grpo.models.abstract import abstract_checkpoint
from tpu_grpo.models.families.gemma2 import Gemma2Config
from tpu_grpo.planning.plan import FEW_LAYERS, _with_layers, extrapolated
from tpu_grpo.planning.programs import refused_bytes


def test_a_line_through_two_and_four_layers() -> None:
    assert FEW_LAYERS == (2, 4)
    few = program("update", argument_bytes=10.0, temporary_bytes=8.0, flops=6.0, kernels=2)
    more = program("update", argument_bytes=14.0, temporary_bytes=7.0, flops=10.0, kernels=4)
    whole = extrapolated(few, more, 36)
    assert whole.argument_bytes == 10 + 2 * 34
    assert whole.flops == 6 + 2 * 34
    assert whole.temporary_bytes == 7  # never falls
    assert whole.kernels == 36
    assert extrapolated(few, more, 4) == extrapolated(few, more, 4)
    assert extrapolated(few, more, 2).argument_bytes == 10


def test_few_layers_are_the_first_ones_where_they_differ(tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    directory = write_random("gemma2", tmp_path, layers=3, layer_types=types)
    with _with_layers(abstract_checkpoint(directory), 2) as fewer:
        assert isinstance(fewer.config, Gemma2Config)
        assert fewer.config.has_window == (False, True)


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 16.50G of 15.75G hbm.", 16.5 * 2**30),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (22.50G)"
            " exceeds available HBM (15.75G).",
            22.5 * 2**30,
        ),
        (
            "RESOURCE_EXHAUSTED: Allocation (size=400) would exceed memory (size=100) :: [space=hbm, size = 1]",
            400,
        ),
        ("Ran out of memory in memory space smem. Used 1.01M of 1.00M smem.", None),
        ("RESOURCE_EXHAUSTED: Allocation (size=400) would exceed memory (size=100) :: #1 [space=smem]", None),
    ],
)
def test_only_refusals_for_the_main_memory_are_read(message: str, size: float | None) -> None:
    assert refused_bytes(message) == size
