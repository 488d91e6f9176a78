"""This reward runs Python programs against tests, in a sandbox."""

import json
from collections.abc import Mapping
from typing import Any

from tpu_grpo.rewards.protocol import per_sample
from tpu_grpo.rewards.shipped.texts import fenced, number
from tpu_grpo.workers.sandbox import Limits, run_tests


@per_sample
def python_tests(
    completion: str,
    tests: Any,
    seconds: float = 5.0,
    memory_mb: int = 1024,
    partial: bool = False,
    fence: bool = True,
) -> float | None:
    """Score 1.0 where the completion's program passes all of its tests, else 0.0; or, with ``partial``, the fraction.

    The program is the last ```python block; without one, with ``fence``, the score is 0.0, otherwise all of the
    completion is the program. ``tests`` is a column: a list, or its JSON text, of Python code that raises if the
    program is wrong (``assert add(1, 2) == 3``) or of mappings {input, output}; one text is one test. A row without
    tests gets None.
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
    return [case for case in cases if not isinstance(case, str) or case.strip()]
