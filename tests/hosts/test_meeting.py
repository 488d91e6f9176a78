"""Meeting on the coordinator's port: with threads in place of hosts, and with a second run of real processes."""

import errno
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.hosts.processes import free_port, run, running
from tpu_grpo.hosts import meeting
from tpu_grpo.hosts.meeting import Caller, arrive, caller_of, hold_port, split_address
from tpu_grpo.records.errors import ConfigError, LockstepError

SECONDS = 5.0


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "PATIENCE_SECONDS", 0.5)


def caller(index: int, *, run: str = "demo", count: int = 3) -> Caller:
    return Caller(run, index, count, f"process {index} of here")


class Host:
    """One host on a thread: ``error`` is what it met, once ``join`` has returned."""

    def __init__(self, address: str, me: Caller, seconds: float = SECONDS, secret: bytes = b"") -> None:
        self.address, self.me, self.seconds, self.secret = address, me, seconds, secret
        self.key = b""
        self.error: Exception | None = None
        self.called = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self.me.index:
                self.key = arrive(self.address, self.me, self.seconds, self.secret)
            else:
                with hold_port(self.address, self.me, self.seconds, self.secret) as meeting:
                    meeting.await_all(self.seconds)
                    meeting.share_port()
                    meeting.call()
                    self.key = meeting.session_key
            self.called.set()
        except (ConfigError, LockstepError) as error:
            self.error = error

    def join(self) -> Exception | None:
        self._thread.join(3 * SECONDS)
        assert not self._thread.is_alive()
        return self.error


def connected(address: str) -> socket.socket:
    """A connection, once somebody listens."""
    end = time.monotonic() + SECONDS
    while True:
        try:
            return socket.create_connection(split_address(address), timeout=SECONDS)
        except ConnectionRefusedError:
            assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_are_called_once_all_have_come(address: str, order: tuple[int, ...]) -> None:
    hosts = []
    for index in order:
        assert not any(host.called.is_set() for host in hosts)
        hosts.append(Host(address, caller(index)))
        time.sleep(0.3)
    assert [host.join() for host in hosts] == [None] * 3


def test_missing_hosts_are_named_to_all_that_came(address: str) -> None:
    hosts = [Host(address, caller(index, count=6), 1.0) for index in (0, 1, 4)]
    for host in hosts:
        error = host.join()
        assert isinstance(error, LockstepError)
        assert str(error) == (
            f"all 6 hosts must start within 1 s; hosts 2, 3, 5 did not come (this is host {host.me.index}); start the "
            "same command on every host, each with its own hosts.index"
        )


@pytest.mark.full
def test_a_host_that_waits_shorter_than_host_0_names_the_missing_ones_too(address: str) -> None:
    first, other = Host(address, caller(0), 5.0), Host(address, caller(1), 0.5)
    assert "all 3 hosts must start within 0.5 s; host 2 did not come (this is host 1)" in str(other.join())
    for index in (1, 2):  # and it may come again
        Host(address, caller(index))
    assert first.join() is None


@pytest.mark.full
def test_without_host_0_its_address_is_named(address: str) -> None:
    error = Host(address, caller(1), 0.5).join()
    assert isinstance(error, LockstepError)
    assert f"host 0, the coordinator at {address}, did not answer host 1 (Connection refused)" in str(error)


@pytest.mark.parametrize(
    ("stranger", "told"),
    [
        (
            Caller("demo", 2, 4, "process 9 of there"),
            "hosts.count must be the same on every host, got 3 on host 0 and 4 on host 2; start the same command on "
            "all of them",
        ),
        (
            Caller("other", 1, 3, "process 9 of there"),
            "hosts.coordinator must be where host 0 of run 'other' waits, got {address}, where run 'demo' waits for "
            "its hosts (process 0 of here); give every run a port of its own",
        ),
        (
            Caller("demo", 1, 3, "process 9 of there"),
            "hosts.index must be another one on every host, got 1 from process 1 of here and from process 9 of there",
        ),
    ],
    ids=["another count", "another run", "a second one of a number"],
)
def test_a_host_that_does_not_belong_is_sent_away_and_the_run_goes_on(
    address: str, stranger: Caller, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = Host(address, caller(0)), Host(address, caller(1))
    time.sleep(1.0)
    error = Host(address, stranger).join()
    assert isinstance(error, LockstepError if stranger.count == 4 else ConfigError)
    assert str(error).startswith(told.format(address=address))
    third = Host(address, caller(2))
    assert [host.join() for host in (first, second, third)] == [None] * 3
    said = f"sent away process 9 of there, which came as host {stranger.index}: "
    assert said + told.format(address=address) in capsys.readouterr().err


def test_a_host_that_went_away_may_come_again(address: str) -> None:
    first = Host(address, caller(0))
    with connected(address) as connection:
        connection.sendall(caller(1).to_line())
        assert json.loads(connection.recv(1000).splitlines()[0]) == {"missing": [2]}
    hosts = [Host(address, caller(index)) for index in (1, 2)]
    assert [host.join() for host in (first, *hosts)] == [None] * 3


@pytest.mark.parametrize(
    "sent",
    [
        b"PRI * HTTP/2.0\r\n\r\n",
        b"\xff\x00\n",
        b"[]\n",
        b"[" * 60_000 + b"\n",
        b'{"a":' * 10_000 + b"\n",
        b'{"tpu_grpo": 2}\n',
        b"x" * 200_000,
        b"",
        Caller("demo", 9, 3, "beyond the count").to_line(),
        Caller("demo", -1, 3, "no index").to_line(),
        Caller("demo", 1, 3, "\x1b[2Jclears the screen").to_line(),
        b'{"tpu_grpo": 1, "run": "demo", "index": 1, "count": 1e999, "who": "x"}\n',
    ],
)
def test_what_is_no_host_disturbs_nobody(address: str, sent: bytes) -> None:
    first = Host(address, caller(0))
    with connected(address) as connection:
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b""
        except OSError:  # host 0 may have left already: a connection that is reset, or not connected any more
            pass
    hosts = [Host(address, caller(index)) for index in (1, 2)]
    assert [host.join() for host in (first, *hosts)] == [None] * 3


@pytest.mark.full
def test_connections_that_say_nothing_are_closed_and_counted(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "SPEAKING_SECONDS", 0.5)
    monkeypatch.setattr(meeting, "MOST_STRANGERS", 8)
    first = Host(address, caller(0), 3.0)
    silent = [connected(address) for _ in range(40)]
    time.sleep(0.2)
    second = Host(address, caller(1))
    for connection in silent:
        connection.settimeout(2.0)
        assert connection.recv(1) == b""
        connection.close()
    assert "host 2 did not come" in str(second.join())
    assert str(first.join()).endswith("; connections that were no hosts of this run: 40")


@pytest.mark.parametrize(
    "coordinator",
    [
        "127.0.0.1:{}",
        "localhost:{}",
        pytest.param("[::1]:{}", marks=pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")),
    ],
)
def test_the_port_is_open_on_the_given_address_only(coordinator: str) -> None:
    import psutil

    coordinator = coordinator.format(free_port())
    with hold_port(coordinator, caller(0), 1.0):
        (found,) = [c for c in psutil.Process().net_connections("tcp") if c.laddr.port == split_address(coordinator)[1]]
        assert found.laddr.ip in ("127.0.0.1", "::1")


def test_an_address_that_is_not_this_machines_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"an address of host 0 itself .* got 192\.0\.2\.1:8476 \(Cannot assign"),
        hold_port("192.0.2.1:8476", caller(0), 1.0),
    ):
        pass


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (b"of the run, 16", b"another one, 16b", "got one on host 0 and another one on host 1"),
        (b"of the run, 16", b"", "got one on host 0 and none on host 1"),
        (b"", b"of the run, 16", "got none on host 0 and one on host 1"),
    ],
)
def test_a_host_that_does_not_know_the_secret_is_sent_away(
    address: str, first: bytes, second: bytes, message: str
) -> None:
    waiting = Host(address, caller(0), secret=first)
    assert message in str(Host(address, caller(1), secret=second).join())
    hosts = [Host(address, caller(index), secret=first) for index in (1, 2)]
    assert [host.join() for host in (waiting, *hosts)] == [None] * 3
    assert {host.key for host in hosts} == {waiting.key}
    assert bool(waiting.key) == bool(first)


def test_every_run_with_a_secret_has_a_key_of_its_own(address: str) -> None:
    keys = set()
    for _ in range(2):
        hosts = [Host(address, caller(index), secret=b"the same secret") for index in range(3)]
        assert [host.join() for host in hosts] == [None] * 3
        keys |= {host.key for host in hosts}
    assert len(keys) == 2
    assert {len(key) for key in keys} == {32}


@pytest.mark.parametrize("nonces", [["a", None, "c"], ["a", "b", "c"], None])
def test_who_calls_without_knowing_the_secret_is_not_followed(address: str, nonces: list[str | None] | None) -> None:
    """A program in place of host 0 says that all have come, with the nonce of host 1 or without it."""
    family, port = socket.AF_INET, split_address(address)[1]
    with socket.create_server(("127.0.0.1", port), family=family) as listener:
        host = Host(address, caller(1), 1.0, secret=b"the same secret")
        listener.settimeout(0.2)
        while not host.called.is_set() and host.error is None:
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                with connection:
                    said = json.loads(connection.makefile().readline())
                    given = nonces and [said["nonce"] if nonce is None else nonce for nonce in nonces]
                    connection.sendall(json.dumps({"come": True, "nonces": given, "proof": ""}).encode() + b"\n")
    assert "where something else answers" in str(host.join())


def test_what_a_host_says_is_read_back() -> None:
    me = caller(2)
    assert caller_of(me.to_line()) == me
    assert caller_of(caller(2).to_line().replace(b": 2", b': "2"')) is None


# --- a port that is taken ---------------------------------------------------------------------------------------------


@contextmanager
def program(address: str, answer: bytes) -> Iterator[None]:
    """Listens as jax's service does, and answers so to whoever comes."""
    with socket.socket() as listener:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
        listener.bind(split_address(address))
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1000)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_port_of_another_program_is_named(address: str) -> None:
    with program(address, b""):
        error = Host(address, caller(0)).join()
    assert isinstance(error, ConfigError)
    assert str(error).startswith(f"hosts.coordinator must name a port that is free on host 0, got {address}, where ")
    assert str(error).endswith(
        "listens; if that is another run, it goes on: choose another port for this one, or end that"
    )


@pytest.mark.parametrize("answer", [b"", b"\x00\x00\x12\x04", b"HTTP/1.1 400 Bad Request\r\n", b'"hello"\n'])
def test_a_host_that_finds_another_program_says_so(address: str, answer: bytes) -> None:
    with program(address, answer):
        error = Host(address, caller(1)).join()
    assert isinstance(error, LockstepError)
    assert f"got {address}, where something else answers: a run that has all its hosts, which no host joins" in str(
        error
    )


def test_a_port_that_is_left_in_time_is_taken(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "PATIENCE_SECONDS", 5.0)
    with program(address, b"ending"):
        hosts = [Host(address, caller(index)) for index in range(3)]
        time.sleep(0.5)
    assert [host.join() for host in hosts] == [None] * 3


def test_at_no_moment_can_another_run_have_the_port(address: str) -> None:
    """Between the meeting and jax's service, which asks for SO_REUSEPORT."""
    with hold_port(address, caller(0, count=1), 1.0) as held:
        held.share_port()
        with program(address, b""):
            for _ in range(2):
                assert isinstance(Host(address, caller(0)).join(), ConfigError)
                held.call()


def test_a_port_that_may_not_be_had_is_named(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    with (
        pytest.raises(ConfigError, match=rf"that it may listen on, got {address} \(Permission denied\)"),
        hold_port(address, caller(0), 1.0),
    ):
        pass


# --- real processes ---------------------------------------------------------------------------------------------------


FIRST = """
from jax.experimental import multihost_utils
with Watch(hosts, timeout_seconds=20, every=0.5):
    multihost_utils.sync_global_devices("all are here")
    print("begun", flush=True)
    while hosts.gather("stop", b"1" if os.path.exists({stop!r}) else b"0")[0] == b"0":
        time.sleep(0.2)
    multihost_utils.sync_global_devices("all are still here")
"""


@pytest.mark.full
def test_a_second_run_on_the_port_of_a_live_one_is_refused_and_the_first_goes_on(address: str, tmp_path: Path) -> None:
    """The second one's host 1 comes to jax's service of the first."""
    stop = tmp_path / "stop"
    with running(FIRST.format(stop=str(stop)), {0: 2, 1: 2}, timeout=30, address=address) as first:
        for process in first:
            assert process.stdout is not None
            assert "begun\n" in iter(process.stdout.readline, "")
        second = run("print('started')", 2, address=address, name="another run", timeout=1)
        stop.touch()
        codes = [process.wait(30) for process in first]
    assert {index: (end.code, end.out) for index, end in second.items()} == {0: (2, ""), 1: (3, "")}, second
    assert re.search(
        rf"ConfigError: hosts.coordinator must name a port that is free on host 0, got {address}, where process "
        rf"{first[0].pid} \(.*\) listens; if that is another run, it goes on",
        second[0].errors,
    ), second
    assert f"got {address}, where something else answers: a run that has all its hosts" in second[1].errors
    assert codes == [0, 0]
