"""Sources, mixtures and evaluations: what follows from settings, and what cannot go together."""

import pytest

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


def test_a_mixture_survives_being_written_out(tmp_path) -> None:
    config = load_config(None, ["data.sources=[{path: a.csv}]", "evaluation.rewards=[{name: gsm8k}]"])
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "again.yaml") == config
