"""The command line of ``scripts/check.py``: checks a machine row by row, and writes the findings.

    this process                packages, device files                before jax is imported
    a child process             hosts, numbers, speeds, a plan        if it dies, its last row is known
    processes of a run          a run that is killed and continued    once the devices are free again

Nothing that imports jax is imported in this process.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_grpo.cli.starting import command_parser, config_from_words, exit_code_of, met_hosts, prepare
from tpu_grpo.hosts import Hosts, choose_platform, keep_programs
from tpu_grpo.observe.run_files import CHECK_FILE, CHECK_PAGE, check_directory
from tpu_grpo.records.json_files import write_json
from tpu_grpo.records.untrusted_input import parse_json

if TYPE_CHECKING:
    from tpu_grpo.checking.findings import Done, Row

ABOUT = """Checks this machine, or all hosts of a slice, row by row: what is there, whether it computes what it should,
and how fast.

The config's model is checked at its real widths, with few layers and random weights; nothing is downloaded. On a slice
every worker runs the same command: scripts/launch.py run CONFIG --script scripts/check.py. What was found goes into
RUN_check/check.json and check.html beside run.dir.

Exit codes: 0 everything works; 1 something is broken; 2 the configuration is bad."""
USAGE = "python scripts/check.py [CONFIG.yaml] [section.key=value ...]"
AGREE_SECONDS = 300.0
"""The seconds that hosts wait for each other after a row."""
RUN_SECONDS = 300.0
"""Time limit for each process of the killed run."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = command_parser(USAGE, ABOUT, words="the config, and settings")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # for the child process: the file for its findings
    options = parser.parse_intermixed_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        check = partial(_check_rows, file=options.rows) if options.rows else partial(_check, scratch=Path(scratch))
        return exit_code_of(lambda: check(options.words))


def rows() -> "list[Row]":
    """Return the rows that the child process checks, in order, with time budgets for a CPU."""
    from tpu_grpo.checking import machine, measured_rates, numerics
    from tpu_grpo.checking.findings import Row

    devices, compiled, sampled = ("devices",), ("compiler",), ("log-probs float32",)
    return [
        Row("hosts", 3, machine.meet),
        Row("clocks", 1, machine.clocks, ("hosts",)),
        Row("devices", 2, machine.devices, ("hosts",)),
        Row("memory", 1, machine.memory, devices),
        Row("compiler", 20, numerics.compile_programs, devices),
        Row("attention", 6, numerics.attention, compiled),
        Row("filters", 2, numerics.filters, devices),
        Row("sampler", 3, numerics.sampler, devices),
        Row("log-probs float32", 4, numerics.log_probabilities("float32"), compiled),
        Row("log-probs bfloat16", 8, numerics.log_probabilities("bfloat16"), compiled),
        Row("decode loop", 8, numerics.decode_loop, sampled),
        Row("packed update", 12, numerics.update, sampled),
        Row("weight sync", 2, numerics.weight_sync, ("packed update",)),
        Row("matrix products", 1, measured_rates.products, devices),
        Row("memory speed", 1, measured_rates.bandwidth, devices),
        Row("links", 2, measured_rates.links, ("matrix products", "memory speed")),
        Row("attention speed", 3, measured_rates.kernel, ("attention", "memory speed")),
        Row("prefill speed", 2, measured_rates.prefill, (*compiled, "matrix products")),
        Row("host time", 1, measured_rates.host_time, ("decode loop",)),
        Row("update speed", 4, measured_rates.learner, ("packed update", "matrix products", "memory speed")),
        Row("plan", 3, measured_rates.plan, ("update speed", "prefill speed", "attention speed", "host time")),
    ]


def _budgets() -> float:
    """Return the factor of all time budgets: 1 on a CPU (two minutes in all), 5 elsewhere (ten minutes)."""
    return 1.0 if os.environ.get("JAX_PLATFORMS") == "cpu" else 5.0


# --- the child, which has the devices --------------------------------------------------------------------------------


def _check_rows(words: Sequence[str], file: Path) -> None:
    """Check the rows; write the name of each row at its start, and the findings, to ``file`` as lines of JSON."""
    config = config_from_words(words)
    prepare(needs_hub=config.needs_hub)
    from tpu_grpo.checking.findings import run_rows
    from tpu_grpo.checking.numerics import Shared

    with ExitStack() as stack, file.open("a") as lines:

        def join() -> Hosts:
            hosts, _ = stack.enter_context(met_hosts(config.hosts, config.run.name))
            hosts.timeout_seconds = AGREE_SECONDS
            keep_programs(hosts)  # the killed run reads them
            return hosts

        def tell(what: "str | Done") -> None:
            print(json.dumps(what, default=asdict), file=lines, flush=True)
            if not isinstance(what, str) and shared.hosts.is_first:
                print(what.line, flush=True)

        shared = Shared(config, check_directory(config.run_dir), join)
        run_rows(rows(), shared, tell, lambda: shared.hosts, budgets=_budgets())
        found: dict[str, Any] = {"generation": shared.generation and shared.generation.name, "rates": shared.rates}
        found["host"] = shared.hosts.index
        if shared.builds:
            found["model"] = str(next(iter(shared.builds.values())).checkpoint.directory)
        print(json.dumps({"found": found}), file=lines)


# --- the command -----------------------------------------------------------------------------------------------------


def _check(words: Sequence[str], scratch: Path) -> int:
    from tpu_grpo.checking import machine
    from tpu_grpo.checking.findings import Finding, Row, run_rows

    config = config_from_words(words)
    directory = check_directory(config.run_dir)
    directory.mkdir(parents=True, exist_ok=True)
    done: list[Done] = []

    def tell(what: "str | Done") -> None:
        if not isinstance(what, str):
            done.append(what)
            if config.hosts.index == 0:
                print(what.line, flush=True)

    settings = scratch / "config.yaml"
    settings.write_text(config.to_yaml())
    choose_platform()
    run_rows([Row("packages", 1, machine.packages), Row("TPU files", 1, machine.device_files)], None, tell)
    found = _other_process(settings, done)
    host = found.get("host", config.hosts.index)  # on a slice, jax gives the index, not the setting
    words = [str(settings), f"model.path={found.get('model')}", "model.train_layers=null", "model.lora.layers=null"]

    def killed_run(_: Any) -> Finding:
        if not (Path(found.get("model", "")) / "tokenizer.json").exists():
            return Finding("not reached", f"no tokenizer of {config.model.path} is here", "fetch the model first")
        return machine.killed_run(host, words, directory / "run", RUN_SECONDS)

    run_rows([Row("killed run", 25, killed_run)], None, tell, budgets=_budgets())
    works = all(row.finding.verdict in ("works", "works but slow") for row in done)
    if host == 0:
        _write(directory, config.model.path, done, found, works)
    return 0 if works else 1


def _other_process(settings: Path, done: "list[Done]") -> dict[str, Any]:
    """Check rows in a child process, and add the results to ``done``; returns the child's other findings."""
    from tpu_grpo.checking.findings import Done, Finding
    from tpu_grpo.checking.machine import command

    file, started = settings.with_name("rows.jsonl"), time.monotonic()
    code = subprocess.run(**command("check", settings, "--rows", file)).returncode
    lines = [parse_json(line) for line in file.read_text().splitlines()] if file.exists() else []
    of_rows = [line for line in lines if isinstance(line, dict) and "row" in line]
    done += [Done(**(line | {"finding": Finding(**line["finding"])})) for line in of_rows]
    if lines and "found" in (last := lines[-1]):
        return last["found"]
    begun = lines[-1] if lines and isinstance(lines[-1], str) else "hosts"
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    said = f"the process that checked it {how}; its own words are above"
    done.append(Done(begun, 0, time.monotonic() - started, Finding("broken", said, "paste them with this block")))
    print(done[-1].line, flush=True)
    return {}


def _write(directory: Path, model: str, done: "list[Done]", found: dict[str, Any], works: bool) -> None:
    """Write check.json and the page, and print a summary to paste into a report."""
    from tpu_grpo.observe.summary import versions
    from tpu_grpo.report.page_tables import Cell, Column, Table
    from tpu_grpo.report.run_page import write_page

    counts = {verdict: sum(row.finding.verdict == verdict for row in done) for verdict in ("works", "works but slow")}
    rest = len(done) - sum(counts.values())
    title = f"check of {model}: {counts['works']} rows work, {counts['works but slow']} but slow, {rest} do not"
    used = ", ".join(f"{name} {version}" for name, version in versions().items())
    planned = next((dict(row.finding.figures) for row in done if row.row == "plan"), {})
    record = {"works": works, "model": model, "versions": versions(), "rows": [asdict(row) for row in done]}
    write_json(directory / CHECK_FILE, {**record, "planned": planned, **found})
    columns = [Column("row"), Column("verdict"), Column("seconds", is_number=True), Column("found"), Column("do")]
    cells = [
        [Cell(x) for x in (row.row, row.finding.verdict, f"{row.seconds:.1f}", row.finding.text, row.finding.remedy)]
        for row in done
    ]
    table = Table("", f"{sum(row.seconds for row in done):.0f} seconds; {used}", columns, cells)
    page = directory / CHECK_PAGE
    write_page(
        page,
        "check.html.jinja",
        title=title,
        again=0,
        table=table,
    )
    lines = [title, used, *(row.line for row in done if not works or row.finding.verdict != "works")]
    print("\n".join(["", "--- to paste ---", *lines, "--- end ---", f"{directory / CHECK_FILE}, {page}"]))
