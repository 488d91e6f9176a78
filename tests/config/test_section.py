"""Values that several settings share: options, and ranges of layers."""

import pytest
from hypothesis import given, strategies as st

from tpu_grpo.config import load_config, parse_layers

RANGES = st.lists(st.tuples(st.integers(0, 80), st.integers(0, 8)), min_size=1, max_size=6)

# --- options ---------------------------------------------------------------------------------------------------------


def test_options_take_switches_and_texts_in_quotes() -> None:
    config = load_config(None, ["data.options={a: false, b: 'no', c: [\"on\"], d: north}"])
    assert config.data.options == {"a": False, "b": "no", "c": ["on"], "d": "north"}


def test_a_bare_no_is_a_text_where_a_text_is_meant() -> None:
    assert load_config(None, ["data.columns={question: no}"]).data.columns == {"question": "no"}


# --- ranges of layers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("5", (5,)),
        ("20-22", (20, 21, 22)),
        ("0-1,28-29", (0, 1, 28, 29)),
        (" 28 - 29, 0", (0, 28, 29)),
        ("3-5,4-6,4", (3, 4, 5, 6)),
        ("007", (7,)),
    ],
)
def test_layers_as_written(text: str, layers: tuple[int, ...]) -> None:
    assert parse_layers(text) == layers


@given(RANGES)
def test_a_layer_is_named_exactly_if_a_range_holds_it(ranges: list[tuple[int, int]]) -> None:
    text = ",".join(f"{first}-{first + more}" if more else str(first) for first, more in ranges)
    layers = parse_layers(text)
    assert list(layers) == sorted(set(layers))
    assert [n for n in range(100) if n in layers] == [
        n for n in range(100) if any(first <= n <= first + more for first, more in ranges)
    ]


@pytest.mark.parametrize("text", ["", "a", "1,", "-3", "1--2", "1.5", "2-", "1;2", "٣"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must name layers like 20-31 or 0-3,28-31, got "):
        parse_layers(text)
