"""What a command says when a library is missing that an extra of the package brings."""

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tpu_grpo.config import parse_config
from tpu_grpo.config.plugins import EXTRAS
from tpu_grpo.environments.environment_classes import load_environment
from tpu_grpo.records.errors import TpuGrpoError
from tpu_grpo.rewards.reward_functions import find_reward
from tpu_grpo.rewards.shipped import SHIPPED
from tpu_grpo.run.inputs import open_inputs

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
FEATURES: dict[str, tuple[str, Callable[[], object]]] = {
    **{
        f"the reward {name}": (shipped.library, lambda name=name: find_reward(name))
        for name, shipped in SHIPPED.items()
        if shipped.library is not None
    },
    **{
        f"the environment {name}": (name, lambda name=name: load_environment(name, {}))
        for name in ("reasoning_gym", "textarena")
    },
    "data.path=reasoning_gym:chain_sum": (
        "reasoning_gym",
        lambda: open_inputs(parse_config({"data": {"path": "reasoning_gym:chain_sum"}})),
    ),
    "data.path: gs://bucket/d.jsonl": (
        "gcsfs",
        lambda: open_inputs(parse_config({"data": {"path": "gs://bucket/d.jsonl"}})),
    ),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_without_its_library_says_what_to_type(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library, use = FEATURES[feature]
    for name in [name for name in sys.modules if name.split(".")[0] == library or "environments.shipped." in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    extra = EXTRAS[library]
    told = (
        f'{feature} needs the package {library}, which is not installed; type: pip install "tpu-grpo[{extra}]", or '
        f"in a clone: uv sync --extra {extra}"
    )
    with pytest.raises(TpuGrpoError, match=f"^{re.escape(told)}$"):
        use()


def test_every_extra_brings_the_library_that_is_named() -> None:
    brought = {
        extra: [re.split(r"\W", requirement.replace("-", "_"))[0] for requirement in requirements]
        for extra, requirements in PROJECT["project"]["optional-dependencies"].items()
    }
    assert brought == {extra: [library] for library, extra in EXTRAS.items()}


def test_the_development_environment_has_what_the_tests_need() -> None:
    """Those of the cloud and of games are tested where they are installed."""
    [own] = [each for each in PROJECT["dependency-groups"]["dev"] if each.startswith("tpu-grpo[")]
    assert set(re.findall(r"\w+", own)) - {"tpu", "grpo"} == set(EXTRAS.values()) - {"gcs", "textarena"}


def test_nothing_is_required_twice() -> None:
    required = [PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values()]
    names = [re.split(r"[\[=]", each)[0] for requirements in required for each in requirements]
    assert sorted(names) == sorted(set(names))
    assert "override-dependencies" not in PROJECT["tool"]["uv"]  # pip knows of none
