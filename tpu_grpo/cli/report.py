"""The command line of ``scripts/report.py``: writes a page about one run, or a page that compares several runs.

It does not import jax, and only reads the directories of runs, so it can be used while the runs are active.
"""

from collections.abc import Sequence
from pathlib import Path

from tpu_grpo.cli.starting import command_parser, exit_code_of
from tpu_grpo.observe.comparison_page import write_comparison
from tpu_grpo.observe.published import read_published
from tpu_grpo.observe.run_files import COMPARISON_FILE
from tpu_grpo.observe.run_page import write_report
from tpu_grpo.observe.run_reader import read_run
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.run.lock import holder

ABOUT = """Writes a page that shows a run (report.html in its directory), or compares several (comparison.html here).

Runs may still go on, may have been stopped or killed, and may differ in length, metrics and settings."""
USAGE = "python scripts/report.py RUN [RUN ...] [--against NAME] [--output FILE.html]"


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    parser = command_parser(USAGE, ABOUT)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the directory of a run (run.dir)")
    parser.add_argument("--output", type=Path, metavar="FILE.html", help="write the page here")
    against = "compare a run with what was published of one: a name under configs/reference, or a file NAME.json"
    parser.add_argument("--against", metavar="NAME", help=against)
    options = parser.parse_args(arguments)
    return exit_code_of(lambda: _write(options.runs, options.output, options.against))


def _write(directories: Sequence[Path], output: Path | None, against: str | None) -> None:
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output must lie in a directory that is there, got {output}; make {output.parent} first")
    # whether each run is active, on this machine or another one
    going = [path.is_dir() and holder(path, guess=True) is not None for path in directories]
    if against is not None and len(directories) > 1:
        raise ConfigError(f"--against compares one run, got {len(directories)}; name one of them")
    if len(directories) == 1:
        published = None if against is None else read_published(against)
        print(write_report(directories[0], goes_on=going[0], path=output, published=published))
        if published is not None:
            run = read_run(directories[0], goes_on=going[0])
            said = published.sentences(run.lines, run.config)
            said = said or [f"the run has not come to {published.points[0].when} of {published.path.stem}"]
            print("\n".join(filter(None, [*said, published.doubt])))
        return
    runs = [read_run(path, goes_on=goes_on) for path, goes_on in zip(directories, going, strict=True)]
    print(write_comparison(runs, output or Path(COMPARISON_FILE)))
