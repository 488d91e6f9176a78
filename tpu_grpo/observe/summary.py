"""Builds the content of ``summary.json``, the results of a run in one small file."""

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tpu_grpo.observe.json_lines import numbers

EDGE_STEPS = 5
"""The number of steps over which the first and the last reward of a run are averaged."""
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
    changes: Sequence[Mapping[str, Any]] = (),
    ended_early: str | None = None,
) -> dict[str, Any]:
    """Collect the last value of every metric, and figures of the whole run.

    ``steps`` is the last step. ``rewards/first_mean`` and ``rewards/last_mean`` are means of ``rewards/mean`` over the
    first and the last five steps that have a reward; these overlap if there are fewer than ten. ``evaluation`` holds
    fields that are added as they are. ``changes`` are the settings that were changed when the run was continued, and
    ``ended_early`` says why the run ended before ``run.max_steps``; both are left out if empty.
    """
    summary: dict[str, Any] = {}
    for line in metrics_lines:
        summary.update(line)
    if rewards := numbers(metrics_lines, "rewards/mean"):
        summary["rewards/first_mean"], summary["rewards/last_mean"] = edge_means(rewards)
    summary["steps"] = summary.get("step", 0)
    if changes:
        summary["changes"] = list(changes)
    if ended_early:
        summary["ended_early"] = ended_early
    return {**summary, **evaluation, "params_digest": params_digest, "versions": dict(versions)}


def edge_means(values: Sequence[float]) -> tuple[float, float]:
    """Return the means of the first and of the last five values; there must be at least one value."""
    first, last = values[:EDGE_STEPS], values[-EDGE_STEPS:]
    return sum(first) / len(first), sum(last) / len(last)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect a run's results, as far as they are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
