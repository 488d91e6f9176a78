"""What is kept of an environment after its episode: its attributes one by one, for the rewards that ask for them."""

import pickle
from collections.abc import Mapping
from typing import Any

from tpu_grpo.records.episode import KeptEnvironment

MOST_BYTES = 2**20
"""A larger attribute is left out."""
MOST_BYTES_TOGETHER = 2**24
"""Attributes beyond so many bytes together are left out."""


def keep(source: str, instance: Any) -> KeptEnvironment:
    """Pickle the attributes of an environment of the class ``source``; what cannot be kept is named with its reason."""
    attributes: dict[str, bytes] = {}
    left_out: dict[str, str] = {}
    together = 0
    for name, value in _attributes(instance).items():
        try:
            data = pickle.dumps(value)
        except Exception as error:  # user code: anything can come
            left_out[name] = f"it cannot be pickled: {type(error).__name__}: {error}"[:500]
            continue
        if len(data) > MOST_BYTES:
            left_out[name] = f"it takes {len(data):,} bytes, and an attribute may have {MOST_BYTES:,}"
        elif together + len(data) > MOST_BYTES_TOGETHER:
            left_out[name] = f"the attributes before it take {together:,} of {MOST_BYTES_TOGETHER:,} bytes"
        else:
            attributes[name] = data
            together += len(data)
    return KeptEnvironment(source, attributes, left_out)


def _attributes(instance: Any) -> Mapping[str, Any]:
    """Return the attributes of an instance, those in its slots too."""
    state: Any = object.__getstate__(instance)
    parts = state if isinstance(state, tuple) else (state,)
    return {name: value for part in parts if part for name, value in part.items()}
