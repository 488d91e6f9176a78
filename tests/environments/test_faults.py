"""What environments do wrong ends them alone, and nothing stays behind."""

import errno
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.environments.playing import acted, answer, begun, call, ended, failure, open_pool, told
from tests.marks import marked
from tpu_grpo.environments import pool as pool_module
from tpu_grpo.environments.actions import Answered, Reply
from tpu_grpo.environments.environment_classes import load_environment
from tpu_grpo.environments.environment_worker import EnvironmentService
from tpu_grpo.environments.pool import EnvironmentPool
from tpu_grpo.records.errors import EpisodeError
from tpu_grpo.workers import fork_server, supervisor
from tpu_grpo.workers.channel import MainChannel, WorkerChannel
from tpu_grpo.workers.messages import Exited, Fork

NAME = "tests.environments.faulty:Faulty"
SECONDS = 60.0


@pytest.fixture(autouse=True)
def _nothing_stays_behind() -> Iterator[None]:
    before = marked()
    yield
    _await(lambda: not marked() - before)


def _await(is_so) -> None:
    deadline = time.monotonic() + 20.0
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_so()


def _put_forward(patched: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the pool's clock be so far ahead of the machine's."""
    patched.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + seconds))


LATE = "did not answer within its timeout of 60 s in"
FAULTS = {
    ("raises", "reset"): ("raised", r"raised KeyError: 'nothing there' in reset \(.*faulty.py:\d+ in raises\)"),
    ("hangs", "reset"): ("late", f"{LATE} its constructor and reset"),
    ("leaves", "reset"): ("died", "exited with code 3"),
    ("gives_an_object", "reset"): ("wrong", "must give a text, .*, got object <object .* from reset"),
    ("gives_much", "reset"): ("wrong", "must give at most 1,048,576 bytes of text at once, got 100,000,000 from reset"),
    ("hangs", "work"): ("late", f"{LATE} the tool work"),
    ("resists", "work"): ("late", f"{LATE} the tool work"),
    ("leaves", "work"): ("died", "exited with code 3"),
    ("exits", "work"): ("died", r"called sys.exit\('enough'\) in the tool work"),
    ("crashes", "work"): ("died", "was ended by SIGSEGV"),
    ("eats", "work"): ("memory", "took more memory than environment.memory_gb in the tool work"),
    ("gives_an_object", "work"): ("wrong", "must give a text, or what has one, got object .* from the tool work"),
    ("gives_bytes", "work"): ("wrong", "must give a text, or what has one, got bytes b'bytes' from the tool work"),
    ("closes_everything", "work"): ("died", "exited with code 0|closed its connection"),
    ("writes_into_connections", "work"): ("died", "wrote something of its own into its connection, and was ended"),
    ("forges_an_answer", "work"): ("died", "wrote something of its own into its connection, and was ended"),
    ("returns_an_awaitable", "work"): ("wrong", "must declare methods whose results have to be awaited with async def"),
    ("raises", "get_reward"): ("raised", "raised KeyError: 'nothing there' in get_reward"),
    ("not_a_number", "get_reward"): ("wrong", "must give a finite number or None, got float nan from get_reward"),
    ("gives_text", "get_reward"): ("wrong", "must give a finite number or None, got str '1' from get_reward"),
    ("leaves", "get_reward"): ("died", "exited with code 3"),
}


@pytest.fixture(scope="module")
def played() -> Iterator[tuple[EnvironmentPool, dict, list[list[Reply]]]]:
    """All faults and good conversations among them, side by side.

    Those that hang do so until all others have answered; then the pool's clock is put forward.
    """
    ahead = 0.0
    with pytest.MonkeyPatch.context() as patched, open_pool(NAME, timeout=SECONDS, memory_gb=1.0) as pool:
        faults = list(FAULTS)
        hanging = {2 * n: where for n, ((_, where), (kind, _)) in enumerate(FAULTS.items()) if kind == "late"}
        columns = [column for fault, where in faults for column in ({"fault": fault, "where": where}, {})]
        for key, row in enumerate(columns):
            pool.start(key, "", row, seed=key)
        replies: dict[int, list[Reply]] = {key: [] for key in range(len(columns))}
        going = [*replies]
        for where, ask in (
            ("reset", lambda key: None),
            ("work", lambda key: pool.act(key, call("work", text="a"))),
            ("get_reward", pool.end),
        ):
            for key in going:
                ask(key)
            for key in sorted(going, key=lambda key: hanging.get(key) == where):
                if hanging.get(key) == where and not pool.ready(key):
                    _put_forward(patched, ahead := ahead + SECONDS)
                replies[key].append(pool.take(key))
            going = [key for key in going if isinstance(replies[key][-1], Answered)]
        patched.undo()  # other tests have the clock of the machine
        yield pool, dict(zip(faults, list(replies.values())[::2], strict=True)), list(replies.values())[1::2]


@pytest.mark.parametrize("fault", FAULTS, ids="-".join)
def test_a_fault_ends_its_conversation_and_is_named(played, fault):
    kind, text = failure(played[1][fault][-1])
    assert kind == FAULTS[fault][0]
    assert re.match(FAULTS[fault][1], text), text


def test_others_are_unaffected(played):
    for begin, work, end in played[2]:
        assert told(begin) == "begin"
        assert told(work) == "did a"
        assert end.reward == 1.0


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    with open_pool(NAME) as pool:
        yield pool


def test_a_tool_that_raises_is_an_answer_and_the_conversation_goes_on(pool: EnvironmentPool):
    begun(pool, columns={"fault": "raises", "where": "work"})
    reply = answer(acted(pool, call("work", text="a")))
    assert (told(reply), reply.errors) == ("Error: KeyError: 'nothing there'", 1)
    assert ended(pool).reward == 1.0


@pytest.mark.parametrize("fault", ["forks", "doubles", "closes_its_output", "fills_its_output"])
def test_what_is_not_forbidden_ends_with_the_conversation(pool: EnvironmentPool, fault: str):
    others = marked()  # which may end meanwhile
    begun(pool, 1)
    before = marked() - others
    begun(pool, columns={"fault": fault, "where": "work"})
    assert told(acted(pool, call("work", text="a"))) in ("forked", "doubled", "closed", "done")
    assert ended(pool).reward == 1.0
    _await(lambda: marked() - others == before)
    assert told(acted(pool, call("work", text="b"), 1)) == "did b"
    pool.drop(1)


@pytest.mark.full
def test_what_a_late_one_has_started_ends_with_it(monkeypatch: pytest.MonkeyPatch):
    others = marked()
    with open_pool(NAME, timeout=SECONDS) as pool:
        begun(pool, 1)
        before = marked() - others
        pool.start(0, "", {"fault": "forks_and_hangs", "where": "reset"}, seed=0)
        _await(lambda: len(marked() - others - before) == 4)
        assert not pool.ready(0)
        _put_forward(monkeypatch, SECONDS)
        assert failure(pool.take(0))[0] == "late"
        _await(lambda: marked() - others == before)


@pytest.mark.parametrize("fault", ["raises", "hangs", "leaves"])
def test_what_happens_when_it_is_closed_is_no_part_of_the_episode(
    monkeypatch: pytest.MonkeyPatch, pool: EnvironmentPool, fault: str
):
    monkeypatch.setattr(pool_module, "_CLOSE_SECONDS", 0.5)
    begun(pool, 0, {"fault": fault, "where": "close"})
    assert ended(pool).reward == 1.0
    assert told(begun(pool)) == "begin"
    pool.drop(0)


@pytest.mark.full
def test_a_pool_goes_on_without_a_server_that_was_killed():
    with open_pool(NAME) as pool:
        begun(pool, 1)
        begun(pool, columns={"fault": "kills_its_parent", "where": "work"})
        assert failure(acted(pool, call("work", text="a")))[0] == "died"
        assert failure(acted(pool, call("work", text="a"), 1))[0] == "died"
        assert told(begun(pool)) == "begin"


@pytest.mark.parametrize("name", ["FailsToBegin", "FailsToBeginSteps"])
def test_a_constructor_that_raises_is_named(name: str):
    with open_pool(f"tests.environments.faulty:{name}") as pool:
        assert failure(begun(pool))[1].startswith("raised KeyError: 'nothing there' in its constructor (")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("leaves", "environment Silent must be imported in its process, which exited with code 7 instead"),
        (
            "raises",
            "environment Silent could not be imported in its process: environment module tests.environments.faulty ",
        ),
    ],
)
def test_an_import_that_fails_in_the_process_ends_the_run(monkeypatch: pytest.MonkeyPatch, fault: str, said: str):
    monkeypatch.setenv("FAULTY_IMPORT", fault)
    with open_pool("tests.environments.faulty:Silent") as pool, pytest.raises(EpisodeError, match=re.escape(said)):
        begun(pool)


@pytest.mark.full
def test_an_import_that_never_ends_in_the_process_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAULTY_IMPORT", "hangs")
    monkeypatch.setattr(supervisor, "START_SECONDS", 1.0)
    said = "environment Silent must be imported in its process within 1 s, got no answer; see what"
    with open_pool("tests.environments.faulty:Silent") as pool, pytest.raises(EpisodeError, match=re.escape(said)):
        begun(pool)


@pytest.mark.full
@pytest.mark.parametrize("was_ready", [False, True])
def test_the_time_for_the_import_begins_when_somebody_waits_for_it(monkeypatch: pytest.MonkeyPatch, was_ready: bool):
    """The first step's models are loaded and compiled between the pool's opening and the first conversation."""
    with open_pool(NAME) as pool:
        if was_ready:
            assert pool.supervisor.selector.select(60.0)  # its word has come, and nobody has taken it in
            monkeypatch.setattr(supervisor, "START_SECONDS", 0.0)
        _put_forward(monkeypatch, 1000.0)
        assert told(begun(pool)) == "begin"


@pytest.mark.full
def test_processes_end_with_a_main_process_that_is_killed():
    script = f"""
        import time
        from tests.environments.playing import begun, call, open_pool
        pool = open_pool("{NAME}").thing
        begun(pool, 0, {{}})
        for key, fault in enumerate(("", "hangs", "resists", "forks"), start=1):
            begun(pool, key, {{"fault": fault, "where": "work"}})
            pool.act(key, call("work", text="a"))
        print("here", flush=True)
        time.sleep(1000)
    """
    before = marked()
    main = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert main.stdout is not None
    assert main.stdout.readline() == b"here\n"
    _await(lambda: len(marked() - before) == 9)  # the server, five conversations, and three that the last one starts
    time.sleep(0.3)  # for the environments to get to it
    psutil.Process(main.pid).send_signal(signal.SIGKILL)
    main.wait()
    main.stdout.close()
    _await(lambda: not marked() - before)


def _open_files() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.full
def test_what_was_to_go_to_a_server_that_died_leaves_no_files_open():
    before = _open_files()
    with open_pool(NAME) as pool:
        begun(pool)
        server = pool.groups[""].servers[0]
        forks = psutil.Process(server.process._process.pid)
        (conversation,) = forks.children()
        for process in (forks, conversation):
            process.suspend()  # the conversation's ends with the server's, and may not answer before
        while not server.channel.is_full:
            server.channel.send(Fork(1000), os.open(os.devnull, os.O_RDONLY))
        forks.kill()
        assert failure(acted(pool, call("work", text="a")))[0] == "died"
        assert told(begun(pool)) == "begin"
    assert _open_files() == before


@pytest.mark.full
def test_a_process_that_cannot_be_forked_leaves_no_files_open(monkeypatch: pytest.MonkeyPatch):
    """The fork server runs in this process, on this thread."""
    ours, theirs = socket.socketpair()
    channel, main = WorkerChannel(ours, (Exited,), 1000), MainChannel(theirs)
    lifeline, end = os.pipe()
    server = fork_server._ForkServer(main, lifeline, EnvironmentService(load_environment(NAME, {}), keep=False))

    def refused() -> int:
        raise OSError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(os, "fork", refused)
    before = _open_files()
    server._fork(7, os.open(os.devnull, os.O_RDONLY))
    assert _open_files() == before
    assert channel.receive() == [(0, Exited(7, "could not be started: no more processes", forced=False))]
    for descriptor in (lifeline, end, server._woken, server._wakes):
        os.close(descriptor)
    server._selector.close()
    channel.close()
    main.close()


@pytest.mark.full
def test_too_few_open_files_are_said_to_be_so():
    script = f"""
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        from tests.environments.playing import open_pool
        from tpu_grpo.records.errors import EpisodeError
        with open_pool("{NAME}") as pool:
            try:
                for key in range(60):
                    pool.start(key, "", {{}}, seed=0)
                for key in range(60):
                    pool.take(key)
            except EpisodeError as error:
                print(error)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    said = r"each conversation with an environment needs an open file, and \d\d have theirs, got Too many open files; "
    assert re.match(said + r"raise the limit \(ulimit -n, at most 40 here\), or set environment.workers", run.stdout)
