"""Starts what the commands have in common: the config of their words, jax's platform, and the hosts of the run.

Nothing heavy is imported here: jax reads its platform from the environment when it is imported, and ``prepare`` should
have chosen it by then.
"""

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tpu_grpo.cli.output import lasting_output
from tpu_grpo.config import BUILTIN, HUB, RunConfig, load_config
from tpu_grpo.hosts import Hosts, Watch, choose_platform, in_time, start
from tpu_grpo.observe.run_files import CONFIG_FILE
from tpu_grpo.records.errors import ConfigError, TpuGrpoError, disk_errors_explained, say

DEFAULT_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "demo_cpu.yaml"
"""The config of a command that names none."""
DEMO_NEEDS = ("model.path", "data.path", "data.sources")
"""A command without a config is the demo as long as these are built in."""


def command_parser(usage: str, about: str, words: str | None = None) -> argparse.ArgumentParser:
    """Make the parser of a command; with ``words``, their help, it takes a config and settings wherever they stand."""
    parser = argparse.ArgumentParser(
        usage=usage, description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    if words is not None:
        parser.add_argument("words", nargs="*", metavar="CONFIG.yaml section.key=value", help=words)
    return parser


def config_from_words(words: Sequence[str]) -> RunConfig:
    """Load the config file that the first word names, with the overrides that follow.

    Without a file it is the demo's; but where the overrides name a model or data that is not built in, every other
    setting has its own default, because the demo's lengths suit two-digit sums only.

    Raises:
        ConfigError: for a file, a setting or an override that is wrong, or a default config that is not there.
    """
    if words and "=" not in words[0]:
        return load_config(Path(words[0]), list(words[1:]))
    given = {name: value for name, _, value in (word.partition("=") for word in words)}
    if any(not given.get(name, BUILTIN).strip("'\" ").startswith(BUILTIN) for name in DEMO_NEEDS):
        return load_config(None, list(words))
    if not DEFAULT_CONFIG.is_file():
        raise ConfigError(
            f"without a config a run takes {DEFAULT_CONFIG}, which is not there: the shipped configs come with the "
            "repository; name a config file, or install the package from a checkout with `pip install -e .`"
        )
    return load_config(DEFAULT_CONFIG, list(words))


def run_config(directory: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load the config of a run that lies in a directory, with overrides; the directory may have been moved.

    Raises:
        ConfigError: for a directory without a run, and for overrides that are wrong.
    """
    if not (directory / CONFIG_FILE).is_file():
        raise ConfigError(f"RUN must be the directory of a run, with its {CONFIG_FILE}, got {directory}; name run.dir")
    return load_config(directory / CONFIG_FILE, [*overrides, f"run.dir={json.dumps(str(directory))}"])


def exit_code_of(command: Callable[[], int | None]) -> int:
    """Run a command: its exit code, or that of its error, which the user is told in a line; 1 after Ctrl-C."""
    with lasting_output():
        try:
            with disk_errors_explained():
                return command() or 0
        except TpuGrpoError as error:
            say(error)
            return error.exit_code
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 1


def prepare(config: RunConfig) -> None:
    """Choose jax's platform, and silence libraries, before they are imported."""
    choose_platform()
    _tell_jax_the_platform()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors of the compiler only
    if not any(path.startswith(HUB) for path in (config.model.path, *config.data_paths.values())):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # every file a run reads is named in its config
    logging.getLogger("absl").setLevel(logging.ERROR)
    logging.raiseExceptions = False  # a log that cannot be written is no reason to print a traceback for every line
    warnings.filterwarnings("ignore", category=DeprecationWarning)


def _tell_jax_the_platform() -> None:
    """Give the platform to a jax that was imported before it was chosen, and would look for a TPU that is not there."""
    if "jax" in sys.modules and (platform := os.environ.get("JAX_PLATFORMS")):
        import jax

        if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
            jax.config.update("jax_platforms", platform)


@contextmanager
def joined_hosts(config: RunConfig) -> Iterator[tuple[Hosts, Watch]]:
    """Join the hosts of the run, and watch them once they agree on everything that they were started with.

    Raises:
        LockstepError: for hosts that do not come, or that were started with something else.
    """
    ours = config.hosts
    hosts = start(
        ours.coordinator, ours.count, ours.index, run=config.run.name, timeout_seconds=ours.start_timeout_seconds
    )
    silence = ours.lost_timeout_seconds
    with Watch(hosts, silence, every=min(5.0, silence / 4)) as watch, _errors_printed_first(), disk_errors_explained():
        if hosts.count > 1:
            from tpu_grpo.run.fingerprints import fingerprints

            hosts.agree_all(fingerprints(config))
        yield hosts, watch


@contextmanager
def _errors_printed_first() -> Iterator[None]:
    """Print an error before the other hosts hear of it, so that theirs do not come first; a full pipe delays nobody."""
    try:
        yield
    except TpuGrpoError as error:
        in_time([partial(say, error)])
        raise
