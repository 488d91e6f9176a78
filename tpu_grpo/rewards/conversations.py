"""The environments of conversations, which rewards may read.

An environment is played in a process of its own, which is over when a reward is asked. Its attributes were kept, and
the reward's process makes an object of its class from them, so that rewards read ``environment.counter`` and call its
methods. What could not be kept, such as a connection, is not there; reading it says why. For other names a class that
has ``__getattr__`` answers itself.
"""

import pickle
from typing import Any

from tpu_grpo.config.plugins import find_function
from tpu_grpo.records.episode import KeptEnvironment
from tpu_grpo.records.errors import RewardError


def rebuilt(kept: KeptEnvironment) -> Any:
    """Make an object of an environment's class with the attributes that were kept.

    Raises:
        RewardError: for a class that cannot be found any more, or attributes that cannot be read.
    """
    found = find_function(kept.source, "environment", RewardError)
    own = getattr(found, "__getattr__", None)

    def missing(self: Any, name: str) -> Any:
        if own is not None and name not in kept.left_out:
            return own(self, name)
        why = kept.left_out.get(name)
        text = f"{name!r} was not kept of the environment" if why else f"the environment has no attribute {name!r}"
        raise AttributeError(f"{text}: {why}" if why else text)

    shown = type(found.__name__, (found,), {"__getattr__": missing}) if isinstance(found, type) else found
    instance = object.__new__(shown)
    for name, value in kept.attributes.items():
        try:
            object.__setattr__(instance, name, pickle.loads(value))
        except Exception as error:  # user code: anything can come
            raise RewardError(
                f"the attribute {name!r} of environment {kept.source} must be readable in another process, got "
                f"{type(error).__name__}: {error}"
            ) from error
    return instance
