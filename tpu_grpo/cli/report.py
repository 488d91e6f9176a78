"""The command line of ``scripts/report.py``: writes a page about one run, or a page that compares several runs.

It does not import jax, and only reads the directories of runs, so it can be used while the runs are active.
"""

from collections.abc import Sequence
from pathlib import Path

from tpu_grpo.cli.starting import command_parser, exit_code_of
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.report.run_page import write_report
from tpu_grpo.run.lock import holder

ABOUT = """Writes a page that shows a run: report.html in its directory.

The run may still go on, or may have been stopped or killed."""
USAGE = "python scripts/report.py RUN [--output FILE.html]"


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    parser = command_parser(USAGE, ABOUT)
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a run (run.dir)")
    parser.add_argument("--output", type=Path, metavar="FILE.html", help="write the page here")
    options = parser.parse_args(arguments)
    return exit_code_of(lambda: _write(options.run, options.output))


def _write(directory: Path, output: Path | None) -> None:
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output must lie in a directory that is there, got {output}; make {output.parent} first")
    goes_on = directory.is_dir() and holder(directory, guess=True) is not None  # on this machine or another one
    print(write_report(directory, goes_on=goes_on, path=output))
