"""The recipes under configs/recipes, and the presets that give defaults."""

import re
from pathlib import Path

import pytest

from tests.config.asking import REPOSITORY
from tpu_grpo.algorithms import open_algorithm
from tpu_grpo.algorithms.formula import objective_line
from tpu_grpo.config import RunConfig, load_config, parse_config
from tpu_grpo.learner.optimizers import learning_rate_schedule
from tpu_grpo.models.checkpoint import abstract_checkpoint
from tpu_grpo.rewards import open_rewards
from tpu_grpo.run.inputs import check_model

RECIPES = sorted((REPOSITORY / "configs" / "recipes").glob("*.yaml"))
MODELS = REPOSITORY / "configs" / "models"


def test_there_is_a_recipe_for_each() -> None:
    assert {path.stem for path in RECIPES} == {"grpo", "dr_grpo", "dapo", "gspo", "scalerl", "lora"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_passes_a_dry_run_and_says_what_it_takes_from_which_paper(path: Path) -> None:
    config = load_config(path)
    assert config.run.name == path.stem
    algorithm = open_algorithm(config.algorithm)
    assert objective_line(config.algorithm, config.rollout, algorithm)
    learning_rate_schedule(config.optimizer, config.updates)
    check_model(config, abstract_checkpoint(MODELS / Path(config.model.path).name))
    with open_rewards(config.rewards, ("question", "answer")) as rewards:
        assert rewards.names[0] == "gsm8k"
    header = " ".join(re.match(r"(#.*\n)+", path.read_text())[0].replace("\n#", "").split())  # type: ignore[index]
    assert re.search(r"From (the paper \(.+ et al\. 20\d\d, arXiv \d{4}\.\d{5}\)|\".+\" \(.+ 20\d\d\)): ", header)
    assert "What departs: " in header
    assert f"scripts/plan.py configs/recipes/{path.name} --slice v5e-8" in header


def test_a_preset_gives_defaults() -> None:
    config = load_config(None, ["algorithm.preset=scalerl"])
    assert parse_config(config.model_dump(mode="json")) == config
    found = config.algorithm
    assert (found.name, found.advantage, found.loss_aggregation) == ("cispo", "scale_rl", "prompt-mean-token-mean")
    assert (found.group_size, found.drop_uninformative) == (16, True)
    others = {"preset", "name", "advantage", "loss_aggregation", "group_size", "drop_uninformative"}
    assert found.model_dump(exclude=others) == RunConfig().algorithm.model_dump(exclude=others)
    open_algorithm(found)


def test_what_is_set_counts_before_a_preset(tmp_path: Path) -> None:
    """In a file, on the command line, before or after the preset, and also where it is the usual default."""
    path = tmp_path / "run.yaml"
    path.write_text("algorithm: {group_size: 4, preset: scalerl, drop_uninformative: false, advantage: null}\n")
    found = load_config(path).algorithm
    assert (found.name, found.group_size, found.drop_uninformative, found.advantage) == ("cispo", 4, False, None)
    found = load_config(path, ["algorithm.group_size=8", "algorithm.name=grpo"]).algorithm
    assert (found.name, found.group_size, found.loss_aggregation) == ("grpo", 8, "prompt-mean-token-mean")
    assert load_config(path, ["algorithm.preset=null"]).algorithm.name == "grpo"
