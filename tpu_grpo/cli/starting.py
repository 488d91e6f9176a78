"""What the commands share at their start: the config from their words, jax's platform, and the hosts of the run.

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
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tpu_grpo.cli.output import lasting_output
from tpu_grpo.config import BUILTIN, HUB, SHIPPED_CONFIGS, RunConfig, load_config, settings
from tpu_grpo.config.setting_names import ABSENT, meant
from tpu_grpo.hosts import Hosts, Watch, choose_platform, in_time, start
from tpu_grpo.observe.run_files import CONFIG_FILE
from tpu_grpo.records.errors import ConfigError, TpuGrpoError, disk_errors_explained, say

DEFAULT_CONFIG = SHIPPED_CONFIGS / "demo_cpu.yaml"
"""The config of a command that names none."""
DEMO_NEEDS = ("model.path", "data.path", "data.sources")
"""A command without a config is the demo as long as these are built in."""


class CommandParser(argparse.ArgumentParser):
    """Parses the words of a command; for a setting that is written as a flag, the error shows the form to type."""

    def parse_intermixed_args(self, args: Sequence[str], namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
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
    """Return the setting that a word names, by its full name, its last part or another library's name, or None."""
    name, known = word.lstrip("-").replace("-", "_"), [setting for setting, *_ in settings()]
    return name if name in known else meant(name, known)


def _value(following: str) -> str:
    """Return the word after a setting, if it can be its value."""
    return following if following and following[0] != "-" and "=" not in following else "VALUE"


def command_parser(usage: str, about: str, words: str | None = None) -> argparse.ArgumentParser:
    """Make a command's parser, with config and overrides as positional words if their help, ``words``, is given."""
    parser = CommandParser(
        usage=usage, description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    if words is not None:
        parser.add_argument("words", nargs="*", metavar="CONFIG.yaml section.key=value", help=words)
    return parser


def config_from_words(words: Sequence[str]) -> RunConfig:
    """Load the config file that the first word names, with the overrides of the other words.

    Without a file it is the demo's config; but if the overrides set a model or data that is not built in, every other
    setting has its own default, because the demo's lengths suit two-digit sums only.

    Raises:
        ConfigError: for a file, a setting or an override that is wrong.
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
    """Load the config in a run's directory, which may have been moved, with overrides.

    Raises:
        ConfigError: for a directory without a run, and for overrides that are wrong.
    """
    if not (directory / CONFIG_FILE).is_file():
        raise ConfigError(f"RUN must be the directory of a run, with its {CONFIG_FILE}, got {directory}; name run.dir")
    return load_config(directory / CONFIG_FILE, [*overrides, f"run.dir={json.dumps(str(directory))}"])


def exit_code_of(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code; an error is printed in one line and gives its own code, Ctrl-C 1."""
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
    """Choose jax's platform and silence libraries; call this before they are imported."""
    choose_platform()
    if "jax" in sys.modules and (
        platform := os.environ.get("JAX_PLATFORMS")
    ):  # imported before, it would look for a TPU
        import jax

        if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
            jax.config.update("jax_platforms", platform)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors of the compiler only
    if not any(path.startswith(HUB) for path in (config.model.path, *config.data_paths.values())):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # every file a run reads is named in its config
    logging.getLogger("absl").setLevel(logging.ERROR)
    logging.raiseExceptions = False  # a log that cannot be written is no reason to print a traceback for every line
    warnings.filterwarnings("ignore", category=DeprecationWarning)


@contextmanager
def joined_hosts(config: RunConfig) -> Iterator[tuple[Hosts, Watch]]:
    """Join the hosts of the run, check that they agree on their settings and files, and watch them.

    Raises:
        LockstepError: for hosts that do not come, or that were started with something else.
    """
    with met_hosts(config) as (hosts, watch):
        if hosts.count > 1:
            from tpu_grpo.run.fingerprints import fingerprints

            hosts.agree_all(fingerprints(config))
        yield hosts, watch


@contextmanager
def met_hosts(config: RunConfig) -> Iterator[tuple[Hosts, Watch]]:
    """Join the hosts of the run, and watch them; raises LockstepError for hosts that do not come."""
    ours = config.hosts
    hosts = start(
        ours.coordinator, ours.count, ours.index, run=config.run.name, timeout_seconds=ours.start_timeout_seconds
    )
    silence = ours.lost_timeout_seconds
    with Watch(hosts, silence, every=min(5.0, silence / 4)) as watch, _errors_printed_first(), disk_errors_explained():
        yield hosts, watch


@contextmanager
def _errors_printed_first() -> Iterator[None]:
    """Print an error before the other hosts hear of it, so that theirs do not come first; a full pipe delays nobody."""
    try:
        yield
    except TpuGrpoError as error:
        in_time([partial(say, error)])
        raise
