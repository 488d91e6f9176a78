"""Passes of a learner, by hand."""

import pytest

from tpu_grpo.launching.tpus import Chip, Generation
from tpu_grpo.planning.rates import ALLREDUCE_SECONDS, FILL, LINKS, MEMORY, PRODUCTS
from tpu_grpo.planning.sizes import TokenCost
from tpu_grpo.planning.training import TrainerSizes, packed_passes, pass_seconds

CHIP = Chip(
    memory_bytes=1,
    flops_per_second=100 / PRODUCTS,
    memory_bytes_per_second=10 / MEMORY,
    link_bytes_per_second=8 / LINKS,  # two of four links lead to others of four chips: 4 bytes a second
)
GENERATION = Generation("v0", "v0", "", 1, 2, (), CHIP)


def sizes(**changes: int) -> TrainerSizes:
    base = {"fsdp": 4, "tp": 1, "layers": 3, "row_tokens": 8, "pass_tokens": 16, "layer_passes": 4, "head_passes": 4}
    return TrainerSizes(
        **{**base, **changes},
        token=TokenCost(layers=50, head=20, attention=5),
        context=4,
        parameter_bytes=7,
        trained_bytes=6,
        outer_share=2 / 7,
        state_bytes=2,
    )


def test_completions_are_packed_with_their_prompts() -> None:
    assert packed_passes(sizes(), rows=10, mean_tokens=8) == 5  # 80 tokens, full rows
    assert packed_passes(sizes(), rows=10, mean_tokens=4 * FILL) == 3  # 40 tokens
    assert packed_passes(sizes(), rows=1, mean_tokens=1) == 1


def test_layers_compute_for_all_tokens_and_the_head_for_completions() -> None:
    """16 tokens on 4 chips: 16 (2 x 50 + 5 x 4) FLOPs of the layers four times, 2 x 20 for each of 10 tokens."""
    found = pass_seconds(sizes(), GENERATION, head_tokens=10, accessed_bytes=30, updates=True)
    products = 4 * (16 * 120 + 10 * 40) / 4 / 100
    first = 7 * 3 * 2 / 7 / 4
    assert found.parts == pytest.approx({"products": products, "links": first})
    assert found.beside == pytest.approx({"memory": 3.0, "links": (21 - 6 + 21 + 18) / 4})


def test_a_forward_pass_gathers_once() -> None:
    """Its memory takes longest, beside products of (16 x 120 + 400) / 400 s."""
    found = pass_seconds(sizes(), GENERATION, head_tokens=10, accessed_bytes=60, updates=False)
    assert found.parts == pytest.approx({"memory": 6.0, "links": 6 / 4})
    assert found.beside == pytest.approx({"products": 5.8, "links": 15 / 4})


def test_where_links_take_longest_the_first_gather_is_added_to_them() -> None:
    found = pass_seconds(sizes(), GENERATION, head_tokens=0, accessed_bytes=0, updates=True)
    slow = pass_seconds(sizes(pass_tokens=1), GENERATION, head_tokens=0, accessed_bytes=0, updates=True)
    assert found.parts["links"] == 6 / 4
    assert slow.parts == {"links": (21 + 21 + 18) / 4}


def test_activations_are_added_up_in_every_layer_and_pass() -> None:
    """Tp 4: three quarters of 16 x 2 bytes, sent twice, over two links; two of these in each of 3 layers, 4 passes."""
    found = pass_seconds(sizes(fsdp=1, tp=4), GENERATION, head_tokens=10, accessed_bytes=0, updates=True)
    assert found.parts["links"] == pytest.approx(4 * 3 * 2 * (ALLREDUCE_SECONDS + 2 * 0.75 * 32 / 4))
    assert found.beside == {"memory": 0.0, "links": 0.0}


def test_one_chip_has_no_links() -> None:
    found = pass_seconds(sizes(fsdp=1), GENERATION, head_tokens=10, accessed_bytes=0, updates=True)
    assert found.parts["links"] == 0.0
