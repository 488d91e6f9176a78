"""What a completion says of its tokens, by hand."""

import numpy as np

from tests.talks import talk
from tpu_grpo.records.stages import Completion


def test_all_that_was_said_with_the_answers_that_a_template_moves_into_a_prompt() -> None:
    """The first answer follows its turn; the second stands in the prompt of the next branch, behind what is left."""
    moved = talk(
        [9],
        ([1, 2], [7]),
        ([3], []),
        ([4, 5], []),
        prompts={2: [9, 2, 3, 6, 8]},
        turns={1: {"observed": 2}},
    )
    assert moved.token_ids.tolist() == [1, 2, 7, 3, 4, 5]
    assert moved.conversation_ids.tolist() == [1, 2, 7, 3, 6, 8, 4, 5]
    assert talk([9], ([1], [7]), ([2], [])).conversation_ids.tolist() == [1, 7, 2]
    assert Completion(np.array([1, 2]), np.zeros(2), "stop", 0).conversation_ids.tolist() == [1, 2]
