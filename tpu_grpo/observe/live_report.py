"""Writes a run's page while the run goes on, and at its end (logging.report); and how the run ended, to end.json.

The page is written at the start, after the first step, and then so rarely that it takes at most a hundredth of the
time: if a write took 0.1 s, the next one comes at least 10 s later. A run of long steps writes it after every step.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from tpu_grpo.config.plugins import addition
from tpu_grpo.hosts import End, Hosts, this_process
from tpu_grpo.hosts.host_log import logger
from tpu_grpo.observe.console import Cell, is_in_notebook
from tpu_grpo.observe.run_files import END_FILE, REPORT_FILE, SUMMARY_FILE
from tpu_grpo.observe.run_log import Sink
from tpu_grpo.observe.standing import Standing, now, write_end
from tpu_grpo.observe.step_metrics import MetricValue
from tpu_grpo.records.errors import DataError
from tpu_grpo.records.json_files import read_json

SHARE = 0.01
"""The share of a run's time that may go into writing its page."""
WAIT_SECONDS = 2.0
"""How long a thread that ends the process waits for another thread to finish writing the page."""


class LiveReport(Sink):
    """Writes the page of a run on host 0, in a ``with`` block. It is a sink, but reads samples from ``samples.jsonl``.

        with LiveReport(run_dir, max_steps, hosts, start, directory.is_ours) as report:
            ...                                # report.write after every step

    Leaving the block writes how the run ended, to ``end.json`` and the page; so does a thread that ends the process.
    Disk errors are raised. Any other error in writing the page is reported once, and the page is not written again
    until the run ends. In a notebook the page is also shown below the cell that trains.

    ``start`` is the number of completed steps. ``is_ours`` tells whether this process still owns the directory.
    Without ``has_page`` only ``end.json`` is written.
    """

    def __init__(
        self,
        run_dir: Path,
        max_steps: int,
        hosts: Hosts,
        start: int,
        is_ours: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        *,
        has_page: bool = True,
    ) -> None:
        self._run_dir, self._hosts, self._is_ours, self._clock = run_dir, hosts, is_ours, clock
        self._step, self._most, self._has_page = start, max_steps, has_page
        self._lock = threading.Lock()
        self._next = 0.0
        self._began: tuple[int, float] | None = None
        """The first step and its end time. This step compiles, so the time left is estimated from later steps."""
        self._works = True
        self._cell: Cell | None = None

    def write(self, metrics: Mapping[str, MetricValue]) -> None:
        """Note that a step, whose metrics are on disk, is done, and write the page if it is due."""
        self._step = int(metrics["step"])
        began = self._clock()
        if self._began is None:
            self._began = (self._step, began)
        if self._works and began >= self._next:
            (first, since), left = self._began, None
            if self._step > first:
                left = (began - since) / (self._step - first) * (self._most - self._step)
            if self._cell is None and self._has_page and is_in_notebook():
                self._cell = Cell()  # created now, so that it is below the console's output
            with self._lock:
                self._write_page(Standing("going", self._step, self._most, at=now(), seconds_left=left))
            ended = self._clock()
            self._next = ended + (ended - began) / SHARE

    def __enter__(self) -> Self:
        (self._run_dir / END_FILE).unlink(missing_ok=True)
        for left in self._run_dir.glob(f"{REPORT_FILE}.*.tmp"):  # left by a kill
            left.unlink(missing_ok=True)
        self._write_page(Standing("going", self._step, self._most, at=now()))
        this_process.at_end = self._end_in_time
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            this_process.at_end = None
            self._write_end(End.by(None))
            return
        self._end_in_time(End.by(error))
        if self._hosts.count == 1:  # on several hosts, another thread may find the cause later, and write it
            this_process.at_end = None

    def _write_end(self, end: End) -> None:
        if end.outcome == "done":
            with suppress(DataError):  # the summary is missing or incomplete
                early = read_json(self._run_dir / SUMMARY_FILE).get("ended_early")
                end = replace(end, message=str(early or end.message))
        standing = Standing.after(end, self._step, self._most)
        write_end(self._run_dir, standing)
        self._write_page(standing)

    def _end_in_time(self, end: End) -> None:
        """Write how the run ended, unless another run owns the directory; any thread may call. Ignores disk errors."""
        if self._lock.acquire(timeout=WAIT_SECONDS):
            try:
                with suppress(OSError):  # the run ends by another error, and the disk may be its cause
                    if self._is_ours():
                        self._write_end(end)
            finally:
                self._lock.release()

    def _write_page(self, standing: Standing) -> None:
        if not self._has_page:
            return
        try:
            addition("report").write_report(self._run_dir, standing=standing)
            if self._cell is not None:
                self._cell.show_page((self._run_dir / REPORT_FILE).read_text())
        except OSError:
            raise
        except Exception as error:
            self._works = False
            logger.error("the page cannot be written", exc_info=error)
            print(
                f"{REPORT_FILE} cannot be written ({type(error).__name__}: {error}); the run goes on without it, and "
                "its other files are complete",
                file=sys.stderr,
                flush=True,
            )
