"""The command line of ``scripts/plan.py``."""

import argparse
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from tpu_grpo.config import RunConfig, load_config
from tpu_grpo.errors import TpuGrpoError, say
from tpu_grpo.planning.process import run_in_child
from tpu_grpo.planning.slices import open_slice, prepare

ABOUT = """Says whether a run fits a TPU slice, by compiling the run's own programs for it; no TPU is needed.

Exit codes: 0 it fits; 2 it does not, or the configuration is bad; 1 compiling did not come to an end."""
USAGE = "python scripts/plan.py CONFIG.yaml [section.key=value ...] --slice v5e-16 [--fast] [--json] [--no-suggestion]"


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        config = load_config(Path(options.config), options.overrides)
        if (code := run_in_child()) is not None:
            return code
        return plan_and_print(
            config, options.slice, fast=options.fast, as_json=options.json, suggesting=not options.no_suggestion
        )
    except TpuGrpoError as error:
        say(error)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage=USAGE, description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("config", help="a run's config")
    parser.add_argument("overrides", nargs="*", help="settings, as scripts/run.py takes them")
    parser.add_argument("--slice", required=True, help="such as v5e-16, v5p-8, v6e-8")
    parser.add_argument("--fast", action="store_true", help="compile models of 2 and 4 layers and extrapolate")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-suggestion", action="store_true", help="do not look for what would fit")
    return parser


def plan_and_print(config: RunConfig, slice_name: str, *, fast: bool, as_json: bool, suggesting: bool) -> int:
    """Plan, print, and where it does not fit look for what would; returns the exit code.

    Raises:
        TpuGrpoError: for what no memory would help.
    """
    prepare(slice_name)
    _quiet()
    from tpu_grpo.planning import changes, plan, report

    found = plan.make_plan(config, open_slice(slice_name), fast=fast, say=report_progress)
    shown = report.as_json(found)
    if not as_json:
        print("\n".join(report.text(found)))
    if not found.fits and suggesting:
        suggestion = changes.suggest(found, report_progress)
        overrides = None if suggestion is None else list(suggestion.overrides)
        shown["suggestion"] = overrides
        if not as_json:
            print(_suggested(suggestion))
    if as_json:
        print(json.dumps(shown, indent=1))
    return 0 if found.fits else 2


def _suggested(suggestion: object) -> str:
    from tpu_grpo.launching.tpus import GIB
    from tpu_grpo.planning.changes import Suggestion

    if not isinstance(suggestion, Suggestion):
        return "no change of remat, micro-batches, running rows or meshes was found to fit; take a larger slice"
    plan = suggestion.plan
    return (
        f"this fits, compiled as well: {' '.join(suggestion.overrides)} (the {plan.worst.stage} needs most and leaves "
        f"{-plan.excess / GIB:.2f} GiB; a step takes {plan.seconds:.1f} s)"
    )


_STARTED = time.perf_counter()


def report_progress(what: str) -> None:
    """Progress, on stderr."""
    print(f"[{time.perf_counter() - _STARTED:6.1f} s] {what}", file=sys.stderr, flush=True)


def _quiet() -> None:
    """Before jax is imported."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger("absl").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
