"""``summary.json``: what a run came to, in one small file."""

import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpu_grpo.metrics.jsonl import jsonable, replace_text

SUMMARY_FILE = "summary.json"
EDGE_STEPS = 5
PACKAGES = (
    "tpu-grpo",
    "jax",
    "jaxlib",
    "libtpu",
    "google-tunix",
    "sglang-jax",
    "flax",
    "optax",
    "orbax-checkpoint",
    "transformers",
    "tokenizers",
    "numpy",
)


def build_summary(
    metrics_lines: Sequence[Mapping[str, Any]],
    *,
    params_digest: str,
    versions: Mapping[str, str],
    evaluation: Mapping[str, Any],
) -> dict[str, Any]:
    """The last value of every metric, and what only the whole run can tell.

    ``steps`` is the last step. ``rewards/first_mean`` and ``rewards/last_mean`` are means of ``rewards/mean`` over the
    first and the last five steps that have one; with fewer than ten steps they share some. ``evaluation`` is added
    under the names it comes with.
    """
    summary: dict[str, Any] = {}
    for line in metrics_lines:
        summary.update(line)
    rewards = [line["rewards/mean"] for line in metrics_lines if line.get("rewards/mean") is not None]
    if rewards:
        first, last = rewards[:EDGE_STEPS], rewards[-EDGE_STEPS:]
        summary["rewards/first_mean"] = sum(first) / len(first)
        summary["rewards/last_mean"] = sum(last) / len(last)
    summary["steps"] = summary.get("step", 0)
    return {**summary, **evaluation, "params_digest": params_digest, "versions": dict(versions)}


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> Path:
    """Write ``summary.json`` as a whole or not at all; numbers that are not finite become null."""
    path = run_dir / SUMMARY_FILE
    text = json.dumps(jsonable(summary), indent=2, ensure_ascii=False, allow_nan=False)
    replace_text(path, text + "\n")
    return path


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what a run computes; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
