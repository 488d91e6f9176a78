"""A cache of what the compiler said of programs, because jax's own cache holds no program that cannot run here.

The files lie in ``$TPU_GRPO_CACHE``, or in the user's cache directory, under ``plans``. Delete them to compile anew.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from tpu_grpo.config.caching import cache_directory

Program = tuple[jax.stages.Lowered, Sequence[Any]]
"""A lowered program, and the devices that it is compiled for."""


def cached_figures(program: Program, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the figures stored for this program, its devices and this compiler, or None if there are none."""
    path = _path(program, options)
    return json.loads(path.read_text()) if path.exists() else None


def store_figures(program: Program, options: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    """Write the figures of a program; the file appears whole or not at all."""
    path = _path(program, options)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(figures))
    os.replace(unfinished, path)


def _path(program: Program, options: Mapping[str, Any]) -> Path:
    """Name the file by a digest of everything that decides the figures."""
    lowered, devices = program
    decides = (
        lowered.as_text(),
        sorted(options.items()),
        [(device.device_kind, device.id, device.coords) for device in devices],
        os.environ.get("LIBTPU_INIT_ARGS", ""),
        [version(name) for name in ("jax", "jaxlib", "libtpu")],
    )
    return cache_directory() / "plans" / f"{hashlib.sha256(repr(decides).encode()).hexdigest()[:24]}.json"
