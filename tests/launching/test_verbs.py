"""The verbs, one after the other, with small programs on the workers of the stand-in."""

from pathlib import Path

import pytest

from tests.launching.driving import SMALL, ended, eventually, launch, started
from tests.launching.stand_in import StandIn
from tpu_grpo.cli.launch import main


def test_from_nothing_to_a_finished_run_and_back(
    stand_in: StandIn, checkout: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["create", "--type", "v5e-16", "--zone", "z", "--spot"]) == 0
    assert "queued resource WAITING_FOR_RESOURCES" in (said := capsys.readouterr().err)
    assert "queued resource ACTIVE, node READY (HEALTHY)" in said
    assert main(["setup", "--zone", "z", "--code", str(checkout)]) == 0
    assert "MiB" in capsys.readouterr().err
    for worker in (0, 1):
        assert (stand_in.home(worker) / ".tpu_grpo/code/scripts/program.py").exists()
        assert (stand_in.home(worker) / "uv_calls").read_text() == "sync --no-dev\n"
        assert (stand_in.home(worker) / ".tpu_grpo").stat().st_mode & 0o777 == 0o700
    assert main(["run", "--zone", "z", *SMALL, str(config), "a=1"]) == 0
    ended(stand_in)
    capsys.readouterr()
    assert main(["status", "--zone", "z"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "v5litepod-16, 2 workers: queued resource ACTIVE, node READY (HEALTHY)"
    assert [line.split(" ")[0] for line in lines[1:]] == ["[0]", "", "[1]", ""][: len(lines) - 1]
    assert all("ended, pid" in line and "exit code 0" in line for line in lines[1::2])
    assert [line.strip() for line in lines[2::2]] == ["finished", "finished"]
    assert main(["logs", "--zone", "z"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        *("[0] worker 0 runs config of mine", "[0] finished"),
        *("[1] worker 1 runs config of mine", "[1] finished"),
    ]
    assert main(["delete", "--zone", "z"]) == 0
    assert main(["status", "--zone", "z"]) == 0
    assert capsys.readouterr().out == "there is no such queued resource (--how vm looks for a TPU VM)\n"
    assert stand_in.processes() == []


def test_a_run_is_detached_and_gets_its_environment(
    ready: StandIn, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*SMALL, "--env", "A=b c", str(config), "seconds=30")
    assert launch(capsys, "run", *words)[0] == 0
    for worker in (0, 1):
        seen = started(ready, worker)
        assert seen["environment"]["WORKER"] == str(worker)
        assert seen["environment"]["A"] == "b c"
        assert "--xla_enable_async_all_gather=true" in seen["environment"]["LIBTPU_INIT_ARGS"].split()
        assert seen["environment"]["JAX_COMPILATION_CACHE_DIR"] == "../jax_cache"
        assert seen["cwd"] == str(ready.home(worker) / ".tpu_grpo/code")
        assert seen["argv"][2:] == ["seconds=30"]
        command = (ready.home(worker) / ".tpu_grpo/job/command").read_text()
        assert command.startswith("env PYTHONUNBUFFERED=1 ")
    out = launch(capsys, "status")[1]
    assert out.count(": running, pid ") == 2
    assert "worker 1 runs config of mine" in out
    code, _, err = launch(capsys, "run", *words)
    assert code == 1
    assert "[0] worker: a run is going on already: env" in err
    code, _, err = launch(capsys, "setup")
    assert code == 1
    assert "a run is going on; stop it before its code is replaced" in err


def test_other_libtpu_arguments_and_another_cache(
    ready: StandIn, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--libtpu-args", "", "--compilation-cache", "gs://b/cache")
    code, _, err = launch(capsys, "run", *SMALL, *flags, str(config))
    assert code == 1
    assert "worker: a cache on gs:// needs gcsfs; setup with --with gcsfs" in err
    for worker in (0, 1):
        (ready.home(worker) / ".tpu_grpo/code/gcsfs.py").write_text("")
    assert launch(capsys, "run", *SMALL, *flags, str(config))[0] == 0
    environment = started(ready, 1)["environment"]
    assert "LIBTPU_INIT_ARGS" not in environment
    assert environment["JAX_COMPILATION_CACHE_DIR"] == "gs://b/cache"


def test_stop_lets_it_save_then_kills_it(ready: StandIn, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saves = ready.home(0) / ".tpu_grpo/code/scripts/program.py"
    saves.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), print('saved'), sys.exit(4)))\n"
        "print('runs')\ntime.sleep(60)\n"
    )
    deaf = ready.home(1) / ".tpu_grpo/code/scripts/program.py"
    deaf.write_text(
        "import signal, subprocess, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen(['sleep', '60'])\nprint('runs')\ntime.sleep(60)\n"
    )
    assert launch(capsys, "run", *SMALL, str(config))[0] == 0
    eventually(lambda: launch(capsys, "status")[1].count("    runs") == 2)
    code, out, _ = launch(capsys, "stop", "--grace", "2")
    assert code == 0
    assert "[0]" in out
    first, second = out.index("[0]"), out.index("[1]")
    assert "ended, pid" in out[first:second]
    assert "exit code 4" in out[first:second]
    assert "saved" in out[first:second]
    assert "exit code 137" in out[second:]
    eventually(lambda: ready.processes() == [])  # nor the child of the deaf one


def test_logs_are_followed_to_the_end(ready: StandIn, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--how", "vm", *SMALL, str(config), "seconds=3", "fails_on=1", "code=7"]) == 0
    capsys.readouterr()
    assert main(["logs", "--how", "vm", "--follow"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("[0]")] == ["[0] worker 0 runs config of mine", "[0] finished"]
    assert [line for line in lines if line.startswith("[1]")] == ["[1] worker 1 runs config of mine", "[1] no luck"]


def test_a_failing_worker_is_seen(ready: StandIn, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(capsys, "run", *SMALL, str(config), "fails_on=1", "code=7")[0] == 0
    ended(ready)
    _, out, _ = launch(capsys, "status")
    assert "exit code 0" in out[: out.index("[1]")]
    assert "exit code 7" in out[out.index("[1]") :]
    assert "no luck" in out[out.index("[1]") :]


def test_a_run_that_vanished_with_a_reboot_is_lost(
    ready: StandIn, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(capsys, "run", *SMALL, str(config), "seconds=30")[0] == 0
    started(ready, 0)
    ready.kill()
    assert launch(capsys, "status")[1].count(": lost, pid ") == 2
    assert launch(capsys, "run", *SMALL, str(config))[0] == 0
    ended(ready)
