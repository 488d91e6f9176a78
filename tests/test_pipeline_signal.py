"""Whole runs with dynamic sampling, pools and retirement: what steps take, and a continued run takes the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.several.runs import lines, train
from tests.test_pipeline import config, files  # noqa: F401  the fixture, too
from tpu_grpo.config import RunConfig

LUCKY = """
import zlib

def lucky(completions):
    return [float(zlib.crc32(text.encode()) % 6 == 0) for text in completions]
"""
"""One completion in six, by its text: of groups of four, a half can be learnt from."""
PROMPTS, PER_ROUND, ROUNDS, STEPS = 3, 5, 2, 6
DATA = {
    "prompts_per_step": PROMPTS,
    "max_prompt_tokens": 12,
    "dynamic": {"extra": 0.5, "rounds": ROUNDS},
    "pools": {"edges": [0.0, 0.3], "weights": [0.5, 1.0, 0.7]},
    "retire": {"at": 0.5, "times": 1},
}


def signal_config(inputs: Path, run_dir: Path, steps: int = STEPS, **sections: Any) -> RunConfig:
    (inputs / "lucky.py").write_text(LUCKY)
    data = inputs / "twelve.jsonl"
    data.write_text("".join(f'{{"question": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(12)))
    given: dict[str, Any] = {
        "run": {"dir": str(run_dir), "max_steps": steps, "seed": 5},
        "rewards": [{"name": f"{inputs}/lucky.py:lucky", "workers": 0}],
        "data": {**DATA, "path": str(data), **sections.pop("data", {})},
        "checkpoint": {"every": 2},
    }
    return config(inputs, run_dir, **(given | sections))


@pytest.fixture(scope="module")
def whole(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    run_dir = tmp_path_factory.mktemp("signal") / "run"
    train(signal_config(files, run_dir))
    return run_dir


@pytest.mark.full
def test_steps_hold_the_first_informative_groups_and_begin_where_the_one_before_ended(whole: Path) -> None:
    """Found again from the samples' rewards and the history."""
    steps, history = lines(whole), lines(whole, "history.jsonl")
    begin, last_rates = 0, dict[int, float]()
    for line, past in zip(steps, history, strict=True):
        assert line["groups/sampled"] == line["groups/rounds"] * PER_ROUND
        assert line["groups/informative_fraction"] == pytest.approx(1 - line["groups/padded"] / PROMPTS)
        informative = [0 < rate < 1 for rate in past["pass_rate"]]
        if line["groups/padded"]:
            assert line["groups/rounds"] == ROUNDS
            assert len(past["prompts"]) == line["groups/sampled"]
            assert sum(informative) == PROMPTS - line["groups/padded"]
        else:
            assert sum(informative) == PROMPTS
            assert informative[-1]  # nothing is used up beyond the last that was needed
        assert past["position"] - begin == len(past["prompts"]) + line["prompts/skipped"]
        begin = past["position"]
        last_rates |= zip(past["prompts"], past["pass_rate"], strict=True)
    assert {line["groups/rounds"] for line in steps} == {1, 2}
    assert any(line["prompts/skipped"] for line in steps)
    assert steps[-1]["prompts/retired"] == sum(rate >= 0.5 for rate in last_rates.values())
    counts = [line["compile/count"] for line in steps]
    assert counts == [counts[0]] * STEPS  # fixed shapes


@pytest.mark.slow  # data/test_prompt_draw.py retires all, too
def test_a_run_whose_prompts_are_all_retired_ends_well_and_says_why(
    files: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = {"prompts_per_step": 6, "dynamic": {}, "pools": {}, "retire": {"at": 0.0, "times": 1}}
    for again in (False, True):
        train(signal_config(files, tmp_path / "run", steps=9, data=data))
        assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2]
        said = capsys.readouterr().out
        assert "the run ends after step 2: 12 of 12 prompts are retired (data.retire)" in said
        assert ("continuing after step 2" in said) == again
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["step"] == 2
