"""The list of settings that --help shows."""

import pytest

from tests.config.asking import leaves
from tpu_grpo.config import RunConfig, settings


def test_every_leaf_is_listed_once_with_a_meaning() -> None:
    listed = [name for name, *_ in settings()]
    assert sorted(listed) == sorted(leaves(RunConfig().model_dump()))
    assert len(listed) == len(set(listed))
    assert [name for name, _, _, meaning in settings() if len(meaning) < 10] == []


@pytest.mark.parametrize(
    ("name", "kind", "default"),
    [
        ("run.dir", "path | unset", "unset"),
        ("run.seed", "int", "0"),
        ("model.dtype", "float32 | bfloat16", "float32"),
        ("data.shuffle", "bool", "true"),
        ("rollout.batch_paddings", "list of int | unset", "unset"),
        ("rollout.steps_per_launch", "auto | int", "auto"),
        ("rewards", "list", "['exact_answer']"),
        ("rewards[i].name", "str", "required"),
        ("rewards[i].options", "mapping", "{}"),
        ("optimizer.learning_rate", "float", "1.0e-06"),
    ],
)
def test_types_and_defaults_as_shown(name: str, kind: str, default: str) -> None:
    assert {n: (k, d) for n, k, d, _ in settings()}[name] == (kind, default)
