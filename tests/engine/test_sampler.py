"""The rollout stage: groups are passed on when they are whole, and a text is decoded once.

A stream gives the same tokens, and its engine goes on when the reader stops.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from tests.engine.building import SAMPLED, build_engine, requests, tokens
from tests.models.test_transformers5 import SAVED
from tpu_grpo.config import AlgorithmSection, RolloutSection
from tpu_grpo.engine.generation import Finished
from tpu_grpo.engine.sampler import Sampler, completion_text, impossible
from tpu_grpo.models.tokenizers import build_byte_tokenizer, load_tokenizer
from tpu_grpo.records.errors import NonFiniteError, RequestError
from tpu_grpo.records.stages import AnswerMode, Completion, Prompt, PromptBatch, Request


def letter(row: int) -> Completion:
    return Completion(np.array([65 + row], np.int32), np.zeros(1, np.float32), "stop", 0)


PROMPTS = (Prompt("x", (1,)), Prompt("y", (2,)), Prompt("z", (3,)))
PAIRS = AlgorithmSection(group_size=2)


class ScriptedEngine:
    """Answers row n with the letter n, and tells of these rows in this order, or fails if it is told to."""

    fails = False

    def __init__(self, tells: Sequence[int]):
        self.figures: Mapping[str, float] = {}
        self.reporting_hosts: Sequence[int] = ()
        self._tells = tells

    def forget_prefixes(self) -> None: ...

    def begin(
        self,
        requests: Sequence[Request],
        finished: Finished | None = None,
        known: Sequence[float | None] | None = None,
        conversations: Any = None,
        make_cut: Any = None,
    ) -> Callable[[], list[Completion]]:
        assert finished is not None
        assert make_cut is None
        self.known, self.given, self.requests = known, conversations, requests
        if self.fails:
            raise RuntimeError("no more")
        for row in self._tells:
            finished(row, letter(row))
        self.reporting_hosts = [0 if row in self._tells else 1 for row in range(len(requests))]
        return lambda: [self.answer(row) for row in range(len(requests))]

    def answer(self, row: int) -> Completion:
        return letter(row)


class CountingTokenizer:
    """Decodes bytes, and notes what it decoded."""

    def __init__(self) -> None:
        self.decoded: list[str] = []
        self._tokenizer = build_byte_tokenizer()

    def decode(self, ids: np.ndarray, **settings: Any) -> str:
        self.decoded.append(str(self._tokenizer.decode(ids, **settings)))
        return self.decoded[-1]


def test_groups_are_passed_on_when_they_are_whole_and_decoded_once() -> None:
    """Two completions each of prompts 0, 1, 2; this host hears of both of 2 and 0, and another host of 1."""
    tokenizer: Any = CountingTokenizer()
    engine: Any = ScriptedEngine([5, 1, 4, 0])
    sampler = Sampler(engine, tokenizer, RolloutSection(), PAIRS, 0)
    heard: list[tuple[int, list[int], Sequence[str]]] = []

    def ended(prompt: int, completions: Sequence[Completion], texts: Sequence[str]) -> None:
        heard.append((prompt, [int(c.token_ids[0]) for c in completions], texts))

    rollout = sampler.rollout(PromptBatch(1, PROMPTS), ended, [7.5, None, 2.0])
    assert engine.known == [7.5, 7.5, None, None, 2.0, 2.0]
    assert rollout.scoring_hosts == (0, 1, 0)
    assert heard == [(2, [69, 70], ["E", "F"]), (0, [65, 66], ["A", "B"])]
    assert rollout.texts == ("A", "B", "C", "D", "E", "F")
    assert sorted(tokenizer.decoded) == ["A", "B", "C", "D", "E", "F"]


def test_a_completion_cut_inside_a_character_keeps_the_characters_before_it() -> None:
    tokenizer = load_tokenizer(SAVED / "gemma2")  # with a token for each byte
    ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in "日本".encode()[:5]])
    completion = Completion(np.array(ids, np.int32), np.zeros(5, np.float32), "length", 0)
    assert completion_text(tokenizer, completion) == "日\ufffd"


def test_answers_are_passed_on_by_mode() -> None:
    """Rows 0, 1, 2 are greedy answers, 3 and 4, 5 and 6, 7 and 8 the sampled ones; another host hears of prompt 1."""
    tokenizer: Any = CountingTokenizer()
    engine: Any = ScriptedEngine([2, 8, 3, 0, 7, 4])
    sampler = Sampler(engine, tokenizer, RolloutSection(), PAIRS, 0)
    heard: list[tuple[str, int, Sequence[str]]] = []
    modes = [AnswerMode(0.0), AnswerMode(1.0, samples=2)]
    ended = [lambda p, _, texts, name=name: heard.append((name, p, texts)) for name in ("greedy", "sampled")]
    greedy, sampled = sampler.answer(PROMPTS, modes, ended)
    assert heard == [("greedy", 2, ["C"]), ("greedy", 0, ["A"]), ("sampled", 2, ["H", "I"]), ("sampled", 0, ["D", "E"])]
    assert (greedy.texts, sampled.texts) == (("A", "B", "C"), ("D", "E", "F", "G", "H", "I"))
    assert greedy.scoring_hosts == sampled.scoring_hosts == (0, 1, 0)
    assert sorted(tokenizer.decoded) == list("ABCDEFGHI")
    assert sampler.answer(PROMPTS, modes)[0].texts == greedy.texts  # whoever wants to hear nothing passes nothing


class OpenedConversations:
    """Notes of whom it was opened for, and whether it is closed; nobody asks it for a turn."""

    def __init__(self) -> None:
        self.opened: list[tuple[Sequence[Prompt], Sequence[Request]]] = []
        self.closed = 0

    def __call__(self, prompts: Sequence[Prompt], requests: Sequence[Request]) -> Any:
        self.opened.append((prompts, requests))
        return self

    def close(self) -> None:
        self.closed += 1


def test_conversations_are_opened_for_the_rows_of_a_batch_and_closed_after_it() -> None:
    """Each row's prompt stands beside its request; modes of an evaluation have their own settings."""
    tokenizer: Any = CountingTokenizer()
    engine: Any = ScriptedEngine([])
    opened = OpenedConversations()
    sampler = Sampler(engine, tokenizer, RolloutSection(), PAIRS, 0, opened)
    sampler.rollout(PromptBatch(1, PROMPTS))
    prompts, rows = opened.opened[0]
    assert [prompt.text for prompt in prompts] == list("xxyyzz")
    assert (engine.given, rows) == (opened, engine.requests)
    assert [request.token_ids for request in rows] == [prompt.token_ids for prompt in prompts]
    assert opened.closed == 1
    sampler.answer(PROMPTS, [AnswerMode(0.0), AnswerMode(0.5, samples=2)])
    prompts, rows = opened.opened[1]
    assert [prompt.text for prompt in prompts] == list("xyzxxyyzz")
    assert [request.sampling.temperature for request in rows] == [0.0] * 3 + [0.5] * 6
    assert (engine.given, opened.closed) == (opened, 2)
    engine.fails = True
    with pytest.raises(RuntimeError, match="no more"):
        sampler.rollout(PromptBatch(2, PROMPTS))
    assert opened.closed == 3


def test_only_sampled_tokens_have_log_probabilities_that_can_be_impossible() -> None:
    logprobs = np.array([-0.5, np.nan, 0.25], np.float32)
    completion = Completion(np.array([65, 66, 67]), logprobs, "stop", 0)
    assert impossible(completion).tolist() == [False, True, True]
    assert impossible(replace(completion, sampled=np.array([True, False, True]))).tolist() == [False, False, True]


class BrokenEngine(ScriptedEngine):
    """Answers with two tokens, and gives the last of rows 3 and 5 a log-probability that cannot be."""

    def __init__(self, value: float):
        super().__init__([])
        self._value = value

    def answer(self, row: int) -> Completion:
        logprobs = np.array([-0.5, self._value if row in (3, 5) else -0.25], np.float32)
        return replace(letter(row), token_ids=np.array([65 + row, 33]), logprobs=logprobs)


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf, 0.5])
def test_an_engine_whose_log_probabilities_cannot_be_ends_the_run(value: float) -> None:
    sampler = Sampler(BrokenEngine(value), CountingTokenizer(), RolloutSection(), PAIRS, 0)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(NonFiniteError) as caught:
        sampler.rollout(PromptBatch(7, PROMPTS))
    assert str(caught.value).startswith(
        f"the engine's log-probabilities must be finite and at most 0, got {value} for token 1 of row 3 of step 7 "
        "(prompt 'y', completion 'D!'), and 1 more rows have such ones; nothing was learnt from them. "
        "Continue from the last checkpoint with"
    )
    assert caught.value.exit_code == 1
    with pytest.raises(NonFiniteError, match=r"row 3 of an evaluation \(prompt 'x', completion 'D!'\)"):
        sampler.answer(PROMPTS, [AnswerMode(0.0), AnswerMode(1.0)])


QUESTION = tuple(range(5, 15))


@pytest.mark.full
def test_an_engine_for_one_short_answer_takes_the_whole_prompt(checkpoint: Path, model: nnx.Module) -> None:
    """The library would put a single token in the place of a prompt that leaves it fewer than seven cache tokens."""
    sampling = replace(SAMPLED, max_new_tokens=2, temperature=0.0)
    asked = requests([QUESTION], sampling)
    small = build_engine(checkpoint, model, max_running_requests=1, context_tokens=len(QUESTION) + 2)
    assert small.options.cache_tokens == len(QUESTION) + 2 - 1 + 7
    [found] = tokens(small.generate(asked))
    assert [found] == tokens(build_engine(checkpoint, model).generate(asked))
    assert len(found) == 2
    tight = build_engine(checkpoint, model, max_running_requests=1, kv_tokens=len(QUESTION) + 6)
    with pytest.raises(RequestError, match="need 17 cache tokens, the cache has 16; raise rollout.kv_tokens"):
        tight.generate(asked)
