#!/usr/bin/env bash
# math-verify 0.9.0 (with latex2sympy2-extended 1.11.0): when it removes the unit at the end of a LaTeX answer, it removes
# everything from the first \text{...} on, numbers too. So \boxed{2 \text{ hours and } 30 \text{ minutes}} is read as 2, and
# \boxed{5 \text{ feet } 6 \text{ inches}} as 5: equal to a reference 5, and not equal to any reference of two numbers.
# It matters because a reward for durations and heights then pays the first number alone, and never the right answer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet math-verify==0.9.0 \
  latex2sympy2-extended==1.11.0 antlr4-python3-runtime==4.13.2 sympy==1.14.0
"$folder/venv/bin/python" - <<'PYTHON'
import sys

from math_verify import parse, verify

seen = {
    text: parse(text)[0]
    for text in (
        r"\boxed{2 \text{ hours and } 30 \text{ minutes}}",
        r"\boxed{5 \text{ feet } 6 \text{ inches}}",
        r"\boxed{18 \text{ cm}}",
    )
}
for text, value in seen.items():
    print(f"{text} is read as {value}")
paid = verify(parse("5"), parse(r"\boxed{5 \text{ feet } 6 \text{ inches}}"))
print(f"5 feet 6 inches equals 5: {paid}")
if list(seen.values()) != [2, 5, 18] or not paid:
    sys.exit("math-verify no longer drops what follows the first \\text: the behaviour changed")
PYTHON
