"""The line of formula that a dry run prints: what it says for some configs, and that it is what the program computes.

Formulas are written as Python is. Here each is worked out token by token, in float64, from its own text.
"""

import ast
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType
from typing import Any, get_args

import numpy as np
import pytest
import yaml

from tests.algorithms import test_correction, test_objectives
from tests.algorithms.test_objectives import Case, case, completions_of, terms  # noqa: F401
from tests.goldens import cases, compare
from tpu_grpo.algorithms import open_algorithm
from tpu_grpo.algorithms.advantages import ADVANTAGES
from tpu_grpo.algorithms.formula import KL_ESTIMATES, MEANS, objective_line, pieces, token_formula
from tpu_grpo.config import AlgorithmSection, LossAggregation, parse_config


def line_of(rollout: dict[str, Any] | None = None, **algorithm: Any) -> str:
    config = parse_config({"algorithm": algorithm, "rollout": {"max_new_tokens": 64, **(rollout or {})}})
    return objective_line(config.algorithm, config.rollout, open_algorithm(config.algorithm))


FORMULAS = Path(__file__).with_name("formulas.txt")


@pytest.mark.parametrize(("algorithm", "line"), cases(FORMULAS))
def test_the_line(algorithm: str, line: str) -> None:
    compare(FORMULAS, algorithm, line, line_of(**yaml.safe_load(algorithm)))


def test_the_temperature_is_that_of_the_rollout() -> None:
    assert line_of({"temperature": 0.7}).endswith("; p = softmax(logits / 0.7)")


def test_filters_are_named_where_the_ratio_is_among_what_they_keep() -> None:
    line = line_of({"top_p": 0.9, "min_p": 0.05}, filtered_ratio=True)
    assert line.endswith("; p = softmax(logits) over the tokens that top_p=0.9 and min_p=0.05 kept")
    assert line_of({"top_p": 0.9}).endswith("; p = softmax(logits)")


def test_every_aggregation_has_its_mean() -> None:
    assert set(MEANS) == set(get_args(LossAggregation))


def test_a_class_of_ones_own_says_its_part_or_is_named(tmp_path: Any) -> None:
    body = (
        "from tpu_grpo.algorithms import TokenLosses\n"
        "class Mine:\n"
        "    aggregation = 'token-mean'\n{}"
        "    def advantages(self, rewards_PG):\n        return 2 * rewards_PG\n"
        "    def token_losses(self, logprobs_BT, old_logprobs_BT, advantages_BT):\n"
        "        return TokenLosses(-advantages_BT * logprobs_BT, logprobs_BT > 0)\n"
    )
    silent, speaking = tmp_path / "silent.py", tmp_path / "speaking.py"
    silent.write_text(body.format(""))
    speaking.write_text(body.format("    formula = '-a*log(p); a = A'\n    advantage_formula = '2*R'\n"))
    found = [line_of(name=f"{path}:Mine") for path in (silent, speaking)]
    assert found == [
        "mean_it [ Mine.token_losses(log(p), log(p_engine), A) ]; A = Mine.advantages(R); p = softmax(logits)",
        "mean_it [ -a*log(p) ]; a = A; A = 2*R; p = softmax(logits)",
    ]


# --- formulas worked out ---------------------------------------------------------------------------------------------


class _Lazy(ast.NodeTransformer):
    """Passes what is to be worked out at every token as text."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        if isinstance(node.func, ast.Name) and node.func.id.endswith("_t"):
            node.args = [ast.Constant(ast.unparse(node.args[0]))]
            return node
        self.generic_visit(node)
        return node


def _compiled(text: str) -> CodeType:
    return compile(ast.fix_missing_locations(_Lazy().visit(ast.parse(text, mode="eval"))), "formula", "eval")


class Completion:
    """The tokens of a completion, each with its numbers by name, for which formulas are worked out."""

    def __init__(self, tokens: list[dict[str, float]]):
        self.tokens = tokens

    def values(self, formula: str) -> np.ndarray:
        text, *definitions = pieces(formula)
        names = {name: other for name, _, other in (piece.partition(" = ") for piece in definitions)}
        return np.array([self._at(text, token, names) for token in self.tokens], float)

    def _at(self, text: str, token: dict[str, float], names: Mapping[str, str]) -> float:
        def over(reduce: Callable[[list[float]], float]) -> Callable[[str], float]:
            return lambda part: reduce([self._at(part, other, names) for other in self.tokens])

        known: dict[str, Any] = {
            **{name: getattr(math, name) for name in ("log", "exp", "inf")},
            "min": min,
            "max": max,
            "sg": lambda value: value,
            "clip": lambda value, low, high: min(max(value, low), high),
            "sigmoid": lambda value: 1 / (1 + math.exp(-value)),
            "mean_t": over(lambda values: sum(values) / len(values)),
            "prod_t": over(math.prod),
            "all_t": over(lambda values: float(all(values))),
        }
        outer = self

        class Names(dict[str, Any]):
            def __missing__(self, name: str) -> float:
                return known[name] if name in known else outer._at(names[name], token, names)

        return eval(_compiled(text), {"__builtins__": {}}, Names(token))


@pytest.mark.parametrize("label", test_objectives.CASES)
def test_token_formulas_are_what_objectives_compute(case: Case, label: str) -> None:  # noqa: F811
    name, chosen = test_objectives.CASES[label]
    section = AlgorithmSection.model_validate({"name": name, **chosen})
    formula = token_formula(open_algorithm(section).objective, "p_engine") + "; r = p/p_engine"
    for _, counts, now, old, advantage in completions_of(case):
        if counts.any():
            tokens = [{"p": p, "p_engine": q, "A": advantage} for p, q in np.exp(np.stack([now, old], 1)).tolist()]
            losses = terms(name, section, now, old, advantage)[0]
            np.testing.assert_allclose(Completion(tokens).values(formula), losses, rtol=1e-9)


@pytest.mark.parametrize("label", test_correction.CASES)
def test_weight_formulas_are_what_corrections_compute(case: Case, label: str) -> None:  # noqa: F811
    section = AlgorithmSection.model_validate(test_correction.CASES[label])
    formula, trainer = open_algorithm(section).correction.formula, test_correction.before_update(case)  # pyrefly: ignore[missing-attribute]
    for index, counts, now, engine, advantage in completions_of(case):
        if counts.any():
            old = trainer.old[index][counts].astype(float)
            tokens = [
                {"p": p, "p_engine": q, "p_old": o, "A": advantage}
                for p, q, o in np.exp(np.stack([now, engine, old], 1)).tolist()
            ]
            weights, _ = test_correction.weights_of(section, now, old, engine, advantage)
            np.testing.assert_allclose(Completion(tokens).values(formula), weights, rtol=1e-9)


@pytest.mark.parametrize("estimator", KL_ESTIMATES)
def test_kl_formulas_are_the_estimates(estimator: str) -> None:
    x = math.log(0.3 / 0.2)
    expected = {"kl": x, "mse_kl": x**2 / 2, "low_var_kl": math.exp(-x) - 1 + x}[estimator]
    assert Completion([{"p": 0.3, "p_ref": 0.2}]).values(KL_ESTIMATES[estimator]) == pytest.approx(expected)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantage_formulas_are_what_advantages_compute(name: Any) -> None:
    """The group 1 2 6 and one of equal rewards; R_k are two rewards with the weights 2 and 1, lengths 1 2 3."""
    R, lengths = np.array([[1.0, 2.0, 6.0], [3.0, 3.0, 3.0]]), np.array([[1, 2, 3], [3, 2, 1]])
    rewards, weights = np.array([[[0.0, 1, 2], [1, 1, 1]], [[1.0, 0, 2], [1, 1, 1]]]), np.array([2.0, 1.0])

    def of_group(reduce: Callable[..., np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
        return lambda values: np.broadcast_to(reduce(values, axis=-1, keepdims=True), values.shape)

    def of_tokens(reduce: Callable[[np.ndarray], float]) -> Callable[[np.ndarray], float]:
        return lambda values: reduce(np.repeat(values.ravel(), lengths.ravel()))

    known: dict[str, Any] = {
        "R": R,
        "R_k": rewards,
        "weight_k": weights[:, None, None],
        "sum_k": lambda values: values.sum(axis=0),
        "mean_g": of_group(np.mean),
        "std_g": of_group(lambda values, **k: values.std(ddof=1, **k)),
        "mean_others": lambda values: (values.sum(axis=1, keepdims=True) - values) / 2,
        "mean_step": np.mean,
        "std_step": lambda values: values.std(ddof=1),
        "mean_tokens": of_tokens(np.mean),
        "std_tokens": of_tokens(lambda values: float(values.std(ddof=1))),
    }
    formula, *definitions = pieces(ADVANTAGES[name].advantage_formula)
    for definition in definitions:
        other, text = definition.split(" = ", 1)
        known[other] = eval(text, known)
    if " if " in formula:
        value, _, condition = formula.removesuffix(" else 0").partition(" if ")
        formula = f"({value}) * ({condition})"
    asked = {"lengths_PG": lengths, "rewards_NPG": rewards, "weights_N": weights}
    found = open_algorithm(AlgorithmSection(advantage=name)).advantages(R, asked)
    np.testing.assert_allclose(eval(formula, known), found, rtol=1e-12, atol=1e-15)
