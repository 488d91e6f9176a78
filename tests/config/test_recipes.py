"""The recipes under configs/recipes, and the presets that give defaults."""

import json
import re
from pathlib import Path

import pytest

from tests.config.asking import REPOSITORY
from tests.environments.template_families import tokenizer
from tests.rewards.conftest import make_rollout, scored
from tpu_grpo.algorithms import open_algorithm
from tpu_grpo.algorithms.formula import objective_line
from tpu_grpo.config import RunConfig, load_config, parse_config
from tpu_grpo.data.stream import open_prompts
from tpu_grpo.learner.optimizers import learning_rate_schedule
from tpu_grpo.models.checkpoint import abstract_checkpoint
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.rewards import open_rewards
from tpu_grpo.run.inputs import check_model

RECIPES = sorted((REPOSITORY / "configs" / "recipes").glob("*.yaml"))
MODELS = REPOSITORY / "configs" / "models"


def test_there_is_a_recipe_for_each() -> None:
    assert {path.stem for path in RECIPES} == {"grpo", "dr_grpo", "dapo", "gspo", "scalerl", "lora", "tunix_gemma"}


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
    header = " ".join(re.match(r"(#.*\n)+", path.read_text())[0].replace("\n#", "").split())  # pyrefly: ignore[unsupported-operation]
    assert re.search(r"From (the paper \(.+ et al\. 20\d\d, arXiv \d{4}\.\d{5}\)|\".+\" \(.+ 20\d\d\)): ", header)
    assert "What departs: " in header
    assert f"scripts/plan.py configs/recipes/{path.name} --slice v5e-8" in header


TUNIX = load_config(REPOSITORY / "configs/recipes/tunix_gemma.yaml")


def test_prompts_of_tunixs_hackathon_by_hand(tmp_path: Path) -> None:
    """Gemma 3's chat template puts the system prompt before the question; Gemma 2's refuses it."""
    (tmp_path / "one.jsonl").write_text(json.dumps({"question": "2+3?", "answer": "2+3=5\n#### 5"}))
    data = TUNIX.data.model_copy(update={"path": str(tmp_path / "one.jsonl"), "max_prompt_tokens": 500})
    prompt = open_prompts(data, 0, tokenizer("gemma3")).batch(1).prompts[0]
    assert prompt.text == (
        "<bos><start_of_turn>user\nYou are given a problem. First, think about the problem and provide your reasoning. "
        "Place it between <reasoning> and </reasoning>. Then, provide the final answer (i.e., just one numerical "
        "value) between <answer> and </answer>.\n\n2+3?<end_of_turn>\n<start_of_turn>model\n"
    )
    with pytest.raises(ConfigError, match=r"accept the roles \['system', 'user'\] of .*; empty data.system_prompt or"):
        open_prompts(data, 0, tokenizer("gemma2")).batch(1)


def test_rewards_of_tunixs_hackathon_by_hand() -> None:
    """Tunix gives 10, 4.5, 3, 3, -0.5, 0.5 and -2.5, by its functions' conditions: a constant of 2.5 less."""
    whole = "<reasoning>2+3</reasoning>"
    expected = {
        f"{whole}<answer>5</answer>": 12.5,
        f"{whole}<answer>50</answer>": 7.0,
        f"It is {whole}<answer>5</answer>": 5.5,  # not at the beginning of a line
        f"{whole}\n<answer>5": 5.5,
        f"<answer>{whole}5</answer> {whole}": 2.0,
        f"{whole}5": 3.0,
        "#### 5": 0.0,
    }
    found = scored(make_rollout(["2+3?"], [*expected], [{"answer": "#### 5"}]), *TUNIX.rewards).total
    assert dict(zip(expected, found.tolist(), strict=True)) == expected


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
