"""The HTTP request and response formats for turns of the policy: OpenAI's, vLLM's and SGLang's.

    form = FORMS["/v1/chat/completions"]
    asked = form.read(body)                     # a TurnRequest; raises RefusedError for one that cannot be honoured
    body = form.write(asked, [turn], "policy")  # the response body, with asked.n turns

In a run, the run's settings decide how tokens are sampled, and a request can only end a turn earlier: by
``max_tokens``, or by stop texts. ``tpu-grpo serve`` also honours ``temperature`` and the other sampling fields.
"""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from tpu_grpo.environments.actions import Action, SampledTurn
from tpu_grpo.environments.tool_calls import checked_value

MOST_CHOICES = 64
MOST_STOPS = 16
GREEDY_BELOW = 1e-5
"""A temperature below this one is greedy, as in vLLM; logits that are divided by a tiny one are infinite."""


class RefusedError(Exception):
    """A request that cannot be honoured: HTTP status, name of the reason, and name of the parameter, if it is one."""

    def __init__(self, text: str, status: int = 400, code: str = "invalid_request", param: str | None = None):
        super().__init__(text)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the HTTP error response, in OpenAI's form."""
        given = {"message": str(self), "type": "invalid_request_error", "param": self.param, "code": self.code}
        return {"error": given}


def most_bytes(context: int) -> int:
    """Return the most bytes of a request whose prompt has to fit into ``context`` tokens: 256 for each, and always
    256 KiB. A token has a few bytes, seldom 100; JSON's escapes, and thinking that templates drop, come on top."""
    return max(2**18, 256 * context)


class TurnRequest(BaseModel):
    """A request for turns. Exactly one of ``messages``, ``text``, ``token_ids`` and ``prompts`` is the prompt."""

    model_config = ConfigDict(frozen=True)

    messages: tuple[dict[str, Any], ...] | None = None
    """Messages {role, content} whose contents are texts, some with ``tool_calls`` (arguments as a dict) or ``name``."""
    tools: tuple[dict[str, Any], ...] = ()
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """Several prompts, each of which gets ``n`` turns."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    """Texts that end the turn; the turn's text ends before them, but its tokens include them."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the turn; its tokens and text include them."""
    sampling: dict[str, float] = Field(default_factory=dict)
    """The fields of `SamplingParams` that the request sets, and ``seed``."""
    n: int = 1
    index: int = 0
    """The number of the turn among the ``n`` of a prompt, from 0."""
    streams: bool = False
    streams_usage: bool = False
    logprobs: bool = False
    likeliest: int = 0
    """How many of the likeliest tokens the response names in each token's place."""
    returns_ids: bool = False

    @property
    def turns(self) -> int:
        """The number of turns: ``n`` for each prompt."""
        return self.n * max(1, len(self.prompts))

    def one(self, index: int = 0) -> "TurnRequest":
        """Return the request for one of the turns; those of the first prompt come first."""
        prompt = _prompt(self.prompts[index // self.n]) if self.prompts else {}
        return self.model_copy(update={"index": index % self.n, "prompts": (), **prompt})

    def for_one(self, index: int = 0) -> str:
        """Return the request for one of the turns in JSON, without the fields that only the response needs."""
        return self.one(index).model_dump_json(exclude={"prompts", "n", "streams", "streams_usage", "returns_ids"})


Text = str | list[dict[str, Any]] | None
Count = Annotated[int, Field(ge=1)]
Likeliest = Annotated[int, Field(ge=0, le=20)]  # as at OpenAI


WITHOUT_EFFECT = (
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prediction", "request_id", "rid"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_salt", "priority", "detokenize"),
    *("skip_special_tokens", "spaces_between_special_tokens", "output_kind", "log_metrics"),
)
"""Parameters that change no turn: there is one model, nothing is stored, and texts never have special tokens."""
_ZEROS = ("presence_penalty", "frequency_penalty", "min_tokens", "min_new_tokens", "top_logprobs_num")
_FALSE = ("echo", "stream", "ignore_eos", "include_stop_str_in_output", "return_text_in_logprobs")
_ABSENT = ("audio", "function_call", "moderation", "reasoning_effort", "verbosity", "web_search_options")
NEUTRAL: Mapping[str, Any] = MappingProxyType(
    dict.fromkeys(_ZEROS, 0)
    | dict.fromkeys(_FALSE, False)
    | dict.fromkeys(_ABSENT)
    | dict.fromkeys(("best_of", "length_penalty", "repetition_penalty"), 1)
    | {"logit_bias": {}, "chat_template_kwargs": {}, "structured_outputs": {}, "functions": [], "suffix": ""}
    | {"response_format": {"type": "text"}, "modalities": ["text"], "tool_choice": "auto", "parallel_tool_calls": True}
    | {"logprob_start_len": -1}
)
"""Known parameters that would change turns or responses, and the value of each that changes none, beside null."""


class _Request(BaseModel):
    """Refuses parameters that are not declared, unless they have no effect."""

    model_config = ConfigDict(extra="allow")

    def model_post_init(self, _: Any) -> None:
        for name, value in (self.model_extra or {}).items():
            if value is None or name in WITHOUT_EFFECT or (name in NEUTRAL and value == NEUTRAL[name]):
                continue
            rule, code = "be a parameter that is known here", "unknown_parameter"
            if name in NEUTRAL:
                rule, code = f"be {json.dumps(NEUTRAL[name])}", "unsupported_parameter"
            text = f"{name:.100} must {rule}, got {value!r:.200}; leave it out"
            raise RefusedError(text, code=code, param=name[:100])


class _Body(_Request):
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: dict[Literal["include_usage", "include_obfuscation"], bool | None] | None = None
    return_token_ids: bool | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None

    def common(self, most_tokens: int | None = None) -> dict[str, Any]:
        """Return arguments of `TurnRequest`; ``most_tokens`` is what the format has in place of ``max_tokens``, if
        given."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MOST_STOPS or "" in stop:
            raise RefusedError(f"stop must hold at most {MOST_STOPS} texts, none of them empty, got {stop!r:.200}")
        sampling = self.model_dump(include={"temperature", "top_p", "top_k", "min_p", "seed"}, exclude_none=True)
        if sampling.get("top_k") == -1:
            sampling["top_k"] = 0  # all tokens, for which vLLM and SGLang write -1
        if sampling.get("temperature", 1.0) < GREEDY_BELOW:
            sampling["temperature"] = 0.0
        return {
            "sampling": sampling,
            "n": self.n or 1,
            "max_tokens": most_tokens or self.max_tokens,
            "stop": tuple(stop),
            "stop_ids": tuple(self.stop_token_ids or ()),
            "streams": bool(self.stream),
            "streams_usage": bool((self.stream_options or {}).get("include_usage")),
            "returns_ids": bool(self.return_token_ids),
        }


class _Function(BaseModel):
    name: Annotated[str, Field(min_length=1, max_length=200)]
    arguments: str | dict[str, Any] = "{}"


class _Call(BaseModel):
    id: str = ""
    function: _Function


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = None
    name: Annotated[str, Field(max_length=200)] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str = ""

    def plain(self, named: dict[str, str]) -> dict[str, Any]:
        """Return the message as chat templates take it; ``named`` maps call ids to tool names, and is extended."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        message["content"] = _plain_text(self.content)
        named |= {call.id: call.function.name for call in self.tool_calls or () if call.id}
        if (name := self.name or (named.get(self.tool_call_id) if self.role == "tool" else None)) is not None:
            message["name"] = name
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.function.name, "arguments": _arguments(call.function)}}
                for call in self.tool_calls
            ]
        return message


class _Schema(BaseModel):
    type: str | list[str] | None = None
    anyOf: "list[_Schema | bool] | None" = None
    oneOf: "list[_Schema | bool] | None" = None


class _Parameters(BaseModel):
    properties: dict[str, _Schema] = Field(default_factory=dict)


class _Described(BaseModel):
    name: Annotated[str, Field(min_length=1, max_length=200)]
    parameters: _Parameters | None = None


def _as_given(given: dict[str, Any], check: ValidatorFunctionWrapHandler) -> dict[str, Any]:
    """Check a value, and return it with its keys in their order, which chat templates show to the policy."""
    check(given)
    return given


class _Tool(BaseModel):
    type: Literal["function"]
    function: Annotated[_Described, WrapValidator(_as_given)]

    def plain(self) -> dict[str, Any]:
        """Return the tool as chat templates take it; raises RefusedError for values that JSON cannot hold."""
        given: dict[str, Any] = self.function  # pyrefly: ignore[bad-assignment]
        function = {key: value for key, value in given.items() if key != "parameters" or value is not None}
        return {"type": "function", "function": _checked(function, f"the tool {function['name']}")}


class _Chat(_Body):
    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[_Tool] | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None

    def asked(self) -> TurnRequest:
        if self.top_logprobs and not self.logprobs:
            raise RefusedError("logprobs must be true if top_logprobs is given, got none", param="top_logprobs")
        if not self.tools and any(message.role == "tool" or message.tool_calls for message in self.messages):
            raise RefusedError("tools must describe the tools of a conversation that has calls, got none; send them")
        named = dict[str, str]()
        return TurnRequest(
            **self.common(self.max_completion_tokens),
            messages=tuple(message.plain(named) for message in self.messages),
            tools=tuple(tool.plain() for tool in self.tools or ()),
            logprobs=bool(self.logprobs),
            likeliest=self.top_logprobs or 0,
        )


class _Completion(_Body):
    prompt: str | list[Any]
    logprobs: Likeliest | None = None

    def asked(self) -> TurnRequest:
        several = isinstance(self.prompt, list) and len(self.prompt) > 0 and not isinstance(self.prompt[0], int)
        prompt: dict[str, Any] = {"prompts": self.prompt} if several else _prompt(self.prompt)
        return TurnRequest(**self.common(), **prompt, logprobs=self.logprobs is not None, likeliest=self.logprobs or 0)


class _Sampling(_Body):
    max_new_tokens: Count | None = None
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None  # vLLM's; sampled tokens always have theirs

    def limits(self) -> dict[str, Any]:
        return self.common(self.max_new_tokens)


class _Generate(_Request):
    token_ids: Annotated[list[int], Field(min_length=1)]
    sampling_params: _Sampling = Field(default_factory=_Sampling)

    def asked(self) -> TurnRequest:
        return TurnRequest(**self.sampling_params.limits(), token_ids=tuple(self.token_ids))


class _Sglang(_Request):
    text: str | None = None
    input_ids: Annotated[list[int], Field(min_length=1)] | None = None
    sampling_params: _Sampling = Field(default_factory=_Sampling)
    return_logprob: bool = False

    def asked(self) -> TurnRequest:
        if (self.text is None) == (self.input_ids is None):
            raise RefusedError("a request must have either text or input_ids, got both or neither; give one")
        given = self.text if self.input_ids is None else self.input_ids
        return TurnRequest(**self.sampling_params.limits(), **_prompt(given), logprobs=self.return_logprob)


def _prompt(given: Any) -> dict[str, Any]:
    return {"text": given} if isinstance(given, str) else {"token_ids": tuple(given or ())}


def _plain_text(content: Text) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RefusedError(
                f"the parts of a message must be texts, got {part!r:.200}; the policy reads nothing else"
            )
    return "".join(part["text"] for part in content)


def _checked(value: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a JSON object; raises RefusedError if it is nested too deep, or has values that JSON cannot hold."""
    try:
        return checked_value(value)
    except ValueError as error:
        raise RefusedError(f"{where}: {error}") from None


def _arguments(function: _Function) -> dict[str, Any]:
    try:
        given = function.arguments
        found = given if isinstance(given, dict) else json.loads(given or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RefusedError(
            f"the arguments of the call of {function.name} must be a JSON object, got {function.arguments!r:.200}"
        )
    return _checked(found, f"the call of {function.name}")


@dataclass(frozen=True)
class Form:
    """An HTTP format: reads the body of a request, and writes the body of the response."""

    body: type[BaseModel]
    write: Callable[[TurnRequest, Sequence[Action], str], dict[str, Any]]
    """Takes the request, its ``n`` turns, and the model's name."""

    def read(self, data: bytes) -> TurnRequest:
        """Read a request. Raises RefusedError for the first problem in the body."""
        try:
            return self.body.model_validate_json(data).asked()  # pyrefly: ignore[missing-attribute]
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or None
            text = f"{place or 'the body'}: {first['msg']}, got {first['input']!r:.200}"
            raise RefusedError(text, param=place) from None


# --- answers ----------------------------------------------------------------------------------------------------------


def _of(turn: Action) -> SampledTurn:
    assert turn.sampled is not None
    return turn.sampled


def _reason(turn: Action) -> str:
    return "length" if _of(turn).is_cut else "stop"


def _usage(turns: Sequence[Action], n: int = 1) -> dict[str, int]:
    """Return the numbers of tokens; the prompt of every ``n`` turns counts once."""
    prompt = sum(len(_of(turn).prompt_ids) for turn in turns[::n])
    sampled = sum(len(_of(turn).token_ids) for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _head(kind: str, model: str) -> dict[str, Any]:
    return {"id": f"{kind}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _token(number: int, piece: bytes | None, logprob: float) -> dict[str, Any]:
    """Return a token as chat completions name it: by its text or, if it is a part of a character, its bytes; by its id,
    as in vLLM, if its bytes are not known."""
    if piece is None:
        return {"token": f"token_id:{number}", "logprob": logprob, "bytes": None}
    text = piece.decode(errors="backslashreplace")
    name = text if text.encode() == piece else f"bytes:{text}"
    return {"token": name, "logprob": logprob, "bytes": list(piece)}


def _content_logprobs(turn: Action) -> dict[str, Any]:
    """Return log-probabilities in the format of chat completions."""
    ids, logprobs, pieces, likeliest = _of(turn).token_ids, _of(turn).logprobs, _of(turn).pieces, _of(turn).likeliest
    rows = zip(ids, pieces or [None] * len(ids), logprobs, likeliest or [()] * len(ids), strict=True)
    return {"content": [{**_token(*row[:3]), "top_logprobs": [_token(*each) for each in row[3]]} for row in rows]}


def _chat_answer(asked: TurnRequest, turns: Sequence[Action], model: str) -> dict[str, Any]:
    choices = []
    for index, turn in enumerate(turns):
        message = turn.message
        calls = message.get("tool_calls", ())
        for call in calls:
            call["id"] = f"call_{uuid.uuid4().hex[:24]}"
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        if calls and not turn.content:
            message["content"] = None
        reason = "tool_calls" if calls and not _of(turn).is_cut else _reason(turn)
        choice: dict[str, Any] = {"index": index, "message": message, "finish_reason": reason, "logprobs": None}
        if asked.logprobs:
            choice["logprobs"] = _content_logprobs(turn)
        if asked.returns_ids:
            choice["token_ids"] = list(_of(turn).token_ids)
        choices.append(choice)
    ids = {"prompt_token_ids": list(_of(turns[0]).prompt_ids)} if asked.returns_ids else {}
    return {**_head("chat.completion", model), "choices": choices, "usage": _usage(turns, asked.n), **ids}


def _completion_answer(asked: TurnRequest, turns: Sequence[Action], model: str) -> dict[str, Any]:
    choices = []
    for index, turn in enumerate(turns):
        choice: dict[str, Any] = {"index": index, "text": turn.text, "finish_reason": _reason(turn), "logprobs": None}
        if asked.logprobs:
            tokens = _content_logprobs(turn)["content"]
            tops = [{each["token"]: each["logprob"] for each in (*token["top_logprobs"], token)} for token in tokens]
            names, values = [token["token"] for token in tokens], list(_of(turn).logprobs)
            tops = tops if asked.likeliest else None
            choice["logprobs"] = {"tokens": names, "token_logprobs": values, "top_logprobs": tops}
        if asked.returns_ids:
            choice |= {"prompt_token_ids": list(_of(turn).prompt_ids), "token_ids": list(_of(turn).token_ids)}
        choices.append(choice)
    return {**_head("text_completion", model), "choices": choices, "usage": _usage(turns, asked.n)}


def _generate_answer(asked: TurnRequest, turns: Sequence[Action], model: str) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "token_ids": list(_of(turn).token_ids),
            "finish_reason": _reason(turn),
            "logprobs": _content_logprobs(turn),
        }
        for index, turn in enumerate(turns)
    ]
    return {"request_id": uuid.uuid4().hex, "model": model, "choices": choices, "usage": _usage(turns, asked.n)}


def _sglang_answer(asked: TurnRequest, turns: Sequence[Action], _: str) -> Any:
    found = []
    for turn in turns:
        sampled = _of(turn)
        meta: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "finish_reason": {"type": _reason(turn)},
            "prompt_tokens": len(sampled.prompt_ids),
            "completion_tokens": len(sampled.token_ids),
        }
        if asked.logprobs:
            pairs = zip(sampled.logprobs, sampled.token_ids, strict=True)
            meta["output_token_logprobs"] = [[logprob, number, None] for logprob, number in pairs]
        found.append({"text": turn.text, "output_ids": list(sampled.token_ids), "meta_info": meta})
    return found[0] if asked.n == 1 else found


def streamed(answer: Mapping[str, Any], *, with_usage: bool) -> list[dict[str, Any]]:
    """Return an OpenAI response as the chunks of a stream: the choices, the finish reasons, and the usage if asked."""
    chunk = dict(answer)
    if chunk["object"] == "chat.completion":
        chunk["object"] = "chat.completion.chunk"
    choices, usage = [dict(choice) for choice in chunk.pop("choices")], chunk.pop("usage")
    for choice in choices:
        if "message" in choice:
            delta = choice.pop("message")
            if calls := delta.get("tool_calls"):
                delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
            choice["delta"] = delta
    ends = [
        {"index": c["index"], "finish_reason": c["finish_reason"], **({"delta": {}} if "delta" in c else {"text": ""})}
        for c in choices
    ]
    begins = [{**choice, "finish_reason": None} for choice in choices]
    parts = [(begins, {"usage": None}), (ends, {"usage": None}), ([], {"usage": usage})]
    return [{**chunk, "choices": part, **(used if with_usage else {})} for part, used in parts[: 2 + with_usage]]


FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "/v1/chat/completions": Form(_Chat, _chat_answer),
        "/v1/completions": Form(_Completion, _completion_answer),
        "/inference/v1/generate": Form(_Generate, _generate_answer),
        "/generate": Form(_Sglang, _sglang_answer),
    }
)
"""URL path -> the format of requests to it."""
