"""Keeps the tokens of one conversation between the policy and its environment.

    conversation = Conversation(start)
    request = conversation.first(answered)          # takes the result of reset
    action = conversation.turn(completion)          # takes the policy's turn; None: the conversation is over
    request = conversation.answered(answered)       # takes the environment's answer; None: the conversation is over
    conversation.ended(ended)
    completion = conversation.completion()

Sampled tokens are never rendered or tokenized again. The policy's next prompt is its previous prompt, the tokens that
it sampled, and the tokens that the chat template appends for the answer.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tpu_grpo.config import EnvironmentSection
from tpu_grpo.environments.actions import Action, Answered, BadCall, Ended, LoadedEnvironment, Message, ToolCall
from tpu_grpo.environments.tool_values import WrongError
from tpu_grpo.records.episode import Branch, Ending, Episode, Failure, Turn
from tpu_grpo.records.stages import Completion, Prompt, Request

if TYPE_CHECKING:
    from tpu_grpo.environments.chat_format import ChatFormat
    from tpu_grpo.environments.turn_tokens import Encoder


def cut_answers(messages: Sequence[Message], most: int, encoder: "Encoder") -> list[Message]:
    """Cut the environment's answers to a turn, the longest first, to at most ``most`` tokens together."""
    texts = [str(message["content"]) for message in messages]
    wanted = [encoder.count(text) for text in texts]
    return [
        message if room == tokens else {**message, "content": encoder.shortened(text, room)}
        for message, text, tokens, room in zip(messages, texts, wanted, shares(wanted, most), strict=True)
    ]


def shares(wanted: Sequence[int], most: int) -> list[int]:
    """Divide ``most`` tokens among answers of ``wanted`` tokens; the longest are cut: ([2, 9, 9], 13) gives [2, 5, 6].

    A remainder goes to the longest answers, and among equally long answers to the last.
    """
    given, left = [0] * len(wanted), most
    shortest_first = sorted(range(len(wanted)), key=lambda n: (wanted[n], n))
    for place, n in enumerate(shortest_first):
        given[n] = min(wanted[n], left // (len(wanted) - place))
        left -= given[n]
    return given


BRANCH_SAMPLES = 2**20
"""Each further branch of a conversation adds this number to the sample number in the branch's `SampleKey`, because
earlier branches have used the random numbers of the same token positions. Group sizes are below this number."""


@dataclass(frozen=True)
class Start:
    """What a conversation needs to begin."""

    prompt: Prompt
    request: Request
    """How the turns are sampled; ``max_new_tokens`` limits the whole conversation after the first prompt."""
    environment: LoadedEnvironment
    chat_format: "ChatFormat"
    section: EnvironmentSection
    max_prompt_tokens: int


class Conversation:
    """The state of one conversation; see the top of this file for the order of calls."""

    def __init__(self, start: Start):
        self._start, self._chat_format = start, start.chat_format
        self._ids: list[int] = []
        """The current branch, prompt included."""
        self._flags: list[bool] = []
        """For each token of the current branch whether the policy sampled it."""
        self._tokens: list[int] = []
        self._hash = hashlib.sha256()
        self._logprobs: list[float] = []
        self._sampled: list[bool] = []
        self._kept: list[int] = []
        """``Completion.kept`` of each token; ``Ended.kept``, the environment's attributes, is something else."""
        self._branches: list[Branch] = []
        self._branch_prompt: tuple[int, ...] = ()
        self._branch_start = 0
        self._turns: list[Turn] = []
        self._messages: list[Message] = []
        self._completions: list[Completion] = []
        self._first_text, self._first_tokens, self._first_messages = "", 0, 0
        self._ending: Ending | None = None
        self._ended = Ended()
        self._failure: Failure | None = None

    @property
    def began(self) -> bool:
        """Whether the result of ``reset`` has arrived."""
        return self._first_tokens > 0

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, the prompt's messages first."""
        return list(self._messages)

    @property
    def asked(self) -> str:
        """The text of the first prompt's last user message, with the result of ``reset`` once that is known."""
        messages = self._messages[: self._first_messages] or self._start.prompt.conversation
        texts = [str(message["content"]) for message in messages if message["role"] == "user"]
        return texts[-1] if texts else str(messages[-1]["content"])

    @property
    def digest(self) -> str:
        """A digest of all tokens so far."""
        return self._hash.copy().hexdigest()[:16]

    # --- its events, in order -----------------------------------------------------------------------------------------

    def first(self, reply: Answered) -> Request:
        """Take the result of ``reset``, and return the request of the first turn. Raises WrongError for a first prompt
        of more than data.max_prompt_tokens tokens."""
        start = self._start
        observation = None if not reply.messages else str(reply.messages[0]["content"])
        messages: list[Message] = list(start.prompt.conversation)
        text, ids = start.prompt.text, list(start.prompt.token_ids)
        if observation is not None:
            text, ids, messages = self._chat_format.first(messages, observation)
        if len(ids) > start.max_prompt_tokens:
            raise WrongError(
                f"must give a first prompt of at most data.max_prompt_tokens={start.max_prompt_tokens} tokens, got "
                f"{len(ids)} with what reset returned"
            )
        self._first_text, self._first_tokens, self._first_messages = text, len(ids), len(messages)
        self._messages = [*messages]
        self._begin_branch(ids)
        return self._next_request()

    def turn(self, completion: Completion) -> Action | None:
        """Take the policy's turn, and return the parsed turn for the environment; None if the conversation ends here.

        The conversation ends if the turn was cut, if the turn calls no tool although the environment has only tools, or
        if the chat template writes no answers after the turn's end token.
        """
        ids = completion.token_ids.tolist()
        action = self._chat_format.read(ids)
        if completion.finish_reason == "length":
            self._ending = "tokens"
        elif not self._chat_format.ends(ids) or (self._start.environment.takes == "calls" and not action.calls):
            self._ending = "answered"
        self._add_turn(completion, action, () if self._ending else action.calls)
        return None if self._ending else action

    def _add_turn(self, completion: Completion, action: Action, made: Sequence[ToolCall | BadCall]) -> None:
        """Add a turn of the policy, some of whose calls are ``made``."""
        self._append(completion.token_ids.tolist(), completion)
        self._completions.append(completion)
        self._messages.append(action.message)
        names, end = tuple(call.name if isinstance(call, ToolCall) else "" for call in made), len(self._tokens)
        self._turns.append(Turn(end - len(completion.token_ids), end, action.text, names))

    def answered(self, reply: Answered) -> Request | None:
        """Take the environment's answer to a turn, and return the request of the next turn; None if the conversation
        is over."""
        section = self._start.section
        messages = cut_answers(reply.messages, section.max_observation_tokens, self._chat_format.encoder)
        answer = "\n".join(str(message["content"]) for message in messages)
        self._turns[-1] = replace(self._turns[-1], answer=answer, reward=reply.reward, errors=reply.errors)
        self._messages += messages
        if reply.done:
            self._ending = "done"
        elif len(self._turns) >= section.max_turns:
            self._ending = "turns"
        else:
            following = self._chat_format.follow(self._ids, self._first_tokens, self._flags, messages)
            # if earlier turns lose their thinking, a new branch begins, none of whose prompt counts as sampled
            branch, past = (None, self._ids) if following.new_prompt is None else ((), following.new_prompt)
            return self._continue([*past, *following.suffix], len(following.suffix), branch)
        return None

    def ended(self, reply: Ended) -> None:
        """Take the environment's result for the whole conversation. Raises WrongError for more turn rewards than
        turns."""
        if reply.turn_rewards is not None and (given := len(reply.turn_rewards)) > (turns := len(self._turns)):
            raise WrongError(
                f"must give a list of {turns} numbers, one for each turn, got {given} from get_turn_rewards; correct it"
            )
        self._ended = reply

    def stop(self) -> None:
        """End the conversation before the policy's next turn."""
        self._ending = "answered"

    def failed(self, failure: Failure) -> None:
        """Record that the environment has failed."""
        self._failure, self._ending = failure, "failed"

    def completion(self, seconds: float = 0.0) -> Completion:
        """Return the whole conversation, which has no tokens if the environment failed before the first turn.
        ``seconds`` is the time that the row waited for the environment."""
        self._end_branch()
        assert self._ending is not None, "the conversation is not over"
        kept = bool(self._completions) and self._completions[0].kept is not None
        return Completion(
            token_ids=np.asarray(self._tokens, np.int32),
            logprobs=np.asarray(self._logprobs, np.float32),
            finish_reason="length" if self._ending in ("turns", "tokens") else "stop",
            cached_tokens=self._completions[0].cached_tokens if self._completions else 0,
            kept=np.asarray(self._kept, np.int32) if kept else None,
            sampled=np.asarray(self._sampled, np.bool_),
            episode=self._episode(self._ending, seconds),
        )

    # --- its tokens ---------------------------------------------------------------------------------------------------

    @property
    def _room(self) -> int:
        """The number of tokens that the conversation may still add."""
        most = self._start.request.sampling.max_new_tokens
        return most - max(len(self._ids) - self._first_tokens, len(self._tokens))

    def _next_request(self) -> Request:
        """Make the request of the next turn. The conversation's token limit applies to the current branch, and to the
        tokens of all branches together."""
        request, room = self._start.request, self._room
        if (most := self._start.section.max_turn_tokens) is not None:
            room = min(room, most)
        branch = len(self._branches)
        key = replace(request.key, sample=request.key.sample + branch * BRANCH_SAMPLES)
        sampling = replace(request.sampling, max_new_tokens=room)
        return replace(request, token_ids=tuple(self._ids), sampling=sampling, key=key)

    def _continue(self, ids: Sequence[int], observed: int, branch: Sequence[bool] | None) -> Request | None:
        """Make ``ids`` the next turn's prompt, and return its request; end the conversation if they leave no room.

        Args:
            ids: the tokens of the current branch and further ones, or those of a new branch.
            observed: how many of them, at the end, are the answer to the last turn.
            branch: ``sampled`` of ``_begin_branch`` for a new branch; None if the current branch continues.
        """
        added = ids[len(self._ids) :] if branch is None else ()
        longest = max(len(ids) - self._first_tokens, len(self._tokens) + len(added))
        if longest >= self._start.request.sampling.max_new_tokens:
            self._ending = "tokens"
            return None
        self._turns[-1] = replace(self._turns[-1], observed=observed)
        if branch is None:
            self._append(added)
        else:
            self._end_branch()
            self._begin_branch(ids, branch)
        return self._next_request()

    def _append(self, ids: Sequence[int], turn: Completion | None = None) -> None:
        """Append the tokens of a turn, or of an answer if ``turn`` is None."""
        zeros = [0] * len(ids)
        self._ids += ids
        self._tokens += ids
        self._hash.update(np.asarray(ids, np.int32).tobytes())
        self._logprobs += zeros if turn is None else turn.logprobs.tolist()
        self._kept += zeros if turn is None or turn.kept is None else turn.kept.tolist()
        self._sampled += [turn is not None] * len(ids)
        self._flags += [turn is not None] * len(ids)

    def _begin_branch(self, ids: Sequence[int], sampled: Sequence[bool] = ()) -> None:
        """Begin a branch with a prompt; ``sampled`` says of its first tokens whether the policy sampled them."""
        self._ids, self._flags = list(ids), [*sampled, *[False] * (len(ids) - len(sampled))]
        self._branch_prompt, self._branch_start = tuple(ids), len(self._tokens)

    def _end_branch(self) -> None:
        """Store the current branch if a token was sampled in it."""
        start, end = self._branch_start, len(self._tokens)
        if any(self._sampled[start:end]):
            self._branches.append(Branch(self._branch_prompt, start, end, self._completions[-1].experts))
        self._branch_start = end

    # --- its record ---------------------------------------------------------------------------------------------------

    def _episode(self, ending: Ending, seconds: float) -> Episode:
        turns = self._turns
        if (given := self._ended.turn_rewards) is not None:
            rewards = [*given, *[0.0] * (len(turns) - len(given))]  # a last turn without calls may add nothing
            turns = [replace(turn, reward=reward) for turn, reward in zip(turns, rewards, strict=True)]
        return Episode(
            prompt=self._first_text,
            branches=tuple(self._branches),
            turns=tuple(turns),
            ending=ending,
            messages=tuple(self._messages[self._first_messages :]),
            environment=self._start.environment.name,
            reward=self._reward(turns),
            failure=self._failure,
            kept=self._ended.kept,
            seconds=seconds,
        )

    def _reward(self, turns: Sequence[Turn]) -> float | None:
        """Return the result of ``get_reward``, or else the sum of the turns' rewards; None if the class gives
        neither, or after a failure. For a class with ``step`` the sum is 0 if the conversation was cut in its first
        turn."""
        if self._failure is not None or self._ended.reward is not None:
            return None if self._failure is not None else self._ended.reward
        known = [turn.reward for turn in turns if turn.reward is not None]
        by_turns = self._start.environment.takes == "texts" and self._start.environment.gives_reward
        return sum(known, 0.0) if known or by_turns else None
