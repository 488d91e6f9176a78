"""What is said about settings that cannot be, or not together: mistakes.txt has settings, and below them the error."""

import re
import shlex
from pathlib import Path

import pytest

from tests.config.asking import message
from tests.goldens import cases, compare, rows
from tpu_grpo.config import load_config

MISTAKES = Path(__file__).with_name("mistakes.txt")
NEEDS = [(given, found[1]) for given, told in rows(MISTAKES) if (found := re.match(r"\S+ needs ([\w.]+=\w+)", told))]


@pytest.mark.parametrize(("given", "told"), cases(MISTAKES))
def test_a_mistake_is_told_with_its_value_and_the_remedy(given: str, told: str) -> None:
    compare(MISTAKES, given, told, message(*shlex.split(given)))


def test_a_long_value_is_cut() -> None:
    assert message(f"evaluation.path={'a' * 5000}") == (
        "evaluation.path must be a path that files can have, of at most 255 bytes in each part and 4095 in all, "
        f"got {'a' * 200}; correct it"
    )


@pytest.mark.parametrize(("given", "needed"), NEEDS)
def test_what_a_setting_is_said_to_need_is_enough(given: str, needed: str) -> None:
    load_config(None, [*shlex.split(given), needed])


def test_most_needs_are_tried() -> None:
    assert len(NEEDS) >= 8
