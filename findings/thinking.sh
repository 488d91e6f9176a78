#!/usr/bin/env bash
# reasoning-gym 0.1.25: `score_answer`, which scores what a model writes, raises for ordinary wrong answers in some tasks,
# and runs the answer as Python in others.
#
# - prime_factorization raises ValueError for an answer that is not of numbers ("five apples"), and boxnet TypeError for a
#   number ("5"); other tasks return 0 for them.
# - string_insertion, spiral_matrix, binary_matrix and n_queens call eval(answer); countdown, puzzle24 and the tasks of
#   polynomials and integrals call sympy's parse_expr, which evaluates Python too.
#
# Why it matters: a reinforcement-learning run that calls score_answer directly ends on a wrong answer, and a policy's
# text is executed in the process that computes rewards: score answers in a process of their own, with a time limit.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet reasoning-gym==0.1.25
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import sys

import reasoning_gym


def scored(task, answer):
    dataset = reasoning_gym.create_dataset(task, size=1, seed=1)
    entry = dataset[0]
    answer = answer(entry) if callable(answer) else answer
    try:
        found = dataset.score_answer(answer, entry)
    except Exception as error:
        found = type(error).__name__
    print(f"{task:20s} {answer[:60]!r:64s} -> {found}")
    return found


found = [
    scored("chain_sum", "five apples"),
    scored("prime_factorization", "five apples"),
    scored("boxnet", "5"),
    # the right text, written as an expression that has to be run to be equal: partial credit
    scored("string_insertion", lambda entry: f"reversed({entry['answer'][::-1]!r})"),
    scored("countdown", lambda entry: f"({entry['answer']}) * len('x')"),
]
expected = [0.0, "ValueError", "TypeError", 0.1, 1.0]
if found != expected:
    sys.exit(f"reasoning-gym behaves otherwise now: {found} for {expected}")
PYTHON
