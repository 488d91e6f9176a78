"""The command line of ``scripts/environment.py``: plays an environment, and shows tokens, masks and rewards."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tpu_grpo.cli.naming import NamedModel, named_model
from tpu_grpo.cli.starting import command_parser, config_from_words, exit_code_of, prepare
from tpu_grpo.records.errors import ConfigError, without_controls

if TYPE_CHECKING:
    from tpu_grpo.cli.environment_episode import EnvironmentEpisode, Model
    from tpu_grpo.data.stream import PromptStream
    from tpu_grpo.records.stages import Completion, Prompt

ABOUT = """Plays an environment of a config: you write what the policy would write, or let a model do it.

Shows the prompt with its tools, what the environment answers, which tokens would be trained on (those that the policy
wrote, in bold), and at the end the rewards. A turn ends with an empty line, and the conversation with Ctrl-D; or turns
come from a file, a function or a model:

  --turns FILE                 turns with a line --- between them
  --policy path.py:function    policy(messages) -> the next turn's text
  --model                      the model of the config writes them, or the checkpoint of the run

A run is named as for scripts/sample.py: runs/mine, runs/mine@best, runs/mine@40."""
USAGE = """python scripts/environment.py CONFIG.yaml [--record 0] [--turns FILE] [--tokens] [section.key=value ...]
       python scripts/environment.py RUN --model [--record 0] [--tokens] [section.key=value ...]"""
RECORD_HELP = "play this prompt of the data; they are counted from 0, those of several sources source after source"
SAMPLED, OBSERVED = "bold green", "dim"


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    parser = command_parser(USAGE, ABOUT, words="config or run, and settings")
    parser.add_argument("--record", type=int, default=0, metavar="N", help=RECORD_HELP)
    parser.add_argument("--turns", type=Path, metavar="FILE", help="take the turns from a file")
    parser.add_argument("--policy", metavar="path.py:function", help="take the turns from a function")
    parser.add_argument("--model", action="store_true", help="let the model play, sampling as in the run")
    parser.add_argument("--tokens", action="store_true", help="show every token with its id and whether it is trained")
    options = parser.parse_intermixed_args(arguments)
    return exit_code_of(lambda: _play(_named(options.words), Console(highlight=False), options))


def _named(words: Sequence[str]) -> NamedModel:
    """Return the model and config that ``words`` name: a run or a model, or else a config file and its model.path."""
    if words and "=" not in words[0] and not words[0].endswith((".yaml", ".yml")):
        return named_model(words[0], words[1:])
    config = config_from_words(words)
    return NamedModel(config.model.path, config, "initial")


def _play(named: NamedModel, console: Console, options: argparse.Namespace) -> None:
    """Play one conversation, and show it.

    Raises:
        ConfigError: for a config without environments, or a record that does not exist.
        TpuGrpoError: for data, templates, an environment or a policy that do not fit the config.
    """
    config = named.config
    if not config.environment.is_on:
        raise ConfigError("environment.name must be set to play an environment, got none; name one")
    given = {"--turns": options.turns is not None, "--policy": options.policy is not None, "--model": options.model}
    if sum(given.values()) > 1:
        both = " and ".join(name for name, is_given in given.items() if is_given)
        raise ConfigError(f"turns come from a file, from a function or from the model, got {both}; drop one")
    prepare(needs_hub=config.needs_hub)
    from tpu_grpo.cli.environment_episode import EnvironmentEpisode, policy_of_file, policy_of_function
    from tpu_grpo.engine.sampler import sampling_params
    from tpu_grpo.hosts import Hosts
    from tpu_grpo.records.stages import Request, SampleKey
    from tpu_grpo.run.inputs import open_inputs
    from tpu_grpo.run.parts import open_run_algorithm, open_task

    inputs = open_inputs(config)
    tokenizer = inputs.tokenizer
    algorithm = open_run_algorithm(config.algorithm, config.data, config.optimizer)
    with closing(open_task(inputs, algorithm, Hosts())) as task:
        environments: Any = task.environments
        prompt = _recorded(task.prompts, options.record)
        request = Request(
            prompt.token_ids, sampling_params(config.rollout), SampleKey(config.run.seed, 1, options.record, 0)
        )
        with closing(EnvironmentEpisode(prompt, request, environments, tokenizer)) as game:
            if options.model:
                from tpu_grpo.serving.served_policy import ServedPolicy

                speaker = ServedPolicy(config, named.which, context=config.context_tokens)  # as long as in the run
                print(f"loading {named.name}", file=sys.stderr)
                speaker.start()
                model = speaker.complete
            elif options.turns is not None:
                model = game.writing(policy_of_file(options.turns))
            elif options.policy is not None:
                model = game.writing(policy_of_function(options.policy))
            else:
                model = game.writing(lambda messages: typed(console))
            show(game, model, console, tokens=options.tokens)
            console.print(outcome(game, task.rewards, prompt, tokenizer))


def _recorded(prompts: "PromptStream", record: int) -> "Prompt":
    if 0 <= record < prompts.size:
        return prompts.prompt(record)
    ends = accumulate(len(part.rendered.prompts) for part in prompts.parts)
    parts = zip(prompts.parts, ends, strict=True)
    ranges = [f"{end - len(part.rendered.prompts)} to {end - 1} of {part.name}" for part, end in parts]
    sources = f" ({', '.join(ranges)})" if len(ranges) > 1 else ""
    raise ConfigError(f"--record must be one of 0 to {prompts.size - 1}{sources}, got {record}; name one of these")


def typed(console: Console) -> str | None:
    """Read a turn from stdin, up to an empty line; None at the end of the input."""
    console.print(Text("your turn; an empty line ends it, Ctrl-D the conversation", style="italic"))
    lines: list[str] = []
    for line in sys.stdin:
        if not line.strip():
            return "\n".join(lines)
        lines.append(line.rstrip("\n"))
    console.print()  # Ctrl-D leaves the cursor in the line
    return "\n".join(lines) if lines else None


def show(game: "EnvironmentEpisode", model: "Model", console: Console, *, tokens: bool) -> None:
    """Play a conversation, and show the text that each request and each turn adds; with ``tokens``, also the tokens."""
    turn = 0
    for stretch in game.play(model):
        turn += stretch.sampled
        what = f"turn {turn}, which the policy wrote" if stretch.sampled else "what the policy sees"
        console.rule(what, align="left")
        console.print(Text(without_controls(stretch.text), style=SAMPLED if stretch.sampled else OBSERVED))
        if tokens:
            mark = "1" if stretch.sampled else "0"  # 1: trained on
            console.print(Text(" ".join(f"{token}/{mark}" for token in stretch.token_ids), style="dim"))


def outcome(game: "EnvironmentEpisode", rewards: Any, prompt: Any, tokenizer: Any) -> Table:
    """Return a table: how the conversation ended, which tokens are trained on, and the rewards."""
    completion = game.completion
    episode = completion.episode
    assert episode is not None
    failure = "" if episode.failure is None else f": {episode.failure.text}"
    calls = [name or "(unreadable)" for turn in episode.turns for name in turn.calls]
    found = {
        "ended": "stopped" if game.was_stopped else f"{episode.ending}{failure}",
        "turns": str(len(episode.turns)),
        "tokens trained on": f"{completion.sampled_tokens} of {len(completion.token_ids)} after the prompt",
        "training samples": str(len(episode.branches)),
        "calls": ", ".join(calls) or "none",
        "environment's reward": _number(episode.reward),
        **(_scores(completion, rewards, prompt, tokenizer) if episode.turns or episode.failure is not None else {}),
    }
    table = Table("", "", title="The conversation", show_header=False)
    for name, value in found.items():
        table.add_row(Text(name), Text(without_controls(value)))
    return table


def _scores(completion: "Completion", rewards: Any, prompt: Any, tokenizer: Any) -> dict[str, str]:
    """Return the run's rewards for a conversation, by name, and their total."""
    from tpu_grpo.engine.sampler import completion_text
    from tpu_grpo.records.stages import PromptBatch, Rollout

    text = completion_text(tokenizer, completion)
    scores = rewards.score(Rollout(PromptBatch(1, (prompt,)), 1, (completion,), (text,), seconds=0.0))
    named: Mapping[str, Any] = scores.by_name
    by_name = {f"reward {name}": _number(float(values[0])) for name, values in named.items()}
    return {**by_name, "total reward": _number(float(scores.total[0]) if scores.scored[0] else None)}


def _number(value: float | None) -> str:
    return "none" if value is None or value != value else f"{value:g}"
