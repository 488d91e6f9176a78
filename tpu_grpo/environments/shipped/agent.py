"""An agent: a program that plays an episode by requesting turns of the policy over HTTP, and reports its reward.

The program gets one line of JSON on its standard input:

    {"session": "s17", "base_url": "http://127.0.0.1:41717/s17/v1", "api_key": "...", "task": {the row's columns}}

The variables OPENAI_BASE_URL and OPENAI_API_KEY are set, too, so that OpenAI's clients need no arguments. The program
posts its reward to /reward (at base_url without /v1), or else writes it as its last line: a number or {"reward": 0.5}.
The program must exit with code 0.

A lasting agent is one program that plays all episodes of a worker process concurrently. It gets a line for every
episode, and writes {"session": "s17", "reward": 0.5} or {"session": "s17", "error": "..."} when the episode is over.
"""

import asyncio
import contextlib
import json
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from tpu_grpo.records.untrusted_input import parse_json

if TYPE_CHECKING:
    from tpu_grpo.environments.actions import Action, Answered

LONGEST_LINE = 2**20
"""The most bytes of a line that an agent may write, 1 MiB."""
OF_WORKERS = ("PYTHONPATH", "JAX_PLATFORMS")
"""Environment variables that agents do not inherit; with PYTHONPATH, an agent would import this process's packages."""
_REST_SECONDS = 1.0
"""The time limit for reading an agent's last lines after the agent has ended."""


class AgentError(Exception):
    """An agent that failed."""


class Agent:
    """Runs the agent of one episode.

    Args:
        command: the program and its arguments, as a list, or as one text that is split as in a shell.
        lasting: whether one program plays all episodes of a worker process.
        variables: more environment variables for the program.
    """

    asks_for_turns = True
    _imported_before: ClassVar[tuple[str, ...]] = ("aiohttp",)
    _endpoint: ClassVar[Any] = None
    """The endpoint of this process; None before the first episode."""
    _lasting: ClassVar["_Lasting | None"] = None
    _starting: ClassVar[asyncio.Lock] = asyncio.Lock()

    def __init__(
        self, command: str | Sequence[str], lasting: bool = False, variables: Mapping[str, str] | None = None
    ) -> None:
        self._command = shlex.split(command) if isinstance(command, str) else [str(part) for part in command]
        if not self._command:
            raise ValueError("command must name a program, got an empty one")
        self._lasts, self._variables = lasting, {name: str(value) for name, value in (variables or {}).items()}
        self._session: Any = None
        self._played: asyncio.Task[float] | None = None

    async def reset(self, **columns: Any) -> "Answered":
        """Start the agent, and wait for its first request."""
        async with Agent._starting:  # concurrent episodes must open only one endpoint
            if Agent._endpoint is None:
                from tpu_grpo.environments.policy_endpoint import Endpoint

                endpoint = Endpoint()
                await endpoint.listen()
                Agent._endpoint = endpoint
        session = self._session = Agent._endpoint.open()
        url = Agent._endpoint.url(session)
        asked = {"session": session.name, "base_url": url, "api_key": session.key, "task": columns}
        self._played = asyncio.create_task(self._play(asked))
        return await self._next()

    async def step(self, turn: "Action") -> "Answered":
        """Answer the agent's request with a turn of the policy, and wait for the next request."""
        self._session.answer(turn)
        return await self._next()

    async def get_reward(self) -> float:
        """Refuse further requests, wait for the end of the agent, and return the reward."""
        from tpu_grpo.environments.policy_requests import RefusedError

        assert self._played is not None
        text = (
            "the policy's turns or tokens of this episode are used up (environment.max_turns, rollout.max_new_tokens)"
        )
        self._session.close(RefusedError(text, code="context_length_exceeded"))
        given = await self._played
        return given if self._session.reward is None else self._session.reward

    async def close(self) -> None:
        """End the agent, unless it plays other episodes too."""
        try:
            if self._played is not None:
                self._played.cancel()
                with contextlib.suppress(asyncio.CancelledError, AgentError):
                    await self._played
        finally:
            if self._session is not None:
                Agent._endpoint.forget(self._session)

    async def _next(self) -> "Answered":
        from tpu_grpo.environments.actions import Answered

        assert self._played is not None
        request = await self._session.next(until=self._played)
        return Answered((), done=request is None, request=request)

    async def _play(self, asked: Mapping[str, Any]) -> float:
        if not self._lasts:
            return await self._play_once(asked)
        async with Agent._starting:  # concurrent episodes must start only one program
            if Agent._lasting is None or Agent._lasting.has_ended:
                Agent._lasting = _Lasting(await self._start({}))
            lasting = Agent._lasting
        return await lasting.play(asked)

    async def _play_once(self, asked: Mapping[str, Any]) -> float:
        process = await self._start({"OPENAI_BASE_URL": asked["base_url"], "OPENAI_API_KEY": asked["api_key"]})
        try:
            last = await _last_line(process, asked)
            if (code := await process.wait()) != 0:
                raise AgentError(f"the agent must end with code 0, got {code}; its last line is {last!r:.300}")
        finally:
            _kill(process)
        if self._session.reward is not None:
            return self._session.reward
        return _reward_in(last)

    async def _start(self, variables: Mapping[str, str]) -> asyncio.subprocess.Process:
        inherited = {name: value for name, value in os.environ.items() if name not in OF_WORKERS}
        try:
            return await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**inherited, **variables, **self._variables},
                limit=LONGEST_LINE,
                start_new_session=True,
            )
        except OSError as error:
            raise AgentError(f"command must be a program that starts, got {self._command[0]!r}: {error}") from error


class _Lasting:
    """A running program that plays many episodes."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process
        self._playing: dict[str, asyncio.Future[float]] = {}
        self._reading = asyncio.create_task(self._read())

    @property
    def has_ended(self) -> bool:
        """Whether the program can play no more episodes."""
        return self._reading.done()

    async def play(self, asked: Mapping[str, Any]) -> float:
        """Let the program play an episode, and return its reward."""
        future = self._playing[asked["session"]] = asyncio.get_running_loop().create_future()
        try:
            await _write(self._process, asked)
            return await future
        finally:
            self._playing.pop(asked["session"], None)

    async def _read(self) -> None:
        """Read the results of episodes until the program ends."""
        assert self._process.stdout is not None
        ended = "ended"
        try:
            while line := await self._process.stdout.readline():
                self._result(line)
            ended = f"ended with code {await self._process.wait()}"
        except ValueError:
            ended = f"wrote a line of more than {LONGEST_LINE} bytes"
        finally:
            _kill(self._process)
            for future in self._playing.values():
                if not future.done():
                    future.set_exception(AgentError(f"a lasting agent must outlast its episodes, got one that {ended}"))

    def _result(self, line: bytes) -> None:
        try:
            result = parse_json(line)
            future = self._playing.get(result["session"])
        except (ValueError, TypeError, KeyError):
            print(line.decode(errors="replace"), end="", flush=True)  # other output is shown to the user
            return
        if future is None or future.done():
            return
        if (error := result.get("error")) is not None:
            future.set_exception(AgentError(f"the agent says: {error!s:.2000}"))
            return
        try:
            future.set_result(float(result["reward"]))
        except (ValueError, TypeError, KeyError, OverflowError):
            said = line.decode(errors="replace").strip()
            future.set_exception(AgentError(f'a result must have a number as "reward", or "error", got {said:.300}'))


async def _write(process: asyncio.subprocess.Process, asked: Mapping[str, Any]) -> None:
    """Write an episode's line to a program; what becomes of a program that does not read it shows in its output."""
    assert process.stdin is not None
    process.stdin.write(f"{json.dumps(asked, default=str)}\n".encode())
    with contextlib.suppress(ConnectionError):
        await process.stdin.drain()


async def _last_line(process: asyncio.subprocess.Process, asked: Mapping[str, Any]) -> str:
    """Write a program's input line, and return the last line of its output."""
    assert process.stdin is not None
    assert process.stdout is not None
    await _write(process, asked)
    process.stdin.close()
    last = b""

    async def read(output: asyncio.StreamReader) -> None:
        nonlocal last
        async for line in output:
            last = line if line.strip() else last

    reading, ended = asyncio.create_task(read(process.stdout)), asyncio.create_task(process.wait())
    try:
        await asyncio.wait({reading, ended}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({reading}, timeout=_REST_SECONDS)  # processes that it started may still hold its output open
        if reading.done():
            reading.result()
    except ValueError:
        raise AgentError(f"an agent must write lines of at most {LONGEST_LINE} bytes, got a longer one") from None
    finally:
        reading.cancel()
        ended.cancel()
    return last.decode(errors="replace").strip()


def _reward_in(line: str) -> float:
    try:
        found = parse_json(line)
        return float(found["reward"] if isinstance(found, dict) else found)
    except (ValueError, TypeError, KeyError, OverflowError):
        raise AgentError(
            f'an agent\'s last line must be its reward, a number or {{"reward": number}}, got {line!r:.300}; or let it '
            "post its reward to /reward"
        ) from None


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill a program and its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
