import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tpu_grpo.observe.metrics.sinks import JsonlSink, SampleRow

ROW = SampleRow("1+1?", "2", {"exact": 1.0, "format": None}, 1.0, -0.5, tokens=3, finish_reason="stop")


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_per_step_that_reads_back_as_written(tmp_path: Path) -> None:
    metrics = {"step": 1, "rewards/mean": 0.1 + 0.2, "rollout/tokens_digest": "ab", "update/kl": float("nan")}
    sink = JsonlSink(tmp_path / "run", 0)
    sink.write(metrics)
    assert records(tmp_path / "run" / "metrics.jsonl") == [{**metrics, "update/kl": None}]  # before closing: flushed
    sink.close()


def test_a_line_per_sample_with_every_field(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path, 0)
    sink.samples(4, [ROW, ROW])
    sink.close()
    expected = {
        "step": 4,
        "prompt": "1+1?",
        "completion": "2",
        "rewards": {"exact": 1.0, "format": None},
        "reward": 1.0,
        "advantage": -0.5,
        "tokens": 3,
        "finish_reason": "stop",
    }
    assert records(tmp_path / "samples.jsonl") == [expected, expected]


def test_resuming_drops_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "rewards/mean": step / 7}) for step in (1, 2, 3, 4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 5, "rew')
    (tmp_path / "samples.jsonl").write_text('{"step": 2, "prompt": "p"}\n{"step": 4, "prompt": "q"}\n')
    sink = JsonlSink(tmp_path, 2)
    sink.write({"step": 3, "rewards/mean": 0.5})
    sink.close()
    assert records(tmp_path / "metrics.jsonl") == [
        {"step": 1, "rewards/mean": 1 / 7},
        {"step": 2, "rewards/mean": 2 / 7},
        {"step": 3, "rewards/mean": 0.5},
    ]
    assert records(tmp_path / "samples.jsonl") == [{"step": 2, "prompt": "p"}]
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "samples.jsonl"]


def test_a_whole_last_line_without_newline_is_kept_apart_from_the_next(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}')
    sink = JsonlSink(tmp_path, 1)
    sink.write({"step": 2})
    sink.close()
    assert [r["step"] for r in records(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_new_run_in_an_old_directory_starts_clean(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    JsonlSink(tmp_path, 0).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_kill_loses_no_finished_line(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from tpu_grpo.observe.metrics.sinks import JsonlSink\n"
        "sink = JsonlSink(Path(sys.argv[1]), 0)\n"
        "for step in (1, 2, 3): sink.write({'step': step})\n"
        "print('written', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "written\n"
        child.send_signal(signal.SIGKILL)
    assert [r["step"] for r in records(tmp_path / "metrics.jsonl")] == [1, 2, 3]
