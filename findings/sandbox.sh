#!/usr/bin/env bash
# reasoning-gym 0.1.25: the verifiers of nine puzzles evaluate an answer as Python, in the process that scores it.
# binary_matrix, n_queens, spiral_matrix and string_insertion use eval; countdown, intermediate_integration,
# polynomial_multiplication, puzzle24 and simple_integration use sympy's parse_expr, which evaluates, too. One would
# expect an answer to be compared as text, or to be read by ast.literal_eval. Whoever trains a policy on these puzzles
# runs what the policy writes, with all rights of the training process, so answers must be checked before they are scored.
# Here the answers are expressions that compute a right answer; they get what a list or a number as text gets.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet reasoning-gym==0.1.25 sympy==1.14.0
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import sys

import reasoning_gym

puzzle = reasoning_gym.create_dataset("string_insertion", size=1, seed=3)
entry = puzzle[0]
computed = puzzle.score_answer(f"[chr(n) for n in {[ord(c) for c in entry['answer']]}]", entry)
print("string_insertion, a comprehension that calls chr:", computed)

puzzle = reasoning_gym.create_dataset("polynomial_multiplication", size=1, seed=3)
entry = puzzle[0]
called = puzzle.score_answer(f"sum([{entry['answer']}])", entry)
print("polynomial_multiplication, a call of sum:", called)
if (computed, called) != (0.1, 1.0):
    sys.exit("reasoning-gym no longer evaluates these answers as Python")
PYTHON
