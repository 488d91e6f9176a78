"""Keeps the tokens of a conversation with an agent, each of whose requests asks the policy for one turn.

An agent sends the whole conversation with every request. If a request begins with messages that the policy has already
seen or sampled, the recorded tokens of these messages are reused: sampled tokens are never rendered or tokenized again.

    request                                          prompt of the turn
    [user: 47+38=]                                   rendered
    [user: 47+38=, assistant: 85, user: and 1?]      the recorded tokens of the first two messages, then the third
    [user: 47+38=]                                   the tokens of the first prompt again, as a new branch
    [user: 85+1=, assistant: 7, user: no]            rendered, as a new branch, since the policy never sampled 7

Every branch is a training sample of the conversation (tpu_grpo/records/episode.py). If the policy alternately plays two
players of a game, each request continues the tokens of its own player, as a new branch.
"""

import bisect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, takewhile
from typing import Any

from tpu_grpo.environments.actions import Action, Answered, Message, SampledTurn
from tpu_grpo.environments.conversation import Conversation, Start
from tpu_grpo.environments.policy_requests import TurnRequest, most_bytes
from tpu_grpo.environments.tool_values import WrongError
from tpu_grpo.models.tokenizers import check_length, token_bytes
from tpu_grpo.records.errors import ConfigError, DataError, RequestError
from tpu_grpo.records.stages import Completion, Request


@dataclass(frozen=True)
class _Seen:
    """Tokens that the policy has seen, and the messages that these tokens encode."""

    tools: str
    messages: tuple[str, ...]
    """Each message as `_canonical` writes it; empty if the prompt was given as token ids or text."""
    ids: tuple[int, ...]
    sampled: tuple[bool, ...]
    """For each token whether the policy sampled it."""
    is_turn: bool
    """Whether the tokens end with a turn of the policy; false if they are the prompt of a turn."""


@dataclass(frozen=True)
class _Prompt:
    """The tokens of a request's prompt."""

    ids: list[int]
    sampled: tuple[bool, ...]
    """For each leading token that the policy has seen, whether the policy sampled it; empty if no tokens are
    reused as they are."""
    added: int
    """The number of tokens at the end that come from the agent's new messages; 0 if no seen tokens are reused."""

    @classmethod
    def of(cls, ids: Sequence[int], seen: _Seen | None) -> "_Prompt":
        """Make a prompt of ``ids``, which begin with the tokens of ``seen``, if any."""
        return cls(list(ids), (), 0) if seen is None else cls(list(ids), seen.sampled, len(ids) - len(seen.ids))


class AgentConversation(Conversation):
    """A conversation in which an agent requests the policy's turns, with the methods of `Conversation`."""

    def __init__(self, start: Start):
        super().__init__(start)
        self._seen: list[_Seen] = []
        self._asked = TurnRequest()
        self._said: tuple[str, ...] = ()
        """The messages of the request, and then the turn, each as `_canonical` writes it."""

    def first(self, reply: Answered) -> Request:
        """Take the agent's first request, and return the engine's `Request` for the first turn. Raises WrongError if
        the agent ended without a request, or the prompt is empty or exceeds data.max_prompt_tokens."""
        if reply.request is None:
            raise WrongError("must ask the policy for at least one turn, got an agent that ended before it did")
        ids = self._prompt(reply.request).ids
        most = self._start.max_prompt_tokens
        if not 0 < len(ids) <= most:
            raise WrongError(f"must begin with a prompt of 1 to data.max_prompt_tokens={most} tokens, got {len(ids)}")
        self._first_text, self._first_tokens = self._chat_format.decode(ids), len(ids)
        self._messages = [dict(message) for message in self._asked.messages or ()]
        self._first_messages = len(self._messages)
        self._begin_branch(ids)
        return self._next_request()

    def turn(self, completion: Completion) -> Action:
        """Add the policy's turn, and return the parsed turn with its tokens. A turn never ends the conversation."""
        chat_format, asked = self._chat_format, self._asked
        pieces = partial(token_bytes, chat_format.tokenizer)
        completion, action = read_turn(
            completion, tuple(self._ids), asked, chat_format.decode, chat_format.read, pieces
        )
        self._add_turn(completion, action, action.calls)
        self._said = (*self._said, _canonical(self._messages[-1]))
        self._remember(is_turn=True)
        return action

    def answered(self, reply: Answered) -> Request | None:
        """Take the agent's next request, and return the engine's `Request` for the next turn; None if the agent has
        ended, or the policy may have no more turns or tokens."""
        if reply.request is None:
            self._ending = "tokens" if self._completions[-1].finish_reason == "length" and not self._room else "done"
        elif len(self._turns) >= self._start.section.max_turns:
            self._ending = "turns"
        else:
            try:
                return self._go_on(reply.request)
            except WrongError as error:
                if not isinstance(error.__cause__, RequestError):
                    raise
                self._ending = "tokens"
        return None

    def _go_on(self, asked: str) -> Request | None:
        before, prompt = self._said, self._prompt(asked)
        ids, known = prompt.ids, len(prompt.sampled)
        continues = len(ids) > len(self._ids) == known and ids[:known] == self._ids
        request = self._continue(ids, prompt.added, None if continues else prompt.sampled)
        if request is not None:
            common = takewhile(lambda pair: pair[0] == pair[1], zip(before, self._said, strict=False))
            new = [dict(message) for message in (self._asked.messages or ())[len(list(common)) :]]
            self._turns[-1] = replace(self._turns[-1], answer="\n".join(str(message["content"]) for message in new))
            self._messages += new
        return request

    # --- prompts ------------------------------------------------------------------------------------------------------

    def _prompt(self, request: str) -> _Prompt:
        """Return the prompt of a request in JSON. The cause of its WrongError is a RequestError if it cannot fit."""
        most = self._start.max_prompt_tokens + self._start.request.sampling.max_new_tokens
        try:
            if len(request) > most_bytes(most):
                raise RequestError(f"a request must have at most {most_bytes(most)} bytes, got {len(request)}")
            self._asked = asked = TurnRequest.model_validate_json(request)
            self._tools, self._said = json.dumps(asked.tools), tuple(map(_canonical, asked.messages or ()))
            self._chat_format = self._start.chat_format.with_tools(self._tools, most)
            if asked.messages is not None:
                return self._conversation(asked.messages, most)
            check_length(self._chat_format.tokenizer, asked.text or "", most)
            ids = list(asked.token_ids or ()) if asked.text is None else self._chat_format.encoder.plain(asked.text)
            fitting = [seen for seen in self._seen if tuple(ids[: len(seen.ids)]) == seen.ids]
            seen = max(fitting, key=lambda seen: len(seen.ids), default=None)
            self._chat_format.check_ids(ids)
            return _Prompt.of(ids, seen)
        except (ConfigError, DataError, RequestError) as error:
            raise WrongError(f"must ask with a prompt that the policy can read: {error}") from error

    def _conversation(self, messages: Sequence[Message], most: int) -> _Prompt:
        """Return the prompt for messages: the recorded tokens of as many of the first messages as possible, then the
        tokens of the other messages. Raises RequestError for far more than ``most`` tokens."""
        fitting = [
            s
            for s in self._seen
            if s.messages and s.tools == self._tools and self._said[: len(s.messages)] == s.messages
        ]
        # the longest match first; one that cannot be continued leaves the turn to a shorter one
        for seen in sorted(fitting, key=lambda seen: len(seen.messages), reverse=True):
            added = messages[len(seen.messages) :]
            check_length(self._chat_format.tokenizer, "\n".join(str(message["content"]) for message in added), most)
            if not seen.is_turn:
                if not added:  # the agent wants another turn for the same prompt
                    return _Prompt.of(seen.ids, seen)
            elif added and self._chat_format.ends(seen.ids) and all(each["role"] != "assistant" for each in added):
                # 0, as a branch's prompt may hold sampled tokens, which seen.sampled marks
                following = self._chat_format.follow(seen.ids, 0, seen.sampled, added)
                if following.new_prompt is None:
                    return _Prompt.of([*seen.ids, *following.suffix], seen)
                ids = [*following.new_prompt, *following.suffix]  # the template drops earlier thinking
                return _Prompt(ids, (), len(following.suffix))
        return _Prompt(self._chat_format.prompt(messages, most), (), 0)

    def _remember(self, *, is_turn: bool) -> None:
        messages = () if self._asked.messages is None else self._said
        self._seen.append(_Seen(self._tools, messages, tuple(self._ids), tuple(self._flags), is_turn))

    def _next_request(self) -> Request:
        self._remember(is_turn=False)
        request = super()._next_request()
        if (most := self._asked.max_tokens) is None:
            return request
        sampling = replace(request.sampling, max_new_tokens=min(most, request.sampling.max_new_tokens))
        return replace(request, sampling=sampling)


def read_turn(
    completion: Completion,
    prompt_ids: tuple[int, ...],
    asked: TurnRequest,
    decode: Callable[[Sequence[int]], str],
    read: Callable[[list[int]], Action],
    pieces: Callable[[Iterable[int]], tuple[bytes, ...]],
) -> tuple[Completion, Action]:
    """Cut a turn after the first token of ``asked.stop_ids`` or that completes a text of ``asked.stop``, and parse it
    with ``read``. ``pieces`` gives the bytes of tokens, for log-probabilities.

    Return the cut turn, and the parsed turn with its tokens; its texts end before the first of the texts ``stop``.
    """
    ids, stops = completion.token_ids.tolist(), asked.stop

    def holds(count: int) -> bool:
        text = decode(ids[:count])
        return any(stop in text for stop in stops) or not set(asked.stop_ids).isdisjoint(ids[:count])

    if holds(len(ids)):
        count = bisect.bisect_left(range(1, len(ids) + 1), True, key=holds) + 1
        completion = replace(
            completion,
            token_ids=completion.token_ids[:count],
            logprobs=completion.logprobs[:count],
            finish_reason="stop",
            kept=None if completion.kept is None else completion.kept[:count],
            experts=None if completion.experts is None else completion.experts[: len(prompt_ids) + count - 1],
        )
        ids = ids[:count]
    action = read(ids)
    for stop in stops:
        action = replace(action, text=action.text.partition(stop)[0], content=action.content.partition(stop)[0].strip())
    logprobs, is_cut = tuple(completion.logprobs.tolist()), completion.finish_reason == "length"
    sampled = SampledTurn(prompt_ids, tuple(ids), logprobs, is_cut)
    if asked.logprobs:
        tops = [list(islice(top.items(), asked.likeliest)) for top in completion.likeliest[: len(ids)]]
        numbers = list({*ids, *(number for top in tops for number, _ in top)})
        spelled = dict(zip(numbers, pieces(numbers), strict=True))
        likeliest = tuple(tuple((number, spelled[number], logprob) for number, logprob in top) for top in tops)
        sampled = replace(sampled, pieces=tuple(spelled[number] for number in ids), likeliest=likeliest)
    return completion, replace(action, sampled=sampled)


def _canonical(message: Mapping[str, Any]) -> str:
    """Write a message as text, so that equal messages give equal texts, whatever the order of keys. Thinking is left
    out, because agents do not send it back."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    parts = message["role"], message.get("name"), str(message.get("content") or "").strip(), calls
    return json.dumps(parts, sort_keys=True)
