"""What counts as the final answer of a conversation."""

import pytest

from tpu_grpo.config import RewardSpec
from tpu_grpo.rewards import load_reward
from tpu_grpo.rewards.shipped.conversations import final_answer

CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
TOLD = {"role": "tool", "name": "add", "content": "936"}


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("messages", "score"),
    [
        ([CALL, TOLD, says("936")], 1.0),
        ([CALL, TOLD, says(" 936\n")], 1.0),
        ([CALL, TOLD, says("~900")], 0.0),
        ([says("936")], 1.0),
        ([says("936"), TOLD, says("935")], 0.0),  # the last turn alone counts
        ([CALL, TOLD], 0.0),  # it ends with the tool
        ([{**CALL, "content": "936"}], 0.0),  # a call is no answer
        ([], 0.0),
    ],
)
def test_the_last_turn_is_compared(messages: list[dict[str, str]], score: float):
    assert final_answer([messages], ["936"]) == [score]


def test_a_verifier_decides():
    rows = [[says("so it is #### 1,000")], [CALL], [says("1000")]]
    assert final_answer(rows, ["1000", "1000", None], verifier="gsm8k") == [1.0, 0.0, None]
    assert final_answer([[says("The Cat!")], [CALL]], ["cat", None], verifier="normalised_match") == [1.0, None]
    with pytest.raises(ValueError, match="verifier must be one of gsm8k, .*math, got 'judge'"):
        final_answer([], [], verifier="judge")


def test_it_gets_messages_without_being_told_to():
    assert load_reward(RewardSpec(name="final_answer"), ("answer",)).call.messages
    assert not load_reward(RewardSpec(name="exact_answer"), ("answer",)).call.messages
