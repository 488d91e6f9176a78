"""The lessons of built-in tasks are played through the environments of their demos."""

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from tpu_grpo.cli.playing import Game
from tpu_grpo.config import RunConfig, load_config
from tpu_grpo.models.tokenizers import build_tool_tokenizer
from tpu_grpo.records.stages import Prompt
from tpu_grpo.run.environments import load_environments, open_environments
from tpu_grpo.tasks.task import Lesson

CONFIGS = Path(__file__).parents[2] / "configs"


def demo(name: str) -> RunConfig:
    """The config of a demo, by its file's name."""
    return load_config(CONFIGS / f"{name}.yaml")


def told(config: RunConfig, lessons: Iterable[Lesson]) -> list[list[str]]:
    """What the environment of a config answers to what the assistant says in each lesson, to its end."""
    tokenizer = build_tool_tokenizer()
    environments = open_environments(config, tokenizer, load_environments(config), keep=False)
    assert environments is not None
    heard = []
    with closing(environments):
        for lesson in lessons:
            text, ids, _ = environments.dialects[""].first(lesson[:1], None)
            prompt = Prompt(text, tuple(ids), {}, lesson[:1])
            said = iter([message["content"] for message in lesson if message["role"] == "assistant"])
            with closing(Game(config, prompt, environments, tokenizer, 0)) as game:
                assert len(list(game.play(game.writing(lambda _, said=said: next(said))))) > 0
                episode = game.completion.episode
            assert episode is not None
            assert episode.ending == "answered", lesson
            assert next(said, None) is None
            heard.append([str(message["content"]) for message in episode.messages if message["role"] == "tool"])
    return heard
