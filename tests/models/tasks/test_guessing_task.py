"""The guessing task: lessons are what the environment says; how often the teacher and halving win is worked out."""

from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpu_grpo.config import load_config
from tpu_grpo.environments.actions import Answered, LoadedEnvironment
from tpu_grpo.environments.chat_format import ChatFormat
from tpu_grpo.environments.conversation import Conversation, Start
from tpu_grpo.environments.shipped.guessing import Guessing
from tpu_grpo.models.tasks import guessing_task as guessing
from tpu_grpo.models.tasks.lessons import Lesson, Problem
from tpu_grpo.models.tokenizers import builtin_tokenizer
from tpu_grpo.records.stages import Completion, Prompt, Request, SampleKey, SamplingParams

DEMO = load_config(Path(__file__).parents[3] / "configs" / "demo_guessing_cpu.yaml")
NUMBERS, GUESSES = tuple(range(10)), 4


def game(**options: Any) -> Guessing:
    """The environment as the demo's config has it."""
    return Guessing(**DEMO.environment.options | options)


def test_every_number_is_asked_for_once_and_no_range_is_in_both_splits() -> None:
    train, heldout = guessing.problems("train"), guessing.problems("heldout")
    assert (len(train), len(heldout)) == (880 * 10, 20 * 10)
    assert sorted(int(problem["secret"]) for problem in [*train, *heldout]) == list(range(1000, 10_000))
    for problem in [*train, *heldout]:
        tens = problem["secret"][:3]
        assert (problem["question"], problem["answer"]) == (f"{tens}0-{tens}9?", problem["secret"])
    in_train, in_heldout = ({problem["question"] for problem in split} for split in (train, heldout))
    assert (len(in_train), len(in_heldout), in_train & in_heldout) == (880, 20, set())
    assert [problem["question"] for problem in heldout[::10]][:3] == ["1110-1119?", "1380-1389?", "1500-1509?"]


def play(game: Any, problem: Problem, lesson: Lesson) -> Completion:
    """Let the teacher's turns be those of the policy in a conversation with the environment.

    The tokens of the conversation are those of the lesson, whose turns of the user are never looked at.
    """
    tokenizer, config = builtin_tokenizer(guessing.TASK), DEMO
    asked: Any = [{"role": "user", "content": problem["question"]}]
    first: Any = tokenizer.apply_chat_template(asked, add_generation_prompt=True)
    prompt = Prompt("", tuple(first), messages=asked)
    request = Request(prompt.token_ids, SamplingParams(config.rollout.max_new_tokens), SampleKey(0, 1, 0, 0))
    loaded = LoadedEnvironment("game", "game.py:Game", "texts")
    chat_format = ChatFormat(tokenizer, ())
    talk = Conversation(Start(prompt, request, loaded, chat_format, config.environment, config.data.max_prompt_tokens))
    game.reset(**problem)
    following = talk.first(Answered(()))
    for turn in lesson[1::2]:
        assert following is not None, "the conversation was over before the lesson"
        ids = [*tokenizer.encode(turn["content"]), tokenizer.eos_token_id]
        assert len(ids) <= following.sampling.max_new_tokens
        action = talk.turn(Completion(np.array(ids, np.int32), np.zeros(len(ids), np.float32), "stop", 0))
        assert action is not None
        told, reward, done, _ = game.step(action.text)
        following = talk.answered(Answered(({"role": "user", "content": told},), reward, done))
    assert following is None, "the lesson was over before the conversation"
    played = talk.completion()
    whole: Any = lesson
    assert [*prompt.token_ids, *played.token_ids.tolist()] == tokenizer.apply_chat_template(whole)
    return played


@pytest.mark.full
def test_lessons_are_what_the_environment_says() -> None:
    config, rng, games = DEMO, np.random.default_rng(0), {True: 0, False: 0}
    question, guess, told = 1 + 10 + 1, 4 + 1, 1 + len("higher") + 1  # with markers and the end
    assert (config.data.max_prompt_tokens, config.rollout.max_new_tokens) == (question, 4 * guess + 3 * told)
    assert guessing.TASK.longest == question + 4 * guess + 3 * told
    assert config.evaluation.prompts == len(guessing.problems("heldout"))
    for problem in guessing.problems("heldout"):
        episode = play(game(), problem, guessing.lesson(problem, rng)).episode
        assert episode is not None
        won = episode.last_words == problem["answer"]
        assert (episode.ending, episode.reward) == ("done", float(won))
        games[won] += 1
    assert min(games.values()) > 40


@cache
def teachers_chance(listens: bool, secret: int, left: tuple[int, ...], guess: int) -> Fraction:
    """How probably the teacher wins from a guess on, with some numbers left by what he has heard."""
    if guess > GUESSES:
        return Fraction(0)
    mean, won = (left[0] + left[-1]) / 2, Fraction(0)
    middle = [number for number in left if abs(number - mean) <= 1]
    for number in middle:
        above = tuple(n for n in left if n > number) or NUMBERS
        below = tuple(n for n in left if n < number) or NUMBERS
        heard = above if (secret > number) == listens else below
        won += Fraction(1) if number == secret else teachers_chance(listens, secret, heard, guess + 1)
    return won / len(middle)


@cache
def best_chance(left: int, guesses: int) -> Fraction:
    """How probably whoever takes the best guesses finds one of some numbers."""
    if not left or not guesses:
        return Fraction(0)
    chances: list[Fraction] = []
    for below in range(left):
        above = left - 1 - below
        later = below * best_chance(below, guesses - 1) + above * best_chance(above, guesses - 1)
        chances.append((1 + later) / left)
    return max(chances)


@pytest.mark.full
def test_teacher_wins_as_often_as_his_habits_do() -> None:
    good, bad = (
        sum((teachers_chance(listens, secret, NUMBERS, 1) for secret in NUMBERS), Fraction(0)) / 10
        for listens in (True, False)
    )
    wins = guessing.LISTENS * float(good) + (1 - guessing.LISTENS) * float(bad)
    assert [float(good), float(bad), wins] == pytest.approx([0.9556, 0.1375, 0.3420], abs=1e-4)
    played, rng, won = game(), np.random.default_rng(1), 0.0
    problems = guessing.problems("train")
    for problem in problems:
        played.reset(**problem)
        won += [played.step(message["content"])[1] for message in guessing.lesson(problem, rng)[1::2]][-1]
    assert abs(won / len(problems) - wins) < 4 * (wins * (1 - wins) / len(problems)) ** 0.5


@pytest.mark.parametrize(("guesses", "found"), [(3, 1 + 2 + 4), (4, 10)])
def test_halving_finds_every_number_with_the_last_guess_and_nothing_is_better(guesses: int, found: int) -> None:
    """One number is found with the first guess, two with the second, four with the third."""
    assert best_chance(10, guesses) == Fraction(found, 10)
    played, won = game(guesses=guesses), 0.0
    for secret in range(4730, 4740):
        played.reset(secret=secret)
        low, high, over = 4730, 4739, False
        while not over:
            guess = (low + high) // 2
            told, reward, over, _ = played.step(str(guess))
            low, high = (guess + 1, high) if told == "higher" else (low, guess - 1)
            won += reward
    assert won == found
