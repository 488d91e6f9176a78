"""Runs one episode of an environment, in which a person, a file, a function or a model writes the policy's turns.

    game = EnvironmentEpisode(prompt, request, environments, tokenizer)
    for stretch in game.play(game.writing(policy)):      # the tokens that a request or a turn adds
        ...
    game.completion                          # the conversation, as in a run

The prompt, tokens, masks and rewards are those that a run would have.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from tpu_grpo.config.plugins import find_function
from tpu_grpo.environments.episodes import Environments, Episodes
from tpu_grpo.models.tokenizers import decode
from tpu_grpo.records.errors import ConfigError, EpisodeError
from tpu_grpo.records.stages import Completion, Prompt, Request
from tpu_grpo.records.untrusted_input import read_file

Policy = Callable[[Sequence[Mapping[str, Any]]], str | None]
"""A function of the messages so far that returns the policy's next turn; None ends the conversation."""
Model = Callable[[Request], Completion]
"""A function that samples a turn."""
BETWEEN_TURNS = "---"
"""The line that separates turns in a file."""


class Stopped(Exception):
    """The player ended the conversation before its next turn."""


class Stretch(NamedTuple):
    """Consecutive tokens that are either all sampled or all not."""

    token_ids: tuple[int, ...]
    text: str
    sampled: bool


def policy_of_file(path: Path) -> Policy:
    """Make a policy that writes the turns of a file in order, and then raises an EpisodeError.

    Raises:
        ConfigError: for a file that cannot be read.
    """
    try:
        lines = read_file(path).decode().splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"turns must be in a readable UTF-8 file, got {error}; correct the path") from error
    turns: list[list[str]] = [[]]
    for line in lines:
        if line.strip() == BETWEEN_TURNS:
            turns.append([])
        else:
            turns[-1].append(line)
    left = iter(["\n".join(turn) for turn in turns])

    def policy(messages: Sequence[Mapping[str, Any]]) -> str:
        if (text := next(left, None)) is None:
            raise EpisodeError(
                f"a conversation must be played to its end, which it has not reached after {len(turns)} turns; write "
                "one more, or lower environment.max_turns"
            )
        return text

    return policy


def policy_of_function(name: str) -> Policy:
    """Load a function of the user that gets the messages so far and returns the text of the next turn.

    The policy raises an EpisodeError if the function returns anything else.

    Raises:
        EpisodeError: for a function that does not exist, or does not take one argument.
    """
    found: Any = find_function(name, "policy", EpisodeError)
    if not callable(found) or len(inspect.signature(found).parameters) != 1:
        raise EpisodeError(
            f"a policy must be a function of the messages so far that returns the next turn, got {name}; write def "
            "policy(messages): ..."
        )

    def policy(messages: Sequence[Mapping[str, Any]]) -> str:
        if not isinstance(text := found(messages), str):
            raise EpisodeError(
                f"a policy must return the text of the next turn as a str, got {type(text).__name__} {text!r:.100} "
                f"from {name}; correct it, or lower environment.max_turns if the conversation is to end there"
            )
        return text

    return policy


class EnvironmentEpisode:
    """One conversation with an environment; ``request`` holds its limits, and the key that the environment's seed
    depends on."""

    def __init__(
        self,
        prompt: Prompt,
        request: Request,
        environments: Environments,
        tokenizer: PreTrainedTokenizerFast,
    ):
        self._tokenizer = tokenizer
        self._episodes: Episodes = environments([prompt], [request])
        self._seen: tuple[int, ...] = ()
        self.was_stopped = False
        """Whether the policy ended the conversation before it was over."""

    def play(self, model: Model) -> Iterator[Stretch]:
        """Play to the end; yield the tokens that each request adds and, after them, the tokens of the turn."""
        episodes = self._episodes
        episodes.begin(0)
        while (request := episodes.next(0)) is not None:
            ids, seen = request.token_ids, self._seen
            start = len(seen) if ids[: len(seen)] == seen else 0  # whole request if its earlier tokens changed
            yield self._stretch(ids[start:], sampled=False)
            try:
                completion = model(request)
            except Stopped:
                self.was_stopped = True
                episodes.stop(0)
                continue
            self._seen = (*request.token_ids, *completion.token_ids.tolist())
            yield self._stretch(completion.token_ids.tolist(), sampled=True)
            episodes.ended(0, completion)

    @property
    def completion(self) -> Completion:
        """The whole conversation, once it is over."""
        return self._episodes.result(0)

    def close(self) -> None:
        """Discard the conversation if it is not over."""
        self._episodes.close()

    def writing(self, policy: Policy) -> Model:
        """Return a model whose turns are the policy's texts, encoded and cut to the limit of tokens of the request."""

        def model(request: Request) -> Completion:
            if (text := policy(self._episodes.messages(0))) is None:
                raise Stopped
            ids = [*self._tokenizer.encode(text, add_special_tokens=False), self._episodes.end_id(0)]
            most = request.sampling.max_new_tokens
            logprobs, reason = np.zeros(min(len(ids), most), np.float32), "length" if len(ids) > most else "stop"
            return Completion(np.asarray(ids[:most], np.int32), logprobs, reason, cached_tokens=0)

        return model

    def _stretch(self, ids: Sequence[int], *, sampled: bool) -> Stretch:
        return Stretch(tuple(ids), decode(self._tokenizer, ids), sampled)
