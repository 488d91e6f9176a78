"""Rewards for structured answers: JSON by a schema, Countdown's expressions, puzzles, Python programs."""

import ast
import json
import operator
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from tpu_grpo.records.untrusted_input import bounded
from tpu_grpo.rewards.protocol import per_sample
from tpu_grpo.rewards.shipped.correctness import LogMetric, fenced, inside, missing, number
from tpu_grpo.workers.puzzle_scores import puzzle_score
from tpu_grpo.workers.sandbox import Limits, run_tests

_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_LONGEST_EXPRESSION = 200


def json_schema(
    completions: Sequence[str], schema: Any, tag: str | None = None, parsed: float = 0.0
) -> list[float | None]:
    """Score 1.0 for JSON that fits ``schema`` (draft 2020-12), ``parsed`` for other JSON, and 0.0 for anything else.

    The JSON is the last fenced block marked json or unmarked, or the whole text without such a block; with ``tag``,
    only the content of the last such tag counts. ``schema`` is an option or a column, a mapping or its JSON text; a row
    without a schema gets None.
    """
    number("parsed", parsed, 0)
    if not isinstance(schema, list):
        validator = _validator(schema)
        return [_json_row(c, validator, tag, parsed) for c in completions]
    rows = zip(completions, schema, strict=True)
    return [None if missing(s) else _json_row(c, _validator(s), tag, parsed) for c, s in rows]


def countdown(
    completions: Sequence[str],
    target: Sequence[Any],
    nums: Sequence[Any],
    tag: str | None = "answer",
    use_all: bool = True,
    format_score: float = 0.0,
) -> list[float | None]:
    """Score 1.0 where the expression makes ``target`` from ``nums`` (a list, or its JSON text), each used exactly once.

    Without ``use_all``, numbers may be left out. The expression is the content of the last ``tag`` up to an equals
    sign. It consists of numbers, + - * / and brackets, and is computed exactly. If it uses the numbers correctly but
    misses the target, the score is ``format_score``.
    """
    number("format_score", format_score, 0)
    rows = zip(completions, target, nums, strict=True)
    return [
        None if missing(t) else _countdown_row(c, Fraction(str(t)), n, tag, use_all, format_score) for c, t, n in rows
    ]


@per_sample
def reasoning_gym(
    completion: str,
    metadata: Any,
    answer: Any,
    question: Any = None,
    tag: str | None = "answer",
    log_metric: LogMetric | None = None,
) -> float | None:
    """Let the puzzle's own verifier score the content of the last ``tag``; score 0.0 without the tag.

    ``metadata`` is reasoning-gym's, as a mapping or its JSON text; its ``source_dataset`` names the verifier. An answer
    for which the verifier raises or does not end scores 0.0; the metric ``unverified`` is the share of such answers.
    """
    if missing(metadata):
        return None
    known, part = _mapping(metadata), inside(completion, tag)
    if not isinstance(known.get("source_dataset"), str):
        raise ValueError(f"metadata must hold source_dataset, the puzzle's name, got {sorted(known)}")
    entry = {"question": question or "", "answer": answer, "metadata": known}
    score = 0.0 if part is None else puzzle_score(part, entry)
    if log_metric is not None:
        log_metric("unverified", float(score is None))
    return score or 0.0


def _validator(schema: Any) -> Any:
    from jsonschema import Draft202012Validator  # installed by an extra
    from jsonschema.exceptions import SchemaError

    schema = _mapping(schema) if not isinstance(schema, bool) else schema
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"schema must be a JSON schema (draft 2020-12), got {error.message}") from error
    return Draft202012Validator(schema)


def _json_row(completion: str, validator: Any, tag: str | None, parsed: float) -> float:
    part = inside(completion, tag)
    if part is None:
        return 0.0
    block = fenced(part, ("json",))
    try:
        value = json.loads(part if block is None else block, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return 0.0
    try:
        with bounded(2.0):  # a pattern of the schema may take for ever
            return 1.0 if validator.is_valid(value) else parsed
    except (ArithmeticError, RecursionError, TimeoutError):  # 1e400 as a multiple, a value that is nested too deep
        return parsed


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _mapping(value: Any) -> Mapping[str, Any]:
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, Mapping):
        raise TypeError(f"a mapping is needed, or its JSON text, got {value!r}")
    return found


def _countdown_row(
    completion: str, target: Fraction, nums: Sequence[Any], tag: str | None, use_all: bool, format_score: float
) -> float:
    part = inside(completion, tag)
    if part is None:
        return 0.0
    expression = unicodedata.normalize("NFKC", part).partition("=")[0]
    expression = expression.replace("×", "*").replace("÷", "/").replace("−", "-").strip()
    try:
        if len(expression) > _LONGEST_EXPRESSION:
            return 0.0
        used: list[Fraction] = []
        value = _compute(ast.parse(expression, mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):  # some of them of Python's parser
        return 0.0
    nums = json.loads(nums) if isinstance(nums, str) else nums
    given, spent = Counter(Fraction(str(n)) for n in nums), Counter(used)
    if not (spent == given if use_all else spent <= given):
        return 0.0
    return 1.0 if value == target else format_score


def _compute(node: ast.expr, used: list[Fraction]) -> Fraction:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            used.append(Fraction(value))
            return Fraction(value)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_compute(left, used), _compute(right, used))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_compute(operand, used)
    raise ValueError("not an expression of whole numbers, + - * / and brackets")


@per_sample
def python_tests(
    completion: str, tests: Any, seconds: float = 5.0, memory_mb: int = 1024, partial: bool = False, fence: bool = True
) -> float | None:
    """Score 1.0 where the program passes all of its tests, else 0.0; with ``partial``, the fraction that it passes.

    The program is the last fenced block marked python, py or python3, or unmarked. Without such a block the score is
    0.0 if ``fence`` is set, otherwise the whole completion is the program. ``tests`` is a column with a list of tests,
    or its JSON text. A test is Python code that raises if the program is wrong (``assert add(1, 2) == 3``), or a
    mapping {input, output}, with ``fn_name`` of a call's arguments and result; a single text is one test. A row
    without tests gets None.
    """
    number("seconds", seconds, 0.1)
    number("memory_mb", memory_mb, 64)
    if not (cases := _cases(tests)):
        return None
    program = fenced(completion, ("python", "py", "python3"))
    if program is None:
        if fence:
            return 0.0
        program = completion
    passed = run_tests(program, cases, Limits(float(seconds), int(memory_mb)))
    return sum(passed) / len(passed) if partial else float(all(passed))


def _cases(tests: Any) -> list[Any]:
    if isinstance(tests, str) and tests.lstrip().startswith("["):
        tests = json.loads(tests)
    cases = [tests] if isinstance(tests, str | Mapping) else list(tests or ())
    for case in cases:
        if not isinstance(case, str) and not (isinstance(case, Mapping) and {"input", "output"} <= set(case)):
            raise ValueError(f"tests must be Python code or mappings of input and output, got {case!r}")
    cases = [_call(case) if isinstance(case, Mapping) and case.get("fn_name") else case for case in cases]
    return [case for case in cases if not isinstance(case, str) or case.strip()]


def _call(case: Mapping[str, Any]) -> str:
    """Return LiveCodeBench's kind of test, in which each line is an argument as JSON, as Python code."""
    name, given, expected = case["fn_name"], case["input"], case["output"]
    if isinstance(given, str):
        given, expected = [json.loads(line) for line in given.splitlines()], json.loads(expected)
    return (
        f"try:\n    call = Solution().{name}\nexcept NameError:\n    call = {name}\nresult = call(*{given!r})\n"
        f"assert (list(result) if isinstance(result, tuple) else result) == {expected!r}"
    )
