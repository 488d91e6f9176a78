"""What is known of prompts from their last group, and that a continued run knows the same."""

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tpu_grpo.data.prompt_draw import PASSES, PromptHistory
from tpu_grpo.hosts import Hosts
from tpu_grpo.observe.run_files import HISTORY_FILE
from tpu_grpo.records.errors import DataError

ALONE = Hosts()


def two_steps(run_dir: Path) -> None:
    with PromptHistory.open(run_dir, 5, 0, ALONE) as history:
        assert history.last("tokens", [4, 0]) == [None, None]
        history.add(1, 2, [4, 0], {"tokens": [10.5, 1 / 3], "pass_rate": [1.0, 0.125]})
        history.add(2, 6, [2, 4, 2], {"tokens": [7.0, 8.25, 9.0], "pass_rate": [1.0, 0.9, math.nan]})
        assert history.position == 6
        assert history.last("tokens", [0, 1, 2, 3, 4]) == [1 / 3, None, 9.0, None, 8.25]


def test_a_continued_run_knows_what_was_known_after_its_step(tmp_path: Path) -> None:
    two_steps(tmp_path)
    with (tmp_path / HISTORY_FILE).open("ab") as file:
        file.write(b'{"step": 3, "prom')  # torn by a kill
    with PromptHistory.open(tmp_path, 5, 2, ALONE) as history:
        assert history.last("tokens", range(5)) == [1 / 3, None, 9.0, None, 8.25]
        assert history.last("pass_rate", range(5)) == [0.125, None, None, None, 0.9]
        assert history.position == 6
    with PromptHistory.open(tmp_path, 5, 2, ALONE, passed_at=0.9) as history:
        assert history.known(PASSES).tolist() == [0, 0, 0, 0, 2]  # 2 was passed, and then not scored
    with PromptHistory.open(tmp_path, 5, 3, ALONE) as history:
        assert history.position is None  # nothing is known of step 3
    with PromptHistory.open(tmp_path, 5, 1, ALONE) as history:
        assert history.position == 2
        assert history.last("tokens", range(5)) == [1 / 3, None, None, None, 10.5]
        history.add(2, 3, [1], {"tokens": [3.0], "pass_rate": [0.0]})
    lines = [json.loads(line) for line in (tmp_path / HISTORY_FILE).read_text().splitlines()]
    assert lines == [
        {"step": 1, "position": 2, "prompts": [4, 0], "tokens": [10.5, 1 / 3], "pass_rate": [1.0, 0.125]},
        {"step": 2, "position": 3, "prompts": [1], "tokens": [3.0], "pass_rate": [0.0]},
    ]
    with PromptHistory.open(tmp_path, 5, 0, ALONE) as history:  # a run that starts over
        assert history.last("tokens", range(5)) == [None] * 5
        assert history.position == 0


def test_lines_of_runs_that_remembered_less_still_tell_lengths(tmp_path: Path) -> None:
    (tmp_path / HISTORY_FILE).write_text('{"step": 1, "prompts": [2, 0], "tokens": [7.5, 8.0]}\n')
    with PromptHistory.open(tmp_path, 3, 1, ALONE, passed_at=0.5) as history:
        assert history.last("tokens", range(3)) == [8.0, None, 7.5]
        assert history.last("pass_rate", range(3)) == [None] * 3
        assert history.position is None


def test_a_broken_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / HISTORY_FILE).write_text('{"step": 1\n{"step": 2, "prompts": [], "tokens": []}\n')
    with pytest.raises(DataError, match="must be one JSON object"):
        PromptHistory.open(tmp_path, 5, 2, ALONE)


def test_other_hosts_are_told_and_write_nothing(tmp_path: Path) -> None:
    two_steps(tmp_path)
    barrier, told = threading.Barrier(2), {}

    def continued(index: int) -> list[float | None]:
        def broadcast(name: str, value: bytes) -> bytes:
            told[index] = name, value
            barrier.wait(timeout=30)
            return told[0][1]

        hosts: Any = Hosts(index)
        hosts.broadcast = broadcast
        directory = tmp_path if index == 0 else tmp_path / "elsewhere"
        with PromptHistory.open(directory, 5, 2, hosts, passed_at=0.9) as history:
            assert history.position == 6
            assert history.known(PASSES).tolist() == [0, 0, 0, 0, 2]
            return history.last("tokens", range(5))

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(continued, range(2))
    assert first == second == [1 / 3, None, 9.0, None, 8.25]
    assert not (tmp_path / "elsewhere").exists()
