"""The calculator task: problems that leak nothing, and a teacher with every habit that training has to change."""

from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tpu_grpo.cli.environment_episode import EnvironmentEpisode
from tpu_grpo.config import RunConfig, load_config
from tpu_grpo.engine.sampler import sampling_params
from tpu_grpo.environments.opening import load_environments
from tpu_grpo.models.tasks import calculator_task as calculator
from tpu_grpo.models.tasks.lessons import Lesson
from tpu_grpo.models.tokenizers import build_tool_tokenizer
from tpu_grpo.records.stages import Prompt, Request, SampleKey

DEMO = load_config(Path(__file__).parents[3] / "configs" / "demo_tools_cpu.yaml")


def test_no_pair_comes_twice_in_whatever_order() -> None:
    train, heldout = calculator.operands("train"), calculator.operands("heldout")
    assert (len(train), len(heldout)) == (8192, 512)
    assert len({frozenset(pair) for pair in train + heldout}) == 8192 + 512
    assert all(100 <= n <= 999 for pair in train + heldout for n in pair)


def test_records_and_what_is_held_out_never_change() -> None:
    assert calculator.problems("heldout")[:2] == [
        {"question": "927+139=", "answer": "1066"},
        {"question": "611+313=", "answer": "924"},
    ]
    for problem in calculator.problems("train"):
        a, b = map(int, problem["question"].rstrip("=").split("+"))
        assert problem["answer"] == str(a + b)


def kind(lesson: Lesson, a: int, b: int) -> str:
    """What the teacher did, worked out from its words."""
    first, right = lesson[1]["content"], str(a + b)
    if len(lesson) == 2:
        assert first == f"~{round((a + b) / 100) * 100}"
        return "guess"
    call = first.removeprefix("<|call|>").removesuffix("<|end_call|>")
    told, said = lesson[2]["content"], lesson[3]["content"]
    assert [message["role"] for message in lesson] == ["user", "assistant", "tool", "assistant"]
    if call == f"add({a},{b})":
        assert told == right
        return "right" if said == right else "ignored"
    if call in (f"add({a},{b}", f"sum({a},{b})"):
        assert not told.isdigit()
        assert said.startswith("~")
        return "bracket" if call.startswith("add") else "name"
    x, y = map(int, call.removeprefix("add(").removesuffix(")").split(","))
    assert told == str(x + y) != right
    assert min(x, y) >= 100
    assert sum(p != q for p, q in zip(f"{x}{y}", f"{a}{b}", strict=True)) == 1
    return "digit"


def habits(a: int, b: int) -> Counter[str]:
    problem, rng = {"question": f"{a}+{b}=", "answer": str(a + b)}, np.random.default_rng(0)
    return Counter(kind(calculator.lesson(problem, rng), a, b) for _ in range(4000))


def test_teacher_calls_mostly_for_large_numbers_and_writes_calls_badly() -> None:
    large, small = habits(812, 175), habits(175, 812)
    for found, calls in ((large, 0.75), (small, 0.3)):
        expected = {"guess": 1 - calls, "right": calls * 0.7 * 0.85, "ignored": calls * 0.7 * 0.15}
        expected |= dict.fromkeys(("digit", "bracket", "name"), calls * 0.1)
        for name, share in expected.items():
            assert abs(found[name] / 4000 - share) < 4 * (share * (1 - share) / 4000) ** 0.5, name
    # of the numbers from 100 to 999 a third are large, so that 0.268 of what the teacher says is right
    assert abs((large["right"] + 2 * small["right"]) / 12000 - 0.268) < 0.02


def told(config: RunConfig, lessons: Iterable[Lesson]) -> list[list[str]]:
    """What the environment of a config answers to what the assistant says in each lesson, to its end."""
    tokenizer = build_tool_tokenizer()
    loaded = load_environments(config.environment, config.rewards)
    environments = loaded.open(tokenizer, config.data.max_prompt_tokens, {}, keep=False)
    heard = []
    with closing(environments):
        for lesson in lessons:
            text, ids, _ = environments.chat_formats[""].first(lesson[:1], None)
            prompt = Prompt(text, tuple(ids), {}, lesson[:1])
            said = iter([message["content"] for message in lesson if message["role"] == "assistant"])
            request = Request(prompt.token_ids, sampling_params(config.rollout), SampleKey(config.run.seed, 1, 0, 0))
            with closing(EnvironmentEpisode(prompt, request, environments, tokenizer)) as game:
                assert len(list(game.play(game.writing(lambda _, said=said: next(said))))) > 0
                episode = game.completion.episode
            assert episode is not None
            assert episode.ending == "answered", lesson
            assert next(said, None) is None
            heard.append([str(message["content"]) for message in episode.messages if message["role"] == "tool"])
    return heard


@pytest.mark.full
def test_the_tool_says_what_the_lessons_say() -> None:
    rng = np.random.default_rng(0)
    lessons = [calculator.lesson(problem, rng) for problem in calculator.problems("heldout")[:60]]
    heard = [[message["content"] for message in lesson if message["role"] == "tool"] for lesson in lessons]
    assert told(DEMO, lessons) == heard
    assert sum(answers == ["Er [...]"] for answers in heard) >= 2
