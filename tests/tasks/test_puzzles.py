"""The puzzles task: words that leak nothing, and a teacher who tries what he tried before."""

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import reasoning_gym

from tests.tasks.lessons import play
from tests.tasks.playing import demo
from tpu_grpo.environments.shipped.puzzles import Puzzle
from tpu_grpo.tasks import puzzles
from tpu_grpo.tasks.task import Problem

LISTED = {"source_dataset": "spell_backward", "word_len": 4}


def problem(word: str) -> Problem:
    return {"question": word, "answer": word[::-1], "metadata": json.dumps({**LISTED, "word": word})}


def test_no_word_comes_twice_forward_or_backward() -> None:
    train, heldout = puzzles.problems("train"), puzzles.problems("heldout")
    assert (len(train), len(heldout)) == (3072, 512)
    words = [p["question"] for p in [*train, *heldout]]
    assert len({frozenset((word, word[::-1])) for word in words}) == 3072 + 512
    assert all(len(word) == 4 and word.isalpha() and word.islower() and word != word[::-1] for word in words)
    assert [p["question"] for p in heldout[:4]] == ["unio", "fide", "ahem", "scho"]


def test_records_are_puzzles_of_reasoning_gym() -> None:
    score: Any = reasoning_gym.get_score_answer_fn("spell_backward")
    for record in puzzles.problems("heldout")[:20]:
        entry = {**record, "metadata": json.loads(record["metadata"])}
        assert entry["metadata"]["word"] == record["question"]
        assert score(record["question"][::-1], entry) == 1.0
        assert score(record["question"], entry) <= 0.5


def test_lessons_are_what_the_environment_says() -> None:
    config, rng, rights = demo("demo_puzzles_cpu"), np.random.default_rng(0), 0
    options = config.environment.options
    assert (options["tries"], config.environment.max_observation_tokens) == (puzzles.TRIES, 16 + 6)
    for record in puzzles.problems("heldout")[::4]:
        episode = play(puzzles.TASK, config, Puzzle(**options), record, puzzles.lesson(record, rng)).episode
        assert episode is not None
        right = episode.last_words == record["answer"]
        assert (episode.ending, episode.reward == pytest.approx(1.0)) == ("done", right)
        rights += right
    assert 20 < rights < 60  # of 128


@pytest.mark.parametrize(("word", "right"), [("mark", 0.2), ("book", 0.6)])
def test_teacher_is_seldom_right_and_seldom_changes_his_mind(word: str, right: float) -> None:
    """Backward, the word as it is, and its ends exchanged, which is right if the letters between are the same."""
    rng, count, seen = np.random.default_rng(0), 4000, Counter[str]()
    for _ in range(count):
        said = [message["content"] for message in puzzles.lesson(problem(word), rng)[1::2]]
        assert set(said) <= {word[::-1], word, word[3] + word[1:3] + word[0]}
        seen["first"] += said[0] == word[::-1]
        seen["last"] += said[-1] == word[::-1]
        seen["changed"] += len(said) > 1 and said[1] == word[::-1]
    again = 0.2 * right  # of five wrong answers one is reconsidered
    expected = {"first": right, "last": 1 - (1 - right) * (1 - again) ** 2, "changed": (1 - right) * again}
    for name, share in expected.items():
        assert abs(seen[name] / count - share) < 4 * (share * (1 - share) / count) ** 0.5, name
