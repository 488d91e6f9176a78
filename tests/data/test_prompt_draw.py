"""Which prompts a step samples, what is known of prompts, and that a continued run draws and knows the same."""

import json
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.test_stream import stream
from tpu_grpo.config import DataSection
from tpu_grpo.data.prompt_draw import FATE, PASSES, PromptDraw, PromptHistory
from tpu_grpo.data.stream import PromptStream
from tpu_grpo.hosts import Hosts
from tpu_grpo.hosts.host_agreement import read_told
from tpu_grpo.observe.run_files import HISTORY_FILE
from tpu_grpo.records.errors import DataError

ALONE = Hosts()
POOLS = {"edges": [0.25, 0.75], "weights": [0.2, 1.0, 0.5]}


def settings(**data: Any) -> DataSection:
    return DataSection.model_validate({"prompts_per_step": 3, **data})


def draw_of(count: int, data: DataSection, seed: int = 0, start: int = 0) -> PromptDraw:
    """Prompts 0, 1, 2 ... in order."""
    history = PromptHistory(count, data.retire.at)
    return PromptDraw(stream(count, 3, shuffle=False), history, data, seed=seed, start=start)


def step(draw: PromptDraw, number: int, rates: dict[int, float] | float, used: int | None = None) -> list[int]:
    """Take a step whose first ``used`` prompts were needed; returns those that were sampled."""
    batch = draw.batch(number)
    done = batch.select(range(len(batch.prompts) if used is None else used))
    values = [rates if not isinstance(rates, dict) else rates.get(record, 0.5) for record in done.records]
    draw.done(number, done, {"tokens": [1.0] * len(values), "pass_rate": values})
    return list(batch.records)


def test_without_these_settings_steps_are_those_of_the_stream() -> None:
    of, draw = stream(50, 3), draw_of(50, settings())
    draw = PromptDraw(of, draw.history, settings(), seed=0, start=0)
    for number in range(1, 40):
        assert draw.batch(number) == of.batch(number)
        step(draw, number, 1.0)
    assert draw.metrics() == {}
    late = PromptDraw(of, PromptHistory(50), settings(), seed=0, start=0)
    late.history.position = None  # its file lacks the last step
    assert PromptDraw(of, late.history, settings(), seed=0, start=7).batch(8) == of.batch(8)


def test_what_was_sampled_and_not_needed_comes_again() -> None:
    draw = draw_of(10, settings(dynamic={"extra": 0.5}))
    assert step(draw, 1, 1.0, used=4) == [0, 1, 2, 3, 4]
    assert step(draw, 2, 1.0, used=5) == [4, 5, 6, 7, 8]
    batch = draw.batch(3)
    assert batch.records == (9, 0, 1, 2, 3)
    more = draw.batch(3, after=batch)
    assert (more.records, more.positions, more.round) == ((4, 5, 6, 7, 8), (14, 15, 16, 17, 18), 1)
    assert draw.batch(3, after=more).round == 2


def test_the_prompts_of_a_round_are_rounded_up() -> None:
    for prompts, extra, expected in ((8, 0.5, 12), (8, 0.0, 8), (30, 0.1, 33), (3, 0.5, 5), (10, 0.01, 11)):
        assert settings(prompts_per_step=prompts, dynamic={"extra": extra}).prompts_per_round == expected


def test_pools_by_an_independent_count() -> None:
    """20 prompts in order: unknown ones always come; of the others those come whose number is below their weight."""
    draw, rates = draw_of(20, settings(pools=POOLS), seed=3), {n: n / 20 for n in range(20)}
    expected, position, known = list[list[int]](), 0, dict[int, float]()
    for _ in range(60):
        batch = list[int]()
        while len(batch) < 3:
            record = position % 20
            rate = known.get(record)
            weight = 1.0 if rate is None else 0.2 if rate <= 0.25 else 1.0 if rate <= 0.75 else 0.5
            if weight == 1.0 or np.random.default_rng([3, FATE, position]).random() < weight:
                batch.append(record)
            position += 1
        expected.append(batch)
        known |= {record: rates[record] for record in batch}
    assert [step(draw, number, rates) for number in range(1, 61)] == expected
    counts = np.bincount(np.concatenate(expected[20:]), minlength=20)  # of some 9 epochs
    assert counts[:6].sum() < counts[6:12].sum() / 2
    assert counts[6:16].min() >= counts[16:].max() - 3
    assert draw.metrics()["prompts/pool_1_fraction"] == 0.3  # 0/20 to 5/20
    assert draw.metrics()["prompts/pool_2_fraction"] == 0.5
    assert draw.metrics()["prompts/pool_3_fraction"] == 0.2
    assert draw.metrics()["prompts/unseen_fraction"] == 0.0


def test_prompts_that_are_passed_often_enough_in_a_row_never_come_again() -> None:
    draw = draw_of(6, settings(retire={"at": 0.9, "times": 2}))
    assert step(draw, 1, {0: 0.9, 1: 1.0, 2: 0.89}) == [0, 1, 2]
    assert step(draw, 2, {3: 1.0, 4: 1.0}) == [3, 4, 5]
    assert step(draw, 3, {0: 0.95, 1: 0.5, 2: 1.0}) == [0, 1, 2]  # 0 is retired, 1 failed again
    assert draw.metrics() == {"prompts/unseen_fraction": 0.0, "prompts/retired": 1, "prompts/skipped": 0}
    assert step(draw, 4, {3: 1.0, 4: 0.0}) == [3, 4, 5]
    assert step(draw, 5, {1: 1.0, 2: 1.0, 4: 1.0}) == [1, 2, 4]
    assert draw.metrics()["prompts/retired"] == 3  # 0, 3 and 2
    assert draw.metrics()["prompts/skipped"] == 2


def test_when_all_are_retired_none_is_left() -> None:
    draw = draw_of(3, settings(retire={"at": 1.0, "times": 1}))
    step(draw, 1, {0: 1.0, 1: 1.0, 2: 0.0})
    assert draw.selection.exhausted is None
    assert step(draw, 2, 1.0) == [2, 2, 2]
    with pytest.raises(
        DataError, match=r"step 3 needs prompts, and none is left: 3 of 3 prompts are retired .*and 0 are"
    ):
        draw.batch(3)


def opened(run_dir: Path, stream: PromptStream, start: int, **data: Any) -> PromptDraw:
    section = DataSection(prompts_per_step=3, **data)
    return PromptDraw.open(run_dir, section, stream, start, ALONE, seed=4, carries=False)


ALL = {"dynamic": {"extra": 0.7, "rounds": 3}, "pools": POOLS, "retire": {"at": 0.9, "times": 2}}


def take_steps(run_dir: Path, first: int, last: int) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Sample two rounds a step, of which a part is needed, with pass rates that depend on step and prompt."""
    taken: list[tuple[Sequence[int], Sequence[int]]] = []
    with opened(run_dir, stream(40, 3, shuffle=False), first - 1, **ALL) as draw:
        for number in range(first, last + 1):
            batch = draw.batch(number)
            more = draw.batch(number, after=batch)
            taken.append((batch.positions, more.positions))
            used, rng = batch.select(range(1 + number % len(batch.prompts))), np.random.default_rng(number)
            rates = rng.choice([0.0, 0.5, 1.0], len(used.records)).tolist()
            draw.done(number, used, {"tokens": [2.0] * len(rates), "pass_rate": rates})
    return taken


def test_a_continued_run_draws_what_an_uninterrupted_one_would(tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = take_steps(tmp_path / "whole", 1, 60)
    assert take_steps(tmp_path / "parts", 1, 33) == whole[:33]
    assert take_steps(tmp_path / "parts", 21, 60) == whole[20:]  # from an earlier checkpoint
    files = [(tmp_path / name / "history.jsonl").read_text() for name in ("whole", "parts")]
    assert files[0] == files[1]
    assert len({positions for positions, _ in whole}) == 60


def test_a_history_that_lacks_the_last_step_is_refused_where_it_is_needed(tmp_path: Path) -> None:
    take_steps(tmp_path, 1, 5)
    with pytest.raises(DataError, match=r"history.jsonl must say where step 6 ended in the data, because data.dynamic"):
        opened(tmp_path, stream(40, 3), 6, **ALL)
    with opened(tmp_path, stream(40, 3), 6) as draw:
        assert draw.batch(7) == stream(40, 3).batch(7)


def two_steps(run_dir: Path) -> None:
    with closing(PromptHistory.open(run_dir, 5, 0, ALONE)) as history:
        assert history.last("tokens", [4, 0]) == [None, None]
        history.add(1, 2, [4, 0], {"tokens": [10.5, 1 / 3], "pass_rate": [1.0, 0.125]})
        history.add(2, 6, [2, 4, 2], {"tokens": [7.0, 8.25, 9.0], "pass_rate": [1.0, 0.9, math.nan]})
        assert history.position == 6
        assert history.last("tokens", [0, 1, 2, 3, 4]) == [1 / 3, None, 9.0, None, 8.25]


def test_a_continued_run_knows_what_was_known_after_its_step(tmp_path: Path) -> None:
    two_steps(tmp_path)
    with (tmp_path / HISTORY_FILE).open("ab") as file:
        file.write(b'{"step": 3, "prom')  # torn by a kill
    with closing(PromptHistory.open(tmp_path, 5, 2, ALONE)) as history:
        assert history.last("tokens", range(5)) == [1 / 3, None, 9.0, None, 8.25]
        assert history.last("pass_rate", range(5)) == [0.125, None, None, None, 0.9]
        assert history.position == 6
    with closing(PromptHistory.open(tmp_path, 5, 2, ALONE, passed_at=0.9)) as history:
        assert history.known(PASSES).tolist() == [0, 0, 0, 0, 2]  # 2 was passed, and then not scored
    with closing(PromptHistory.open(tmp_path, 5, 3, ALONE)) as history:
        assert history.position is None  # nothing is known of step 3
    with closing(PromptHistory.open(tmp_path, 5, 1, ALONE)) as history:
        assert history.position == 2
        assert history.last("tokens", range(5)) == [1 / 3, None, None, None, 10.5]
        history.add(2, 3, [1], {"tokens": [3.0], "pass_rate": [0.0]})
    lines = [json.loads(line) for line in (tmp_path / HISTORY_FILE).read_text().splitlines()]
    assert lines == [
        {"step": 1, "position": 2, "prompts": [4, 0], "tokens": [10.5, 1 / 3], "pass_rate": [1.0, 0.125]},
        {"step": 2, "position": 3, "prompts": [1], "tokens": [3.0], "pass_rate": [0.0]},
    ]
    with closing(PromptHistory.open(tmp_path, 5, 0, ALONE)) as history:  # a run that starts over
        assert history.last("tokens", range(5)) == [None] * 5
        assert history.position == 0


def test_a_broken_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / HISTORY_FILE).write_text('{"step": 1\n{"step": 2, "prompts": [], "tokens": []}\n')
    with pytest.raises(DataError, match="must be one JSON object"):
        PromptHistory.open(tmp_path, 5, 2, ALONE)


@pytest.mark.parametrize("position", ["", '"position": null, ', '"position": 1e999, '])
def test_a_line_that_no_run_writes_is_refused(tmp_path: Path, position: str) -> None:
    line = '{"step": 1, POSITION"prompts": [2, 0], "tokens": [7.5, 8.0], "pass_rate": [null, 1.0]}\n'
    (tmp_path / HISTORY_FILE).write_text(line.replace("POSITION", position))
    with pytest.raises(DataError, match="every line must be as a run writes it, got .* in that of step 1; restore"):
        PromptHistory.open(tmp_path, 3, 1, ALONE)


def test_other_hosts_are_told_and_write_nothing(tmp_path: Path) -> None:
    two_steps(tmp_path)
    barrier, told = threading.Barrier(2), {}

    def continued(index: int) -> list[float | None]:
        def broadcast(name: str, value: Any, kind: object, read: Callable[[Any], Any]) -> Any:
            told[index] = json.dumps(value).encode()
            barrier.wait(timeout=30)
            return read_told(told[0], kind, name, read)

        hosts: Any = Hosts(index)
        hosts.broadcast = broadcast
        directory = tmp_path if index == 0 else tmp_path / "elsewhere"
        with closing(PromptHistory.open(directory, 5, 2, hosts, passed_at=0.9)) as history:
            assert history.position == 6
            assert history.known(PASSES).tolist() == [0, 0, 0, 0, 2]
            return history.last("tokens", range(5))

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(continued, range(2))
    assert first == second == [1 / 3, None, 9.0, None, 8.25]
    assert not (tmp_path / "elsewhere").exists()
