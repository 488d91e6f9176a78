"""Rewards are distributed over real processes: every host ends with what one host computes, and odd ones are found."""

import json
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.hosts.processes import run
from tests.rewards.conftest import make_rollout
from tpu_grpo.config import RewardSpec
from tpu_grpo.hosts import packed
from tpu_grpo.hosts.host_agreement import read_told
from tpu_grpo.records.errors import LockstepError
from tpu_grpo.records.stages import Figure, Scores
from tpu_grpo.rewards import DistributedRewards, open_rewards
from tpu_grpo.rewards.distributed import merge_figures

REWARDS = """
import sys
from tpu_grpo.rewards import per_token

def length(completions):
    print("asked", completions)
    return [len(text) + (1e-9 if sys.argv[3] == "2" else 0) for text in completions]

def judge(completions):
    return [float(sys.argv[3]) for _ in completions]

@per_token
def letters(completions, completion_ids):
    return [[ord(letter) - 96.0 for letter in text] for text in completions]

def seldom(completions):
    return [1.0 if text == "f" else None for text in completions]
"""
BODY = """
from dataclasses import replace

import numpy as np
from tests.rewards.conftest import make_rollout
from tpu_grpo.config import RewardSpec
from tpu_grpo.rewards import DistributedRewards, open_rewards

texts = ["a", "bb", "c", "dd", "eee", "f", "g", "h", "i", "jjjj"]
rollout = make_rollout([f"p{{n}}" for n in range(5)], texts, [{{}}] * 5)
of_letters = tuple(replace(c, token_ids=np.arange(len(t))) for c, t in zip(rollout.completions, texts))
rollout = replace(rollout, completions=of_letters)
weights = {{"length": 1.0, "judge": 0.0, "seldom": 0.5, "letters": 2.0}}
specs = [RewardSpec(name=f"{file}:{{name}}", weight=weight, workers=0) for name, weight in weights.items()]
scores = DistributedRewards(open_rewards(specs, ()), hosts, compared={compared}).score(rollout)
{then}"""
SHOWN = """
print(scores.total.tolist())
print(scores.by_name["length"].tolist())
print(scores.by_name["judge"].tolist())
print([str(value) for value in scores.by_name["seldom"]])
print(scores.figures["rewards/length/errors"])
print([values.tolist() for values in scores.per_token])
"""
EARLY = """
specs = [spec.model_copy(update={"early": spec.shown != "seldom"}) for spec in specs]
told = (1, 1, 0, 0, 1)
print("early")
with DistributedRewards(open_rewards(specs, ()), hosts, compared=["length"]).begin(rollout.batch) as scoring:
    for p in (4, 0, 3):
        if told[p] == hosts.index:
            scoring.add(p, rollout.completions[2 * p : 2 * p + 2], texts[2 * p : 2 * p + 2])
    [scores] = scoring.finish([replace(rollout, scoring_hosts=told)])
"""
"""The same rows; hosts hear of groups while they are sampled, of groups 1 and 2 only with the rollout."""
FEWER = """
print("fewer")
scores = DistributedRewards(open_rewards(specs, ()), hosts, compared=["length"]).score(rollout.select([0]))
print(scores.total.tolist())
"""
"""The rows of one prompt, so that host 1 has none."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path


@pytest.mark.full
def test_every_host_ends_with_all_values_of_rows_scored_once(file: Path) -> None:
    body = BODY.format(file=file, compared=["length", "seldom", "letters"], then=SHOWN + EARLY + SHOWN + FEWER)
    ended = run(body, 2)
    for index, end in ended.items():
        assert end.code == 0, end
        at_once, early, fewer = (part.splitlines() for part in re.split("early\n|fewer\n", end.out))
        own, witness, *shown = at_once
        assert shown == [
            "[1.0, 2.0, 1.0, 2.0, 3.0, 1.5, 1.0, 1.0, 1.0, 4.0]",  # length, and half a point for f
            "[1.0, 2.0, 1.0, 2.0, 3.0, 1.0, 1.0, 1.0, 1.0, 4.0]",
            # prompts 0, 2 and 4 are host 0's, 1 and 3 host 1's; the judge says which host it was
            "[0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]",
            "['nan', 'nan', 'nan', 'nan', 'nan', '1.0', 'nan', 'nan', 'nan', 'nan']",
            "Figure(value=0, merge='sum', count=2)",  # of both hosts
            # the number of each letter of a text, times 2
            "[[2.0], [4.0, 4.0], [6.0], [8.0, 8.0], [10.0, 10.0, 10.0], [12.0], [14.0], [16.0], [18.0], "
            "[20.0, 20.0, 20.0, 20.0]]",
        ]
        shares = [["a", "bb", "eee", "f", "i", "jjjj"], ["c", "dd", "g", "h"]]
        assert own == f"asked {shares[index]}"
        assert witness == "asked ['a', 'bb']"  # the witness group of step 0
        # while others are sampled the same values come, of groups 0, 1 and 4 from host 1
        asked = [[["g", "h"], ["eee", "f"]], [["i", "jjjj"], ["a", "bb"], ["c", "dd"]]][index]
        assert early[: len(asked) + 1] == [f"asked {group}" for group in [*asked, ["a", "bb"]]]
        shown[2] = "[1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0]"
        assert early[len(asked) + 1 :] == shown
        assert fewer[-1] == "[1.0, 2.0]"


@pytest.mark.full
def test_a_reward_that_differs_on_one_host_is_named_with_the_values_and_the_text(file: Path) -> None:
    ended = run(BODY.format(file=file, compared=["length"], then=SHOWN), 3)
    for end in ended.values():
        assert end.code == 3, end
        assert (
            "LockstepError: reward length must give the same value for the same text on every host, got 1.0 on host 0, "
            "1.0 on host 1, 1.000000001 on host 2 for 'a'"
        ) in end.errors


def test_figures_of_hosts_are_merged_as_sums_means_and_maxima():
    first = {"errors": Figure(2, "sum"), "seconds": Figure(0.5, "max"), "length": Figure(2.0, "mean", 1)}
    second = {"errors": Figure(3, "sum"), "seconds": Figure(0.25, "max"), "length": Figure(5.0, "mean", 2)}
    third = {"seconds": Figure(0.75, "max"), "other": Figure(1.0, "mean", 4)}
    assert merge_figures([first, second, third]) == {
        "errors": Figure(5, "sum", 2),
        "seconds": Figure(0.75, "max", 3),
        "length": Figure(4.0, "mean", 3),
        "other": Figure(1.0, "mean", 4),
    }
    assert merge_figures([]) == {}


FORGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a row more": lambda told: [column.append(0.5) for column in told["columns"]],
    "a column less": lambda told: told["columns"].pop(),
    "ragged columns": lambda told: told["columns"][0].pop(),
    "a text for a number": lambda told: told["columns"].__setitem__(0, ["x", 1.0]),
    "no witness": lambda told: told["witness"].clear(),
    "another's witness": lambda told: told["witness"].update(length=[1.0]),
    "a figure of nothing": lambda told: told["figures"].update(x={"value": 1.0, "merge": "mean", "count": 0}),
    "a figure put together otherwise": lambda told: told["figures"].update(x={"value": 1.0, "merge": "eval"}),
    "tokens of nobody": lambda told: told.update(of_tokens=packed(np.zeros(99))),
    "a bomb": lambda told: told.update(of_tokens=packed(np.zeros(10**7))),
    "no packing": lambda told: told.update(of_tokens="AAAA"),
}


@pytest.mark.full
@pytest.mark.parametrize("what", [None, *FORGED])
def test_what_no_host_can_have_told_is_named(file: Path, monkeypatch: pytest.MonkeyPatch, what: str | None) -> None:
    monkeypatch.setattr("sys.argv", ["", "", "", "0"])  # in which the rewards look for the host
    texts = ["a", "bb", "ccc", "d"]
    rollout = make_rollout(["p0", "p1"], texts, [{}] * 2)
    of_letters = [replace(c, token_ids=np.arange(len(t))) for c, t in zip(rollout.completions, texts, strict=True)]
    rollout = replace(rollout, completions=tuple(of_letters))
    said: dict[str, Any] = {}

    def scored(index: int) -> Scores:
        def share(name: str, value: Any, kind: object, read: Callable[[int, Any], Any]) -> list[Any]:
            if index == 1:
                said.update(json.loads(json.dumps(value, default=vars)))
                return [read(1, value)] * 2
            return [read(0, value), read_told(json.dumps(said).encode(), kind, f"{name} of host 1", partial(read, 1))]

        hosts: Any = SimpleNamespace(index=index, count=2, is_first=index == 0, share=share)
        specs = [RewardSpec(name=f"{file}:{name}", workers=0) for name in ("length", "letters")]
        with closing(DistributedRewards(open_rewards(specs, ()), hosts, compared=["length"])) as rewards:
            return rewards.score(rollout)

    scored(1)
    if what is None:
        found = scored(0)
        assert found.by_name["length"].tolist() == [1.0, 2.0, 3.0, 1.0]
        assert [values.tolist() for values in found.per_token] == [[1.0], [2.0, 2.0], [3.0, 3.0, 3.0], [4.0]]
        return
    FORGED[what](said)
    with pytest.raises(LockstepError, match="got what no host tells at 'rewards of host 1'"):
        scored(0)
