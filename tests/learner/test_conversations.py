"""Conversations through packing, loss and learner: what is learnt from them is worked out here token by token."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from tests.algorithms.test_objectives import gradient_of, surrogate
from tests.learner.test_loss import batch_of, distance, pick
from tests.learner.test_mini_batches import completions_of
from tests.learner.toy import (
    VOCAB,
    make_config,
    make_learner,
    make_mesh,
    make_model,
    make_scored,
    model_logps,
    settings_of,
    signal_of,
    with_completion,
)
from tests.talks import talk
from tpu_grpo.config import AlgorithmSection, LossAggregation
from tpu_grpo.learner.rows import RowShape, train_rows
from tpu_grpo.learner.teachers import TeacherReadings
from tpu_grpo.records.episode import Branch, Episode, Failure
from tpu_grpo.records.stages import Completion, Prompt, PromptBatch, Rollout, ScoredRollout, Scores

# --- the loss, where the "model" is a table of log-probabilities, and a sampled token's id a place in it --------------

WORDS = [  # of four rows, two groups: how many tokens were sampled and observed in each turn, and who begins a branch
    ([(2, 1), (1, 2), (3, 0)], ()),
    ([(1, 3)], ()),
    ([(3, 1), (2, 1), (1, 1)], (2,)),
    ([(2, 1), (4, 0)], (1,)),
]
SHAPE = RowShape(8, 9, 20, 2, group_size=2)
SAMPLED = [6, 1, 6, 6]
BRANCHES = [(0, slice(0, 6)), (1, slice(0, 1)), (2, slice(0, 5)), (2, slice(5, 6)), (3, slice(0, 2)), (3, slice(2, 6))]
"""The row of each, and which of the row's sampled tokens it has."""


def table_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-3.0, -0.1, 1 + sum(SAMPLED)).astype(np.float32)


NOW, ENGINE = (
    table_of(1),
    table_of(1) + np.random.default_rng(2).uniform(-0.5, 0.5, 1 + sum(SAMPLED)).astype(np.float32),
)
ADVANTAGES = np.random.default_rng(3).normal(size=1 + sum(SAMPLED))


def talks() -> Iterator[tuple[Completion, np.ndarray]]:
    """The conversations and the advantages of their tokens; those of observed tokens are rubbish."""
    place = 1
    for turns, breaks in WORDS:
        spoken, values, advantages = [], [], []
        for written, answered in turns:
            ids = list(range(place, place + written))
            spoken.append((ids, [0] * answered))
            values += ENGINE[ids].tolist()
            advantages += [*ADVANTAGES[ids], *[99.0] * answered]
            place += written
        yield talk([0, 0], *spoken, prompts={b: [0] * 8 for b in breaks}, logprobs=values), np.array(advantages)


def by_hand(section: AlgorithmSection, aggregation: str) -> tuple[float, np.ndarray]:
    """Loss and gradient by the table: every branch is a sequence, every row a completion."""
    firsts = np.cumsum([1, *SAMPLED])
    loss, gradient = 0.0, np.zeros(len(NOW))
    for row, which in BRANCHES:
        ids = np.arange(firsts[row], firsts[row + 1])[which]
        now, engine, ratios = NOW[ids].astype(float), ENGINE[ids].astype(float), np.ones(len(ids))
        group = SAMPLED[row - row % 2] + SAMPLED[row - row % 2 + 1]
        divisor = {
            "sequence-mean-token-mean": 4 * SAMPLED[row],
            "token-mean": sum(SAMPLED),
            "sequence-mean-token-sum": 4,
            "sequence-mean-token-scale": 4 * SHAPE.max_new_tokens,
            "prompt-mean-token-mean": 2 * group,
        }[aggregation]
        if section.correction == "geometric":
            kept = section.importance_floor <= np.exp((now - engine).mean()) <= section.importance_cap
            ratios = ratios * kept
        for place, (token, one_now, one_engine) in enumerate(zip(ids, now, engine, strict=True)):
            advantage = float(ADVANTAGES[token])
            if section.name == "gspo":
                value, slope = surrogate(np.exp((now - engine).mean()), advantage, 3e-4, 4e-4, np.inf)
                gradient[ids] += slope / len(ids) / divisor
            else:
                value, slope = surrogate(np.exp(one_now - one_engine), advantage, 0.2, 0.2, np.inf)
                gradient[token] += ratios[place] * slope / divisor
            loss += ratios[place] * float(value) / divisor
    return loss, gradient


GEOMETRIC = {"correction": "geometric", "importance_floor": 0.9, "importance_cap": 1.1}
CASES = [({}, name) for name in get_args(LossAggregation)] + [
    ({"name": "gspo"}, "token-mean"),
    (GEOMETRIC, "sequence-mean-token-mean"),
]


@pytest.mark.parametrize(("algorithm", "aggregation"), CASES, ids=str)
def test_loss_and_gradient_by_hand(algorithm: dict[str, Any], aggregation: Any) -> None:
    section = AlgorithmSection.model_validate(algorithm)
    completions, advantages = zip(*talks(), strict=True)
    rows, packing = train_rows([[0]] * 4, completions, advantages, SHAPE, aggregation)
    assert len(packing.rows) == len(BRANCHES) > packing.count  # sequences share rows
    settings, batch = settings_of(section), batch_of(rows)
    parts = [pick(batch, slice(start, start + 2)) for start in range(0, packing.count, 2)]
    found = [gradient_of(NOW, part, settings) for part in parts]
    loss, gradient = by_hand(section, aggregation)
    assert sum(float(value) for (value, _), _ in found) == pytest.approx(loss, rel=1e-6)
    slopes = np.sum([np.asarray(slope, float) for _, slope in found], axis=0)
    assert distance({"": slopes}, {"": gradient}) < 1e-6
    assert slopes[0] == 0.0  # the place of what was not sampled
    sums = [measured for (_, measured), _ in found]
    gap = np.abs(NOW - ENGINE)[1:]
    assert sum(float(one.agreement.tokens) for one in sums) == sum(SAMPLED)
    assert sum(float(one.agreement.abs_sum) for one in sums) == pytest.approx(gap.sum(), rel=1e-6)
    assert max(float(one.agreement.abs_max) for one in sums) == gap.max()


# --- a learner -------------------------------------------------------------------------------------------------------


def scored_talks(model: Any, config: Any, *, wild: bool) -> tuple[ScoredRollout, list[list[float]]]:
    """Four groups of two conversations, every second with two branches, whose engine was the model itself.

    ``wild`` says rubbish of all observed tokens. Beside the rollout: log-probabilities of each row's sampled tokens.
    """
    rng, completions, logprobs = np.random.default_rng(5), [], []
    for row in range(8):
        prompt = [*map(int, rng.integers(3, VOCAB, 3))]
        spoken = [([*map(int, rng.integers(3, VOCAB, 1 + row % 3))], [row + 3]), ([row + 5], [4])]
        later = {1: [9, *map(int, rng.integers(3, VOCAB, 6))]} if row % 2 else None
        made = talk(prompt, *spoken, prompts=later, rewards=[0.5 * row, 1.0])
        values = []
        assert made.episode is not None
        assert made.sampled is not None
        for branch in made.episode.branches:
            ids = made.token_ids[branch.start : branch.end].tolist()
            [found] = model_logps(model, [branch.prompt], [ids])
            values += found[made.sampled[branch.start : branch.end]].tolist()
        logprobs.append(values)
        filled = np.full(len(made.token_ids), np.nan if wild else 0.0, np.float32)
        filled[made.sampled] = values
        completions.append(replace(made, logprobs=filled))
    prompts = tuple(Prompt("", (number,)) for number in range(4))
    rollout = Rollout(PromptBatch(1, prompts), 2, tuple(completions), ("",) * 8, 0.0)
    per_token = tuple(np.where(one.sampled, 0.1, 7.0 if wild else 0.0) for one in completions)
    scores = Scores(np.random.default_rng(6).normal(size=8), {}, 0.0, per_token=per_token)
    return ScoredRollout(rollout, scores), logprobs


LEARNING: dict[str, Any] = {"old_policy": "trainer", "mini_batch_prompts": 2, "iterations": 1}


def test_a_step_in_which_no_conversation_began_teaches_nothing(tmp_path: Path) -> None:
    """All environments failed in ``reset``: there is no update, and the run goes on."""
    for sizes in ({}, {"mini_batch_prompts": 1}):
        config = make_config(tmp_path, {"algorithm": sizes})
        scored, none = make_scored(make_model(make_mesh()), config), np.zeros(0, np.float32)
        failure = Failure("raised", "raised KeyError: 'no level' in reset (bad.py:7 in reset)")
        episode = Episode("", (), (), "failed", (), "Bad", failure=failure)
        never = Completion(none.astype(np.int32), none, "stop", 0, sampled=none.astype(np.bool_), episode=episode)
        rows = len(scored.rollout.completions)
        rollout = replace(scored.rollout, completions=(never,) * rows)
        learner = make_learner(config)
        before = learner.params_digest()
        found = learner.update(ScoredRollout(rollout, Scores(np.full(rows, np.nan), {}, 0.0)))
        assert found.notes == (
            "step 1: nothing was learnt, because no conversation had a turn: in row 0 the environment Bad raised "
            "KeyError: 'no level' in reset (bad.py:7 in reset)",
        )
        assert found.metrics == {"groups/informative_fraction": 0.0}
        assert not found.advantages.any()
        assert learner.params_digest() == before


@pytest.mark.full
def test_a_learner_compares_sampled_tokens_and_keeps_branches_together(tmp_path: Path) -> None:
    """Each mini-batch has all branches of its rows, and nothing said of observed tokens changes a bit of the policy."""
    mesh = make_mesh(1)
    model = make_model(mesh, scale=0.1)
    tree = {"algorithm": LEARNING, "environment": {"name": "toy.py:Toy", "turn_credit": "turn"}}
    digests = []
    for wild in (False, True):
        config = make_config(tmp_path / str(wild), {**tree, "rollout": {"max_new_tokens": 6}})
        learner = make_learner(config, mesh, model=make_model(mesh, scale=0.1))
        scored, logprobs = scored_talks(model, config, wild=wild)
        if not wild:
            check_mini_batches(learner, scored, logprobs)
            found = learner.logprobs([[1]] * 8, scored.rollout.completions)
            for line, completion, values in zip(found, scored.rollout.completions, logprobs, strict=True):
                mask = np.pad(completion.sampled, (0, 6 - len(completion.token_ids)))  # pyrefly: ignore[no-matching-overload]
                np.testing.assert_allclose(line[mask], values, atol=2e-6)
                assert not line[~mask].any()
        before, metrics = learner.params_digest(), learner.update(scored).metrics
        assert metrics["agreement/logprob_abs_diff_max"] < 1e-5
        digests += [before, learner.params_digest()]
    assert digests[:2] == digests[2:]
    assert digests[0] != digests[1]


def check_mini_batches(learner: Any, scored: ScoredRollout, logprobs: list[list[float]]) -> None:
    branches: dict[tuple[int, ...], tuple[int, slice]] = {}
    for row, completion in enumerate(scored.rollout.completions):
        assert completion.episode is not None
        assert completion.sampled is not None
        done = 0
        for branch in completion.episode.branches:
            ids = sampled_ids(completion, branch)
            branches[ids] = row, slice(done, done := done + len(ids))
    assert len(branches) == 12
    seen = []
    for batches in learner._updates(signal_of(learner, scored), TeacherReadings()):
        for ids, values in completions_of(batches, "old_logps"):
            row, which = branches[ids]
            np.testing.assert_allclose(values, logprobs[row][which], atol=2e-6)
        seen.append(sorted({branches[ids][0] // 2 for ids, _ in completions_of(batches, "old_logps")}))
        assert (
            len(list(completions_of(batches, "old_logps"))) == 6
        )  # two groups of a row with one branch and one of two
        for ids, weights in completions_of(batches, "weights"):
            row, _ = branches[ids]
            np.testing.assert_allclose(weights, 1 / (4 * scored.rollout.completions[row].sampled_tokens), rtol=1e-6)
    assert sorted(prompt for part in seen for prompt in part) == [0, 1, 2, 3]
    failed = scored
    for row in scored.rollout.rows_of(seen[0]):  # their environments failed at once: there is nothing to learn from
        failed = with_completion(failed, row, **vars(talk([1], ending="failed", failure=Failure("died", "died"))))
    failed = replace(failed, scores=replace(failed.scores, per_token=()))
    assert len(list(learner._updates(signal_of(learner, failed), TeacherReadings()))) == 1


def sampled_ids(completion: Completion, branch: Branch) -> tuple[int, ...]:
    assert completion.sampled is not None
    chosen = completion.sampled[branch.start : branch.end]
    return tuple(completion.token_ids[branch.start : branch.end][chosen].tolist())
