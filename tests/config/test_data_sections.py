"""Sources, mixtures and evaluations: what follows from settings, and what cannot go together."""

import pytest

from tests.config.asking import message
from tpu_grpo.config import load_config


@pytest.mark.parametrize(
    ("overrides", "paths"),
    [
        ([], {"data.path": "builtin:addition"}),
        (["data.path=a.csv", "evaluation.path=b.csv"], {"data.path": "a.csv", "evaluation.path": "b.csv"}),
        (
            ["data.sources=[{path: a.csv}, {path: 'hf:b'}]", "evaluation.path=c.csv"],
            {"data.sources.0.path": "a.csv", "data.sources.1.path": "hf:b", "evaluation.path": "c.csv"},
        ),
    ],
)
def test_the_sources_of_a_run(overrides: list[str], paths: dict[str, str]) -> None:
    assert load_config(None, overrides).data_paths == paths


@pytest.mark.parametrize(("samples", "every_k"), [(1, ()), (2, (2,)), (6, (2, 4)), (8, (2, 4, 8))])
def test_which_k_are_told(samples: int, every_k: tuple[int, ...]) -> None:
    assert load_config(None, [f"evaluation.samples={samples}"]).evaluation.every_k == every_k


@pytest.mark.parametrize("best", ["greedy/exact_answer", "sampled/exact_answer", "pass@4/exact_answer"])
def test_what_the_best_may_be_of(best: str) -> None:
    assert load_config(None, ["evaluation.samples=4", f"evaluation.best={best}"]).evaluation.best == best


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.path=a.csv", "data.sources=[{path: b.csv}]"], "data.path=a.csv and data.sources exclude each other"),
        (
            ["data.sources=[{path: b.csv}]", "data.split=test"],
            "data.split must be set for each of data.sources, got test beside them; move it there",
        ),
        (
            ["data.sources=[{path: b.csv, name: x}, {path: c.csv, name: x}]"],
            "data.sources must have names of their own, got ['x'] twice; rename one",
        ),
        (["data.sources=[{path: b.csv, weight: 0}]"], "data.sources.0.weight must be greater than 0, got 0"),
        (["data.sources=[{path: b.csv, wieght: 2}]"], "did you mean data.sources[i].weight?"),
        (["data.date=26.7.2024"], "data.date must be a day as YYYY-MM-DD, got '26.7.2024' (such as 2024-07-26)"),
        (["data.date=2024-02-30"], "data.date must be a day as YYYY-MM-DD, got '2024-02-30' (day is out of range"),
        (["data.columns={question: ''}"], "must map names to columns, got an empty one for 'question'"),
        (["evaluation.rewards=[]"], "evaluation.rewards must name at least one reward, got none"),
        (
            ["evaluation.best=pass@4/exact_answer", "evaluation.samples=2"],
            "evaluation.best must be MODE/REWARD with a mode of ['greedy', 'sampled', 'pass@2', 'maj@2'] and a reward "
            "of ['exact_answer'], got 'pass@4/exact_answer'",
        ),
        (["evaluation.best=greedy/gsm8k"], "a reward of ['exact_answer'], got 'greedy/gsm8k'"),
    ],
)
def test_what_cannot_be(overrides: list[str], said: str) -> None:
    assert said in message(*overrides)


def test_a_mixture_survives_being_written_out(tmp_path) -> None:
    config = load_config(None, ["data.sources=[{path: a.csv}]", "evaluation.rewards=[{name: gsm8k}]"])
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "again.yaml") == config
