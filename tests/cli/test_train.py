"""The command line: what it says, what it returns, and what it does not import to say it."""

import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.launching.driving import imported
from tpu_grpo.cli import starting
from tpu_grpo.cli.train import closing_lines, help_text, main
from tpu_grpo.config import RunConfig, load_config, settings
from tpu_grpo.config.setting_names import COMMON
from tpu_grpo.hosts import Hosts, StopRequest, Watch
from tpu_grpo.records import errors
from tpu_grpo.run.inputs import Inputs
from tpu_grpo.run.lock import RunLock

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "run.py"
HEAVY = {"jax", "jaxlib", "flax", "transformers", "sgl_jax", "tunix", "torch", "numpy", "matplotlib", "wandb"}


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a command changes in its process is put back."""
    for name in ("JAX_PLATFORMS", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, os.environ[name])
    handler, level = signal.getsignal(signal.SIGTERM), logging.getLogger("absl").level
    yield
    signal.signal(signal.SIGTERM, handler)
    logging.getLogger("absl").setLevel(level)


def run_script(*arguments: str, cwd: Path, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, without what the tests set for theirs."""
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS", "HF_HUB_OFFLINE")}
    command = [sys.executable, *python, str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)


def run_main(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# --- light ways out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help", "all"], 0),
        (["--print-config"], 0),
        (["--dry-run", "run=1"], 2),
    ],
)
def test_nothing_heavy_is_imported_to_answer(tmp_path: Path, arguments: list[str], code: int) -> None:
    done = run_script(*arguments, cwd=tmp_path, python=("-X", "importtime"))
    assert done.returncode == code
    found = imported(done.stderr)
    assert {"tpu_grpo.cli.starting", "tpu_grpo.config", "pydantic"} <= found  # the list is of this command
    assert found & HEAVY == set()


@pytest.mark.parametrize("flags", [(), ("--dry-run",)], ids=["run", "dry run"])
def test_what_is_wrong_with_paths_is_said_before_jax_is_imported(tmp_path: Path, flags: tuple[str, ...]) -> None:
    done = run_script("data.path=nosuch.jsonl", *flags, cwd=tmp_path, python=("-X", "importtime"))
    assert done.returncode == 2
    assert "DataError: data.path: data file not found: nosuch.jsonl" in done.stderr
    assert "tpu_grpo.run.inputs" in imported(done.stderr)
    assert imported(done.stderr) & (HEAVY - {"numpy"}) == set()
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_flag_shows_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--print-confg"])
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert "usage: python scripts/run.py [CONFIG.yaml] [section.key=value ...]" in shown
    assert "unrecognized arguments: --print-confg" in shown


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_needs_no_valid_config(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert run_main(capsys, "nosuch.yaml", flag) == (0, help_text() + "\n", "")


def test_help_all_lists_every_setting_with_its_default() -> None:
    shown = dict(re.findall(r"^  (\S+)  \(.*; default (.*)\)$", help_text("all"), flags=re.MULTILINE))
    assert shown == {name: default for name, _, default, _ in settings()}


def test_help_shows_what_most_people_change_and_how_to_see_more(capsys: pytest.CaptureFixture[str]) -> None:
    def names(topic: str) -> list[str]:
        return re.findall(r"^  (\S+)  \(.*; default ", help_text(topic), flags=re.MULTILINE)

    assert names("") == COMMON
    assert help_text().splitlines()[-2].startswith("--help all lists all ")
    assert help_text().splitlines()[-1].split() == [f"{s}," for s in [*RunConfig.model_fields][:-1]] + ["logging"]
    assert names("optimizer") == [name for name in names("all") if name.startswith("optimizer.")]
    assert names("rewards")[:2] == ["rewards", "rewards[i].name"]
    assert names("run.seed") == ["run.seed"]
    assert run_main(capsys, "--help", "optimiser") == (
        *(2, ""),
        "ConfigError: --help takes a section, a setting, or all, got optimiser; did you mean optimizer?\n",
    )


def test_help_explains_each_setting() -> None:
    lines = help_text("all").splitlines()
    first = lines.index("Settings (name, values, default):")
    for line, following in pairwise([*lines[first + 2 :], ""]):
        if line.startswith("  ") and not line.startswith("      "):
            assert following.startswith("      "), line


def test_the_demo_is_the_default_config(capsys: pytest.CaptureFixture[str]) -> None:
    expected = load_config(REPOSITORY / "configs" / "demo_cpu.yaml").to_yaml()
    assert run_main(capsys, "--print-config") == (0, expected, "")


def test_a_printed_config_can_be_fed_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    overrides = ["run.name=off", "run.dir=~/x", "optimizer.learning_rate=3e-4", 'data.system_prompt="a: b"']
    config = str(REPOSITORY / "configs" / "gsm8k_cpu_check.yaml")
    _, printed, _ = run_main(capsys, config, *overrides, "--print-config")
    assert printed == load_config(config, overrides).to_yaml()
    (tmp_path / "again.yaml").write_text(printed)
    assert run_main(capsys, str(tmp_path / "again.yaml"), "--print-config") == (0, printed, "")


@pytest.mark.parametrize("position", [0, 1, 2])
def test_flags_stand_anywhere(capsys: pytest.CaptureFixture[str], position: int) -> None:
    words = [str(REPOSITORY / "configs" / "gsm8k_cpu_check.yaml"), "run.seed=7"]
    expected = load_config(words[0], ["run.seed=7"]).to_yaml()
    words.insert(position, "--print-config")
    assert run_main(capsys, *words) == (0, expected, "")


# --- training, with a fake pipeline ----------------------------------------------------------------------------------


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., dict[str, Any]]], None]:
    """Put a function in the place of ``tpu_grpo.run.pipeline.train``, without importing the real one."""

    def use(train: Callable[..., dict[str, Any]]) -> None:
        module = ModuleType("tpu_grpo.run.pipeline")
        module.__dict__["train"] = train
        monkeypatch.setitem(sys.modules, "tpu_grpo.run.pipeline", module)

    return use


def raising(error: BaseException) -> Callable[..., dict[str, Any]]:
    def train(*_: Any) -> dict[str, Any]:
        raise error

    return train


PROGRESS = r"\[ *\d+\.\d s\] "
NOTICE = f"{PROGRESS}checking the data\n{PROGRESS}importing trainer and engine\n"
CODES = {
    errors.TpuGrpoError: 1,
    errors.ConfigError: 2,
    errors.CheckpointError: 2,
    errors.DataError: 2,
    errors.RewardError: 2,
    errors.CallbackError: 2,
    errors.EpisodeError: 2,
    errors.RequestError: 2,
    errors.WeightsError: 2,
    errors.NonFiniteError: 1,
    errors.DiskError: 1,
    errors.LaunchError: 1,
    errors.PlanningError: 1,
    errors.LockstepError: 3,
    errors.Interrupted: 4,
}


def test_every_error_of_the_package_has_a_code() -> None:
    defined = {e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.TpuGrpoError)}
    assert defined == set(CODES)


@pytest.mark.full
@pytest.mark.parametrize(("error", "code"), CODES.items(), ids=lambda value: getattr(value, "__name__", value))
def test_exit_codes(
    pipeline: Any, capsys: pytest.CaptureFixture[str], error: type[errors.TpuGrpoError], code: int
) -> None:
    pipeline(raising(error("what is wrong; what to do")))
    start = "" if error is errors.Interrupted else f"{error.__name__}: "
    got, out, err = run_main(capsys)
    assert (got, out) == (code, "")
    assert re.fullmatch(f"{NOTICE}{start}what is wrong; what to do\n", err)


def test_ctrl_c_ends_without_a_traceback(pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline(raising(KeyboardInterrupt()))
    code, out, err = run_main(capsys)
    assert (code, out) == (1, "")
    assert re.fullmatch(f"{NOTICE}interrupted\n", err)


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyError("x")])
def test_other_errors_are_bugs_and_keep_their_traceback(pipeline: Any, error: BaseException) -> None:
    pipeline(raising(error))
    with pytest.raises(type(error)) as caught:
        main([])
    assert caught.value is error


def test_training_gets_the_config_and_ends_with_what_it_came_to(
    pipeline: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[RunConfig] = []

    def train(inputs: Inputs, hosts: Hosts, watch: Watch, stop: StopRequest, *_: Any) -> dict[str, Any]:
        given.append(inputs.config)
        assert inputs.prompts.size == 7588
        assert not stop.asked
        return {"steps": 3, "rewards/first_mean": 0.25, "rewards/last_mean": 0.5}

    pipeline(train)
    code, out, err = run_main(capsys, "run.max_steps=3", "run.dir=out")
    assert given == [load_config(REPOSITORY / "configs" / "demo_cpu.yaml", ["run.max_steps=3", "run.dir=out"])]
    assert code == 0
    assert re.fullmatch(NOTICE, err)
    assert out == (
        "done: 3 steps\nreward, mean of the first five steps 0.250, of the last five 0.500\nlook at out/report.html\n"
    )


def test_what_the_user_set_for_the_platform_is_kept(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.setattr(starting, "join", lambda *_, **__: Hosts())  # would look for the slice
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    seen: dict[str, str] = {}

    def train(*_: Any) -> dict[str, Any]:
        seen.update({name: os.environ[name] for name in ("JAX_PLATFORMS", "HF_HUB_OFFLINE")})
        return {"steps": 0}

    pipeline(train)
    assert main([]) == 0
    assert seen == {"JAX_PLATFORMS": "tpu", "HF_HUB_OFFLINE": "0"}


def test_closing_lines_compare_held_out_values_that_were_measured_twice() -> None:
    before = {"greedy": {"r": 0.25, "s": 0.0, "t": 0.0, "u": 1.0}, "sampled": {"r": 0.125, "t": 0.5}}
    after = {"greedy": {"r": 0.5, "s": 1.0}, "sampled": {"r": 0.75, "s": 0.5, "t": 0.5}}
    summary = {"steps": 2, "evaluation/before": before, "evaluation/after": after}
    assert closing_lines(summary).splitlines() == [
        "done: 2 steps",
        "held out, r: greedy 0.250 -> 0.500, sampled 0.125 -> 0.750",
        "held out, s: greedy 0.000 -> 1.000",
        "held out, t: sampled 0.500 -> 0.500",
    ]


# --- dry run, with the real parts ------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_dry_run_of_the_demo_finds_nothing_wrong_and_says_nothing_about_tpus(tmp_path: Path) -> None:
    done = run_script("--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"tpu|grpc|metadata|warning", done.stderr, flags=re.IGNORECASE) is None, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        *("run.dir", "model", "meshes", "data", "rewards", "algorithm", "objective"),
        *("evaluation", "trainer", "rollout", "step", "run", "sync"),
        *("1", *["3"] * 11, "1"),  # kinds of leaves
        "ok:",
    ]
    assert lines[0] == "run.dir    runs/demo_cpu: a run that starts at step 1"
    assert lines[3] == "data       builtin:addition: 7588 prompts, 0 dropped as too long"
    assert lines[6] == (
        "objective  mean_i mean_t [ max(-r*A, -clip(r, 0.8, 1.2)*A) ]; r = p/p_engine; "
        "A = (R - mean_g(R)) / (std_g(R) + 1e-6); p = softmax(logits)"
    )
    assert lines[7] == "evaluation 512 prompts"
    assert lines[10] == "step       32 prompts x 8 completions"
    assert lines[11] == "run        60 steps; an epoch of 7588 prompts has 237.1"
    assert lines[12] == "sync       35 leaves, 23 shared, 1.3 MiB move in 1 programs"
    assert lines[-1] == "ok: nothing wrong found"
    assert list(tmp_path.iterdir()) == []


# --- what lies in run.dir --------------------------------------------------------------------------------------------


def leave_finished(directory: Path, *overrides: str) -> None:
    config = load_config(REPOSITORY / "configs" / "demo_cpu.yaml", [f"run.dir={directory}", *overrides])
    directory.mkdir()
    (directory / "config.yaml").write_text(config.to_yaml())
    (directory / "metrics.jsonl").write_text('{"step": 3}\n')
    (directory / "summary.json").write_text('{"steps": 3}\n')


def test_a_finished_run_says_so_and_neither_touches_a_file_nor_imports_jax(tmp_path: Path) -> None:
    run = tmp_path / "run"
    leave_finished(run, "run.max_steps=3", "checkpoint.resume=auto")
    before = {path: path.stat().st_mtime_ns for path in [run, *run.iterdir()]}
    words = ("run.max_steps=3", "checkpoint.resume=auto", f"run.dir={run}")
    done = run_script(*words, cwd=tmp_path, python=("-X", "importtime"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "this run is done: 3 of 3 steps; set run.max_steps higher to go on, or another run.dir\n"
        f"look at {run}/report.html\n"
    )
    assert imported(done.stderr) & (HEAVY - {"numpy"}) == set()
    assert {path: path.stat().st_mtime_ns for path in [run, *run.iterdir()]} == before


def test_another_runs_directory_and_one_in_use_are_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_finished(tmp_path / "run", "checkpoint.resume=auto")
    words = (f"run.dir={tmp_path}/run", "checkpoint.resume=auto", "optimizer.learning_rate=1e-3")
    for more in ((), ("--dry-run",)):
        code, out, err = run_main(capsys, *words, *more)
        assert (code, out) == (2, "")
        assert "\n  optimizer.learning_rate: 0.0001 -> 0.001\n" in err
    lock = RunLock.take(tmp_path / "run")
    for resume in ("auto", "never"):
        code, out, err = run_main(capsys, *words, f"checkpoint.resume={resume}")
        assert (code, out) == (2, "")
        assert err.startswith(f"ConfigError: run.dir must have one run at a time; {tmp_path}/run is in use by process ")
    lock.release()


def test_who_is_stopped_is_told_the_command_that_continues() -> None:
    demo = load_config(REPOSITORY / "configs" / "demo_cpu.yaml")
    assert demo.going_on == (
        "start the command again with checkpoint.resume=auto to continue; with checkpoint.resume=never, as it is, it "
        "would start over"
    )
    assert RunConfig().going_on == "start the same command again to continue"


def test_a_signal_while_the_package_is_imported_is_answered_once_a_run_can(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, f"run.dir={tmp_path / 'run'}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    blocked = Path(f"/proc/{process.pid}/status")
    while f"SigBlk:\t{1 << (signal.SIGINT - 1) | 1 << (signal.SIGTERM - 1):016x}" not in blocked.read_text():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 4
    assert "SIGTERM: the run is ended before its first step" in errors
