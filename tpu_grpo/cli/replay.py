"""``scripts/run.py --replay FILE``: an update that was not finite is done again, alone."""

from collections.abc import Sequence
from pathlib import Path

from tpu_grpo.cli.starting import joined_hosts, prepare
from tpu_grpo.config import changed_config
from tpu_grpo.hosts import choose_platform
from tpu_grpo.records.errors import ConfigError

PROCESS = ("coordinator", "count", "index")
"""The settings of hosts that differ from process to process, or from one start to the next."""


def replay_and_print(path: Path, words: Sequence[str]) -> int:
    """Do the update of a file again, with the config that it holds and the overrides in ``words``.

    Which processes do it is not the run's: hosts.coordinator, count and index are those in ``words``.
    """
    if other := [word for word in words if "=" not in word]:
        raise ConfigError(f"--replay takes the config from its file, got {other[0]}; leave it out")
    choose_platform()  # before jax is imported, which happens now
    from tpu_grpo.run.non_finite import read_update

    kept = read_update(path)
    hosts = {name: value for name, value in kept.settings["hosts"].items() if name not in PROCESS}
    config = changed_config({**kept.settings, "hosts": hosts}, words)
    prepare(config)
    with joined_hosts(config) as (hosts, _):
        from tpu_grpo.run.non_finite import replay

        for line in replay(kept, config, hosts):
            if hosts.is_first:
                print(line, flush=True)
    return 0
