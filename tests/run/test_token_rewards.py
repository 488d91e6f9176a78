"""Per-token rewards meet algorithms: which take them, and what the advantages of completions see of them."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.learner.test_signal import scored_of
from tests.learner.toy import make_config
from tpu_grpo.algorithms import open_algorithm
from tpu_grpo.config import parse_config
from tpu_grpo.hosts import Hosts
from tpu_grpo.learner.signal import _asked
from tpu_grpo.records.errors import ConfigError, RewardError
from tpu_grpo.records.stages import ScoredRollout, Scores
from tpu_grpo.run.inputs import open_inputs
from tpu_grpo.run.parts import Task, _check_token_rewards, open_task

REWARD = """
from tpu_grpo.rewards import per_token

@per_token
def quarter(completions, completion_ids):
    return [[0.25] * len(ids) for ids in completion_ids]
"""


def open_with(directory: Path, **algorithm: Any) -> Task:
    (directory / "quarter.py").write_text(REWARD)
    config = parse_config(
        {
            "data": {"path": "builtin:addition", "max_prompt_tokens": 12},
            "rewards": [{"name": f"{directory}/quarter.py:quarter", "workers": 0}],
            "algorithm": algorithm,
            "evaluation": {"prompts": 8},
        }
    )
    return open_task(open_inputs(config), open_algorithm(config.algorithm), Hosts())


@pytest.mark.full
def test_one_ratio_for_a_whole_completion_is_refused(tmp_path: Path) -> None:
    message = r"is of the whole completion, but the rewards \['quarter'\] give every token its own; set algorithm"
    with pytest.raises(ConfigError, match=message):
        open_with(tmp_path, name="gspo")
    for algorithm in ({"name": "gspo", "options": {"per_token": True}}, {"name": "grpo"}, {"name": "cispo"}):
        open_with(tmp_path, **algorithm).close()


def test_one_ratio_for_a_whole_completion_does_not_go_with_advantages_of_turns() -> None:
    rewards: Any = SimpleNamespace(token_rewards=())
    for environment, algorithm, refused in (
        ({"name": "toy.py:Toy", "turn_credit": "turn"}, {"name": "gspo"}, True),
        ({"name": "toy.py:Toy", "turn_credit": "turn"}, {"name": "gspo", "options": {"per_token": True}}, False),
        ({"name": "toy.py:Toy"}, {"name": "gspo"}, False),
        ({"turn_credit": "turn"}, {"name": "gspo"}, False),
    ):
        config = parse_config({"environment": environment, "algorithm": algorithm})
        message = "is of the whole completion, but environment.turn_credit=turn gives every turn its own; set algorithm"
        with pytest.raises(ConfigError, match=message) if refused else nullcontext():
            _check_token_rewards(config.environment, config.algorithm, rewards, open_algorithm(config.algorithm))


def test_advantages_take_rewards_of_completions_one_by_one_without_those_of_tokens(tmp_path: Path) -> None:
    """GDPO sees the reward of completions alone; with none there is nothing that it could standardize."""
    rewards = [{"name": "exact_answer", "weight": 0.5}, {"name": "quarter.py:quarter", "weight": 2.0}]
    tree = {
        "algorithm": {"group_size": 2, "advantage": "gdpo"},
        "data": {"prompts_per_step": 2, "max_prompt_tokens": 6},
    }
    config = make_config(tmp_path, tree).model_copy(
        update={"rewards": parse_config({"rewards": rewards}).rewards},
    )
    algorithm = open_algorithm(config.algorithm)
    by_name = {"exact_answer": np.array([0.0, 1.0, 1.0, 1.0]), "quarter": np.arange(4.0)}
    scored = scored_of([[0, 0.5], [0.5, 0.5]], "ssss")
    scores = Scores(scored.scores.total, by_name, 0.0, token_rewards=("quarter",))
    known = _asked(ScoredRollout(scored.rollout, scores), config.rewards, algorithm)
    np.testing.assert_array_equal(known["rewards_NPG"], [[[0, 1], [1, 1]]])
    np.testing.assert_array_equal(known["weights_N"], [0.5])
    of_tokens = ScoredRollout(scored.rollout, replace(scores, token_rewards=("exact_answer", "quarter")))
    with pytest.raises(
        RewardError, match=r"got only \['exact_answer', 'quarter'\], which are per-token rewards; add another"
    ):
        _asked(of_tokens, config.rewards, algorithm)
