"""Tests play a teacher's lessons with these, as a run of the demo would have them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tpu_grpo.config import RunConfig
from tpu_grpo.environments.actions import Answered, LoadedEnvironment
from tpu_grpo.environments.conversation import Conversation, Start
from tpu_grpo.environments.dialects import open_dialect
from tpu_grpo.models.tokenizers import builtin_tokenizer
from tpu_grpo.records.stages import Completion, Prompt, Request, SampleKey, SamplingParams
from tpu_grpo.tasks.task import Lesson, Task


def play(task: Task, config: RunConfig, game: Any, problem: Mapping[str, str], lesson: Lesson) -> Completion:
    """Let the teacher's turns be those of the policy in a conversation with an environment that has ``step``.

    The tokens of the conversation are those of the lesson, whose turns of the user are never looked at.
    """
    tokenizer = builtin_tokenizer(task)
    asked: Any = [{"role": "user", "content": problem["question"]}]
    first: Any = tokenizer.apply_chat_template(asked, add_generation_prompt=True)
    prompt = Prompt("", tuple(first), messages=asked)
    request = Request(prompt.token_ids, SamplingParams(config.rollout.max_new_tokens), SampleKey(0, 1, 0, 0))
    loaded = LoadedEnvironment("game", "game.py:Game", "texts")
    dialect = open_dialect(tokenizer, ())
    talk = Conversation(Start(prompt, request, loaded, dialect, config.environment, config.data.max_prompt_tokens))
    game.reset(**problem)
    following = talk.first(Answered(()))
    for turn in lesson[1::2]:
        assert following is not None, "the conversation was over before the lesson"
        ids = [*tokenizer.encode(turn["content"]), tokenizer.eos_token_id]
        assert len(ids) <= following.sampling.max_new_tokens
        action = talk.turn(Completion(np.array(ids, np.int32), np.zeros(len(ids), np.float32), "stop", 0))
        assert action is not None
        told, reward, done, _ = game.step(action.text)
        following = talk.answered(Answered(({"role": "user", "content": told},), reward, done))
    assert following is None, "the lesson was over before the conversation"
    played = talk.completion()
    whole: Any = lesson
    assert [*prompt.token_ids, *played.token_ids.tolist()] == tokenizer.apply_chat_template(whole)
    return played
