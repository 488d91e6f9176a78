"""Whatever a worker writes ends that worker at most, and is named; nothing of it runs in the main process."""

import os
import pickle
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.marks import left_after, marked
from tests.workers.test_channel import Touches, framed
from tpu_grpo.workers.channel import FOREIGN, BrokenChannelError, encode
from tpu_grpo.workers.messages import Mode
from tpu_grpo.workers.supervisor import Session, Supervisor


@dataclass(frozen=True)
class Done:
    number: int


class Writing:
    """A service that writes into its worker's sockets what it is asked to, and then replies."""

    name, start = "service", "set up"
    replies: tuple[type, ...] = (Done,)
    secrets: tuple[str, ...] = ()
    most_bytes = 1000

    def __init__(self, mode: Mode):
        self.mode: Mode = mode

    def set_up(self) -> None:
        pass

    @contextmanager
    def answering(self, went_on: Callable[[], None]) -> Iterator[Callable[[bytes, float], Done]]:
        yield lambda data, _: self.write(data)

    def session(self, went_on: Callable[[], None]) -> Any:
        return self

    async def reply(self, data: bytes) -> Done:
        return self.write(data)

    async def close(self) -> None:
        pass

    def write(self, data: bytes) -> Done:
        for descriptor in range(3, 64):
            if data and os.path.exists(f"/proc/self/fd/{descriptor}") and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.write(descriptor, data)
        return Done(len(data))


class TurnRequest(Session):
    def __init__(self) -> None:
        self.said: Any = None

    def replied(self, reply: Done) -> None:
        if reply.number < 0:
            raise BrokenChannelError(FOREIGN)
        self.said = reply

    def lost(self, how: str) -> None:
        self.said = how


FORGED = {
    "a pickle": lambda path, _: framed(pickle.dumps(Touches(path))),
    "a pickle as a record": lambda path, number: framed(b"%d Done\n" % number + pickle.dumps(Touches(path))),
    "too long": lambda _, __: struct.pack("!I", 2**31) + b"x" * 2000,
    "longer than replies are": lambda _, number: framed(b'%d Done\n{"number": %s1}' % (number, b" " * 1000)),
    "another shape": lambda _, number: framed(b'%d Done\n{"number": "1"}' % number),
    "another record": lambda _, number: framed(b'%d Exited\n{"number": 1, "text": "", "forced": true}' % number),
    "ready once more": lambda _, number: framed(b"%d Ready\n{}" % number),
    "a reply that does not fit": lambda _, number: framed(encode(number, Done(-1))),
}


@pytest.mark.parametrize("mode", ["per_session", "serial", "shared"])
def test_what_a_worker_forges_ends_it_and_runs_nothing(mode: Mode, tmp_path: Path):
    before = marked()
    supervisor = Supervisor()
    group = supervisor.add(Writing(mode), memory_bytes=2**30, count=0 if mode == "per_session" else 1)

    def asked(forge: Callable[[Path, int], bytes] | None) -> Any:
        while not group.is_ready:
            supervisor.advance(0.1)
        session = TurnRequest()
        for make in (None, forge):  # the session has its number after the first request
            session.said = None
            group.call(session, b"" if make is None else make(tmp_path / "touched", session.number), 60.0)
            while session.said is None:
                supervisor.advance(0.1)
        group.release(session, 5.0)
        return session.said

    for name, forge in FORGED.items():
        assert asked(forge) == f"{FOREIGN}, and was ended", name
        assert asked(None) == Done(0)  # another worker goes on
    assert not (tmp_path / "touched").exists()
    supervisor.close(5.0)
    assert left_after(before, 10.0) == set()
