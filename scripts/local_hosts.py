"""Train as several hosts on this machine.

    python scripts/local_hosts.py --hosts 2 --devices-per-host 4 -- [CONFIG.yaml] [section.key=value ...]

Each host is a process of scripts/run.py with CPU devices of its own; all processes get the arguments after --. Every
line of output begins with the number of its host. The exit code is 0, or that of the host that failed first.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import beside

RUN = Path(__file__).resolve().with_name("run.py")
USAGE = (
    "python scripts/local_hosts.py --hosts N --devices-per-host D [--command PROGRAM] [--grace SECONDS] "
    "-- [CONFIG.yaml] [section.key=value ...]"
)


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    from tpu_grpo.hosts.local_hosts import run_local_hosts
    from tpu_grpo.records.errors import ConfigError, say

    options = _parser().parse_args(arguments)
    try:
        return run_local_hosts(
            [sys.executable, str(RUN)] if options.command is None else shlex.split(options.command),
            options.words,
            hosts=options.hosts,
            devices_per_host=options.devices_per_host,
            grace_seconds=options.grace,
        )
    except ConfigError as error:
        say(error)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(usage=USAGE, description="Train as several hosts on this machine.")
    parser.add_argument("--hosts", type=int, required=True, help="processes to start")
    parser.add_argument("--devices-per-host", type=int, required=True, help="CPU devices of each")
    parser.add_argument("--command", help="what each host runs, split like a shell's line (default: scripts/run.py)")
    parser.add_argument(
        "--grace",
        type=float,
        default=60.0,
        help="seconds the others have to end once a host failed, or all once the run is stopped (default: 60)",
    )
    parser.add_argument("words", nargs="*", metavar="ARGUMENT", help="passed to every host")
    return parser


if __name__ == "__main__":
    beside.prepare()
    sys.exit(main(sys.argv[1:]))
