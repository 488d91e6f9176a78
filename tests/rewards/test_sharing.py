"""Rewards shared out over real processes: every host ends with what one host computes, and odd ones are found."""

from tests.hosts.processes import run

BODY = """
from tests.rewards.conftest import make_rollout
from tpu_grpo.rewards import LoadedReward, RewardSet, SharedRewards

calls = []

def length(completions):
    calls.append(list(completions))
    return [len(text) + {odd} for text in completions]

def judge(completions):
    return [float(index) for _ in completions]

def seldom(completions):
    return [1.0 if text == "f" else None for text in completions]

texts = ["a", "bb", "c", "dd", "eee", "f", "g", "h", "i", "jjjj"]
rollout = make_rollout([f"p{{n}}" for n in range(5)], texts, [{{}}] * 5)
rewards = RewardSet(
    tuple(LoadedReward(f.__name__, f, ("completions",)) for f in (length, judge, seldom)), (1.0, 0.0, 0.5)
)
scores = SharedRewards(rewards, hosts, compared={compared}).score(rollout)
print(scores.total.tolist())
print(scores.by_name["length"].tolist(), scores.by_name["judge"].tolist())
print([str(value) for value in scores.by_name["seldom"]])
print(calls)
"""


def test_every_host_ends_with_all_values_of_rows_scored_once() -> None:
    ended = run(BODY.format(odd=0, compared=["length", "seldom"]), 2)
    for index, end in ended.items():
        assert end.code == 0, end
        total, columns, seldom, calls = end.out.splitlines()
        assert total == "[1.0, 2.0, 1.0, 2.0, 3.0, 1.5, 1.0, 1.0, 1.0, 4.0]"  # length, and half a point for f
        # prompts 0, 2 and 4 are host 0's, 1 and 3 host 1's; the judge says which host it was
        assert columns == (
            "[1.0, 2.0, 1.0, 2.0, 3.0, 1.0, 1.0, 1.0, 1.0, 4.0] [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]"
        )
        assert seldom == "['nan', 'nan', 'nan', 'nan', 'nan', '1.0', 'nan', 'nan', 'nan', 'nan']"
        shares = [["a", "bb", "eee", "f", "i", "jjjj"], ["c", "dd", "g", "h"]]
        assert calls == str([shares[index], ["a", "bb"]])  # its share, and the witness group of step 0


def test_a_reward_that_differs_on_one_host_is_named_with_the_values_and_the_text() -> None:
    ended = run(BODY.format(odd="(1e-9 if index == 2 else 0)", compared=["length"]), 3)
    for end in ended.values():
        assert end.code == 3, end
        assert (
            "LockstepError: reward length must give the same value for the same text on every host, got 1.0 on host 0, "
            "1.0 on host 1, 1.000000001 on host 2 for 'a'"
        ) in end.errors


def test_a_reward_that_cannot_repeat_itself_is_left_alone_on_request() -> None:
    compared = run(BODY.format(odd=0, compared=["judge"]), 2)
    assert all("reward judge must give the same value" in end.errors for end in compared.values())


def test_fewer_prompts_than_hosts() -> None:
    body = BODY.replace("range(5)", "range(1)").replace("texts = [", "texts = ['x', 'yy'] or [").replace("* 5)", ")")
    ended = run(body.format(odd=0, compared=["length"]), 2)
    assert [end.out.splitlines()[0] for end in ended.values()] == ["[1.0, 2.0]"] * 2
