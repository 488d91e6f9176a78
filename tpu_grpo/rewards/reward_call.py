"""Calls a reward on a batch, in any process, and returns numbers and problems.

    batch = RewardBatch({"completions": ["5", "6"], "answer": ["5", "7"]}, step=3, size=2)
    answer = Caller(call, function).answer(batch, seconds)    # Answer([1.0, nan], [Problem("raised", "...", row=1)])

A reward's errors are not exceptions here: an exception or a wrong return value becomes a Problem, which can be sent
between processes and is treated as ``on_error`` of the config says.
"""

import asyncio
import base64
import inspect
import math
import re
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Self, cast

import numpy as np
from jaxtyping import Float
from pydantic import PlainValidator

from tpu_grpo.records.episode import KeptEnvironment
from tpu_grpo.records.errors import RewardError
from tpu_grpo.records.short_texts import SHORT_REPR, shortened
from tpu_grpo.rewards.protocol import EXTRAS, OF_ROWS, RESERVED_METRICS, TEXT_ARGUMENTS, TrainerState
from tpu_grpo.rewards.shipped import Thinking
from tpu_grpo.rewards.shipped.correctness import boxed, inside


def _read_values(text: object) -> np.ndarray:
    if not isinstance(text, str):
        raise ValueError("numbers of tokens must be sent as a text")
    return np.frombuffer(base64.b64decode(text, validate=True), np.float64).copy()


TokenValues = Annotated[Float[np.ndarray, "_"], PlainValidator(_read_values)]
"""A float64 number per token; empty where the reward does not apply. Workers send the numbers as base64."""
NO_VALUES: TokenValues = np.zeros(0)
"""Shortens the texts and values that error messages show."""
SEARCH_SECONDS = 2.0
"""The time limit of the search for the row that makes a batch raise."""
_LATE = object()
_LONGEST_MESSAGE = 500
VERL_COMPLETIONS = {"solution_str", "solution_strs", "model_output", "predict_str"}
VERL_INFO = "extra_info"
"""A column of verl; verl passes an empty dict where the column is missing or null."""
VERL_TRUTH, VERL_TRUTH_COLUMN = "ground_truth", "reward_model"
"""verl's data has the ground truth as a field of the column ``reward_model``."""
_WANTED_MESSAGES = re.compile(
    r"string indices must be integers|string index out of range|'str' object has no attribute '(get|items|keys|values)'"
)
"""Matches errors of code that expects lists of messages, such as completion[0]["content"], but gets a text."""
_WANTED_TEXTS = re.compile(r"'?\blist\b'?")
"""Matches errors of code that expects a text, such as completion.strip(), but gets a list."""


@dataclass(frozen=True)
class Call:
    """How a reward is found and called; a Call is sent to the reward's worker processes."""

    name: str
    source: str
    """The name in the config, by which the reward is found."""
    arguments: tuple[str, ...] = ("completions",)
    """The columns that are passed: prompts, completions or columns of the data."""
    passed_options: Mapping[str, Any] = field(default_factory=dict)
    """The options that are passed by name, to the function or to a class's constructor."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """All options, for a function that declares the parameter ``options``."""
    extras: tuple[str, ...] = ()
    """The names in protocol.EXTRAS that the function receives."""
    beside: tuple[str, ...] = ()
    """The columns that are passed only within ``batch`` and ``states``."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Column or extra -> parameter that receives it: {completions: completion}. Absent if the names are equal."""
    is_built: bool = False
    """If set, ``source`` names a class, or a function that makes the reward; either is called with the options."""
    concurrency: int | None = None
    """For a function of one row, the most rows that run concurrently if it is async; None for a function of a batch."""
    is_async: bool = False
    messages: bool = False
    """If set, prompts and completions are passed as lists of messages."""
    thinking: Thinking = "kept"
    per_token: bool = False
    """If set, the function returns a number per token, see `per_token` in tpu_grpo/rewards/protocol.py."""
    verl: bool = False
    """If set, the function gets the ground truth and ``extra_info`` as verl passes them, see `verl_argument`."""
    max_steps: int = 0
    """The number of steps of the run, for ``trainer_state``."""
    find_failing_row: bool = True
    """If set, a batch that raises is searched for the row that raises on its own."""
    secrets: tuple[str, ...] = ()
    """The secret environment variables that the worker processes get."""

    @property
    def batch_columns(self) -> list[str]:
        """Return the names of the columns in this reward's batches, including the declared ones of OF_ROWS."""
        return [*self.arguments, *self.beside, *(name for name in OF_ROWS if name in self.extras)]


@dataclass(frozen=True)
class RewardBatch:
    """The rows of one call of a reward."""

    columns: Mapping[str, Sequence[Any]]
    """Name -> values, each [size], for the names in `Call.batch_columns`."""
    step: int
    size: int

    @classmethod
    def joined(cls, batches: Sequence[Self]) -> Self:
        """Join batches of one step."""
        columns = {name: [value for b in batches for value in b.columns[name]] for name in batches[0].columns}
        return cls(columns, batches[0].step, sum(batch.size for batch in batches))


@dataclass(frozen=True)
class Problem:
    """What a reward did in place of returning a number."""

    kind: Literal["raised", "late", "died", "wrong"]
    text: str
    """What happened, phrased to follow the reward's name."""
    row: int | None = None
    """The row of the batch that had the problem, from 0; None for the whole batch."""
    failing_row: int | None = None
    """For a problem of the whole batch, the row that was found to raise on its own."""
    trace: str = ""


@dataclass(frozen=True)
class Answer:
    """A reward's values and problems for a batch."""

    values: list[float]
    """One value per row; NaN where the reward does not apply or had a problem."""
    problems: list[Problem] = field(default_factory=list)
    logged: dict[str, list[float]] = field(default_factory=dict)
    """Name of a metric -> the values that the reward passed to log_metric."""
    of_tokens: list[TokenValues] = field(default_factory=list)
    """For a per-token reward, each row's numbers, see `check_token_values`; empty for any other reward."""

    def fits(self, batch: RewardBatch) -> bool:
        """Whether sizes, row numbers and values fit this batch; tpu_grpo/workers/channel.py checks the types."""
        rows = (*(p.row for p in self.problems), *(p.failing_row for p in self.problems))
        numbers = [*self.values, *(value for values in self.logged.values() for value in values)]
        lengths = [len(ids) for ids in batch.columns.get("completion_ids", ())] if self.of_tokens else []
        return (
            len(self.values) == batch.size
            and not any(map(math.isinf, numbers))
            and all(row is None or 0 <= row < batch.size for row in rows)
            and len(self.of_tokens) == len(lengths)
            and all(
                len(values_T) in (0, length) and np.isfinite(values_T).all()
                for values_T, length in zip(self.of_tokens, lengths, strict=True)
            )
        )

    def split(self, sizes: Sequence[int]) -> list["Answer"]:
        """Divide the answer to joined batches into answers to batches of these sizes.

        A problem of the whole becomes a problem of each batch. The first batch gets all logged values.
        """
        found, start = [], 0
        for size in sizes:
            rows, logged = slice(start, start + size), {} if start else self.logged
            own = [
                replace(p, row=p.row - start) for p in self.problems if p.row is not None and 0 <= p.row - start < size
            ]
            problems = [p for p in self.problems if p.row is None] + own
            found.append(Answer(self.values[rows], problems, logged, self.of_tokens[rows]))
            start += size
        return found


def failed_answer(size: int, problem: Problem) -> Answer:
    """Make the answer for a batch in which no row has a value."""
    return Answer([math.nan] * size, [problem])


class Caller:
    """A reward that is set up and can be called from one thread."""

    def __init__(self, call: Call, target: Any):
        """Build the reward, if it is a class or a function that makes rewards, and call its ``setup``. Raises whatever
        these raise."""
        self._call = call
        self._loop = asyncio.Runner()
        self._reward: Any = target(**call.passed_options) if call.is_built else target
        self._passed_options = {} if call.is_built else dict(call.passed_options)
        self._parser = AnswerParser(call.options.get("parser")) if "parser" in call.extras else None
        self._check = check_token_values if call.per_token else check_values
        function = self._reward if inspect.isfunction(self._reward) else type(self._reward).__call__
        self._code = getattr(inspect.unwrap(function), "__code__", None)
        self._call_if_defined("setup")

    def close(self) -> None:
        """Call the reward's ``close``. Raises whatever it raises."""
        self._call_if_defined("close")
        self._loop.close()

    def _call_if_defined(self, method: str) -> None:
        if callable(function := getattr(self._reward, method, None)):
            self._resolve(function())

    def answer(self, batch: RewardBatch, deadline: float) -> Answer:
        """Call the reward on a batch, with ``deadline`` less 10% (at most 0.5 s) as its time limit in seconds.

        At the limit an async reward is cancelled, a synchronous function of one row is not called for further rows,
        and a synchronous function of a batch runs on.
        """
        seconds = max(0.0, deadline - min(0.5, 0.1 * deadline))
        if self._call.concurrency is None:
            return self._answer_batch(batch, seconds)
        return self._answer_rows(batch, seconds, self._call.concurrency)

    def raw_outputs(self, batch: RewardBatch) -> Any:
        """Return the function's unchecked result for a batch; for a function of one row, the list of its results.
        Exceptions of the function pass through."""
        if self._call.concurrency is None:
            return self._resolve(self._reward(**self._arguments(batch, {})))
        return [self._resolve(self._reward(**self._arguments(batch, {}, row))) for row in range(batch.size)]

    def _answer_batch(self, batch: RewardBatch, seconds: float) -> Answer:
        logged: dict[str, list[float]] = {}
        lengths = self._lengths(batch)  # before the reward can change them
        try:
            values = self._resolve(self._reward(**self._arguments(batch, logged)), seconds)
            if values is _LATE:
                return failed_answer(batch.size, Problem("late", "did not finish"))
            if isinstance(values, list) and any(isinstance(value, Mapping) for value in values):
                values = [score_of(value, logged) for value in values]
            numbers, of_tokens, problems = self._check(values, lengths)
        except (Exception, SystemExit) as error:  # user code can raise anything
            failing_row = self._find_failing_row(batch) if self._call.find_failing_row else None
            return failed_answer(batch.size, self._raised(error, failing_row))
        return Answer(numbers, problems, logged, of_tokens)

    def _answer_rows(self, batch: RewardBatch, seconds: float, concurrency: int) -> Answer:
        logged: dict[str, list[float]] = {}
        end, lengths = time.monotonic() + seconds, self._lengths(batch)
        results = [self._call_for_row(batch, logged, row, end) for row in range(batch.size)]
        if any(inspect.isawaitable(r) for r in results):
            results = self._loop.run(self._await_rows(results, seconds, concurrency))
        numbers, of_tokens, problems = self._check([score_of(result, logged) for result in results], lengths)
        return Answer(numbers, problems, logged, of_tokens)

    def _lengths(self, batch: RewardBatch) -> list[int]:
        """Return each completion's number of tokens for a per-token reward; for other rewards, 1 per completion."""
        return [len(ids) for ids in batch.columns["completion_ids"]] if self._call.per_token else [1] * batch.size

    def _call_for_row(self, batch: RewardBatch, logged: dict[str, list[float]], row: int, end: float) -> Any:
        if time.monotonic() >= end:
            return Problem("late", "did not get to it")
        try:
            return self._reward(**self._arguments(batch, logged, row))
        except (Exception, SystemExit) as error:  # user code can raise anything
            return self._raised(error)

    async def _await_rows(self, results: list[Any], seconds: float, concurrency: int) -> list[Any]:
        """Await the results for ``seconds``; cancel those that are not done by then, and report them as late."""
        slots = asyncio.Semaphore(concurrency)

        async def await_row(result: Any) -> Any:
            if not inspect.isawaitable(result):
                return result
            async with slots:
                try:
                    return await result
                except (Exception, SystemExit) as error:  # user code can raise anything
                    return self._raised(error)

        tasks = [asyncio.ensure_future(await_row(result)) for result in results]
        _, late = await asyncio.wait(tasks, timeout=seconds)
        await _cancel(late)
        for task, result in zip(tasks, results, strict=True):
            if task in late and inspect.iscoroutine(result):
                result.close()
        return [Problem("late", "did not finish") if task in late else task.result() for task in tasks]

    def _resolve(self, value: Any, seconds: float | None = None) -> Any:
        """Return a value as it is, or an awaitable's result; _LATE if awaiting takes longer than ``seconds``."""

        async def within() -> Any:
            task = asyncio.ensure_future(value)
            _, late = await asyncio.wait([task], timeout=seconds)
            await _cancel(late)
            return _LATE if late else task.result()

        return self._loop.run(within()) if inspect.isawaitable(value) else value

    def _arguments(self, batch: RewardBatch, logged: dict[str, list[float]], row: int | None = None) -> dict[str, Any]:
        """Make the keyword arguments for the batch, or for one row of it, with new lists that the reward may change."""
        call, renamed = self._call, self._call.renamed
        rows = slice(None) if row is None else slice(row, row + 1)
        given = {n: [self._as_argument(n, value) for value in values[rows]] for n, values in batch.columns.items()}
        data = {n: values for n, values in given.items() if n not in (*TEXT_ARGUMENTS, *OF_ROWS)}
        size = batch.size if row is None else 1
        arguments = {n: values for n, values in given.items() if n not in call.beside}
        if "states" in call.extras:
            shown = {**data, "prompt": given["prompts"], "completion": given["completions"]}
            arguments["states"] = [{n: values[i] for n, values in shown.items()} for i in range(size)]
        if row is not None:
            arguments = {n: value for n, [value] in arguments.items()}
        extras = {
            "step": batch.step,
            "options": dict(call.options),
            "log_metric": logger(logged),
            "log_extra": lambda name, values: None,
            "trainer_state": TrainerState(batch.step, call.max_steps),
            "batch": data,
            "parser": self._parser,
            VERL_INFO: {},
            f"{VERL_INFO}s": [{} for _ in range(size)],
        }
        arguments |= {n: extras[n] for n in call.extras if n in extras}
        return {renamed.get(n, n): value for n, value in arguments.items()} | self._passed_options

    def _as_argument(self, name: str, value: Any) -> Any:
        """Convert a value to what the reward expects; token ids and messages are copied, because rewards share them."""
        if name == "completion_ids" and name in self._call.extras:
            return list(value)
        if isinstance(value, KeptEnvironment):
            from tpu_grpo.workers.attributes import rebuilt  # only needed here

            return rebuilt(value, RewardError)
        if not self._call.messages or name not in TEXT_ARGUMENTS:
            return verl_argument(name, value) if self._call.verl else value
        if isinstance(value, str):
            return [{"role": "assistant", "content": value}]
        return [dict(message) for message in value]

    def _raised(self, error: BaseException, failing_row: int | None = None) -> Problem:
        message = shortened(str(error), _LONGEST_MESSAGE)
        text = f"raised {type(error).__name__}: {message} ({self._source_line(error)}){hint(self._call, error)}"
        return Problem("raised", text, failing_row=failing_row, trace="".join(traceback.format_exception(error)))

    def _source_line(self, error: BaseException) -> str:
        """Return the innermost traceback line in the reward's own file, or else in any file, for the error message."""
        frames = traceback.extract_tb(error.__traceback__)
        file = getattr(self._code, "co_filename", None)
        frame = next((f for f in reversed(frames) if f.filename == file), frames[-1])
        return f"{frame.filename}:{frame.lineno} in {frame.name}"

    def _find_failing_row(self, batch: RewardBatch) -> int | None:
        """Call the reward again for a batch that raised, row by row, and return the first row that raises; None if no
        row raises in time. The run ends with this error anyway, so the extra calls only delay its end."""
        started = time.monotonic()
        for row in range(batch.size):
            if time.monotonic() - started > SEARCH_SECONDS:
                return None
            alone = RewardBatch({name: [values[row]] for name, values in batch.columns.items()}, batch.step, 1)
            try:
                self._resolve(self._reward(**self._arguments(alone, {})), SEARCH_SECONDS)
            except (Exception, SystemExit):  # user code can raise anything
                return row
        return None


async def _cancel(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and give them 0.2 s to clean up; a task that blocks the event loop longer delays the answer."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=0.2)


# --- what a reward returned ------------------------------------------------------------------------------------------


Checked = tuple[list[float], list[TokenValues], list[Problem]]
"""Three lists: a number per row (NaN for None), each row's token values (for per-token rewards), and the problems."""


def check_values(values: Any, lengths: Sequence[int]) -> Checked:
    """Convert a reward's result to a number per completion; of ``lengths``, only the number of elements matters."""
    if problem := _miscounted(values, len(lengths), "of one number"):
        return [math.nan] * len(lengths), [], [problem]
    numbers, problems = [], []
    for row, value in enumerate(values):
        number = math.nan if isinstance(value, Problem) else number_or_none(value)
        if isinstance(value, Problem):
            problems.append(replace(value, row=row))
        elif number is None:
            marked = "" if length_of(value) is None else "; marked with @per_token, a number per token"
            wanted = f"must return finite numbers (or None where it does not apply{marked})"
            text = f"{wanted}, got {SHORT_REPR.repr(value)}"
            problems.append(Problem("wrong", text, row))
        numbers.append(math.nan if number is None else number)
    return numbers, [], problems


def _miscounted(values: Any, expected: int, of_what: str) -> Problem | None:
    if (found := length_of(values)) == expected:
        return None
    got = f"a {type(values).__name__}" if found is None else f"{found} values"
    return Problem("wrong", f"must return a list {of_what} (or None) per completion, {expected} here, got {got}")


def length_of(values: Any) -> int | None:
    """Return the length of a list, tuple or array; None for other values, such as generators, texts or mappings."""
    is_other = isinstance(values, str | bytes | set | frozenset | Mapping) or not hasattr(values, "__len__")
    return None if is_other or getattr(values, "shape", (0,)) == () else len(values)


def number_or_none(value: Any) -> float | None:
    """Return a finite number as a float, NaN for None, and None for anything else."""
    if value is None:
        return math.nan
    if getattr(value, "shape", None) == ():
        value = value.item()  # a scalar of numpy or jax
    try:
        number = float(value) if isinstance(value, Real) else math.inf
    except OverflowError:
        number = math.inf
    return number if math.isfinite(number) else None


def check_token_values(values: Any, lengths: Sequence[int]) -> Checked:
    """Convert a per-token reward's result to numbers, for completions of ``lengths`` tokens. The number of a row is the
    sum over its tokens."""
    nothing = [math.nan] * len(lengths), [NO_VALUES] * len(lengths)
    if problem := _miscounted(values, len(lengths), "with one list of numbers"):
        return *nothing, [problem]
    sums, of_tokens, problems = *nothing, []
    for row, (value, count) in enumerate(zip(values, lengths, strict=True)):
        if value is None:
            continue
        found = value if isinstance(value, Problem) else _numbers(value, count)
        if isinstance(found, Problem):
            problems.append(replace(found, row=row))
        else:
            sums[row], of_tokens[row] = math.fsum(np.clip(found, -1e100, 1e100)), found  # larger ones are refused
    return sums, of_tokens, problems


def _numbers(value: Any, count: int) -> TokenValues | Problem:
    """Return the numbers of a completion's tokens, or the Problem with them."""
    if (found := length_of(value)) != count:
        got = SHORT_REPR.repr(value) if found is None else f"{found} values"
        text = f"must return one number per token, {count} for this completion (the stop token counts, too), got {got}"
        return Problem("wrong", text)
    if hasattr(value, "dtype"):
        array_T = np.asarray(value)
    else:
        numbers = [number_or_none(each) for each in value]
        array_T = np.array([math.nan if number is None else number for number in numbers])
    if array_T.ndim != 1 or array_T.dtype.kind not in "biuf" or not np.isfinite(array_T).all():
        return Problem("wrong", f"must return finite numbers per token, got {SHORT_REPR.repr(value)}")
    return array_T.astype(np.float64)


# --- what a reward logs beside its value: through log_metric, or as part of a row's result ---------------------------


def logger(logged: dict[str, list[float]]) -> Callable[[str, float], None]:
    """Make the ``log_metric`` of a call, which adds values to ``logged``."""

    def log_metric(name: str, value: float) -> None:
        number = number_or_none(value)
        if name in RESERVED_METRICS or number is None or math.isnan(number):
            raise ValueError(
                f"log_metric takes a name other than {', '.join(RESERVED_METRICS)} and a finite number, got "
                f"{name!r}, {value!r}"
            )
        logged.setdefault(name, []).append(number)

    return log_metric


def score_of(result: Any, logged: dict[str, list[float]]) -> Any:
    """Return the score of a row's result and log its other numbers; return a result without a score unchanged.

    verl's rewards return {"score": 1.0, "acc": True, "pred": "72"}, which scores 1.0 and logs acc. Rewards of Tunix and
    rLLM return an object with ``reward`` and a dict ``metadata``. If a number cannot be logged, a Problem is returned.
    """
    if isinstance(metadata := getattr(result, "metadata", None), Mapping) and hasattr(result, "reward"):
        result = {**metadata, "score": result.reward}
    if not isinstance(result, Mapping) or "score" not in result:
        return result
    log_metric = logger(logged)
    for name, value in result.items():
        if name == "score" or not (isinstance(value, Real) or getattr(value, "shape", None) == ()):
            continue
        try:
            log_metric(str(name), cast(float, value))
        except ValueError as error:
            return Problem("wrong", f"returned a score with a metric that cannot be logged: {error}")
    return result["score"]


# --- rewards that were written for another trainer -------------------------------------------------------------------


def verl_argument(name: str, value: Any) -> Any:
    """Convert a value of the data to what verl passes: the bare ground truth, and an empty ``extra_info`` for null.
    Raises ValueError for a column ``reward_model`` without a ground truth."""
    if name == VERL_TRUTH_COLUMN:
        if not isinstance(value, Mapping) or VERL_TRUTH not in value:
            raise ValueError(f"the column reward_model must hold a ground_truth, as verl's data does, got {value!r}")
        return value[VERL_TRUTH]
    return {} if name == VERL_INFO and value is None else value


class AnswerParser:
    r"""Parses completions (texts or messages) like the parsers of verifiers.

    Args:
        how: None for the whole text, "think" for what follows ``</think>``, "boxed" for the last ``\boxed{...}``, or a
            list of tags. With tags, the answer is in the tag ``answer`` if it is listed, else in the last tag.
    """

    def __init__(self, how: Any = None):
        self._tags = how if isinstance(how, list | tuple) else ()
        if how not in (None, "think", "boxed") and not all(str(tag).isidentifier() for tag in self._tags or ("",)):
            raise ValueError(f"the option parser must be think, boxed or a list of tags, got {how!r}; correct it")
        self._how = how

    def parse(self, text: str) -> Any:
        """Return a text's answer ("" without ``</think>``, None without a box), or an object with a field per tag."""
        match self._how:
            case None:
                return text.strip()
            case "think":
                return text.rpartition("</think>")[2].strip() if "</think>" in text else ""
            case "boxed":
                return (boxed(text)[-1:] or [None])[0]
        return SimpleNamespace(**{tag: inside(text, tag) for tag in self._tags})

    def parse_answer(self, completion: Any) -> str | None:
        """Return the answer of a completion's last message."""
        said = completion if isinstance(completion, str) else self.get_assistant_messages(completion)[-1]["content"]
        found = self.parse(said)
        return getattr(found, "answer" if "answer" in self._tags else self._tags[-1]) if self._tags else found

    def get_assistant_messages(self, completion: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the messages with the role ``assistant``."""
        return [message for message in completion if message["role"] == "assistant"]

    def get_user_messages(self, completion: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the messages with the role ``user``."""
        return [message for message in completion if message["role"] == "user"]


def hint(call: Call, error: BaseException) -> str:
    """Return a suggestion for the error, as the end of its message; empty if there is none."""
    text = str(error)
    if isinstance(error, KeyError) and error.args and error.args[0] in EXTRAS:
        return f"; it comes to a function that declares it: add {error.args[0]} to its parameters"
    if isinstance(error, KeyError) and {"batch", "states"} & {*call.extras}:
        columns = [name for name in (*call.arguments, *call.beside) if name not in TEXT_ARGUMENTS]
        return f"; the columns of the data are: {', '.join(columns)}"
    if not isinstance(error, TypeError | AttributeError | IndexError):
        return ""
    if not call.messages and _WANTED_MESSAGES.search(text):
        return (
            "; prompts and completions are texts here: if it expects lists of messages, as in TRL's conversational "
            "form, set messages: true for this reward"
        )
    if call.messages and _WANTED_TEXTS.search(text):
        return (
            "; with messages: true prompts and completions are lists of messages: if it expects texts, leave messages "
            "out for this reward"
        )
    return ""
