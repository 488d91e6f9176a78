"""Calls the user's callbacks with a run's metrics and samples, on host 0. A callback may ask the run to stop.

    class Watcher:                                     # logging.callbacks: [my_callbacks.py:Watcher]
        def __init__(self, config): ...                # the run's config, a nested dictionary
        def on_step(self, metrics, samples): ...       # as in metrics.jsonl, and all B completions as in samples.jsonl
        def on_evaluation(self, metrics, samples): ... # step and evaluation/*, and lines of evaluations/<step>.jsonl
        def close(self): ...                           # called however the run ends

A class needs ``on_step`` or ``on_evaluation``; other methods are optional. If one of these two returns True, the run
saves a checkpoint after the current step and ends, as after Ctrl-C, so that it can be continued. Functions that are
passed to `tpu_grpo.train` get the arguments of these methods.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from tpu_grpo.config.plugins import find_function
from tpu_grpo.records.errors import CallbackError, ConfigError

EventFunction = Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], bool | None]
"""Takes metrics and samples; True asks the run to stop."""
EVENTS = ("on_step", "on_evaluation")


class Callback:
    """Calls the methods of a user's object, as far as it has them. ``make`` creates the object when the run begins."""

    def __init__(self, name: str, make: Callable[[Mapping[str, Any]], object]) -> None:
        self.name, self._make = name, make
        self._target: object = None
        self.asked_to_stop = False

    def begin(self, config: Mapping[str, Any]) -> None:
        """Create the user's object."""
        self._target = self._try("its constructor", self._make, config)

    def call(self, event: str, metrics: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """Call the method of an event with metrics and samples, and record whether the run is to stop.

        Raises:
            CallbackError: the method raises, or returns something other than None, True or False.
        """
        if (method := getattr(self._target, event, None)) is None:
            return
        answer = self._try(f"{event} of step {metrics['step']}", method, dict(metrics), samples)
        if answer is not None and not isinstance(answer, bool):
            raise CallbackError(
                f"callback {self.name}: {event} must return True to stop the run, or nothing, got {answer!r}; mend it"
            )
        self.asked_to_stop |= bool(answer)

    def close(self) -> None:
        """Call the object's ``close``, if it has one; raises CallbackError as `call` does."""
        if (method := getattr(self._target, "close", None)) is not None:
            self._try("close", method)

    def _try(self, where: str, call: Callable[..., Any], *given: Any) -> Any:
        try:
            return call(*given)
        except Exception as error:  # users' code may raise anything
            raise CallbackError(
                f"callback {self.name} failed in {where}, got {type(error).__name__}: {error}; mend it or leave it out"
            ) from error


def find_callbacks(
    names: Sequence[str], on_step: EventFunction | None = None, on_evaluation: EventFunction | None = None
) -> tuple[Callback, ...]:
    """Return callbacks for the named classes (``logging.callbacks``), then for the functions; none is called yet.

    Raises:
        ConfigError: a class cannot be found, cannot be made from the config alone, or has no method of EVENTS.
    """
    found = []
    for name in names:
        make: Any = find_function(name, "callback", ConfigError)
        if not any(hasattr(make, event) for event in EVENTS):
            raise ConfigError(
                f"logging.callbacks must name classes with on_step or on_evaluation, got {name} with neither; add one"
            )
        try:
            inspect.signature(make).bind({})
        except TypeError:
            raise ConfigError(
                f"a callback must be made from the config alone, got {name}{inspect.signature(make)}; write def "
                "__init__(self, config): ..."
            ) from None
        found.append(Callback(name, make))
    for event, function in zip(EVENTS, (on_step, on_evaluation), strict=True):
        if function is not None:
            target = SimpleNamespace(**{event: function})
            found.append(Callback(f"{event}={getattr(function, '__qualname__', function)}", lambda _, it=target: it))
    return tuple(found)
