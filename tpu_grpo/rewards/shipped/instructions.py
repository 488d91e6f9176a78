"""This reward checks instructions by program, under the names of IFEval (Zhou et al. 2023, arXiv 2311.07911).

Data in IFEval's form has the columns ``instruction_id_list`` (names) and ``kwargs`` (their arguments, one mapping per
name; nulls are ignored). The checks are in ``instruction_checks.py``.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tpu_grpo.rewards.shipped.instruction_checks import CHECKS


def instructions(
    completions: Sequence[str],
    instruction_id_list: Sequence[Any],
    kwargs: Sequence[Any],
    loose: bool = False,
    partial: bool = True,
) -> list[float | None]:
    """Score the fraction of a row's instructions that its completion follows; without ``partial``, 1.0 for all or 0.0.

    ``loose`` tries each instruction on the completion without its first line, its last line and its asterisks too.
    A row without instructions gets None.
    """
    rows = zip(completions, instruction_id_list, kwargs, strict=True)
    return [_row(c, names, arguments, loose, partial) for c, names, arguments in rows]


def follows(text: str, name: str, arguments: Mapping[str, Any] | None) -> bool:
    """Return whether a text follows one instruction.

    Raises:
        ValueError: for an instruction that is not known, or without an argument that it needs.
    """
    if name not in CHECKS:
        raise ValueError(f"instruction_id_list must name instructions of IFEval ({', '.join(CHECKS)}), got {name!r}")
    given = {key: value for key, value in (arguments or {}).items() if value is not None}
    try:
        return bool(text.strip()) and CHECKS[name](text, **given)
    except TypeError as error:
        raise ValueError(f"kwargs of {name} do not fit: {error}") from error


def _row(text: str, names: Any, arguments: Any, loose: bool, partial: bool) -> float | None:
    if not names:
        return None
    if len(names) != len(arguments):
        raise ValueError(f"kwargs must have one mapping per instruction, got {len(arguments)} for {list(names)}")
    tried = list(_looser(text)) if loose else [text]
    kept = [any(follows(t, name, given) for t in tried) for name, given in zip(names, arguments, strict=True)]
    return sum(kept) / len(kept) if partial else float(all(kept))


def _looser(text: str) -> Iterator[str]:
    lines = text.split("\n")
    for kept in (lines, lines[1:], lines[:-1], lines[1:-1]):
        cut = "\n".join(kept).strip()
        yield cut
        yield cut.replace("*", "")
