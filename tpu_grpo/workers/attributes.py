"""Passes an environment's attributes to rewards, as bytes that only worker processes pickle and unpickle.

Environments and rewards run in different processes. So when an environment ends, its attributes are pickled one by one,
and the reward's process rebuilds an object of the environment's class from them. Rewards can then read
``environment.counter`` and call methods. Reading an attribute that could not be pickled, such as a connection, raises
an error with the reason. Other names go to the class's ``__getattr__``, if it has one.
"""

import base64
import pickle
from typing import Any

from tpu_grpo.config.plugins import find_function
from tpu_grpo.records.episode import KeptEnvironment
from tpu_grpo.records.errors import TpuGrpoError

MOST_BYTES = 2**20
"""The most bytes of an attribute; a larger attribute is left out."""
MOST_BYTES_TOGETHER = 2**24
"""The most bytes of all attributes together; further attributes are left out."""


def keep(source: str, instance: Any) -> KeptEnvironment:
    """Pickle an environment's attributes, and the reasons why others are left out; ``source`` names the class."""
    attributes: dict[str, bytes] = {}
    left_out: dict[str, str] = {}
    together = 0
    state: Any = object.__getstate__(instance)  # for a class with slots, a tuple of two dicts
    parts = state if isinstance(state, tuple) else (state,)
    for name, value in (item for part in parts if part for item in part.items()):
        try:
            data = pickle.dumps(value)
        except Exception as error:  # user code can raise anything
            left_out[name] = f"it cannot be pickled: {type(error).__name__}: {error}"[:500]
            continue
        if len(data) > MOST_BYTES:
            left_out[name] = f"it takes {len(data):,} bytes, and an attribute may have {MOST_BYTES:,}"
        elif together + len(data) > MOST_BYTES_TOGETHER:
            left_out[name] = f"the attributes before it take {together:,} of {MOST_BYTES_TOGETHER:,} bytes"
        else:
            attributes[name] = data
            together += len(data)
    return KeptEnvironment(source, base64.b64encode(pickle.dumps((attributes, left_out))))


def rebuilt(kept: KeptEnvironment, error_type: type[TpuGrpoError]) -> Any:
    """Rebuild an object of an environment's class from its pickled attributes. Only workers may call it. Raises
    ``error_type`` for a class that cannot be found any more, or attributes that cannot be unpickled."""
    found = find_function(kept.source, "environment", error_type)
    own = getattr(found, "__getattr__", None)
    attributes, left_out = pickle.loads(base64.b64decode(kept.state))

    def missing(self: Any, name: str) -> Any:
        if name in left_out:
            raise AttributeError(f"{name!r} was not kept of the environment: {left_out[name]}")
        if own is not None:
            return own(self, name)
        raise AttributeError(f"the environment has no attribute {name!r}")

    shown = type(found.__name__, (found,), {"__getattr__": missing}) if isinstance(found, type) else found
    instance = object.__new__(shown)
    for name, value in attributes.items():
        try:
            object.__setattr__(instance, name, pickle.loads(value))
        except Exception as error:  # user code can raise anything
            raise error_type(
                f"the attribute {name!r} of environment {kept.source} must be readable in another process, got "
                f"{type(error).__name__}: {error}"
            ) from error
    return instance
