"""Watching a run of a slice from here: its newest metrics and its report, over ssh or from a bucket."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.launching import gcloud_syntax
from tests.launching.stand_in import StandIn
from tests.report.runs import leave_run
from tpu_grpo.cli.launch import main
from tpu_grpo.observe.standing import Standing, write_end
from tpu_grpo.report.run_page import write_report


def go_on(run_dir: Path) -> Callable[[float], None]:
    """Leave a run of two steps; at every wait it makes another, and after the fourth it ends."""
    steps = iter((3, 3, 4))

    def leave(step: int) -> None:
        write_report(leave_run(run_dir, step, name="mine"), goes_on=True)

    def wait(seconds: float) -> None:
        assert seconds == 7
        if (step := next(steps, None)) is not None:
            return leave(step)
        standing = Standing("done", 4, 10, exit_code=0, at="today")
        write_end(run_dir, standing)
        write_report(run_dir, standing=standing)
        return None

    leave(2)
    (run_dir / "checkpoints").mkdir()
    return wait


@pytest.mark.parametrize("place", ["runs/mine", "/mnt", "gs://bucket/mine"])
def test_a_run_is_watched_until_it_ends(
    place: str, ready: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if place.startswith("gs://"):
        run_dir = ready.bucket(place)
        monkeypatch.delenv("TPU_NAME")  # the TPU may be gone
    elif place == "/mnt":
        run_dir = tmp_path / "mnt" / "mine"
        place = str(run_dir)
    else:
        run_dir = ready.home(0) / ".tpu_grpo/code" / place
    monkeypatch.setattr("tpu_grpo.cli.launch.time", SimpleNamespace(sleep=go_on(run_dir)))
    monkeypatch.chdir(tmp_path)
    assert main(["watch", "--how", "vm", "--poll", "7", place]) == 0
    out, err = capsys.readouterr()
    lines = [line.partition("; written")[0] + line.partition("UTC.")[2] for line in out.splitlines()]
    assert lines == [
        "The run goes on: step 2 of 10 reward 0.200",
        "The run goes on: step 3 of 10 reward 0.300",
        "The run goes on: step 4 of 10 reward 0.400",
        "The run is done, after step 4 of 10. It ended today. reward 0.400",
    ]
    assert "look at watched/mine/report.html" in err
    assert err.count("$ gcloud") == 1  # once, though it is given again and again
    here = tmp_path / "watched" / "mine"
    assert {path.name for path in here.iterdir()} == {"config.yaml", "metrics.jsonl", "report.html", "end.json"}
    assert all((here / path.name).read_bytes() == (run_dir / path.name).read_bytes() for path in here.iterdir())
    for command in ready.calls():
        gcloud_syntax.check(command)


@pytest.mark.parametrize("words", ["--how vm runs/none", "--how vm gs://bucket/none", "--on gke gs://bucket/none"])
def test_a_run_that_is_not_there(words: str, ready: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", *words.split(), "--to", str(ready.root / "here")]) == 1
    told = capsys.readouterr().err
    assert "No such file or directory" in told or "Did not find existing container at: gs://bucket/none" in told
