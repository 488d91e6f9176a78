"""The command line of ``scripts/run.py``: parses arguments, trains or checks, and returns an exit code.

Heavy modules are imported only when needed, so that help and error messages appear quickly.
"""

import argparse
import re
import signal
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tpu_grpo.cli.starting import CommandParser, config_from_words, exit_code_of, prepare, start
from tpu_grpo.config import RunConfig, RunSection, settings
from tpu_grpo.config.run_config import known_names
from tpu_grpo.config.setting_names import COMMON, nearest
from tpu_grpo.hosts import Hosts, SignalledStop, StopRequest, Watch, announce, choose_platform, may_have_others
from tpu_grpo.observe.run_files import REPORT_FILE
from tpu_grpo.records.errors import ConfigError

if TYPE_CHECKING:
    from tpu_grpo.observe.callbacks import EventFunction

ABOUT = """Trains a language model by GRPO with the rewards of the config.

Without a config it runs configs/demo_cpu.yaml, which shows a small model learning on a CPU within minutes.
--print-config shows the resolved config; --dry-run checks everything that can be checked without generating a token,
with --slice also whether the run fits that TPU slice, which need not be there."""
USAGE = """python scripts/run.py [CONFIG.yaml] [section.key=value ...] [--dry-run [--slice v5e-16] | --print-config]
       python scripts/run.py --help [SECTION | all]"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code: 0 done, 1 failed, 2 bad input, 3 hosts disagree, 4 stopped as asked."""
    options = _parser().parse_intermixed_args(arguments)
    return exit_code_of(lambda: _command(options))


def _command(options: argparse.Namespace) -> int:
    if options.help is not None:
        print(help_text(options.help))
        return 0
    config = config_from_words(options.words)
    if options.print_config:
        print(config.to_yaml(), end="")
        return 0
    if options.slice and not options.dry_run:
        raise ConfigError(f"--slice needs --dry-run, got --slice {options.slice} alone; a run finds its own devices")
    if not (options.slice or options.dry_run):
        return _train(config)
    _let_signals_come()
    return _dry_run_on(config, options.slice) if options.slice else _dry_run(config)


def _let_signals_come() -> None:
    """Unblock SIGINT and SIGTERM, which scripts/run.py blocks until the run's own handlers are installed."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))


def help_text(topic: str = "") -> str:
    """Describe settings with values, default and meaning. ``topic`` is a section, a setting or ``all``; without a
    topic, return the usage and the settings that most people change.

    Raises:
        ConfigError: there is no such section or setting.
    """
    every = list(settings())
    sections = ", ".join(dict.fromkeys(re.split(r"[.[]", name)[0] for name, *_ in every))
    first, last = [f"usage: {USAGE}", "", ABOUT, ""], []
    if not topic or "=" in topic or topic.endswith((".yaml", ".yml")):
        by_name = {entry[0]: entry for entry in every}
        shown = [by_name[name] for name in COMMON]
        first += ["The settings that most people change (name, values, default):", ""]
        last = [
            "",
            f"--help all lists all {len(every)} settings, and --help SECTION those of a section:",
            f"  {sections}",
        ]
    elif topic == "all":
        shown, first = every, [*first, "Settings (name, values, default):", ""]
    else:
        shown, first = [entry for entry in every if re.match(rf"{re.escape(topic)}(\.|\[|$)", entry[0])], []
    if not shown:
        hint = nearest(topic, known_names()) or f"sections: {sections}"
        raise ConfigError(f"--help takes a section, a setting, or all, got {topic}; {hint}")
    for name, kind, default, meaning in shown:
        first.append(f"  {name}  ({kind}; default {default})")
        first += textwrap.wrap(meaning, width=110, initial_indent="      ", subsequent_indent="      ")
    return "\n".join([*first, *last])


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(usage=USAGE, add_help=False, allow_abbrev=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--help", "-h", nargs="?", const="")
    for flag in ("--print-config", "--dry-run"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--slice")
    return parser


def _dry_run(config: RunConfig) -> int:
    with start(config) as (hosts, _):
        from tpu_grpo.run.directory import RunDirectory
        from tpu_grpo.run.inputs import open_inputs

        earlier = RunDirectory(config, hosts).look(guess=True)
        there = earlier.describe(config.run_dir, config.run, config.optimizer)
        inputs = open_inputs(config)
        from tpu_grpo.cli.dry_run import check

        found = check(inputs)
        if hosts.is_first:
            print("\n".join([*there, *found, "ok: nothing wrong found"]))
    return 0


def _dry_run_on(config: RunConfig, slice_name: str) -> int:
    """Check the config for a slice that this machine does not have, and print whether the run fits it."""
    from tpu_grpo.cli.plan import plan_and_print
    from tpu_grpo.planning.slices import open_slice, prepare as prepare_slice, run_in_child

    if (code := run_in_child()) is not None:
        return code
    prepare_slice(slice_name)
    prepare(needs_hub=config.needs_hub)
    target = open_slice(slice_name, config.meshes.slices)
    from tpu_grpo.cli.dry_run import check
    from tpu_grpo.run.inputs import open_inputs

    with target.as_jax_devices():
        print("\n".join([*check(open_inputs(config), target.devices), ""]))
    code = plan_and_print(config, target, fast=True, suggesting=False)
    print(
        f"no: it does not fit; `python scripts/plan.py CONFIG --slice {slice_name}` looks for changes that would"
        if code
        else "ok: nothing wrong found"
    )
    return code


def _train(config: RunConfig) -> int:
    choose_platform()
    with SignalledStop(meets_others=may_have_others(config.hosts.count)) as stop:
        with start(config) as (hosts, watch):
            stop.hosts_met(watch.report_end)
            trained = train_together(config, hosts, watch, stop)
        if hosts.is_first and trained.was_done:
            from tpu_grpo.run.directory import how_it_ended

            print(how_it_ended(trained.run, config.optimizer, trained.summary))
        elif hosts.is_first:
            print(closing_lines(trained.summary))
        if hosts.is_first and config.logging.report:
            print(f"look at {config.run_dir}/{REPORT_FILE}")
    return 0


class Trained(NamedTuple):
    """The result of a run."""

    run: RunSection
    """With the steps that ``run.epochs`` stands for."""
    summary: dict[str, Any]
    was_done: bool
    """Whether the run had been completed earlier, so that nothing was done now."""


def train_together(
    config: RunConfig,
    hosts: Hosts,
    watch: Watch,
    stop: StopRequest,
    on_step: "EventFunction | None" = None,
    on_evaluation: "EventFunction | None" = None,
) -> Trained:
    """Train on joined hosts; used by the command and `tpu_grpo.train`. A run that is done is left unchanged."""
    from tpu_grpo.observe.callbacks import find_callbacks
    from tpu_grpo.run.directory import RunDirectory
    from tpu_grpo.run.inputs import open_inputs

    inputs = None
    if config.run.epochs is not None:  # whether the run is done depends on the size of the data
        inputs = open_inputs(config, lambda: announce(hosts, "checking the data"))
        config = inputs.config
    earlier = RunDirectory(config, hosts).look()
    if earlier.summary is not None:
        return Trained(config.run, earlier.summary, was_done=True)
    earlier.refuse()
    callbacks = find_callbacks(config.logging.callbacks, on_step, on_evaluation)
    inputs = inputs or open_inputs(config, lambda: announce(hosts, "checking the data"))
    announce(hosts, "importing trainer and engine")
    from tpu_grpo.run.pipeline import train

    return Trained(config.run, train(inputs, hosts, watch, stop, callbacks), was_done=False)


def closing_lines(summary: dict[str, Any]) -> str:
    """Return the last lines of the output: the results of the run."""
    first, last = summary.get("rewards/first_mean"), summary.get("rewards/last_mean")
    lines = [f"done: {summary['steps']} steps"]
    if first is not None:
        lines.append(f"reward, mean of the first five steps {first:.3f}, of the last five {last:.3f}")
    before, after = summary.get("evaluation/before"), summary.get("evaluation/after")
    if before and after:
        for name in before["greedy"]:
            modes = [mode for mode in before if name in before[mode] and name in after[mode]]
            shown = ", ".join(f"{mode} {before[mode][name]:.3f} -> {after[mode][name]:.3f}" for mode in modes)
            lines += [f"held out, {name}: {shown}"] if shown else []
    if best := summary.get("evaluation/best"):
        lines.append(f"best: step {best['step']}, {best['of']} {best['value']:.3f}")
    return "\n".join(lines)
