"""The verbs, one after the other, with small programs on the workers of the stand-in; what workers are set up with."""

import json
from pathlib import Path

import pytest

from tests.launching import gcloud_syntax
from tests.launching.conftest import git
from tests.launching.driving import SMALL, Launch, ended, eventually, started
from tests.launching.stand_in import StandIn
from tpu_grpo.cli.launch import main
from tpu_grpo.launching.launcher import pack


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
        assert (stand_in.home(worker) / "uv_calls").read_text() == "sync --no-dev --all-extras\n"
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


@pytest.mark.full
def test_a_run_is_detached_and_gets_its_environment(ready: StandIn, config: Path, launch: Launch) -> None:
    words = (*SMALL, "--env", "A=b c", str(config), "seconds=30")
    assert launch("run", *words)[0] == 0
    for worker in (0, 1):
        seen = started(ready, worker)
        assert seen["environment"]["WORKER"] == str(worker)
        assert seen["environment"]["A"] == "b c"
        assert "--xla_enable_async_all_gather=true" in seen["environment"]["LIBTPU_INIT_ARGS"].split()
        assert "JAX_COMPILATION_CACHE_DIR" not in seen["environment"]
        assert seen["cwd"] == str(ready.home(worker) / ".tpu_grpo/code")
        assert seen["argv"][2:] == ["seconds=30"]
        command = (ready.home(worker) / ".tpu_grpo/job/command").read_text()
        assert command.startswith("env PYTHONUNBUFFERED=1 ")
    out = launch("status")[1]
    assert out.count(": running, pid ") == 2
    assert "worker 1 runs config of mine" in out
    code, _, err = launch("run", *words)
    assert code == 1
    assert "[0] worker: a run is going on already: env" in err
    code, _, err = launch("setup")
    assert code == 1
    assert "a run is going on; stop it before its code is replaced" in err


@pytest.mark.full
def test_other_libtpu_arguments_and_another_cache(ready: StandIn, config: Path, launch: Launch) -> None:
    flags = ("--libtpu-args", "", "--compilation-cache", "gs://b/cache")
    code, _, err = launch("run", *SMALL, *flags, str(config))
    assert code == 1
    assert "worker: a cache on gs:// needs gcsfs; setup with --with gcsfs" in err
    for worker in (0, 1):
        (ready.home(worker) / ".tpu_grpo/code/gcsfs.py").write_text("")
    assert launch("run", *SMALL, *flags, str(config))[0] == 0
    environment = started(ready, 1)["environment"]
    assert "LIBTPU_INIT_ARGS" not in environment
    assert environment["JAX_COMPILATION_CACHE_DIR"] == "gs://b/cache"


@pytest.mark.full
def test_stop_lets_it_save_then_kills_it(ready: StandIn, config: Path, launch: Launch) -> None:
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
    assert launch("run", *SMALL, str(config))[0] == 0
    eventually(lambda: launch("status")[1].count("    runs") == 2)
    code, out, _ = launch("stop", "--grace", "2")
    assert code == 0
    assert "[0]" in out
    first, second = out.index("[0]"), out.index("[1]")
    assert "ended, pid" in out[first:second]
    assert "exit code 4" in out[first:second]
    assert "saved" in out[first:second]
    assert "exit code 137" in out[second:]
    eventually(lambda: ready.processes() == [])  # nor the child of the deaf one


def test_a_run_that_vanished_with_a_reboot_is_lost(ready: StandIn, config: Path, launch: Launch) -> None:
    assert launch("run", *SMALL, str(config), "seconds=30")[0] == 0
    started(ready, 0)
    ready.kill()
    assert launch("status")[1].count(": lost, pid ") == 2
    assert launch("run", *SMALL, str(config))[0] == 0
    ended(ready)


# --- several slices --------------------------------------------------------------------------------------------------

SLICES = ("grpo-0", "grpo-1")


@pytest.fixture
def homes(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[Path]:
    """Two slices of two workers; their home directories, in the order of the run's hosts."""
    monkeypatch.setenv("TPU_SLICES", "2")
    assert main(["create", "--type", "v5e-8", "--spot"]) == 0
    capsys.readouterr()
    return [stand_in.home(worker, name) for name in SLICES for worker in (0, 1)]


@pytest.mark.full
def test_two_slices_are_requested_together_and_run_as_four_hosts(
    stand_in: StandIn, homes: list[Path], checkout: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stand_in.calls()[0][4:] == [
        *("create", "grpo", "--accelerator-type=v5litepod-8", "--node-count=2", "--node-prefix=grpo"),
        *("--runtime-version=v2-alpha-tpuv5-lite", "--spot", "--quiet"),
    ]
    assert main(["setup", "--code", str(checkout)]) == 0
    assert main(["run", *SMALL, str(config), "seconds=30"]) == 0
    eventually(lambda: all((home / "started0").exists() for home in homes))
    capsys.readouterr()
    assert main(["logs"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"[{n}] worker {n} runs config of mine" for n in range(4)]
    assert main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "v5litepod-8, 4 workers: queued resource ACTIVE, node grpo-0 READY (HEALTHY), node grpo-1 READY (HEALTHY)"
    )
    assert [line.split(" ")[0] for line in lines[1::2]] == ["[0]", "[1]", "[2]", "[3]"]
    assert all(": running, pid " in line for line in lines[1::2])
    assert main(["stop"]) == 0
    assert capsys.readouterr().out.count("exit code 143") == 4  # SIGTERM
    assert main(["run", *SMALL, str(config), "seconds=1", "fails_on=3", "code=7"]) == 0
    capsys.readouterr()
    assert main(["logs", "--follow"]) == 0
    said = sorted(capsys.readouterr().out.splitlines(), key=lambda line: line[:3])  # each worker's lines in their order
    assert said[::2] == [f"[{n}] worker {n} runs config of mine" for n in range(4)]
    assert said[1::2] == ["[0] finished", "[1] finished", "[2] finished", "[3] no luck"]
    seen = [json.loads((home / "started1").read_text())["environment"] for home in homes]
    assert [environment["WORKER"] for environment in seen] == ["0", "1", "2", "3"]
    assert len({environment["TPU_GRPO_SECRET"] for environment in seen}) == 1
    assert main(["delete"]) == 0
    assert stand_in.load()["nodes"] == {}
    for command in stand_in.calls():
        gcloud_syntax.check(command)


@pytest.mark.full
@pytest.mark.parametrize("given", ["1", "3"])
def test_another_number_of_slices_than_was_created_is_no_lost_machine(
    homes: list[Path], given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--slices", given]) == 1
    assert (
        f"--slices must be the number of nodes of the queued resource grpo, 2, got {given}" in capsys.readouterr().err
    )


@pytest.mark.full
def test_slices_are_set_up_at_the_same_time_and_errors_name_the_slice(
    homes: list[Path], checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The setup script ends once it runs on all four workers; then the last worker fails."""
    met = tmp_path / "met"
    met.mkdir()
    script = tmp_path / "script"
    script.write_text(
        f"touch {met}/$WORKER\nfor _ in $(seq 200); do [ $(ls {met} | wc -l) = 4 ] && exit 0; sleep 0.1; done; exit 1\n"
    )
    words = ["setup", "--code", str(checkout), "--setup-script", str(script)]
    assert main(words) == 0
    (homes[3] / "uv_fails").write_text("")
    capsys.readouterr()
    assert main(words) == 1
    err = capsys.readouterr().err
    assert "GcloudError: `gcloud compute tpus tpu-vm ssh grpo-1` failed (worker, exit code 1)" in err
    assert "[3] error: No solution found when resolving dependencies" in err
    assert "[3] worker: uv could not install the environment" in err
    (homes[2] / ".tpu_grpo").rename(homes[2] / "elsewhere")
    (homes[2] / ".tpu_grpo").write_text("")
    assert main(["run", *SMALL, str(script)]) == 1
    assert "scp" in (said := capsys.readouterr().err)
    assert " grpo-1:.tpu_grpo/` failed" in said


def test_a_lost_slice_is_named(
    stand_in: StandIn, homes: list[Path], config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in.preempt("grpo-1")
    assert main(["status"]) == 0
    lost = "node grpo-1 PREEMPTED (HEALTHY)"
    assert capsys.readouterr().out == f"v5litepod-8, 4 workers: queued resource ACTIVE, {lost}\n"
    state = stand_in.load()
    state["requests"]["grpo"]["state"] = "SUSPENDING"
    stand_in.save(state)
    assert main(["run", *SMALL, str(config)]) == 1
    assert f"grpo must be ready, got: queued resource SUSPENDING, {lost}; " in capsys.readouterr().err


# --- setup -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_setup_brings_the_work_tree_as_it_is_and_keeps_what_runs_left(
    ready: StandIn, checkout: Path, launch: Launch
) -> None:
    code = ready.home(1) / ".tpu_grpo/code"
    (code / "runs").mkdir()
    (code / "runs" / "result").write_text("precious")
    (checkout / "runs").mkdir()
    (checkout / "runs" / "not this").write_text("")
    (checkout / "scripts" / "program.py").rename(checkout / "scripts" / "it's new\n.py")
    status, _, err = launch("setup", "--code", str(checkout))
    assert status == 0
    assert " and 2 changed files, " in err  # one is gone, one is new
    assert sorted(path.name for path in (code / "scripts").iterdir()) == ["it's new\n.py"]
    assert [path.name for path in (code / "runs").iterdir()] == ["result"]
    assert "(code " in launch("status")[1]
    assert " and 2 changed files)" in launch("status")[1]


@pytest.mark.full
def test_the_setup_script_runs_in_the_checkout_of_every_worker(
    ready: StandIn, checkout: Path, tmp_path: Path, launch: Launch
) -> None:
    script = tmp_path / "mount it.sh"
    script.write_text('pwd > "$HOME/mounted"\n')
    words = ("setup", "--code", str(checkout), "--setup-script", str(script))
    assert launch(*words)[0] == 0
    for worker in (0, 1):
        assert (ready.home(worker) / "mounted").read_text().strip() == str(ready.home(worker) / ".tpu_grpo/code")
    script.write_text("echo no such bucket\nexit 3\n")
    code, _, err = launch(*words)
    assert code == 1
    assert "[1] no such bucket\n" in err
    assert "[1] worker: the setup script failed" in err
    assert "failed (worker, exit code 1)" in err


def test_the_work_tree_is_named_with_its_changes(checkout: Path, tmp_path: Path) -> None:
    clean = pack(checkout, tmp_path)
    assert " " not in clean
    (checkout / "new").write_text("")
    assert pack(checkout, tmp_path) == f"{clean} and 1 changed file"
    git(checkout, "add", "-A")
    git(checkout, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "two")
    assert pack(checkout, tmp_path) not in (clean, f"{clean} and 1 changed file")


@pytest.mark.full
def test_further_packages_are_installed_after_the_pinned_ones(ready: StandIn, checkout: Path, launch: Launch) -> None:
    words = ("--with", "gcsfs==2026.10.1", "--with", "my reward[x] >= 1")
    assert launch("setup", "--code", str(checkout), *words)[0] == 0
    assert (ready.home(1) / "uv_calls").read_text().splitlines() == [
        "sync --no-dev --all-extras",
        "sync --no-dev --all-extras",
        "pip install --python .venv/bin/python gcsfs==2026.10.1 my reward[x] >= 1",
    ]


def test_a_run_before_setup_is_refused(ready: StandIn, config: Path, launch: Launch) -> None:
    (ready.home(1) / ".tpu_grpo/code/.venv/bin/python").unlink()
    code, _, err = launch("run", *SMALL, str(config))
    assert code == 1
    assert "[1] worker: no code and environment here; run setup first" in err
