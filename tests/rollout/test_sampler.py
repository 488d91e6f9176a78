"""The rollout stage: groups are passed on when they are whole, and a text is decoded once."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tpu_grpo.config.loading import parse_config
from tpu_grpo.models.tokenizers import build_byte_tokenizer
from tpu_grpo.rollout.generation import Finished
from tpu_grpo.rollout.sampler import Sampler
from tpu_grpo.types import Completion, Prompt, PromptBatch, Request


def letter(row: int) -> Completion:
    return Completion(np.array([65 + row], np.int32), np.zeros(1, np.float32), "stop", 0)


class ScriptedEngine:
    """Answers row n with the letter n, and tells of these rows in this order."""

    def __init__(self, tells: Sequence[int]):
        self.figures: Mapping[str, float] = {}
        self._tells = tells

    def forget_prefixes(self) -> None: ...

    def generate(self, requests: Sequence[Request], finished: Finished | None = None) -> list[Completion]:
        assert finished is not None
        for row in self._tells:
            finished(row, letter(row))
        return [letter(row) for row in range(len(requests))]


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
    sampler = Sampler(ScriptedEngine([5, 1, 4, 0]), tokenizer, parse_config({"algorithm": {"group_size": 2}}))
    heard: list[tuple[int, list[int], Sequence[str]]] = []

    def ended(prompt: int, completions: Sequence[Completion], texts: Sequence[str]) -> None:
        heard.append((prompt, [int(c.token_ids[0]) for c in completions], texts))

    batch = PromptBatch(1, (Prompt("x", (1,)), Prompt("y", (2,)), Prompt("z", (3,))))
    rollout = sampler.rollout(batch, ended)
    assert heard == [(2, [69, 70], ["E", "F"]), (0, [65, 66], ["A", "B"])]
    assert rollout.texts == ("A", "B", "C", "D", "E", "F")
    assert sorted(tokenizer.decoded) == ["A", "B", "C", "D", "E", "F"]
