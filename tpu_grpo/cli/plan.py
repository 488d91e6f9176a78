"""The command line of ``scripts/plan.py``: parses arguments, plans in a child process, and prints the plan."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tpu_grpo.cli.starting import command_parser, exit_code_of, prepare
from tpu_grpo.config import RunConfig, load_config
from tpu_grpo.planning.slices import Target, open_slice, prepare as prepare_slice, run_in_child, with_rates
from tpu_grpo.records.errors import ConfigError

ABOUT = """Says whether a run fits a TPU slice, by compiling the run's own programs for it; no TPU is needed.

Exit codes: 0 it fits; 2 it does not, or the configuration is bad; 1 compiling did not come to an end."""
USAGE = (
    "python scripts/plan.py CONFIG.yaml [section.key=value ...] --slice v5e-16 [--mean-new-tokens N] "
    "[--price-per-chip-hour X] [--rates check.json] [--fast] [--alternatives] [--json] [--no-suggestion]"
)


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = command_parser(USAGE, ABOUT)
    parser.add_argument("config", help="a run's config")
    parser.add_argument("overrides", nargs="*", help="settings, as scripts/run.py takes them")
    parser.add_argument("--slice", required=True, help="such as v5e-16, v5p-8, v6e-8")
    parser.add_argument(
        "--mean-new-tokens", type=float, metavar="N", help="also estimate a step with completions of this mean length"
    )
    price = "also say what the run costs, in the currency of this price"
    parser.add_argument("--price-per-chip-hour", type=float, metavar="X", help=price)
    parser.add_argument("--rates", type=Path, metavar="check.json", help="plan with rates that tpu-grpo check measured")
    parser.add_argument("--fast", action="store_true", help="compile models of 2 and 4 layers and extrapolate")
    also = "also plan splits by whole hosts, weights and a cache of 8 bits, the fastest first; needs --mean-new-tokens"
    parser.add_argument("--alternatives", action="store_true", help=also)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-suggestion", action="store_true", help="do not look for what would fit")
    options = parser.parse_intermixed_args(arguments)
    return exit_code_of(lambda: _plan(options))


def _plan(options: argparse.Namespace) -> int:
    config = load_config(Path(options.config), options.overrides)
    mean, longest = options.mean_new_tokens, config.rollout.max_new_tokens
    if mean is not None and not 1 <= mean <= longest:
        raise ConfigError(
            f"--mean-new-tokens must be between 1 and rollout.max_new_tokens={longest}, got {mean:g}; take the mean "
            "length of the completions that you expect, completions/mean_tokens of a run"
        )
    if options.alternatives and mean is None:
        raise ConfigError("--alternatives needs --mean-new-tokens N, since they differ where lengths do; give it")
    if (price := options.price_per_chip_hour) is not None and not 0 <= price < float("inf"):
        raise ConfigError(f"--price-per-chip-hour must be a number >= 0, got {price:g}; look it up for your zone")
    if (code := run_in_child()) is not None:
        return code
    prepare_slice(options.slice)
    prepare(needs_hub=config.needs_hub)
    target = open_slice(options.slice, config.meshes.slices)
    return plan_and_print(
        config,
        target if options.rates is None else with_rates(target, options.rates),
        fast=options.fast,
        as_json=options.json,
        suggesting=not options.no_suggestion,
        compiling=options.alternatives,
        mean_new_tokens=mean,
        price=price,
    )


def plan_and_print(
    config: RunConfig,
    target: Target,
    *,
    fast: bool,
    suggesting: bool,
    as_json: bool = False,
    compiling: bool = False,
    mean_new_tokens: float | None = None,
    price: float | None = None,
) -> int:
    """Plan and print the plan; suggest settings if the run does not fit. Returns the exit code.

    ``mean_new_tokens`` adds an estimate of a step with this mean length of completions, and alternative settings;
    ``compiling`` adds the alternatives that have to be compiled. ``price`` (of a chip-hour) adds the cost of the run.

    Raises:
        TpuGrpoError: for a run that would fail with any amount of memory.
    """
    from tpu_grpo.planning.plan_report import (
        alternative_lines,
        packed_line,
        plan_as_json,
        plan_lines,
        suggestion_line,
    )
    from tpu_grpo.planning.slice_plan import alternatives, make_plan, packed_algorithm, suggest

    tell = (lambda line: None) if as_json else print
    plan = make_plan(config, target, fast=fast, say=report_progress)
    shown = plan_as_json(plan, mean_new_tokens, price)
    tell("\n".join(plan_lines(plan, mean_new_tokens, price)))
    if config.algorithm.tunix is not None:
        section = packed_algorithm(config.algorithm, config.data, config.optimizer)
        packed_config = config.model_copy(update={"algorithm": section})
        packed = make_plan(packed_config, target, fast=fast, say=report_progress)
        shown["packed"] = plan_as_json(packed, mean_new_tokens, price)
        tell(packed_line(plan, packed))
    if mean_new_tokens is not None:
        found = alternatives(plan, mean_new_tokens, compiled=compiling, say=report_progress)
        shown["alternatives"] = [
            {"overrides": list(each.overrides), **plan_as_json(each.plan, mean_new_tokens, price)} for each in found
        ]
        if found:
            tell("\n".join(["", *alternative_lines(plan, found, mean_new_tokens)]))
    if not plan.fits and suggesting:
        suggestion = suggest(plan, report_progress)
        shown["suggestion"] = None if suggestion is None else list(suggestion.overrides)
        tell(suggestion_line(suggestion))
    if as_json:
        print(json.dumps(shown, indent=1))
    return 0 if plan.fits else 2


_STARTED = time.perf_counter()


def report_progress(what: str) -> None:
    """Print the current work to stderr, with the seconds since the start."""
    print(f"[{time.perf_counter() - _STARTED:6.1f} s] {what}", file=sys.stderr, flush=True)
