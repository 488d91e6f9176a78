"""Profiles the steps of ``logging.profile_steps``; every host records itself and its devices.

Consecutive steps form one recording. Steps 3, 4 and 10 give two recordings, with these files of host 0:

    steps_3-4_host_0.json.gz                        for Perfetto (https://ui.perfetto.dev), in Chrome's JSON format
    plugins/profile/steps_3-4/host_0.xplane.pb      for TensorBoard's profile plugin, at the path it expects
    step_10_host_0.json.gz
    plugins/profile/step_10/host_0.xplane.pb

The main thread's spans are named after stages (`Watch.stage`) and the host's work for an engine (`EngineUse`).
"""

import gzip
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import jax
from jax._src.profiler import _profile_state
from jax.profiler import ProfileOptions, StepTraceAnnotation

from tpu_grpo.hosts.host_log import logger

TENSORBOARD_DIR = Path("plugins") / "profile"
"""TensorBoard's plugin looks for recordings in this subdirectory of its log directory."""
HEAD_BYTES = 4096
"""The metadata before the events of a trace is much shorter than this."""
COMPRESSION = 5


class Timeline:
    """Records the given steps of this host, and writes the files into a directory.

    If a recording cannot be written, the run goes on without further recordings; a note and the host's log say so.
    """

    def __init__(self, steps: Collection[int], directory: Path, host: int, note: Callable[[str], None]):
        self._steps = frozenset(steps)
        self._directory = directory
        self._host = f"host_{host}"
        self._own = directory / f".{self._host}"
        """Where the profiler writes, before the files get their names."""
        self._note = note
        self._recording: list[int] = []
        """The steps recorded so far in the current recording; empty between recordings."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End a recording that an error or the end of the run cut short, and write what was recorded."""
        if self._recording:
            self._end()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record the block if ``step`` is one of the steps to profile."""
        if step in self._steps and (self._recording or self._begin(step)):
            self._recording.append(step)
        with StepTraceAnnotation("step", step_num=step):
            yield
        if self._recording and step + 1 not in self._steps:
            self._end()

    def _begin(self, step: int) -> bool:
        options = ProfileOptions()
        options.python_tracer_level = 0  # recording all Python calls would slow the run and hide the stages
        try:
            jax.profiler.start_trace(self._own, profiler_options=options)
        except RuntimeError as error:  # other code in this process is recording
            self._give_up(f"of step {step} was not begun", error)
            return False
        return True

    def _give_up(self, what: str, error: Exception) -> None:
        self._steps = frozenset()
        logger.warning("the timeline %s: %s", what, error)
        self._note(f"the timeline {what}: {error}; the run goes on")

    def _end(self) -> None:
        first, last = self._recording[0], self._recording[-1]
        name, self._recording = f"step_{first}" if first == last else f"steps_{first}-{last}", []
        try:
            jax.profiler.stop_trace()
            self._name_files(name)
            self._note(f"the timeline {name} is in {self._directory}")
        except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
            with _profile_state.lock:
                _profile_state.reset()  # else jax keeps the failed recording, and cannot begin another
            self._give_up(f"{name} was not written to {self._directory}", error)
        finally:
            shutil.rmtree(self._own, ignore_errors=True)

    def _name_files(self, name: str) -> None:
        """Move the profiler's files to their final paths; raises ValueError unless there is one of each kind."""
        (xplane,) = self._own.glob("plugins/profile/*/*.xplane.pb")
        (trace,) = self._own.glob("plugins/profile/*/*.trace.json.gz")
        write_for_perfetto(trace, self._directory / f"{name}_{self._host}.json.gz")
        target = self._directory / TENSORBOARD_DIR / name / f"{self._host}.xplane.pb"
        target.parent.mkdir(parents=True, exist_ok=True)
        xplane.replace(target)


def write_for_perfetto(trace: Path, target: Path) -> None:
    """Copy the profiler's trace without its leading metadata, which Perfetto does not read.

    A trace can have a million events. Parsing them would hold the GIL, and other threads, such as those of `Watch`,
    would have to wait.

    Raises:
        ValueError: if the events do not begin within the first ``HEAD_BYTES``.
    """
    with gzip.open(trace, "rb") as source, gzip.open(target, "wb", compresslevel=COMPRESSION) as copy:
        head = source.read(HEAD_BYTES)
        copy.write(b'{"displayTimeUnit":"ns",' + head[head.index(b'"traceEvents":') :])
        shutil.copyfileobj(source, copy)
