"""Algorithms of the user's own: what is said when one cannot be trained with, and that one that can be does train."""

import textwrap
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.learner.toy import make_config, make_learner, make_mesh, make_model, make_scored
from tpu_grpo.algorithms import Sequences, notices, open_algorithm
from tpu_grpo.config import AlgorithmSection, parse_config
from tpu_grpo.records.errors import ConfigError, NonFiniteError

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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def Mine(): pass", "must be a class with the methods advantages and token_losses, got a function"),
        ("class Mine: pass", r"must have a method advantages\(rewards_PG\), got a class without; add one"),
        (
            replaced("old_logprobs_BT, advantages_BT)", "old, advantages_BT)"),
            r"token_losses must take \(logprobs_BT, old_logprobs_BT, advantages_BT\) by these names, got .*; rename",
        ),
        (replaced("token-mean", "mean"), "must have an attribute aggregation that is one of .*, got 'mean'"),
        (replaced("strength=1.0", "strength"), r"requires \['strength'\], which are neither in algorithm.options"),
        (replaced("= clip_high,", "= clip_high / 0,"), "Mine raised ZeroDivisionError: .*; repair it"),
        (replaced("rewards_PG - ", "rewards_PG[0] - nothing + "), "advantages raised NameError: .*nothing"),
        (replaced("return rewards_PG - ", "return "), r"advantages returns must have the shape \(2, 8\).*\(2, 1\)"),
        (
            replaced("keepdims=True)", "keepdims=True) + 0 / rewards_PG"),
            "advantages returns must be finite, got .*a group of equal rewards has a standard deviation of 0",
        ),
        (replaced("TokenLosses(loss_BT, ", "(loss_BT, "), r"must return TokenLosses\(.*, got a tuple"),
        (replaced("(loss_BT, jnp", "(loss_BT.mean(), jnp"), r"loss_BT of token_losses must have the shape \(3, 2"),
        (replaced("* logprobs_BT", "* jnp.log(logprobs_BT)"), "loss_BT of token_losses must be finite, got"),
        (
            replaced("advantages_BT * logprobs_BT", "jnp.sqrt(0 * logprobs_BT)"),
            "the gradient of loss_BT by logprobs_BT must be finite",
        ),
        (replaced("* logprobs_BT", "* old_logprobs_BT"), "must depend on logprobs_BT, got a gradient of zero"),
    ],
)
def test_what_cannot_be_trained_with_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_algorithm(section(tmp_path, text))


def test_options_that_a_class_does_not_take_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not take the options \['strenght'\]; it takes: strength"):
        open_algorithm(section(tmp_path, GOOD, options={"strenght": 1}))
    with pytest.raises(ConfigError, match=r"options must not hold \['clip_high'\], which are settings"):
        open_algorithm(section(tmp_path, GOOD, options={"clip_high": 1}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("drgrpo", r"algorithm.name=drgrpo is not a shipped algorithm; did you mean dr_grpo\? \(shipped: grpo"),
        ("xyz", r"is not a shipped algorithm; \(shipped: .*your own: path.py:Class"),
        ("missing.py:Mine", "algorithm file missing.py must be readable from the working directory"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_algorithm(AlgorithmSection(name=name))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"options": {"cap": 1}}, r"algorithm grpo does not take the options \['cap'\]; it takes: none"),
        ({"name": "cispo", "options": {"cup": 1}}, r"cispo does not take the options \['cup'\]; it takes: cap"),
        ({"options": {"delta": 3}}, r"options must not hold \['delta'\], which are settings of algorithm; set"),
        ({"name": "sapo", "clip_low": 0.1}, "algorithm.clip_low=0.1 needs an algorithm that bounds its ratio so, and"),
        ({"name": "cispo", "dual_clip": 3.0}, "algorithm.dual_clip=3.0 needs an algorithm that .*, and cispo does not"),
        ({"name": "reinforce", "delta": 3.0}, "algorithm.delta=3.0 needs an algorithm that .*; leave it out"),
        ({"dual_clip": 3.0, "delta": 3.0}, "dual_clip=3.0 and algorithm.delta=3.0 exclude each other.*; set one"),
        ({"delta": 1.25, "clip_high": 0.28}, r"delta must be > 1 \+ clip_high = 1.28, got 1.25; .*raise it"),
        ({"name": "cispo", "clip_high": 4.0, "options": {"cap": 5.0}}, "cap=5.0 and algorithm.clip_high=4.0 exclude"),
        ({"name": "cispo", "options": {"cap": 0.0}}, "options.cap must be > 0, got 0.0"),
        ({"name": "dppo", "old_policy": "trainer"}, "dppo needs algorithm.old_policy=rollout, got trainer; .*leave"),
        ({"name": "dppo", "options": {"mask_high": 2}}, r"mask_high must be a difference of probabilities in \(0, 1\]"),
        ({"name": "dppo", "options": {"kl_weight": -1}}, "kl_weight must be >= 0, got -1"),
        ({"name": "sapo", "options": {"temperature_negative": 0}}, "temperature_negative must be > 0, got 0"),
        ({"name": "vespo", "options": {"k_negative": 0}}, "options of vespo must be > 0, got 0"),
        ({"name": "reinforce", "iterations": 2}, "reinforce needs algorithm.iterations=1, got 2; .*importance_samp"),
        ({"name": "reinforce", "mini_batch_prompts": 4}, "needs algorithm.mini_batch_prompts=null, got 4; .*or take"),
        # the KL penalty and the entropy bonus
        ({"kl_unbiased": True}, "kl_unbiased=true needs a KL penalty, got algorithm.beta=0; set beta"),
        ({"kl_unbiased": True, "beta": 0.1, "kl_estimator": "mse_kl"}, "needs kl_estimator k3 or k1, got mse_kl"),
        ({"reference_reset_every": 5}, "reference_reset_every=5 needs a KL penalty, got algorithm.beta=0; set beta"),
        ({"kl_in": "reward"}, "kl_in=reward needs a KL penalty, got algorithm.beta=0; set beta"),
        ({"kl_in": "reward", "beta": 0.1, "kl_unbiased": True}, "kl_unbiased=true needs algorithm.kl_in=loss, got rew"),
        ({"kl_in": "reward", "beta": 0.1, "kl_estimator": "k3"}, "kl_in=reward needs kl_estimator k1, got k3; as a re"),
        ({"entropy_step": 0.01}, "entropy_step=0.01 needs algorithm.entropy_target, got none; set it"),
        # corrections
        ({"importance_floor": 0.5}, "importance_floor=0.5 needs algorithm.correction, got none; set it to token"),
        ({"correction": "token", "importance_floor": 3.0}, "importance_floor must be < importance_cap = 2.0, got 3.0"),
        (
            {"old_policy": "trainer", "correction": "geometric", "correction_mode": "truncate"},
            "correction=geometric needs algorithm.correction_mode=mask, got truncate",
        ),
        (
            {"correction": "token", "correction_mode": "truncate"},
            "correction_mode=truncate needs algorithm.old_policy=trainer, got rollout; .*would count twice",
        ),
    ],
)
def test_settings_that_make_no_sense_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_algorithm(AlgorithmSection.model_validate(settings))


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
