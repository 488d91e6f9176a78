"""Whole runs of a small random model: files, metrics, determinism, and continuing after a kill."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.observe.test_trackers import events
from tests.run.test_timeline import xplane_spans
from tests.several import runs
from tests.several.runs import laid_over, lines, train, write_files
from tpu_grpo.config import RunConfig, parse_config
from tpu_grpo.hosts import StopRequest
from tpu_grpo.observe.callbacks import find_callbacks
from tpu_grpo.records.errors import DiskError, Interrupted, RewardError

CONTRACT = {
    "step", "rewards/mean", "rewards/std", "rewards/exact_answer/mean", "rewards/ascii_share/mean", "rewards/seconds",
    "groups/zero_variance_fraction", "completions/mean_tokens", "completions/truncated_fraction", "rollout/seconds",
    "rollout/tokens_per_second", "rollout/tokens_digest", "rollout/wait_seconds", "rollout/tokens_per_launch",
    "rollout/decode_step_seconds",
    "rollout/occupied_rows", "rollout/prefills", "rollout/accepted_rows", "agreement/logprob_abs_diff_max",
    "agreement/logprob_abs_diff_mean", "agreement/ratio_mean", "agreement/kl", "agreement/effective_sample_size",
    "update/loss", "update/grad_norm", "update/applied_fraction", "update/kl", "update/entropy", "update/clip_fraction",
    "update/ratio_mean", "update/learning_rate", "update/seconds", "weights/sync_seconds", "weights/bytes_moved",
    "step/seconds", "compile/count", "memory/host_gib",
}  # fmt: skip
STAGES = ("rollout", "rewards", "update", "weight sync")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with the byte tokenizer, and a reward file."""
    return write_files(tmp_path_factory.mktemp("inputs"), kv_heads=2, layers=1)


def settings(files: Path, run_dir: Path, **sections: Any) -> dict[str, Any]:
    tree = runs.settings(
        run_dir,
        run={"max_steps": 4},
        model={"path": str(files / "model")},
        data={"path": "builtin:addition"},
        rewards=[{"name": "exact_answer"}, {"name": f"{files}/rewards.py:ascii_share", "weight": 0.5}],
        meshes={"sampler": {"tensor": 4}},  # one engine to compile
        evaluation={"prompts": 16},
        logging={"samples_every": 2},
    )
    return laid_over(tree, sections)


def config(files: Path, run_dir: Path, **sections: Any) -> RunConfig:
    return parse_config(settings(files, run_dir, **sections))


def digests(run_dir: Path) -> dict[int, str]:
    return {line["step"]: line["rollout/tokens_digest"] for line in lines(run_dir)}


@pytest.fixture(scope="module")
def whole(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that others are compared with, with a timeline and histograms."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    shown = {"profile_steps": [2, 3], "tensorboard": True, "histograms_every": 2}
    train(config(files, run_dir, logging=shown))
    return run_dir


def test_a_run_leaves_its_files(whole: Path) -> None:
    names = {path.name for path in whole.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "samples.jsonl", "summary.json", "report.html", "checkpoints"} <= names
    assert json.loads((whole / "end.json").read_text())["outcome"] == "done"
    assert "The run is done, after step 4 of 4." in (whole / "report.html").read_text()
    history = lines(whole, "history.jsonl")
    assert [(line["step"], len(line["prompts"])) for line in history] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    means = [sum(line["tokens"]) / 4 for line in history]
    assert means == pytest.approx([line["completions/mean_tokens"] for line in lines(whole)])
    samples = lines(whole, "samples.jsonl")
    assert [s["step"] for s in samples] == [2] * 16 + [4] * 16
    assert set(samples[0]["rewards"]) == {"exact_answer", "ascii_share"}
    assert all(s["gold"].isdecimal() for s in samples)


def test_every_step_has_every_metric_of_the_contract(whole: Path) -> None:
    steps = lines(whole)
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    for line in steps:
        assert line.keys() >= CONTRACT
        assert line["agreement/logprob_abs_diff_max"] <= 1e-4
        assert line["agreement/logprob_abs_diff_mean"] <= 1e-5
        assert line["agreement/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        weighted = line["rewards/exact_answer/mean"] + 0.5 * line["rewards/ascii_share/mean"]
        assert line["rewards/mean"] == pytest.approx(weighted)
    assert len(set(digests(whole).values())) == 4
    assert any(line["update/grad_norm"] > 0 for line in steps)


def test_nothing_compiles_after_the_second_step(whole: Path) -> None:
    counts = [line["compile/count"] for line in lines(whole)]
    assert counts[1:] == [counts[1]] * (len(counts) - 1)


def test_histograms_of_parameters_and_gradients_are_in_the_event_file(whole: Path) -> None:
    [logged] = list(events(whole))
    found = [(event.step, v.tag, v.histo) for event in logged for v in event.summary.value if v.HasField("histo")]
    names = {"layers.0.attn.q_proj.w", "embedder.input_embedding", "final_norm.w"}
    for step in (2, 4):
        tags = {tag for at, tag, _ in found if at == step}
        assert tags >= {f"{kind}/{name}" for kind in ("gradients", "parameters") for name in names}
        squares = sum(
            counted.sum_squares for at, tag, counted in found if (at, tag.split("/")[0]) == (step, "gradients")
        )
        assert squares**0.5 == pytest.approx(lines(whole)[step - 1]["update/grad_norm"], rel=1e-5)
    assert {at for at, *_ in found} == {2, 4}


def test_the_summary_repeats_and_adds(whole: Path) -> None:
    summary = json.loads((whole / "summary.json").read_text())
    steps = lines(whole)
    assert summary["rewards/first_mean"] == pytest.approx(sum(s["rewards/mean"] for s in steps) / 4)
    assert summary["update/loss"] == steps[-1]["update/loss"]
    assert len(summary["params_digest"]) == 64
    assert summary["versions"]["google-tunix"] == "0.1.7"
    assert set(summary["evaluation/before"]) == {"greedy", "sampled"}


def test_a_timeline_names_the_stages_and_what_the_engine_does(whole: Path) -> None:
    found = xplane_spans(whole / "profile/plugins/profile/steps_2-3/host_0.xplane.pb")
    steps = lines(whole)
    for step in (2, 3):
        rollout, update = found[f"rollout of step {step}"][0], found[f"update of step {step}"][0]
        assert steps[step - 1]["rollout/seconds"] <= rollout < steps[step - 1]["rollout/seconds"] + 1
        assert steps[step - 1]["update/seconds"] <= update + 1e-3
        assert rollout + update <= steps[step - 1]["step/seconds"] <= sum(found["step"])
    assert not {"rollout of step 1", "rollout of step 4"} & found.keys()
    assert sum(found["step"]) >= sum(found[f"{stage} of step {step}"][0] for stage in STAGES for step in (2, 3))
    waited = sum(steps[step]["rollout/wait_seconds"] for step in (1, 2))
    assert sum(found["wait"]) == pytest.approx(waited, abs=0.05)
    assert {"schedule", "launch", "collect"} <= found.keys()


@pytest.mark.full
def test_a_run_whose_directory_goes_away_notices_it_at_the_next_step_and_saves_it(
    files: Path, whole: Path, tmp_path: Path
) -> None:
    """Another directory is in its place, which stays as it is."""
    run_dir, apart = tmp_path / "run", tmp_path / "run.1"

    def on_step(metrics: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        if metrics["step"] == 1:
            run_dir.rename(tmp_path / "elsewhere")
            run_dir.mkdir()
            (run_dir / "mine").touch()

    with pytest.raises(DiskError) as caught:
        train(config(files, run_dir), callbacks=find_callbacks((), on_step))
    assert str(caught.value) == (
        f"run.dir must stay where it is during a run, but {run_dir} is gone or another one now; step 2 was saved in "
        f"{apart}; go on with run.dir={apart} checkpoint.resume=auto"
    )
    assert [path.name for path in run_dir.iterdir()] == ["mine"]
    train(config(files, apart))
    assert [digests(apart)[step] for step in (3, 4)] == [digests(whole)[step] for step in (3, 4)]


@pytest.mark.full
def test_asked_to_stop_by_its_caller_or_a_callback_a_run_saves_and_says_so(
    files: Path, whole: Path, tmp_path: Path
) -> None:
    """It then goes on, here to the end of its epochs, which come to the same four steps."""
    run_dir = tmp_path / "run"
    told: list[tuple[str, int, int]] = []

    def on_evaluation(metrics: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        assert 0 <= metrics["evaluation/greedy/exact_answer"] <= 1
        told.append(("evaluation", metrics["step"], len([s for s in samples if s["mode"] == "greedy"])))

    def on_step(metrics: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> bool:
        told.append((metrics["rollout/tokens_digest"], metrics["step"], len(samples)))
        return metrics["step"] == 2

    callbacks = find_callbacks((), on_step, on_evaluation)
    with pytest.raises(Interrupted, match="stopped after step 1 as asked, which is saved; start the same command"):
        train(config(files, run_dir), stop=StopRequest(lambda: True), callbacks=callbacks)
    with pytest.raises(Interrupted, match="stopped after step 2 as asked"):
        train(config(files, run_dir), callbacks=find_callbacks((), on_step))
    train(config(files, run_dir, run={"max_steps": None, "epochs": 15.5 / 7588}))
    assert digests(run_dir) == digests(whole)
    assert told == [("evaluation", 0, 16), (digests(whole)[1], 1, 16), (digests(whole)[2], 2, 16)]
    run = yaml.safe_load((run_dir / "config.yaml").read_text())["run"]
    assert (run["max_steps"], run["epochs"]) == (4, None)


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_start_that_fails_leaves_the_earlier_run_as_it_was(files: Path, tmp_path: Path, resume: str) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(config(files, run_dir).to_yaml())
    before = (run_dir / "config.yaml").stat().st_mtime_ns
    rewards = [{"name": f"{files}/rewards.py:not_there"}]
    with pytest.raises(RewardError, match="has no function 'not_there'"):
        train(config(files, run_dir, rewards=rewards, checkpoint={"resume": resume}))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert (run_dir / "config.yaml").stat().st_mtime_ns == before
    assert {path.name for path in run_dir.iterdir()} <= {"config.yaml", "logs"}
