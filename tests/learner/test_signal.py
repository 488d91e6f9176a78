"""Groups and completions that are left out of the loss: which they are, and that the others learn as if alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from tests.learner.test_learner import first_moments
from tests.learner.toy import make_config, make_learner, make_mesh, make_model, make_scored, with_completion
from tpu_grpo.algorithms import open_algorithm
from tpu_grpo.config import LossAggregation, RunConfig, parse_config
from tpu_grpo.learner.rows import RowShape, group_advantages, train_rows
from tpu_grpo.learner.signal import counted_rows, informative_groups, signal_metrics
from tpu_grpo.records.errors import ConfigError, RewardError
from tpu_grpo.records.stages import Completion, Prompt, PromptBatch, Rollout, ScoredRollout, Scores
from tpu_grpo.tunix_loop.learner import GrpoAlgorithmConfig

NAN = float("nan")


def scored_of(totals: Sequence[Sequence[float]], ends: str) -> ScoredRollout:
    """Groups with these rewards; a letter of ``ends`` says how each completion ended: s(top), l(ength)."""
    total_B, ends = np.array(totals, np.float64).ravel(), ends.replace(" ", "")
    completions = tuple(
        Completion(np.array([5]), np.array([-1.0], np.float32), "stop" if end == "s" else "length", 0) for end in ends
    )
    prompts, size = tuple(Prompt("", (number,)) for number in range(len(totals))), len(totals[0])
    rollout = Rollout(PromptBatch(1, prompts, tuple(range(len(totals)))), size, completions, ("",) * len(ends), 0.0)
    return ScoredRollout(rollout, Scores(total_B, {}, 0.0))


def config(**algorithm: Any) -> RunConfig:
    return parse_config({"algorithm": algorithm})


GROUPS = scored_of([[1, 1], [0, 1], [0, 0], [1, 0], [2, 1]], "ss ss ll ll sl")


def test_informative_groups_and_counted_completions_by_hand() -> None:
    for algorithm, informative, counted in (
        ({}, [0, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ({"drop_uninformative": True}, [0, 1, 0, 1, 1], [0, 0, 1, 1, 0, 0, 1, 1, 1, 1]),
        ({"truncated": "mask"}, [0, 1, 0, 0, 1], [1, 1, 1, 1, 0, 0, 0, 0, 1, 0]),
        ({"truncated": "mask", "drop_uninformative": True}, [0, 1, 0, 0, 1], [0, 0, 1, 1, 0, 0, 0, 0, 1, 0]),
    ):
        settings = config(**algorithm)
        informative_P = informative_groups(GROUPS, {}, settings)
        assert informative_P.tolist() == [bool(value) for value in informative]
        assert counted_rows(GROUPS.rollout, informative_P, settings).tolist() == [bool(value) for value in counted]
        metrics = signal_metrics(GROUPS.rollout, informative_P, settings)
        assert metrics["groups/informative_fraction"] == sum(informative) / 5
        assert metrics.get("completions/masked_fraction") == (0.5 if "truncated" in algorithm else None)


def test_a_group_with_a_token_that_is_rewarded_by_itself_is_informative() -> None:
    """The first group's rewards are equal and its tokens got nothing; of the third one token did."""
    per_token = tuple(np.array([value]) for value in (0, 0, 0, 0, 0, -0.5, 1, 0, 0, 0))
    scored = replace(GROUPS, scores=replace(GROUPS.scores, per_token=per_token))
    assert informative_groups(scored, {}, config()).tolist() == [False, True, True, True, True]
    masked = informative_groups(scored, {}, config(truncated="mask"))  # the third and the fourth were cut
    assert masked.tolist() == [False, True, False, False, True]


def test_rewards_one_by_one_decide_where_the_advantages_take_them_so() -> None:
    """Totals of the first group are equal, its rewards are not; the third differs only in a reward of weight 0."""
    scored = scored_of([[1, 1], [1, 1], [1, 1], [0, 1]], "s" * 8)
    rewards_NPG = np.array(
        [[[0, 1], [1, NAN], [1, 1], [0, 0]], [[1, 0], [1, 1], [NAN, NAN], [0, 1]], [[0, 0], [0, 0], [3, 4], [0, 0]]]
    )
    known = {"rewards_NPG": rewards_NPG, "weights_N": np.array([1.0, 0.5, 0.0])}
    assert informative_groups(scored, known, config()).tolist() == [True, False, False, True]
    assert informative_groups(scored, {}, config()).tolist() == [False, False, False, True]


@pytest.mark.parametrize("aggregation", get_args(LossAggregation))
def test_those_that_do_not_count_leave_the_weights_of_the_others_as_if_alone(aggregation: Any) -> None:
    rng = np.random.default_rng(1)
    counts = rng.integers(1, 6, 8)
    completions = [Completion(np.ones(n, np.int32), np.zeros(n, np.float32), "stop", 0) for n in counts]
    shape, counted = RowShape(2, 5, 7, 1), np.array([1, 0, 1, 1, 0, 0, 1, 1], np.bool_)

    def weight_of_each(which: Sequence[int], counted: np.ndarray | None) -> list[float]:
        chosen, prompts = [completions[i] for i in which], [[1]] * len(which)
        rows, packing = train_rows(prompts, chosen, np.zeros(len(which)), shape, aggregation, counted)
        starts = zip(packing.rows, packing.starts, strict=True)
        return [float(rows.weights[row, start + 1]) for row, start in starts]

    alone = weight_of_each(np.flatnonzero(counted).tolist(), None)
    among = weight_of_each(range(8), counted)
    assert [among[i] for i in np.flatnonzero(counted)] == alone
    assert [among[i] for i in np.flatnonzero(~counted)] == [0.0] * 3


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "lite_ppo", "scale_rl", "reinforce_pp_baseline", "gdpo"])
def test_advantages_of_a_step_are_those_of_the_groups_that_are_taken(advantage: str) -> None:
    """Deviations over a step, too; and in whatever order the groups stand."""
    rng = np.random.default_rng(2)
    rewards_PG, taken = rng.normal(size=(6, 3)), np.array([1, 0, 0, 1, 1, 0], np.bool_)
    known = {"lengths_PG": rng.integers(1, 9, (6, 3)), "rewards_NPG": rewards_PG[None], "weights_N": np.ones(1)}
    algorithm = open_algorithm(config(advantage=advantage).algorithm)

    def advantages(order: np.ndarray, taken_P: np.ndarray | None) -> np.ndarray:
        of_order = {name: value if value.ndim == 1 else value[..., order, :] for name, value in known.items()}
        found = group_advantages(
            rewards_PG[order].ravel(), group_size=3, algorithm=algorithm, known=of_order, taken_P=taken_P
        )
        return found.reshape(-1, 3)

    alone, among = advantages(np.flatnonzero(taken), None), advantages(np.arange(6), taken)
    np.testing.assert_array_equal(among[taken], alone)
    assert not among[~taken].any()
    order = np.array([5, 3, 0, 1, 4, 2])
    np.testing.assert_allclose(advantages(order, taken[order]), among[order], rtol=1e-12, atol=1e-15)
    assert not advantages(np.arange(6), np.zeros(6, np.bool_)).any()


@pytest.mark.slow  # two learners; the next test works out the loss that one of them has
def test_groups_of_equal_rewards_change_nothing_in_the_step(tmp_path: Path) -> None:
    """Four groups, two of them of equal rewards, teach what the other two teach alone; the loss is worked out here."""
    algorithm = {"advantage": "scale_rl", "loss_aggregation": "token-mean"}
    of_two = make_config(tmp_path / "two", {"data": {"prompts_per_step": 2}, "algorithm": algorithm})
    of_four = make_config(tmp_path / "four", {"algorithm": algorithm | {"drop_uninformative": True}})
    scored = make_scored(make_model(make_mesh()), of_four)
    total = scored.scores.total.copy()
    total[0:2], total[4:6] = 0.25, 1.0
    scored = replace(scored, scores=Scores(total, {}, 0.0))
    two, four = make_learner(of_two), make_learner(of_four)
    alone, among = two.update(scored.select([1, 3])), four.update(scored)

    centred = total.reshape(4, 2)[[1, 3]] - total.reshape(4, 2)[[1, 3]].mean(axis=1, keepdims=True)
    advantages = centred / (centred.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(among.advantages.reshape(4, 2)[[1, 3]], advantages, rtol=1e-12)
    lengths = np.array([len(c.token_ids) for c in scored.rollout.completions]).reshape(4, 2)[[1, 3]]
    loss = -(lengths * advantages).sum() / lengths.sum()  # at ratio 1 a token's loss is minus its advantage
    assert among.metrics["update/loss"] == pytest.approx(loss, abs=1e-6)
    assert among.metrics["update/loss"] == pytest.approx(alone.metrics["update/loss"], abs=1e-6)
    assert among.metrics["update/grad_norm"] == pytest.approx(alone.metrics["update/grad_norm"], rel=1e-5)
    assert among.metrics["groups/informative_fraction"] == 0.5
    moments = first_moments(two)
    for name, moment in first_moments(four).items():
        np.testing.assert_allclose(moment, moments[name], atol=1e-6, err_msg=name)
    nothing = replace(scored, scores=Scores(np.ones(8), {}, 0.0))
    assert four.update(nothing).metrics["update/loss"] == 0.0
    with pytest.raises(RewardError, match=r"rewards must be finite, got nan in row 1"):
        four.update(replace(scored, scores=Scores(np.array([0, NAN, *total[2:]]), {}, 0.0)))
    two.close()
    four.close()


@pytest.mark.slow  # a learner; token weights are tested by hand
def test_cut_completions_have_a_reward_for_the_baseline_and_no_token_in_the_loss(tmp_path: Path) -> None:
    algorithm = {"truncated": "mask", "drop_uninformative": True, "loss_aggregation": "token-mean"}
    settings = make_config(tmp_path, {"algorithm": algorithm})
    scored = make_scored(make_model(make_mesh()), settings)  # all are cut
    for row in (0, 1, 2, 3, 6):
        scored = with_completion(scored, row, finish_reason="stop")
    total = np.array([0.5, 0.5, 1.0, 3.0, 0.0, 1.0, 0.25, -1.0])
    learner = make_learner(settings)
    found = learner.update(replace(scored, scores=Scores(total, {}, 0.0)))
    rewards = total.reshape(4, 2)
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    advantages[2] = 0.0  # both completions are cut
    np.testing.assert_allclose(found.advantages, advantages.ravel(), rtol=1e-9)
    lengths, kept = np.array([len(c.token_ids) for c in scored.rollout.completions]), [2, 3, 6]
    loss = -(lengths * advantages.ravel())[kept].sum() / lengths[kept].sum()
    assert found.metrics["update/loss"] == pytest.approx(loss, abs=1e-6)
    assert found.metrics["completions/masked_fraction"] == 0.375
    assert found.metrics["groups/informative_fraction"] == 0.5
    learner.close()


def test_a_baseline_of_the_whole_step_learns_from_every_group() -> None:
    with pytest.raises(ValueError, match=r"drop_uninformative=true does not go with algorithm.advantage=reinforce_pp,"):
        config(drop_uninformative=True, advantage="reinforce_pp")
    assert config(drop_uninformative=True, advantage="reinforce_pp_baseline").drops_uninformative


@pytest.mark.parametrize("setting", [{"drop_uninformative": True}, {"truncated": "mask"}])
def test_tunix_own_loop_refuses_to_leave_anything_out(setting: dict[str, Any]) -> None:
    name, value = next(iter(setting.items()))
    with pytest.raises(ConfigError, match=rf"algorithm.{name}={str(value).lower()} needs a whole step at once"):
        GrpoAlgorithmConfig.from_section(config(**setting).algorithm)


def test_what_is_selected_of_a_step() -> None:
    chosen = GROUPS.select([4, 1])
    assert chosen.scores.total.tolist() == [2, 1, 0, 1]
    assert chosen.rollout.batch.records == (4, 1)
    assert [p.token_ids for p in chosen.rollout.batch.prompts] == [(4,), (1,)]
    assert [c.finish_reason for c in chosen.rollout.completions] == ["stop", "length", "stop", "stop"]
