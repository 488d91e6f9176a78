"""What of a completion is trained on: conversations by hand, and that a plain answer stays what it was."""

from dataclasses import replace
from typing import Any, get_args

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given, settings

from tests.talks import talk
from tpu_grpo.config import LossAggregation
from tpu_grpo.learner.loss import TrainBatch
from tpu_grpo.learner.rows import ReplayShape, RowShape, train_rows, unpacked
from tpu_grpo.records.episode import Episode, Failure
from tpu_grpo.records.errors import DataError, NonFiniteError
from tpu_grpo.records.stages import Completion

SHAPE = RowShape(max_prompt_tokens=3, max_new_tokens=7, tokens=10, micro_batch=1)
TWO_TURNS = talk([1, 2], ([11, 12], [21]), ([13], [22, 23]), logprobs=[-0.25, -0.5, -0.75])
TWO_BRANCHES = talk([1], ([11, 12], [21]), ([13, 14], []), prompts={1: [1, 12, 21, 31]}, logprobs=[-1, -2, -3, -4])


def same(left: TrainBatch, right: TrainBatch) -> bool:
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    alike = all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)
    return alike and jax.tree.structure(left) == jax.tree.structure(right)


def test_a_conversation_by_hand() -> None:
    """What was observed is context; what was observed last is context of nothing, and left out."""
    batch, packing = train_rows([[9]], [TWO_TURNS], np.array([2.0]), SHAPE, "token-mean")
    assert batch.rows.token_ids.tolist() == [[1, 2, 11, 12, 21, 13, 0, 0, 0, 0]]
    assert batch.rows.segments.tolist() == [[1, 1, 1, 1, 1, 1, 0, 0, 0, 0]]
    assert batch.rows.positions.tolist() == [[0, 1, 2, 3, 4, 5, 0, 0, 0, 0]]
    assert (1 * batch.rows.mask).tolist() == [[0, 0, 1, 1, 0, 1, 0, 0, 0, 0]]
    assert batch.rollout_logps.tolist() == [[0, 0, -0.25, -0.5, 0, -0.75, 0, 0, 0, 0]]
    assert batch.advantages.tolist() == [[0, 0, 2, 2, 0, 2, 0, 0, 0, 0]]
    np.testing.assert_allclose(batch.weights, [[0, 0, 1 / 3, 1 / 3, 0, 1 / 3, 0, 0, 0, 0]], rtol=1e-7)
    of_tokens = train_rows([[9]], [TWO_TURNS], [np.arange(1.0, 7.0)], SHAPE)[0].advantages
    assert of_tokens.tolist() == [[0, 0, 1, 2, 0, 4, 0, 0, 0, 0]]
    taken = unpacked(batch.rows.token_ids.astype(np.float32), packing, 1, 7)
    assert taken.tolist() == [[11, 12, 0, 13, 0, 0, 0]]
    known = train_rows([[9]], [TWO_TURNS], np.array([2.0]), SHAPE, known={"old_logps": taken})[0]
    assert known.old_logps.tolist() == [[0, 0, 11, 12, 0, 13, 0, 0, 0, 0]]
    assert known.reference_logps is None
    counted = replace(TWO_TURNS, kept=np.array([5, 6, 1, 7, 1, 1]))
    filtered = train_rows([[9]], [counted], np.array([2.0]), replace(SHAPE, filtered=True))[0]
    assert filtered.rows.kept.tolist() == [[0, 0, 5, 6, 0, 7, 0, 0, 0, 0]]
    aged = replace(TWO_TURNS, ages=np.array([1, 0, 1, 2, 0, 0]))
    carried = train_rows([[9]], [aged], np.array([2.0]), replace(SHAPE, carries=True))[0]
    assert (1 * carried.older).tolist() == [[0, 0, 1, 0, 0, 1, 0, 0, 0, 0]]


@pytest.mark.parametrize("aggregation", get_args(LossAggregation))
def test_two_branches_are_packed_like_two_answers_whose_tokens_are_weighed_together(aggregation: Any) -> None:
    """The first branch ends with its last sampled token; a plain answer of one token is the other row of the group."""
    plain = Completion(np.array([41], np.int32), np.array([-5.0], np.float32), "stop", 0)
    values = [np.array([0.1, 0.2, 9.0, 0.3, 0.4]), np.array([0.5])]
    shape = replace(SHAPE, group_size=2)
    batch, packing = train_rows([[9], [1]], [TWO_BRANCHES, plain], values, shape, aggregation)
    by_hand, _ = train_rows(
        [[1], [1, 12, 21, 31], [1]],
        [
            Completion(np.array([11, 12], np.int32), np.array([-1, -2], np.float32), "stop", 0),
            Completion(np.array([13, 14], np.int32), np.array([-3, -4], np.float32), "stop", 0),
            plain,
        ],
        [np.array([0.1, 0.2]), np.array([0.3, 0.4]), np.array([0.5])],
        replace(SHAPE, max_prompt_tokens=4),
    )
    weight = {  # of the conversation's four tokens, and of the plain answer's one
        "sequence-mean-token-mean": (1 / 8, 1 / 2),
        "token-mean": (1 / 5, 1 / 5),
        "sequence-mean-token-sum": (1 / 2, 1 / 2),
        "sequence-mean-token-scale": (1 / 14, 1 / 14),
        "prompt-mean-token-mean": (1 / 5, 1 / 5),
    }[aggregation]
    of_two = np.where(by_hand.rows.mask, weight[0], 0)
    weights = np.where(by_hand.rollout_logps == -5, weight[1], of_two).astype(np.float32)
    assert same(batch, replace(by_hand, weights=weights))
    taken = unpacked(batch.rollout_logps, packing, 2, 7)
    assert taken.tolist() == [[-1, -2, 0, -3, -4, 0, 0], [-5, 0, 0, 0, 0, 0, 0]]
    counted, known = np.array([False, True]), {"reference_logps": taken}
    none = train_rows([[9], [1]], [TWO_BRANCHES, plain], np.ones(2), shape, aggregation, counted, known)[0]
    np.testing.assert_array_equal(none.reference_logps, batch.rollout_logps)
    assert none.weights.sum() == pytest.approx(1 / 7 if aggregation == "sequence-mean-token-scale" else 1)
    assert not none.weights[none.rollout_logps != -5].any()


SPOKEN = st.lists(
    st.tuples(st.lists(st.integers(3, 60), min_size=1, max_size=3), st.lists(st.integers(3, 60), max_size=3)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=40, deadline=None)
@given(spoken=SPOKEN, seed=st.integers(0, 99))
def test_what_is_known_of_observed_tokens_changes_nothing(spoken: Any, seed: int) -> None:
    """Log-probabilities that are no numbers, advantages and counts of kept tokens: the rows are the same to the bit."""
    rng = np.random.default_rng(seed)
    completion = talk([1, 2], *spoken)
    mask, count = completion.sampled, len(completion.token_ids)
    assert mask is not None
    shape = RowShape(3, 20, 23, 1, filtered=True)
    logprobs, kept = rng.normal(size=count).astype(np.float32), rng.integers(1, 9, count)
    advantages = rng.normal(size=count)
    clean = replace(completion, logprobs=np.where(mask, logprobs, 0), kept=np.where(mask, kept, 0))
    wild = replace(completion, logprobs=np.where(mask, logprobs, np.nan).astype(np.float32), kept=kept)
    expected, _ = train_rows([[9]], [clean], [np.where(mask, advantages, 0)], shape)
    found, _ = train_rows([[9]], [wild], [np.where(mask, advantages, np.inf)], shape)
    assert same(found, expected)
    assert expected.rows.mask.sum() == completion.sampled_tokens


@settings(max_examples=40, deadline=None)
@given(answers=st.lists(st.lists(st.integers(3, 60), min_size=1, max_size=7), min_size=2, max_size=6))
def test_a_turn_that_nothing_answers_is_a_plain_answer(answers: list[list[int]]) -> None:
    plain = [Completion(np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32), "stop", 0) for ids in answers]
    talks = [talk([number, 2], (ids, [])) for number, ids in enumerate(answers)]
    prompts, advantages = [[number, 2] for number in range(len(answers))], np.arange(float(len(answers)))
    expected, packing = train_rows(prompts, plain, advantages, SHAPE)
    found, packed = train_rows(prompts, talks, advantages, SHAPE)
    assert same(found, expected)
    assert packed.rows.tolist() == packing.rows.tolist()
    assert packed.starts.tolist() == packing.starts.tolist()


def replayed(completion: Completion) -> Any:
    class Sizes:
        class config:
            num_layers, num_experts_per_tok, num_experts = 1, 1, 8

    batch, _ = train_rows([[9]], [completion], np.zeros(1), replace(SHAPE, replay=ReplayShape(Sizes)))
    return batch.rows.experts[:, 0].tolist()


def test_each_branch_replays_its_experts() -> None:
    """Those of the last sampled token, which the engine ran because it was answered, are for nothing."""
    episode = TWO_BRANCHES.episode
    assert episode is not None
    first, second = (np.arange(8, dtype=np.uint8)[:n, None, None] for n in (3, 5))
    for of_first in (first, first[:2]):
        branches = [replace(b, experts=e) for b, e in zip(episode.branches, (of_first, second), strict=True)]
        completion = replace(TWO_BRANCHES, episode=replace(episode, branches=tuple(branches)))
        assert replayed(completion) == [[0, 1, 255, 0, 1, 2, 3, 4, 255, 255]]
    for wrong, found in ((None, "None"), (first[:1], r"\[1, 1, 1\]"), (second[:4], r"\[4, 1, 1\]")):
        branches = (replace(episode.branches[0], experts=wrong), replace(episode.branches[1], experts=second))
        expected = r"row 0 must have \[2, 1, 1\] \(tokens, layers, experts per token\)"
        with pytest.raises(DataError, match=rf"{expected}, got {found}; let the engine"):
            replayed(replace(TWO_BRANCHES, episode=replace(episode, branches=branches)))


def with_branches(completion: Completion, *branches: Any) -> Completion:
    assert completion.episode is not None
    made = tuple(replace(completion.episode.branches[0], **branch) for branch in branches)
    return replace(completion, episode=replace(completion.episode, branches=made))


BAD_LOGPROB = replace(TWO_TURNS, logprobs=np.array([-1, -1, 0, np.inf, 0, 0], np.float32))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (replace(TWO_TURNS, sampled=np.zeros(6, np.bool_)), "that the policy sampled, got none among the 6 "),
        (replace(TWO_TURNS, sampled=np.ones(5, np.bool_)), "row 1 has 6 tokens, and a mask of 5; give"),
        (talk([1] * 4, ([11], [])), r"prompts must have 1 to data.max_prompt_tokens=3 tokens, got 4 in row"),
        (talk([1], ([11], [21] * 7)), r"completions must have 1 to rollout.max_new_tokens=7 tokens, got 8"),
        (talk([1], ([11], []), ([12], []), prompts={1: [1] * 10}), "= 10 tokens, got 10 [+] 1 in branch 2 o"),
        (talk([1], ([11], []), ([12], []), prompts={1: []}), r"a prompt, .* got 0 [+] 1 in branch 2 of row 1"),
        (with_branches(TWO_TURNS, {"end": 3}), r"in a branch of its .*, got \[\(0, 3\)\] for the 3 sampled"),
        (with_branches(TWO_TURNS, {}, {"start": 3}), r"follow each other within the 6 tokens .*\(3, 6\)\] in"),
        (with_branches(TWO_TURNS, {"end": 9}), r"within the 6 tokens of their .* got \[\(0, 9\)\] in row 1"),
        (with_branches(TWO_TURNS, {"start": 3, "end": 2}), r"follow each other within .* got \[\(3, 2\)\] in row 1"),
        (with_branches(TWO_TURNS), r"must be in a branch .* got \[\] for the 3 sampled ones of row 1; add"),
        (BAD_LOGPROB, "log-probability of token 3 in row 1 must be finite, got inf"),
    ],
)
def test_conversations_that_cannot_be_learnt_from_are_refused(bad: Completion, message: str) -> None:
    with pytest.raises(NonFiniteError if bad is BAD_LOGPROB else DataError, match=message):
        train_rows([[9], [9]], [TWO_TURNS, bad], np.zeros(2), SHAPE)


def test_a_later_branch_may_have_a_prompt_of_the_whole_context() -> None:
    long = talk([1], ([11], []), ([12], []), prompts={1: [5] * 9})
    assert train_rows([[1]], [long], np.zeros(1), SHAPE)[0].rows.mask.sum() == 2


def test_a_conversation_that_never_began_is_passed_over() -> None:
    """Its environment failed at once, and the config says that it counts nowhere, or gives it a reward."""
    episode = Episode("", (), (), "failed", (), "Toy", failure=Failure("died", "died"))
    none = np.zeros(0, np.float32)
    never = Completion(none.astype(np.int32), none, "stop", 0, sampled=none.astype(np.bool_), episode=episode)
    batch, _ = train_rows([[9], [9]], [never, TWO_TURNS], np.array([5.0, 2.0]), SHAPE, "token-mean")
    assert same(batch, train_rows([[9]], [TWO_TURNS], np.array([2.0]), SHAPE, "token-mean")[0])
