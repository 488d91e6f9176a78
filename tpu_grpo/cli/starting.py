"""The common start of commands: the config from their arguments, jax's platform, and the hosts of the run.

Nothing heavy is imported here, because jax reads its platform from the environment when it is imported, and
``prepare`` must have chosen the platform by then.
"""

import argparse
import gc
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tpu_grpo.config import BUILTIN, SHIPPED_CONFIGS, HostsSection, RunConfig, load_config, settings
from tpu_grpo.config.setting_names import ABSENT, meant
from tpu_grpo.hosts import Hosts, Watch, choose_platform, in_time, start as join, this_process
from tpu_grpo.observe.run_files import CONFIG_FILE
from tpu_grpo.records.errors import ConfigError, TpuGrpoError, disk_errors_explained, say
from tpu_grpo.workers.streams import lasting_output

DEFAULT_CONFIG = SHIPPED_CONFIGS / "demo_cpu.yaml"
"""The config of a command that does not name one."""
FEW_COLLECTIONS = 50_000, 20, 100
"""The thresholds of Python's garbage collector until a run begins its first step. Imports and traces make much that
lives on; with Python's own thresholds, collections take a tenth of a start."""
DEMO_NEEDS = ("model.path", "data.path", "data.sources")
"""A command without a config uses the demo's, unless one of these settings names something that is not built in."""


class CommandParser(argparse.ArgumentParser):
    """Parses a command's arguments; the error for a setting written as a flag shows the correct form."""

    def parse_intermixed_args(self, args: Sequence[str], namespace: Any = None) -> Any:
        """Parse as argparse does; exits with code 2 for a setting that is written as a flag."""
        for word, following in zip_longest(args, args[1:], fillvalue=""):
            flag, equals, value = word.partition("=")
            if word == "--":
                break
            if flag.startswith("--") and flag not in self._option_string_actions and (setting := setting_named(flag)):
                value = value if equals else _value(following)
                self.exit(2, f"{flag} is no flag; settings are written without dashes: {setting}={value}\n")
            if flag.startswith("--") and (why := ABSENT.get(flag[2:].replace("-", "_"))):
                self.exit(2, f"{flag} is no flag; {why}\n")
        return super().parse_intermixed_args(args, namespace)


def setting_named(word: str) -> str | None:
    """Return the setting that a word means: its full name, its last part, or another library's name; else None."""
    name, known = word.lstrip("-").replace("-", "_"), [setting for setting, *_ in settings()]
    return name if name in known else meant(name, known)


def _value(following: str) -> str:
    """Return the word after a setting if it can be the value, else "VALUE"."""
    return following if following and following[0] != "-" and "=" not in following else "VALUE"


def command_parser(usage: str, about: str, words: str | None = None) -> argparse.ArgumentParser:
    """Make a command's parser. If ``words`` is given, the command takes a config and overrides, with this help text."""
    parser = CommandParser(
        usage=usage, description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    if words is not None:
        parser.add_argument("words", nargs="*", metavar="CONFIG.yaml section.key=value", help=words)
    return parser


def config_from_words(words: Sequence[str]) -> RunConfig:
    """Load the config file that the first word names, with the overrides of the other words.

    Without a file, the demo's config is used. But if the overrides set a model or data that is not built in, other
    settings have their defaults, because the demo's lengths suit two-digit sums only.

    Raises:
        ConfigError: for a wrong file, setting or override.
    """
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        if "=" not in word and not Path(word).exists() and (setting := setting_named(word)):
            form = f"{setting}={_value(following)}"
            raise ConfigError(f"a setting is written with an equals sign: {form}, got {word!r}")
    if words and "=" not in words[0]:
        return load_config(Path(words[0]), list(words[1:]))
    given = {name: value for name, _, value in (word.partition("=") for word in words)}
    if any(not given.get(name, BUILTIN).strip("'\" ").startswith(BUILTIN) for name in DEMO_NEEDS):
        return load_config(None, list(words))
    return load_config(DEFAULT_CONFIG, list(words))


def run_config(directory: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load the config in a run's directory, with overrides; run.dir becomes this directory.

    Raises:
        ConfigError: for a directory without a run, and for wrong overrides.
    """
    if not (directory / CONFIG_FILE).is_file():
        raise ConfigError(f"RUN must be the directory of a run, with its {CONFIG_FILE}, got {directory}; name run.dir")
    return load_config(directory / CONFIG_FILE, [*overrides, f"run.dir={json.dumps(str(directory))}"])


def exit_code_of(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code; an error is printed and gives its class's code, Ctrl-C gives 1."""
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


def prepare(*, needs_hub: bool) -> None:
    """Choose jax's platform and silence libraries; call this before jax is used. ``needs_hub`` says whether models or
    data may be fetched from the hub."""
    gc.set_threshold(*FEW_COLLECTIONS)
    choose_platform()
    platform = os.environ.get("JAX_PLATFORMS")
    if platform and "jax" in sys.modules:  # a jax that was imported before would look for a TPU
        import jax

        if not jax.config.jax_platforms:  # pyrefly: ignore[missing-attribute]
            jax.config.update("jax_platforms", platform)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # only errors of the compiler are shown
    if not needs_hub:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger("absl").setLevel(logging.ERROR)
    logging.raiseExceptions = False  # else an unwritable log prints a traceback for every line
    warnings.filterwarnings("ignore", category=DeprecationWarning)


@contextmanager
def start(config: RunConfig) -> Iterator[tuple[Hosts, Watch]]:
    """Choose jax's platform, meet the other hosts of the run, and watch them for as long as the block lasts.

    Raises:
        ConfigError: if the run has several hosts, and jax has created its devices already.
        LockstepError: if a host does not join in time, or was started with other settings or files.
    """
    prepare(needs_hub=config.needs_hub)
    with met_hosts(config.hosts, config.run.name) as (hosts, watch):
        if config.meshes.slices > 1:
            this_process.hosts_per_slice = max(1, hosts.count // config.meshes.slices)
        if hosts.count > 1:
            from tpu_grpo.run.fingerprints import fingerprints

            hosts.agree_all(fingerprints(config))
        yield hosts, watch


@contextmanager
def met_hosts(ours: HostsSection, run: str) -> Iterator[tuple[Hosts, Watch]]:
    """Join the hosts of the named run, and watch them; raises LockstepError if some do not join in time."""
    hosts = join(ours.coordinator, ours.count, ours.index, run=run, timeout_seconds=ours.start_timeout_seconds)
    silence = ours.lost_timeout_seconds
    with Watch(hosts, silence, every=min(5.0, silence / 4)) as watch, _errors_printed_first(), disk_errors_explained():
        yield hosts, watch


@contextmanager
def _errors_printed_first() -> Iterator[None]:
    """Print an error before the other hosts learn of it and print theirs; a full pipe delays this only briefly."""
    try:
        yield
    except TpuGrpoError as error:
        in_time([partial(say, error)])
        raise
