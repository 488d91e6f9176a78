"""The numbers of records, and records in a compact form."""

import tracemalloc

import pytest

from tpu_grpo.observe.json_lines import compact, is_number


def test_an_integer_that_no_float_can_hold_is_no_number() -> None:
    assert is_number(10**308)
    assert not is_number(10**309)
    assert not is_number(-(10**309))
    assert not is_number(True)


def test_compact_records_hold_what_the_records_did() -> None:
    records = [
        {"step": 1, "a": 0.5, "digest": "x", "gap": None, "n": 2**53, "m": 2**53 + 1, "on": True, "inner": {"b": [1]}},
        {"step": 2, "a": 7.0},
        {"a": 1e-300, "step": 3},
    ]
    made = compact(records)
    assert [dict(record) for record in made] == records
    assert [type(value) for value in made[0].values()] == [type(value) for value in records[0].values()]
    assert ("a" in made[1], "digest" in made[1], made[1].get("digest"), len(made[2])) == (True, False, None, 2)


@pytest.mark.full
def test_a_page_holds_less_than_a_kilobyte_of_a_step() -> None:
    """100 metrics of 8 bytes; as a dict, a step takes more than five times as many."""
    records = ({"step": step} | {f"stage/metric_{name}": step / 7 for name in range(99)} for step in range(500))
    tracemalloc.start()
    try:
        made = compact(records)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(made) == 500
    assert held / 500 < 1024
