"""What rewards get of conversations: the last turn or all messages, what environments gave, and the environments."""

import base64
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rewards.conftest import MakeFile, scored
from tpu_grpo.config import RewardSpec
from tpu_grpo.records.episode import Episode, Failure, KeptEnvironment, Turn
from tpu_grpo.records.errors import ConfigError, RewardError
from tpu_grpo.records.stages import Completion, Prompt, PromptBatch, Rollout
from tpu_grpo.rewards import open_rewards
from tpu_grpo.workers.attributes import rebuilt

GAME = """
class Game:
    '''A class as people write one.'''
    level = 3

    def reset(self, **columns): ...

    def score(self):
        return self.counter * self.level
"""


def completion(
    text: str, reward: float | None = None, failure: Failure | None = None, kept: KeptEnvironment | None = None
) -> Completion:
    said = ({"role": "assistant", "content": "add(1,2)"}, {"role": "tool", "content": "3"})
    episode = Episode(
        prompt="1+2=",
        branches=(),
        turns=(Turn(0, 1, "add(1,2)", ("add",), "3"), Turn(2, 3, text)),
        ending="answered" if failure is None else "failed",
        messages=(*said, {"role": "assistant", "content": text}),
        environment="Game",
        reward=reward,
        failure=failure,
        kept=kept,
    )
    sampled = np.array([True, False, True])
    return Completion(
        np.array([1, 2, 3], np.int32), np.zeros(3, np.float32), "stop", 0, sampled=sampled, episode=episode
    )


def rollout(*completions: Completion) -> Rollout:
    batch = PromptBatch(1, (Prompt("1+2=", (1,), {"answer": "3"}),))
    return Rollout(batch, len(completions), completions, ("add(1,2)33",) * len(completions), seconds=0.0)


def kept(source: str, **attributes: Any) -> KeptEnvironment:
    return as_kept(source, {name: pickle.dumps(v) for name, v in attributes.items()}, {"client": "a socket"})


def as_kept(source: str, attributes: Mapping[str, bytes], left_out: Mapping[str, str]) -> KeptEnvironment:
    return KeptEnvironment(source, base64.b64encode(pickle.dumps((attributes, left_out))))


def scores(specs: Sequence[Mapping[str, Any]], *completions: Completion) -> Any:
    return scored(rollout(*completions), *(RewardSpec(**spec) for spec in specs))


def test_texts_are_those_of_the_last_turn() -> None:
    found = scores([{"name": "exact_answer"}], completion("3"), completion("33"))
    assert found.total.tolist() == [1.0, 0.0]


def test_messages_are_all_of_them(reward_file: MakeFile) -> None:
    path = reward_file(
        "def f(prompts, completions):\n    return [float(len(c) + 10 * len(p)) for p, c in zip(prompts, completions)]\n"
    )
    assert scores([{"name": f"{path}:f", "messages": True}], completion("3")).total.tolist() == [13.0]


def test_what_the_environment_gave() -> None:
    found = scores([{"name": "environment"}], completion("3", reward=0.5), completion("3", reward=0.25))
    assert found.by_name["environment"].tolist() == [0.5, 0.25]


@pytest.mark.full
def test_environments_are_there_as_they_were(reward_file: MakeFile, tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(GAME)
    path = reward_file("def f(environments, **kwargs):\n    return [e.score() + e.counter for e in environments]\n")
    games = [kept(f"{tmp_path}/game.py:Game", counter=value) for value in (2, 5)]
    found = scores([{"name": f"{path}:f"}], *(completion("3", kept=game) for game in games))  # in a worker process
    assert found.total.tolist() == [2 * 3 + 2, 5 * 3 + 5]


def test_environments_are_opened_in_workers_only(reward_file: MakeFile) -> None:
    path = reward_file("def f(environments):\n    return [1.0]\n\n\ndef g(environment_rewards):\n    return [1.0]\n")
    said = r"reward f takes environments, .* its workers must be >= 1, got 0; set workers: 1 or more, or take"
    with pytest.raises(ConfigError, match=said):
        open_rewards([RewardSpec(name=f"{path}:f", workers=0)], [])
    for name, workers, keeps in (("f", 1, True), ("g", 0, False)):
        with open_rewards([RewardSpec(name=f"{path}:{name}", workers=workers)], []) as rewards:
            assert rewards.keeps_environments is keeps


def test_what_was_not_kept_says_why(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(GAME)
    game = rebuilt(kept(f"{tmp_path}/game.py:Game", counter=1), RewardError)
    with pytest.raises(AttributeError, match="'client' was not kept of the environment: a socket"):
        _ = game.client
    with pytest.raises(AttributeError, match="the environment has no attribute 'other'"):
        _ = game.other
    broken = as_kept(f"{tmp_path}/game.py:Game", {"counter": b"no pickle"}, {})
    with pytest.raises(RewardError, match="attribute 'counter' of environment .* must be readable"):
        rebuilt(broken, RewardError)


WRAPPER = """
class Wrapper:
    def __getattr__(self, name):
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)
"""


def test_a_class_that_passes_attributes_on_still_does(tmp_path: Path) -> None:
    """But the reason why something was not kept is told, also for what it would pass on to that."""
    (tmp_path / "wrapper.py").write_text(WRAPPER)
    wrapper = rebuilt(kept(f"{tmp_path}/wrapper.py:Wrapper", inner=1 + 2j), RewardError)
    assert wrapper.imag == 2.0
    with pytest.raises(AttributeError, match="'complex' object has no attribute 'other'"):
        _ = wrapper.other
    with pytest.raises(AttributeError, match="'client' was not kept of the environment: a socket"):
        _ = wrapper.client
    left_out = as_kept(f"{tmp_path}/wrapper.py:Wrapper", {}, {"inner": "a generator"})
    with pytest.raises(AttributeError, match="'inner' was not kept of the environment: a generator"):
        _ = rebuilt(left_out, RewardError).score


def test_no_reward_is_asked_about_a_failed_environment(reward_file: MakeFile) -> None:
    path = reward_file(
        "def f(completions):\n    assert 'bad' not in completions\n    return [1.0] * len(completions)\n"
    )
    failures = [Failure("late", "did not answer", reward=reward) for reward in (-0.5, None, 0.0)]
    failed = [completion("bad", failure=failure) for failure in failures]
    found = scores([{"name": f"{path}:f"}], *failed, completion("3"))
    np.testing.assert_array_equal(found.by_name["f"], [-0.5, np.nan, 0.0, 1.0])
    np.testing.assert_array_equal(found.total, [-0.5, np.nan, 0.0, 1.0])
    assert found.scored.tolist() == [True, False, True, True]


def test_all_may_have_failed() -> None:
    found = scores([{"name": "exact_answer"}], completion("", failure=Failure("died", "died")))
    assert found.scored.tolist() == [False]


def test_plain_completions_have_no_environment() -> None:
    plain = Completion(np.array([1], np.int32), np.zeros(1, np.float32), "stop", 0)
    with pytest.raises(RewardError, match="takes environment_rewards needs conversations"):
        scores([{"name": "environment"}], plain)


@pytest.mark.full
def test_every_reward_of_a_failed_environment_is_its_value_and_weights_change_nothing(reward_file: MakeFile) -> None:
    path = reward_file("def f(completions):\n    return [1.0] * len(completions)\n")
    worth = Failure("late", "did not answer", reward=-0.5)
    specs = [{"name": f"{path}:f", "weight": 4.0}, {"name": "exact_answer", "weight": 0.0}]
    found = scores(specs, completion("", failure=worth), completion("3"))
    assert [values[0] for values in found.by_name.values()] == [-0.5, -0.5]
    assert found.total.tolist() == [-0.5, 4.0]
