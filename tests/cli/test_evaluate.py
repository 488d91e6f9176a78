"""Evaluations in whole runs: the same numbers whenever and wherever they are made, and the best step kept."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.utils._http import reset_sessions

from tests.models.hub import TOKEN, Hub, open_hub
from tests.several.runs import settings, train, write_files
from tpu_grpo.cli import export
from tpu_grpo.cli.evaluate import evaluate_checkpoint
from tpu_grpo.cli.export import export_checkpoint
from tpu_grpo.config import RunConfig, parse_config
from tpu_grpo.hosts import Hosts, Watch
from tpu_grpo.observe.evaluation import Estimate, Evaluation
from tpu_grpo.records.errors import CheckpointError, ConfigError, DataError
from tpu_grpo.run import pipeline
from tpu_grpo.run.policies import Chosen, choose

EVALUATION = {"path": "held.jsonl", "prompts": 6, "samples": 4, "every": 1}
REWARDS = [{"name": "rewards.py:ascii_share", "workers": 0}, {"name": "exact_answer"}]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(autouse=True)
def in_the_directory_of_the_files(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)


def config(run_dir: Path, **sections: Any) -> RunConfig:
    given = {
        "meshes": {"sampler": {"tensor": 4}},
        "checkpoint": {"every": 1},
        "evaluation": EVALUATION,
        "rewards": REWARDS,
    }
    return parse_config(settings(run_dir, **(given | sections)))


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "evaluation.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, evaluated at each, whose best policy is exported."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(files)
        train(config(run_dir, export={"every": "best"}))
    return run_dir


@pytest.mark.full
def test_a_run_tells_every_figure_and_keeps_the_samples(whole: Path) -> None:
    found = lines(whole)
    assert [line["step"] for line in found] == [0, 1, 2]
    modes = ("greedy", "sampled", "pass@2", "pass@4", "maj@2", "maj@4")
    for line in found:
        assert set(line["intervals"]) == {
            f"{mode}/{name}" for mode in modes for name in ("ascii_share", "exact_answer")
        }
        assert line["evaluation/pass@4/ascii_share"] >= line["evaluation/pass@2/ascii_share"]
        samples = [json.loads(s) for s in (whole / "evaluations" / f"{line['step']}.jsonl").read_text().splitlines()]
        assert len(samples) == 6 + 6 * 4
        greedy = [s["rewards"]["ascii_share"] for s in samples if s["mode"] == "greedy"]
        assert line["evaluation/greedy/ascii_share"] == pytest.approx(sum(greedy) / 6)
        sampled = [s["rewards"]["ascii_share"] == 1.0 for s in samples if s["mode"] == "sampled"]
        pairs = [1 - math.comb(4 - sum(sampled[p : p + 4]), 2) / 6 for p in range(0, 24, 4)]
        assert line["evaluation/pass@2/ascii_share"] == pytest.approx(sum(pairs) / 6)
        solved = [any(sampled[p : p + 4]) for p in range(0, 24, 4)]
        assert line["evaluation/pass@4/ascii_share"] == pytest.approx(sum(solved) / 6)
    metrics = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["evaluation/pass@4/ascii_share"] == found[1]["evaluation/pass@4/ascii_share"]
    assert metrics[1]["compile/count"] == metrics[0]["compile/count"]  # evaluations compile nothing of their own
    best = max(found, key=lambda line: line["evaluation/greedy/ascii_share"])
    assert json.loads((whole / "best.json").read_text())["step"] == best["step"]
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["evaluation/best"]["step"] == best["step"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("which", "step"),
    [pytest.param("initial", 0, marks=pytest.mark.slow), ("1", 1), pytest.param("latest", 2, marks=pytest.mark.slow)],
)
def test_a_checkpoint_gives_the_numbers_that_the_run_found(whole: Path, which: str, step: int) -> None:
    chosen, found = evaluate_checkpoint(config(whole), which, Hosts(), Watch(Hosts()))
    (expected,) = [line for line in lines(whole) if line["step"] == step]
    written = json.loads((whole / "evaluations" / f"{chosen.name}.json").read_text())
    assert written == expected
    assert found.digest == expected["digest"]
    samples = [(whole / "evaluations" / f"{name}.jsonl").read_bytes() for name in (chosen.name, str(step))]
    assert samples[0] == samples[1]


def assert_same_export(one: Path, other: Path) -> None:
    names = {path.name for path in one.iterdir()}
    assert names == {path.name for path in other.iterdir()} >= {"README.md", "tpu_grpo.yaml"}
    same = {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    for name in same:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on this machine, which this process may write to."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    reset_sessions()
    with open_hub({}) as opened:
        monkeypatch.setattr(constants, "ENDPOINT", opened.address)
        yield opened
    reset_sessions()


@pytest.mark.full
def test_the_policy_leaves_at_the_end_as_the_command_exports_it(
    whole: Path, tmp_path: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the trainer's four devices then, from the checkpoint on one now; and pushed to the hub."""
    assert json.loads((whole / "best.json").read_text())["step"] == 2
    assert [path.name for path in (whole / "exports").iterdir()] == ["2"]
    assert export.main([str(whole), "--best", "--out", str(tmp_path / "out"), "--push", "me/mine"]) == 0
    told, pushed = capsys.readouterr().out.splitlines()[-2:]
    assert told.startswith(f"the model of step 2 is in {tmp_path}/out: ")
    assert pushed == f"it is also at {hub.address}/me/mine"
    assert hub.models["me/mine"] == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert_same_export(whole / "exports/2", tmp_path / "out")
    assert "| held out, pass@4, ascii_share | " in (tmp_path / "out/README.md").read_text()


@pytest.mark.full
def test_a_damaged_checkpoint_is_not_exported(whole: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "run"
    shutil.copytree(whole, damaged)
    files = [path for path in (damaged / "checkpoints/2/model_params").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"checkpoints/2 must hold this model, whole, but could not be read \("):
        export_checkpoint(config(damaged), "latest", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow  # another run
def test_an_evaluation_that_was_interrupted_and_repeated_gives_the_same_numbers(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped while the answers after step 2 are there and not yet written: the run goes on from step 1."""
    evaluate = pipeline.evaluate_policy

    def stopped(sampler: Any, held_out: Any, step: int) -> Any:
        found = evaluate(sampler, held_out, step)
        if step == 2:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "evaluate_policy", stopped)
        with pytest.raises(KeyboardInterrupt):
            train(config(tmp_path))
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]
    train(config(tmp_path))
    assert lines(tmp_path) == lines(whole)
    assert (tmp_path / "evaluations/2.jsonl").read_bytes() == (whole / "evaluations/2.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_best_step_is_saved_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {0: 0.1, 1: 0.5, 2: 0.4, 3: 0.9, 4: 0.2, 5: 0.3, 6: 0.3}

    def canned(sampler: Any, held_out: Any, step: int) -> Any:
        return Evaluation(step, {"greedy": {"ascii_share": Estimate(values[step], 0, 1, 6)}}), ()

    monkeypatch.setattr(pipeline, "evaluate_policy", canned)
    run = {"dir": str(tmp_path / "run"), "max_steps": 4, "seed": 5}
    sections = {"checkpoint": {"every": 0, "keep": 1}, "export": {"every": "best"}}
    train(config(tmp_path / "run", run=run, **sections))
    export_checkpoint(config(tmp_path / "run"), "best", tmp_path / "out")
    assert_same_export(tmp_path / "run/exports/3", tmp_path / "out")  # read back, with the last step on the devices
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["3", "4"]
    assert choose(tmp_path / "run", "best") == Chosen(tmp_path / "run/checkpoints", 3)
    assert choose(tmp_path / "run", "latest") == Chosen(tmp_path / "run/checkpoints", 4)
    train(config(tmp_path / "run", run=run | {"max_steps": 6}, **sections))  # goes on at 4
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["3", "6"]
    assert [path.name for path in (tmp_path / "run/exports").iterdir()] == ["3"]


@pytest.mark.slow
def test_other_data_is_no_continuation(whole: Path, files: Path) -> None:
    rows = (files / "data.jsonl").read_text()
    try:
        (files / "data.jsonl").write_text(rows.replace("0+1=", "1+0="))
        with pytest.raises(DataError, match=r"a run must go on with the prompts it began with.*after step 2"):
            train(config(whole))
    finally:
        (files / "data.jsonl").write_text(rows)


def test_which_checkpoint(tmp_path: Path) -> None:
    step = tmp_path / "other" / "40"
    step.mkdir(parents=True)
    assert choose(tmp_path, "initial").name == "initial"
    assert choose(tmp_path, "7") == Chosen(tmp_path / "checkpoints", 7)
    assert choose(tmp_path, str(step)) == Chosen(tmp_path / "other", 40)
    (tmp_path / "best.json").write_text('{"step": 0}')
    assert choose(tmp_path, "best").step is None  # nothing was better than the model the run started from
    for which, error, said in (
        ("latest", CheckpointError, "there must be a checkpoint in"),
        ("newest", ConfigError, "--checkpoint must be initial, latest, best, a step, or a directory"),
        (str(tmp_path), ConfigError, "--checkpoint must be"),
    ):
        with pytest.raises(error, match=said):
            choose(tmp_path, which)
    (tmp_path / "best.json").unlink()
    with pytest.raises(CheckpointError, match="a best checkpoint needs .*best.json"):
        choose(tmp_path, "best")


def test_without_held_out_data_there_is_nothing_to_evaluate(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an evaluation needs held-out data, got none; set evaluation.path"):
        evaluate_checkpoint(config(tmp_path, evaluation={}), "initial", Hosts(), Watch(Hosts()))
