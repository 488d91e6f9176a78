"""Algorithms of the user's own: what is said when one cannot be trained with, and that one that can be does train."""

import textwrap
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from tests.goldens import cases, compare
from tests.learner.toy import make_config, make_learner, make_mesh, make_model, make_scored
from tpu_grpo.algorithms import Sequences, notices, open_algorithm
from tpu_grpo.config import AlgorithmSection, parse_config
from tpu_grpo.records.errors import ConfigError, NonFiniteError

MISTAKES = Path(__file__).with_name("mistakes.txt")
CLASSES = Path(__file__).with_name("classes.txt")
"""Changes of GOOD, or whole texts, and what is said about them."""
GOOD = """\
import jax.numpy as jnp
from tpu_grpo.algorithms import TokenLosses


class Mine:
    aggregation = "token-mean"

    def __init__(self, clip_high, strength=1.0):
        self.clip_high, self.strength = clip_high, strength

    def advantages(self, rewards_PG):
        return rewards_PG - rewards_PG.mean(axis=1, keepdims=True)

    def token_losses(self, logprobs_BT, old_logprobs_BT, advantages_BT):
        loss_BT = -self.strength * advantages_BT * logprobs_BT
        return TokenLosses(loss_BT, jnp.zeros_like(loss_BT, bool))
"""


def section(directory: Path, text: str, **settings: Any) -> AlgorithmSection:
    path = directory / "mine.py"
    path.write_text(text)
    return AlgorithmSection.model_validate({"name": f"{path}:Mine", **settings})


def test_a_class_gets_the_settings_it_asks_for_and_its_options(tmp_path: Path) -> None:
    opened = open_algorithm(section(tmp_path, GOOD, clip_low=0.3, options={"strength": 2.0}))
    mine: Any = opened.objective
    assert (mine.clip_high, mine.strength, opened.aggregation) == (0.3, 2.0, "token-mean")
    assert opened.advantages(np.array([[1.0, 3.0]])).tolist() == [[-1.0, 1.0]]


def replaced(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


@pytest.mark.parametrize(("change", "told"), cases(CLASSES))
def test_what_cannot_be_trained_with_is_refused(tmp_path: Path, change: str, told: str) -> None:
    old, arrow, new = change.partition(" ⇒ ")
    with pytest.raises(ConfigError) as caught:
        open_algorithm(section(tmp_path, replaced(old, new) if arrow else change))
    compare(CLASSES, change, told, str(caught.value).replace(str(tmp_path), "HERE"))


def test_options_that_a_class_does_not_take_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not take the options \['strenght'\]; it takes: strength"):
        open_algorithm(section(tmp_path, GOOD, options={"strenght": 1}))
    with pytest.raises(ConfigError, match=r"options must not hold \['clip_high'\], which are settings"):
        open_algorithm(section(tmp_path, GOOD, options={"clip_high": 1}))


@pytest.mark.parametrize(("settings", "told"), cases(MISTAKES))
def test_settings_that_make_no_sense_together_are_refused(settings: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_algorithm(AlgorithmSection.model_validate(yaml.safe_load(settings)))
    compare(MISTAKES, settings, told, str(caught.value).replace(str(Path.cwd()), "HERE"))


def test_a_class_of_ones_own_may_use_the_names_of_later_settings_for_its_options(tmp_path: Path) -> None:
    text = replaced("strength=1.0", "delta=1.0").replace("strength", "delta")
    mine: Any = open_algorithm(section(tmp_path, text, options={"delta": 0.5})).objective
    assert mine.delta == 0.5


ASKING = """\
from tpu_grpo.algorithms import TokenLosses


class Mine:
    aggregation = "token-mean"

    def advantages(self, rewards_PG, lengths_PG, rewards_NPG, weights_N):
        return rewards_PG * lengths_PG + (weights_N[:, None, None] * rewards_NPG).sum(axis=0)

    def token_losses(self, logprobs_BT, old_logprobs_BT, advantages_BT, sequences):
        return TokenLosses(-advantages_BT * sequences.sum(logprobs_BT), logprobs_BT > 0)
"""


def test_methods_get_what_they_ask_for(tmp_path: Path) -> None:
    mine = open_algorithm(section(tmp_path, ASKING))
    assert mine.asked == ("lengths_PG", "rewards_NPG", "weights_N")
    known = {
        "lengths_PG": np.array([[3, 4]]),
        "rewards_NPG": np.array([[[1.0, 2.0]], [[5.0, 7.0]]]),
        "weights_N": np.array([2.0, 1.0]),
    }
    assert mine.advantages(np.array([[1.0, 1.0]]), known).tolist() == [[3 + 2 + 5, 4 + 4 + 7]]
    sequences = Sequences(jnp.array([[1, 1, 2]]), jnp.array([[True, True, True]]))
    losses = mine.token_losses(jnp.array([[-1.0, -2.0, -4.0]]), jnp.zeros((1, 3)), jnp.ones((1, 3)), sequences)
    assert losses.loss_BT.tolist() == [[3.0, 3.0, 4.0]]


@pytest.mark.slow
def test_an_algorithm_of_ones_own_takes_a_step(tmp_path: Path) -> None:
    """Minus A log p by hand, over all tokens; then the same algorithm with advantages that are not finite."""
    chosen = section(tmp_path, GOOD, options={"strength": 0.5}, group_size=2)
    config = make_config(tmp_path / "run", {"algorithm": chosen.model_dump()})
    learner, scored = make_learner(config), make_scored(make_model(make_mesh()), config)
    before = learner.params_digest()
    result = learner.update(scored)
    totals = scored.scores.total.reshape(4, 2)
    np.testing.assert_allclose(result.advantages, (totals - totals.mean(1, keepdims=True)).ravel(), atol=1e-12)
    tokens = [c.logprobs * a for c, a in zip(scored.rollout.completions, result.advantages, strict=True)]
    assert result.metrics["update/loss"] == pytest.approx(-0.5 * np.concatenate(tokens).mean(), abs=1e-5)
    assert learner.params_digest() != before

    opened: Any = learner._parts.settings.algorithm
    opened.objective.advantages = lambda rewards_PG: rewards_PG * np.nan
    with pytest.raises(NonFiniteError, match="advantages must be finite, got nan in row 0, for a group"):
        learner.update(scored)


def test_the_text_of_the_class_is_what_is_read(tmp_path: Path) -> None:
    first = open_algorithm(section(tmp_path, GOOD))
    second = open_algorithm(section(tmp_path, textwrap.dedent(replaced('"token-mean"', '"sequence-mean-token-scale"'))))
    assert (first.aggregation, second.aggregation) == ("token-mean", "sequence-mean-token-scale")


# --- what a run says at its start -------------------------------------------------------------------------------------


def said(algorithm: dict[str, Any], **rollout: Any) -> list[str]:
    config = parse_config({"algorithm": algorithm, "rollout": rollout})
    return notices(config.algorithm, config.rollout)


def test_filters_bias_the_ratio_unless_it_is_filtered() -> None:
    assert said({}) == []
    [notice] = said({}, top_p=0.9, top_k=20)
    assert notice.startswith("rollout.top_k=20 and rollout.top_p=0.9 biases the ratio: ")
    assert notice.endswith("set algorithm.filtered_ratio=true for that among the kept tokens")
    assert said({"filtered_ratio": True}, min_p=0.1) == []


def test_products_over_long_answers_are_warned_of() -> None:
    assert said({"correction": "sequence"}, max_new_tokens=128) == []
    assert said({"correction": "geometric"}, max_new_tokens=1024) == []
    [notice] = said({"correction": "sequence"}, max_new_tokens=1024)
    assert "up to rollout.max_new_tokens=1024 ratios: 0.01 nats a token become a factor of e^10.2 = 2.8e+04" in notice
    assert notice.endswith("algorithm.correction=geometric does not grow with length")


def test_a_filtered_ratio_needs_a_filter() -> None:
    with pytest.raises(ValueError, match="filtered_ratio=true needs rollout.top_k, top_p or min_p, got none of them"):
        said({"filtered_ratio": True})
