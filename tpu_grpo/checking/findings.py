"""The rows (single checks) of `tpu-grpo check`, their findings, and the loop that checks the rows on all hosts.

This file imports no jax.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from tpu_grpo.hosts import Hosts
from tpu_grpo.records.errors import TpuGrpoError

Verdict = Literal["works", "works but slow", "broken", "not reached"]
ORDER: tuple[Verdict, ...] = ("works", "works but slow", "not reached", "broken")
"""All verdicts, from good to bad."""
LONGEST = 600
"""The most characters of another library's error that are shown."""


@dataclass(frozen=True)
class Finding:
    """The result of checking a row."""

    verdict: Verdict
    text: str
    remedy: str = ""
    """What to do; empty if the row works."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What was measured, by name."""


@dataclass(frozen=True)
class Row:
    """One check. ``check`` is called with the object that all rows share; if it raises, the row is broken."""

    name: str
    budget: float
    """The seconds that the check should take on the CPU of a usual machine."""
    check: Callable[[Any], Finding]
    needs: tuple[str, ...] = ()
    """The names of the rows that must work before this one can be checked."""


@dataclass(frozen=True)
class Done:
    """The result of a checked row, with the seconds that the row should have taken (``budget``) and has taken."""

    row: str
    budget: float
    seconds: float
    finding: Finding

    @property
    def line(self) -> str:
        """Return the row as a line of the printed block."""
        found = self.finding
        do = f"; do: {found.remedy}" if found.remedy else ""
        return f"{self.row:24}{found.verdict:16}{self.seconds:6.1f} of {self.budget:3.0f} s  {found.text}{do}"


def within(gap: float, bound: float, what: str, remedy: str) -> Finding:
    """Report that a row works if the difference ``gap`` is at most ``bound``; a larger gap or NaN means broken."""
    works = gap <= bound
    text = f"{what} off by {gap:.2g}, {'within' if works else 'must be within'} {bound:.2g}"
    return Finding("works" if works else "broken", text, "" if works else remedy, {"difference": gap, "bound": bound})


def run_rows(
    rows: Sequence[Row],
    shared: Any,
    tell: Callable[[str | Done], None],
    hosts: Callable[[], Hosts] = Hosts,
    budgets: float = 1.0,
) -> None:
    """Check rows in order on all hosts, and report each row's name as it begins, and then its result.

    Args:
        rows: what to check.
        shared: the object that each row's ``check`` gets.
        tell: is called with the name of a row, and then with the row's worst result on any host.
        hosts: returns the hosts that are connected so far.
        budgets: the factor on the budgets of all rows.
    """
    found: dict[str, Finding] = {}
    for row in rows:
        tell(row.name)
        started = time.monotonic()
        missing = [name for name in row.needs if found[name].verdict in ORDER[2:]]
        if missing:
            finding = Finding("not reached", f"it needs the row {missing[0]}", f"mend {missing[0]} first")
        else:
            finding = _checked(row, shared)
        found[row.name] = _worst(row.name, finding, hosts())
        tell(Done(row.name, budgets * row.budget, time.monotonic() - started, found[row.name]))


def _checked(row: Row, shared: Any) -> Finding:
    try:
        return row.check(shared)
    except TpuGrpoError as error:
        return Finding("broken", f"{type(error).__name__}: {error}", "what the message says")
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return Finding("broken", text[:LONGEST], "paste this block into an issue")


def _worst(name: str, finding: Finding, hosts: Hosts) -> Finding:
    """Return the worst finding of all hosts, with the host's number."""
    if hosts.count == 1:
        return finding
    findings = hosts.share(f"row {name}", asdict(finding), dict[str, Any])
    host = max(range(len(findings)), key=lambda index: ORDER.index(findings[index]["verdict"]))
    worst = Finding(**findings[host])
    return worst if worst.verdict == "works" else replace(worst, text=f"host {host}: {worst.text}")
