"""A conversation that is played without a model, with the tokens of a model family."""

from contextlib import closing

from tests.environments.template_families import ids, tokenizer
from tpu_grpo.cli.environment_episode import EnvironmentEpisode
from tpu_grpo.config import parse_config
from tpu_grpo.engine.sampler import sampling_params
from tpu_grpo.environments.opening import load_environments
from tpu_grpo.records.stages import Prompt, Request, SampleKey


def test_turns_end_as_the_chat_template_ends_them() -> None:
    """Gemma's texts end with <eos>, and its turns with <end_of_turn>, behind which the next one can come."""
    config = parse_config(
        {
            "environment": {"name": "guessing", "options": {"greets": False}},
            "rewards": [{"name": "environment"}],
            "data": {"max_prompt_tokens": 100},
            "rollout": {"max_new_tokens": 200},
        }
    )
    gemma = tokenizer("gemma2")
    environments = load_environments(config.environment, config.rewards).open(gemma, 100, {}, keep=False)
    asked = "<bos><start_of_turn>user\nGuess.<end_of_turn>\n<start_of_turn>model\n"
    messages = [{"role": "user", "content": "Guess."}]
    prompt = Prompt(asked, tuple(ids("gemma2", asked)), {"secret": 3}, messages)
    guesses = iter(["50", "3"])
    request = Request(prompt.token_ids, sampling_params(config.rollout), SampleKey(0, 1, 0, 0))
    with closing(environments), closing(EnvironmentEpisode(prompt, request, environments, gemma)) as game:
        policy = game.writing(lambda said: next(guesses, None))
        shown = [stretch.text for stretch in game.play(policy)]
        episode = game.completion.episode
    assert shown == [
        asked,
        "50<end_of_turn>",
        "\n<start_of_turn>user\nlower<end_of_turn>\n<start_of_turn>model\n",
        "3<end_of_turn>",
    ]
    assert episode is not None
    assert episode.ending == "done"
