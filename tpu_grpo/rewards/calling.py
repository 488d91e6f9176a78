"""A reward is called here, in whatever process: a batch goes in, numbers and problems come out.

Nothing a reward does to itself is an exception here: what it raises and what it returns in place of numbers become
Problems, which pass between processes and which ``on_error`` of the config decides about.
"""

import asyncio
import inspect
import time
import traceback
from collections.abc import Awaitable, Collection, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from tpu_grpo.records.episode import KeptEnvironment
from tpu_grpo.rewards.batches import Answer, Call, Problem, RewardBatch, check_values, failed_answer
from tpu_grpo.rewards.conversations import rebuilt
from tpu_grpo.rewards.hints import hint
from tpu_grpo.rewards.logged import logger, score_of
from tpu_grpo.rewards.protocol import SAMPLE_ARGUMENTS, TEXT_ARGUMENTS, TrainerState
from tpu_grpo.rewards.signatures import VERL_INFO, verl_arguments
from tpu_grpo.rewards.tokens import check_token_values

_LATE = object()
_LONGEST_MESSAGE = 500
_ROW_ARGUMENTS = {batch: row for row, batch in SAMPLE_ARGUMENTS.items()}
SEARCH_SECONDS = 2.0
"""The search for the row that makes a reward of a batch raise ends after this time."""


class Caller:
    """A Caller holds a reward that is ready to be called; it is used from one thread."""

    def __init__(self, call: Call, target: Any):
        """Build the reward, if it is a class, and call its ``setup``. Raises what these raise."""
        self._call = call
        self._loop = asyncio.Runner()
        is_class = inspect.isclass(target)
        self._reward: Any = target(**call.passed_options) if is_class else target
        self._passed_options = {} if is_class else dict(call.passed_options)
        function = target if inspect.isfunction(target) else type(self._reward).__call__
        self._code = getattr(inspect.unwrap(function), "__code__", None)
        self._resolve(_call_if_defined(self._reward, "setup"))

    def close(self) -> None:
        """Call the reward's ``close``. Raises what that raises."""
        self._resolve(_call_if_defined(self._reward, "close"))
        self._loop.close()

    def answer(self, batch: RewardBatch, deadline: float) -> Answer:
        """Ask about a batch that is given up on after ``deadline`` seconds; the answer comes a little earlier.

        An async reward is cancelled then. A function of one row is not asked about further rows, and a function of a
        batch runs on.
        """
        seconds = max(0.0, deadline - min(0.5, 0.1 * deadline))
        logged: dict[str, list[float]] = {}
        if self._call.concurrency is None:
            return self._answer_batch(batch, seconds, logged)
        return self._answer_rows(batch, seconds, self._call.concurrency, logged)

    def raw_outputs(self, batch: RewardBatch) -> Any:
        """Return what the function returns for a batch, or a list of its results by row; raises what it raises."""
        if self._call.concurrency is None:
            return self._resolve(self._reward(**self._arguments(batch, {})))
        return [self._resolve(self._reward(**self._arguments(batch, {}, row))) for row in range(batch.size)]

    def _answer_batch(self, batch: RewardBatch, seconds: float, logged: dict[str, list[float]]) -> Answer:
        lengths = self._lengths(batch)  # before the reward can change them
        try:
            values = self._resolve(self._reward(**self._arguments(batch, logged)), seconds)
        except (Exception, SystemExit) as error:  # user code: anything can come
            failing_row = self._find_failing_row(batch) if self._call.find_failing_row else None
            return failed_answer(batch.size, self._raised(error, failing_row))
        if values is _LATE:
            return failed_answer(batch.size, Problem("late", "did not finish"))
        numbers, of_tokens, problems = self._checked(values, lengths)
        return Answer(numbers, problems, logged, of_tokens)

    def _answer_rows(
        self, batch: RewardBatch, seconds: float, concurrency: int, logged: dict[str, list[float]]
    ) -> Answer:
        end, lengths = time.monotonic() + seconds, self._lengths(batch)
        results = [self._call_for_row(batch, logged, row, end) for row in range(batch.size)]
        if any(inspect.isawaitable(r) for r in results):
            results = self._loop.run(self._await_rows(results, seconds, concurrency))
        numbers, of_tokens, problems = [], [], []
        for row, result in enumerate(results):
            result = result if isinstance(result, Problem) else score_of(result, logged)
            value, given, found = self._checked(
                [None if isinstance(result, Problem) else result], lengths[row : row + 1]
            )
            numbers += value
            of_tokens += given
            problems += [replace(p, row=row) for p in ([result] if isinstance(result, Problem) else found)]
        return Answer(numbers, problems, logged, of_tokens)

    def _lengths(self, batch: RewardBatch) -> list[int]:
        """Return the tokens of every completion, where they matter."""
        return [len(ids) for ids in batch.columns["completion_ids"]] if self._call.per_token else [1] * batch.size

    def _checked(self, values: Any, lengths: Sequence[int]) -> tuple[list[float], list[Any], list[Problem]]:
        """Check what the reward returned for completions of these lengths."""
        if self._call.per_token:
            return check_token_values(values, lengths)
        numbers, problems = check_values(values, len(lengths))
        return numbers, [], problems

    def _call_for_row(self, batch: RewardBatch, logged: dict[str, list[float]], row: int, end: float) -> Any:
        """Return what a call for one row returns, or the problem with it."""
        if time.monotonic() >= end:
            return Problem("late", "did not get to it")
        try:
            return self._reward(**self._arguments(batch, logged, row))
        except (Exception, SystemExit) as error:  # user code: anything can come
            return self._raised(error)

    async def _await_rows(self, results: list[Any], seconds: float, concurrency: int) -> list[Any]:
        """Await all of them within ``seconds``; those that are not done by then are cancelled, and late."""
        slots = asyncio.Semaphore(concurrency)

        async def await_row(result: Any) -> Any:
            if not inspect.isawaitable(result):
                return result
            async with slots:
                try:
                    return await result
                except (Exception, SystemExit) as error:  # user code: anything can come
                    return self._raised(error)

        tasks = [asyncio.ensure_future(await_row(result)) for result in results]
        _, late = await asyncio.wait(tasks, timeout=seconds)
        await _cancel(late)
        for task, result in zip(tasks, results, strict=True):
            if task in late and inspect.iscoroutine(result):
                result.close()
        return [Problem("late", "did not finish") if task in late else task.result() for task in tasks]

    def _resolve(self, value: Any, seconds: float | None = None) -> Any:
        """Return a value as it is, or an awaitable's result, or _LATE if that takes longer than ``seconds``."""
        if not inspect.isawaitable(value):
            return value
        return self._loop.run(_await_within(value, seconds))

    def _arguments(self, batch: RewardBatch, logged: dict[str, list[float]], row: int | None = None) -> dict[str, Any]:
        """Make the keyword arguments for the batch, or for one row of it; the reward may change the lists."""
        if row is None:
            columns = {n: [self._as_argument(n, v) for v in values] for n, values in batch.columns.items()}
        else:
            columns = {
                _ROW_ARGUMENTS.get(n, n): self._as_argument(n, values[row]) for n, values in batch.columns.items()
            }
        extras = {
            "step": batch.step,
            "options": dict(self._call.options),
            "log_metric": logger(logged),
            "trainer_state": TrainerState(batch.step, self._call.max_steps),
            VERL_INFO: {},
        }
        arguments = {**columns, **{n: extras[n] for n in self._call.extras if n in extras}, **self._passed_options}
        return verl_arguments(arguments) if self._call.verl else arguments

    def _as_argument(self, name: str, value: Any) -> Any:
        """Make messages where the reward expects them; what it may change is a copy, as other rewards get it, too."""
        if name == "completion_ids" and name in self._call.extras:
            return list(value)
        if isinstance(value, KeptEnvironment):
            return rebuilt(value)
        if not self._call.messages or name not in TEXT_ARGUMENTS:
            return value
        if isinstance(value, str):
            return [{"role": "assistant", "content": value}]
        return [dict(message) for message in value]

    def _raised(self, error: BaseException, failing_row: int | None = None) -> Problem:
        message = str(error)
        message = message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}..."
        text = f"raised {type(error).__name__}: {message} ({self._source_line(error)}){hint(self._call, error)}"
        return Problem("raised", text, failing_row=failing_row, trace="".join(traceback.format_exception(error)))

    def _source_line(self, error: BaseException) -> str:
        """Name the innermost line of the reward's own file in the traceback, or else of any file."""
        frames = traceback.extract_tb(error.__traceback__)
        file = getattr(self._code, "co_filename", None)
        frame = next((f for f in reversed(frames) if f.filename == file), frames[-1])
        return f"{frame.filename}:{frame.lineno} in {frame.name}"

    def _find_failing_row(self, batch: RewardBatch) -> int | None:
        """Call a reward that raised once more, a row at a time, up to the first row that raises.

        The run ends with this error either way, so a second call per row is a fair price for the name of the sample.
        """
        started = time.monotonic()
        for row in range(batch.size):
            if time.monotonic() - started > SEARCH_SECONDS:
                return None
            alone = RewardBatch({name: [values[row]] for name, values in batch.columns.items()}, batch.step, 1)
            try:
                self._resolve(self._reward(**self._arguments(alone, {})), SEARCH_SECONDS)
            except (Exception, SystemExit):  # user code: anything can come
                return row
        return None


def _call_if_defined(reward: Any, method: str) -> Any:
    return getattr(reward, method)() if callable(getattr(reward, method, None)) else None


async def _await_within(value: Awaitable[Any], seconds: float | None) -> Any:
    task = asyncio.ensure_future(_coroutine(value))
    _, late = await asyncio.wait([task], timeout=seconds)
    await _cancel(late)
    return _LATE if late else task.result()


def _coroutine(value: Awaitable[Any]) -> Coroutine[Any, Any, Any]:
    async def wait_for() -> Any:
        return await value

    return wait_for()


async def _cancel(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel tasks and let them tidy up for a moment; what resists runs into the deadline of the whole batch."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=0.2)
