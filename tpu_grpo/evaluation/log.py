"""Keeps ``evaluation.jsonl``, with a line per evaluation, continued when a run is, and ``best.json``, the best step."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpu_grpo.evaluation.evaluating import Evaluation
from tpu_grpo.evaluation.statistics import Estimate
from tpu_grpo.hosts import Hosts
from tpu_grpo.observe.metrics.jsonl import encode_line, jsonable, keep_records, read_records, write_json
from tpu_grpo.observe.metrics.run_files import BEST_FILE, EVALUATION_FILE


class EvaluationLog:
    """Remembers the evaluations of a run, the same on every host; host 0 keeps the files.

    Args:
        run_dir: the run's directory.
        start_step: steps already done; evaluations of later ones, and all of a fresh start, are dropped.
        best: the mode/reward that the best step is the highest of.
        hosts: every one of them makes a log.
    """

    def __init__(self, run_dir: Path, start_step: int, best: str, hosts: Hosts):
        self._directory = run_dir
        self._hosts = hosts
        self._best = best
        lines = self._kept(start_step) if hosts.is_first else []
        lines = json.loads(hosts.broadcast("the evaluations so far", json.dumps(lines).encode()))
        self.done = [evaluation_of(line) for line in lines]

    def _kept(self, start_step: int) -> list[dict[str, Any]]:
        path = self._directory / EVALUATION_FILE
        keep_records(path, lambda record: 0 < start_step >= record["step"])  # a fresh start keeps none
        return list(read_records(path, missing_ok=True))

    def add(self, evaluation: Evaluation) -> None:
        """Remember an evaluation, and which one is now the best."""
        self.done.append(evaluation)
        if not self._hosts.is_first:
            return
        with (self._directory / EVALUATION_FILE).open("ab") as file:
            file.write(encode_line(record_of(evaluation)))
        if self.best is not None:
            write_json(self._directory / BEST_FILE, self._described(self.best))

    @property
    def best(self) -> Evaluation | None:
        """Return the evaluation with the highest value, the first of equal ones; None if none has the value."""
        return best_of(self.done, self._best)

    @property
    def best_step(self) -> int | None:
        """Return the step of the best evaluation; None if there is none."""
        return None if self.best is None else self.best.step

    def _described(self, best: Evaluation) -> dict[str, Any]:
        estimate = value_of(best, self._best)
        assert estimate is not None  # it would not be the best
        return jsonable({"step": best.step, "of": self._best, "value": estimate.value, "interval": interval(estimate)})

    def summary(self) -> dict[str, Any]:
        """Return the first and the last evaluation and the best step, as summary.json has them."""
        if not self.done:
            return {}
        return {
            "evaluation/before": self.done[0].means,
            "evaluation/after": self.done[-1].means,
            "evaluation/intervals": record_of(self.done[-1])["intervals"],
            **({} if self.best is None else {"evaluation/best": self._described(self.best)}),
        }


def best_of(evaluations: Sequence[Evaluation], of: str) -> Evaluation | None:
    """Find the evaluation with the highest ``mode/reward``, the first of equal ones."""
    found = [(estimate.value, e) for e in evaluations if (estimate := value_of(e, of)) is not None]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def value_of(evaluation: Evaluation, of: str) -> Estimate | None:
    """Look up the estimate that ``mode/reward`` names, if it is there."""
    mode, _, reward = of.partition("/")
    return evaluation.estimates.get(mode, {}).get(reward)


def interval(estimate: Estimate) -> list[float]:
    """Return the low and the high end of an estimate's interval, and its number of problems."""
    return [estimate.low, estimate.high, estimate.problems]


def record_of(evaluation: Evaluation) -> dict[str, Any]:
    """Make a line of evaluation.jsonl."""
    intervals = {
        f"{mode}/{name}": interval(e) for mode, found in evaluation.estimates.items() for name, e in found.items()
    }
    return {"step": evaluation.step, **evaluation.metrics(), "intervals": intervals, "digest": evaluation.digest}


def evaluation_of(record: dict[str, Any]) -> Evaluation:
    """Read the evaluation back from a line of evaluation.jsonl, written by this version or one before it."""
    estimates: dict[str, dict[str, Estimate]] = {}
    lengths: dict[str, dict[str, float]] = {"tokens": {}, "truncated": {}, "failed": {}}
    intervals = record.get("intervals", {})
    for name, value in record.items():
        if not name.startswith("evaluation/"):
            continue
        _, mode, rest = name.split("/", 2)
        if mode in lengths:
            lengths[mode][rest] = value
        else:
            low, high, problems = intervals.get(f"{mode}/{rest}", (None, None, 0))
            low, high = (math.nan if bound is None else bound for bound in (low, high))
            estimates.setdefault(mode, {})[rest] = Estimate(value, low, high, problems)
    return Evaluation(record["step"], estimates, **lengths, digest=record.get("digest", ""))
