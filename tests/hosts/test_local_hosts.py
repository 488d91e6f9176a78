"""Local hosts, played by tiny programs: what they get, what is shown of them, and how they end."""

import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from tests.goldens import cases, compare
from tpu_grpo.hosts import local_hosts
from tpu_grpo.hosts.local_hosts import host_environment, run_local_hosts
from tpu_grpo.records.errors import ConfigError

MISTAKES = Path(__file__).with_name("mistakes.txt")
SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "local_hosts.py"
INDEX = "import os, signal, subprocess, sys, time; i = int(sys.argv[-1].removeprefix('hosts.index='))\n"
IGNORE = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
FOREVER = "print('up'); time.sleep(100)"


def program(text: str) -> list[str]:
    """A host that knows its index as ``i``."""
    return [sys.executable, "-S", "-c", INDEX + textwrap.dedent(text)]


def run(text: str, *arguments: str, hosts: int = 2, devices: int = 1, grace: float = 20.0) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    out, err = io.BytesIO(), io.BytesIO()
    code = run_local_hosts(
        program(text), arguments, hosts=hosts, devices_per_host=devices, grace_seconds=grace, stdout=out, stderr=err
    )
    return code, out.getvalue().decode(), err.getvalue().decode()


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """No process, and the signal handlers as they were."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) - before == set()
    assert {number: signal.getsignal(number) for number in handlers} == handlers


# --- what a host gets ------------------------------------------------------------------------------------------------


def test_every_host_gets_the_arguments_and_its_own_place() -> None:
    code, out, err = run("print(*sys.argv[1:], sep='|')", "a b.yaml", "run.seed=3", "--dry-run", hosts=3)
    assert (code, err) == (0, "")
    lines = sorted(out.splitlines())
    ports = {int(port) for port in re.findall(r"hosts\.coordinator=127\.0\.0\.1:(\d+)\|", out)}
    assert len(ports) == 1
    (port,) = ports
    own = f"hosts.coordinator=127.0.0.1:{port}|hosts.count=3|hosts.index="
    assert lines == [f"[{i}] a b.yaml|run.seed=3|--dry-run|{own}{i}" for i in range(3)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))  # free: nobody was listening


def test_every_host_gets_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=9 --xla_b")
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.setenv("KEPT", "yes")
    _, out, _ = run(
        "import json; print(json.dumps([os.environ[n] for n in ('XLA_FLAGS', 'JAX_PLATFORMS', 'KEPT')]))", devices=3
    )
    expected = ["--xla_a=1 --xla_b --xla_force_host_platform_device_count=3", "cpu", "yes"]
    assert sorted(out.splitlines()) == [f"[{i}] {json.dumps(expected)}" for i in range(2)]
    assert os.environ["JAX_PLATFORMS"] == "tpu"  # only theirs was changed


def test_the_environment_without_flags() -> None:
    assert host_environment({}, 2) == {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "PYTHONUNBUFFERED": "1",
    }
    assert host_environment({"PYTHONUNBUFFERED": ""}, 1)["PYTHONUNBUFFERED"] == ""  # the user's choice


def test_a_host_has_no_input() -> None:
    assert run("print(repr(sys.stdin.read()))", hosts=1) == (0, "[0] ''\n", "")


# --- what is shown ---------------------------------------------------------------------------------------------------


def test_each_stream_goes_to_its_own_with_the_host_in_front() -> None:
    code, out, err = run("print('out', i); print('err', i, file=sys.stderr)")
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] out 0", "[1] out 1"]
    assert sorted(err.splitlines()) == ["[0] err 0", "[1] err 1"]


def test_lines_stay_whole_and_in_order_however_they_are_written() -> None:
    text = """
        for n in range(200):
            for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
                stream.write(f"{name} {n} ")
                stream.flush()
                stream.write("x" * (n * 40) + "\\n")  # up to 8 kB: beyond what a pipe passes in one piece
                stream.flush()
    """
    both = io.BytesIO()  # as on a terminal, where both streams are one
    code = run_local_hosts(program(text), hosts=3, devices_per_host=1, stdout=both, stderr=both)
    assert code == 0
    lines = both.getvalue().decode().split("\n")
    assert lines.pop() == ""
    assert len(lines) == 3 * 2 * 200
    for i in range(3):
        for name in ("out", "err"):
            found = [line for line in lines if line.startswith(f"[{i}] {name} ")]
            assert found == [f"[{i}] {name} {n} {'x' * (n * 40)}" for n in range(200)]


def test_a_line_is_shown_when_it_is_printed(tmp_path: Path) -> None:
    """The host prints its second line only after its first was shown."""
    shown = tmp_path / "shown"

    class Stream(io.BytesIO):
        def write(self, data, /) -> int:
            shown.touch()
            return super().write(data)

    out = Stream()
    waits = f"print('first'); [time.sleep(0.05) for _ in range(600) if not os.path.exists({str(shown)!r})]"
    told = f"print('second' if os.path.exists({str(shown)!r}) else 'never shown')"
    run_local_hosts(program(f"{waits}; {told}"), hosts=1, devices_per_host=1, stdout=out)
    assert out.getvalue() == b"[0] first\n[0] second\n"


def test_a_last_line_without_newline_is_shown_and_ended() -> None:
    code, out, err = run("sys.stdout.write(f'a{i}\\n\\nlast{i}'); sys.stderr.write('oops')")
    assert code == 0
    assert [line for line in out.splitlines(keepends=True) if line[1] == "0"] == ["[0] a0\n", "[0] \n", "[0] last0\n"]
    assert [line for line in out.splitlines(keepends=True) if line[1] == "1"] == ["[1] a1\n", "[1] \n", "[1] last1\n"]
    assert sorted(err.splitlines(keepends=True)) == ["[0] oops\n", "[1] oops\n"]


def test_bytes_that_are_no_text_pass_unchanged() -> None:
    out = io.BytesIO()
    run_local_hosts(program("os.write(1, b'\\xff\\r\\x00\\n')"), hosts=1, devices_per_host=1, stdout=out)
    assert out.getvalue() == b"[0] \xff\r\x00\n"


def test_what_a_failing_host_wrote_comes_before_the_news_of_its_end() -> None:
    _, _, err = run("[print('trace', n, file=sys.stderr) for n in range(500)]; sys.exit(5)", hosts=1)
    assert err.splitlines() == [*(f"[0] trace {n}" for n in range(500)), "[hosts] host 0 ended with exit code 5"]


# --- the exit code ---------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("pass", 0),
        ("sys.exit(4)", 4),
        ("sys.exit(2 if i == 1 else 0)", 2),
        ("time.sleep(2 * i); sys.exit((3, 7)[i])", 3),
        ("time.sleep(2 * (1 - i)); sys.exit((3, 7)[i])", 7),
        ("time.sleep(2 * i); sys.exit((0, 255)[i])", 255),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1),
        ("time.sleep(2 * i); os.kill(os.getpid(), signal.SIGKILL) if i == 0 else sys.exit(3)", 1),
        ("time.sleep(2 * (1 - i)); os.kill(os.getpid(), signal.SIGTERM) if i == 0 else sys.exit(3)", 3),
        ("raise KeyError", 1),
    ],
)
def test_the_code_is_that_of_the_first_host_that_failed(text: str, code: int) -> None:
    assert run(text)[0] == code


def test_hosts_that_end_well_stop_nobody() -> None:
    assert run("time.sleep(0.8 * i); print('done')", grace=0.1) == (0, "[0] done\n[1] done\n", "")


# --- a host fails ----------------------------------------------------------------------------------------------------


def test_the_others_may_end_by_themselves() -> None:
    started = time.monotonic()
    code, out, err = run("i == 1 and sys.exit(3); time.sleep(0.8); print('saw it'); sys.exit(9)", grace=60)
    assert (code, out) == (3, "[0] saw it\n")
    assert err == (
        "[hosts] host 1 ended with exit code 3; the others have 60 s to end by themselves\n"
        "[hosts] host 0 ended with exit code 9\n"
    )
    assert time.monotonic() - started < 20


@pytest.mark.full
def test_the_others_are_asked_to_end_after_the_grace() -> None:
    text = """
        if i == 1:
            time.sleep(0.5)
            sys.exit(3)
        signal.signal(signal.SIGTERM, lambda *_: (print("asked"), sys.exit(4)))
        time.sleep(100)
    """
    started = time.monotonic()
    code, out, err = run(text, hosts=3, grace=1)
    assert 1.5 <= time.monotonic() - started < 20
    assert code == 3
    assert sorted(out.splitlines()) == ["[0] asked", "[2] asked"]
    assert err.splitlines()[:2] == [
        "[hosts] host 1 ended with exit code 3; the others have 1 s to end by themselves",
        "[hosts] SIGTERM to host 0, 2",
    ]


def test_a_host_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_hosts, "KILL_AFTER_SECONDS", 0.5)
    code, out, err = run(IGNORE + "i == 1 and (time.sleep(0.5), os._exit(3)); " + FOREVER, grace=1)
    assert (code, out) == (3, "[0] up\n")
    assert err.splitlines()[1:] == [
        "[hosts] SIGTERM to host 0",
        "[hosts] SIGKILL to host 0",
        "[hosts] host 0 was killed by SIGKILL",
    ]


@pytest.mark.full
def test_a_second_failure_does_not_prolong_the_grace() -> None:
    text = "i < 2 and (time.sleep(0.2 + 0.8 * i), sys.exit(i + 2)); time.sleep(100)"
    started = time.monotonic()
    code, _, err = run(text, hosts=3, grace=1.5)
    assert code == 2
    assert time.monotonic() - started < 15
    assert err.count("to end by themselves") == 1


def test_workers_of_a_host_end_with_it() -> None:
    text = "print(subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(100)']).pid); sys.exit(i)"
    started = time.monotonic()
    code, out, _ = run(text)  # the workers hold the hosts' output open
    assert code == 1
    assert time.monotonic() - started < 4
    workers = [int(line.split()[1]) for line in out.splitlines()]
    assert len(workers) == 2
    deadline = time.monotonic() + 10
    while any(_runs(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(_runs(worker) for worker in workers)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # whoever adopted it may not have noticed yet
    except psutil.NoSuchProcess:
        return False


def test_output_held_open_by_a_stranger_is_not_awaited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_hosts, "KILL_AFTER_SECONDS", 0.5)
    text = "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(6)'], start_new_session=True)"
    before = set(psutil.Process().children(recursive=True))
    started = time.monotonic()
    assert run(text + "; print('ok')", hosts=1)[:2] == (0, "[0] ok\n")
    assert time.monotonic() - started < 4
    assert set(psutil.Process().children(recursive=True)) == before


# --- the script ------------------------------------------------------------------------------------------------------


def script(*options: str, text: str | None = None, hosts: int = 2) -> list[str]:
    command = [] if text is None else ["--command", shlex.join(program(text))]
    return [sys.executable, str(SCRIPT), "--hosts", str(hosts), "--devices-per-host", "1", *command, *options]


def start(*options: str, text: str) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    """The script, once both its hosts said 'up', and the hosts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored
    process = subprocess.Popen(script(*options, text=text), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    signal.signal(signal.SIGHUP, before)
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(2)) == [b"[0] up\n", b"[1] up\n"]
    hosts = psutil.Process(process.pid).children(recursive=True)
    assert len(hosts) == 2
    return process, hosts


def end(process: subprocess.Popen[bytes], hosts: list[psutil.Process]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr), with nobody left."""
    out, err = process.communicate(timeout=30)
    assert psutil.wait_procs(hosts, timeout=5)[1] == []
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_script_asks_every_host(number: signal.Signals) -> None:
    text = "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(4)))\n" + FOREVER
    process, hosts = start(text=text)
    process.send_signal(number)
    code, out, err = end(process, hosts)
    assert code == 4
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"]
    assert err.splitlines()[:2] == [
        f"[hosts] stopping ({number.name}): hosts have 60 s to end; a second Ctrl-C kills them",
        "[hosts] SIGTERM to host 0, 1",
    ]


def test_hosts_that_do_not_care_end_too() -> None:
    process, hosts = start(text=FOREVER)
    process.send_signal(signal.SIGINT)
    assert end(process, hosts)[0] == 1


def test_a_second_interrupt_kills() -> None:
    process, hosts = start(text=IGNORE + FOREVER)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert b"stopping (SIGINT)" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    code, _, err = end(process, hosts)
    assert code == 1
    assert "[hosts] SIGKILL to host 0, 1\n" in err


@pytest.mark.full
def test_signals_that_come_together_leave_time_to_save() -> None:
    # Ctrl-C on ``... | tee log`` also ends tee; a closing terminal and its shell both send SIGHUP
    text = "signal.signal(signal.SIGTERM, lambda *_: (print('saving'), time.sleep(1), os._exit(4)))\n" + FOREVER
    process, hosts = start(text=text)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    assert b"stopping (" in process.stderr.readline()
    process.send_signal(signal.SIGHUP)
    code, _, err = end(process, hosts)
    assert code == 4
    assert "SIGKILL" not in err


def test_the_grace_holds_for_a_stopped_run_too() -> None:
    process, hosts = start("--grace", "0.5", text=IGNORE + FOREVER)
    process.send_signal(signal.SIGTERM)
    assert end(process, hosts)[0] == 1


def test_a_run_whose_output_nobody_reads_ends() -> None:
    process, hosts = start("--grace", "2", text="print('up')\nwhile True: time.sleep(1); print('more')")
    assert process.stdout is not None
    process.stdout.close()
    code, _, err = end(process, hosts)
    assert code == 1
    assert "stopping (nobody reads the output)" in err
    assert "BrokenPipe" not in err


def test_the_script_passes_on_what_follows_the_dashes() -> None:
    text = "print(*sys.argv[1:-3]); print(i, file=sys.stderr); sys.exit(6 * i)"
    done = subprocess.run(
        script("--", "c.yaml", "run.seed=1", "--dry-run", text=text), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 6
    assert sorted(done.stdout.splitlines()) == [f"[{i}] c.yaml run.seed=1 --dry-run" for i in range(2)]
    assert {"[0] 0", "[1] 1"} < set(done.stderr.splitlines())


def test_by_default_each_host_is_a_training_run() -> None:
    done = subprocess.run(script("--", "--help", hosts=1), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("[0] usage: python scripts/run.py ")


def test_nothing_heavy_is_imported() -> None:
    command = script("--", text="pass", hosts=1)
    command[1:1] = ["-X", "importtime"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "tpu_grpo" in imported
    assert imported & {"jax", "numpy", "pydantic", "flax", "tunix", "sgl_jax"} == set()


# --- what cannot be started ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changed", "told"), cases(MISTAKES))
def test_what_cannot_work_is_refused_before_anything_starts(changed: str, told: str, tmp_path: Path) -> None:
    mark = tmp_path / "started"
    given = {"command": program(f"open({str(mark)!r}, 'w')"), "arguments": [], "hosts": 1, "devices_per_host": 1}
    with pytest.raises(ConfigError) as caught:
        run_local_hosts(**given | yaml.safe_load(changed))
    compare(MISTAKES, changed, told, str(caught.value))
    assert not mark.exists()


def test_the_script_says_so_in_one_line() -> None:
    done = subprocess.run(script(hosts=0), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ConfigError: --hosts must be >= 1, got 0; ")
    assert done.stderr.count("\n") == 1


def test_a_host_that_cannot_be_started_takes_the_others_along(monkeypatch: pytest.MonkeyPatch) -> None:
    popen, made = subprocess.Popen, []

    def second_fails(*arguments, **options):
        if made:
            raise BlockingIOError("too many processes")
        made.append(popen(*arguments, **options))
        return made[0]

    monkeypatch.setattr(subprocess, "Popen", second_fails)
    with pytest.raises(BlockingIOError):
        run_local_hosts(program("time.sleep(100)"), hosts=2, devices_per_host=1)
    assert made[0].returncode == -signal.SIGKILL
