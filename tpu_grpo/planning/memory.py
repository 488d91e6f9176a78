"""Figures of programs that were compiled before, by the program: jax's own cache takes none that cannot run here.

They are kept in ``$TPU_GRPO_CACHE``, or the user's cache directory, under ``plans``; delete it to compile anew.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from tpu_grpo.models.builtin import cache_directory

Program = tuple[jax.stages.Lowered, Sequence[Any]]
"""What is compiled, and the devices it is for."""


def remembered(program: Program, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """The figures of this very program, for the same devices and compiler; None if it has not been compiled."""
    path = _path(program, options)
    return json.loads(path.read_text()) if path.exists() else None


def remember(program: Program, options: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    """Keep them; a file appears whole or not at all."""
    path = _path(program, options)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(figures))
    os.replace(unfinished, path)


def _path(program: Program, options: Mapping[str, Any]) -> Path:
    """Named by a digest of all that decides the figures."""
    lowered, devices = program
    decides = (
        lowered.as_text(),
        sorted(options.items()),
        [(device.device_kind, device.id, device.coords) for device in devices],
        os.environ.get("LIBTPU_INIT_ARGS", ""),
        [version(name) for name in ("jax", "jaxlib", "libtpu")],
    )
    return cache_directory() / "plans" / f"{hashlib.sha256(repr(decides).encode()).hexdigest()[:24]}.json"
