import pytest

from tpu_grpo.rollout.shapes import choose_shapes, ladder, pad_to


def test_ladders_by_hand() -> None:
    assert ladder(8, 50, 2) == (8, 16, 32, 50)
    assert ladder(64, 64, 4) == (64,)
    assert ladder(64, 16, 4) == (16,)


def test_shapes_of_a_run() -> None:
    shapes = choose_shapes(context_tokens=286, page_size=16, max_running_requests=24, prefill_tokens=2048)
    assert (shapes.batch, shapes.prefill, shapes.context) == ((8, 16, 24), (64, 256, 1024, 2048), 288)
    given = choose_shapes(
        context_tokens=9, page_size=1, max_running_requests=24, prefill_tokens=8, batch_paddings=(4, 24, 100)
    )
    assert (given.batch, given.prefill, given.context) == ((4, 24), (24,), 9)  # a step of 24 rows needs 24 tokens


def test_padding_takes_the_first_rung_that_holds() -> None:
    assert [pad_to((8, 16, 50), n) for n in (1, 8, 9, 50)] == [8, 8, 16, 50]
    with pytest.raises(ValueError, match="51 is beyond the largest compiled size 50"):
        pad_to((8, 16, 50), 51)
