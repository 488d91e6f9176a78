"""Every command behind one name: ``tpu-grpo COMMAND ...``, or ``python -m tpu_grpo COMMAND ...``.

    tpu-grpo run configs/demo_cpu.yaml run.seed=1      =   python scripts/run.py configs/demo_cpu.yaml run.seed=1
    tpu-grpo rewards my.yaml --completions some.jsonl  =   python scripts/rewards.py my.yaml --completions some.jsonl

A command's module is imported only when that command is called, so that help and error messages appear quickly.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

from tpu_grpo.workers.streams import lasting_output

COMMANDS = {
    "run": ("train", "train by GRPO with the rewards of a config"),
    "plan": ("plan", "say whether a run fits a TPU slice, and how long a step takes; no TPU needed"),
    "check": ("check", "say row by row whether this machine, or every host of a slice, works, and how fast it is"),
    "eval": ("evaluate", "evaluate a checkpoint of a run on held-out prompts, without training"),
    "export": ("export", "write the model of a checkpoint as a Hugging Face directory"),
    "report": ("report", "write a page that shows a run; also while it goes on"),
    "sample": ("sample", "let the model of a run, an export or any other answer prompts"),
    "serve": ("serve", "answer HTTP requests with a model, in the forms of OpenAI, vLLM and SGLang"),
    "data": ("data", "show the first prompts of a config as the model will see them"),
    "environment": ("environment", "play an environment of a config, with tokens, masks and rewards"),
    "rewards": ("rewards", "score completions of a file with the rewards of a config"),
    "launch": ("launch", "run on a Cloud TPU slice: create, setup, run, status, logs, stop, delete, babysit"),
}
"""Command -> (module of this package whose ``main`` runs it, description)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names; returns its exit code, or 2 for an unknown command.

    ``arguments`` defaults to those of the process, as for the installed command ``tpu-grpo``.
    """
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    with lasting_output():  # the reader may close the pipe, as head does
        if command in ("--help", "-h"):
            print(help_text())
            return 0
        if command not in COMMANDS:
            known = ", ".join(COMMANDS)
            print(f"a command must be one of {known}, got {command!r}; see tpu-grpo --help", file=sys.stderr)
            return 2
        module, _ = COMMANDS[command]
        return import_module(f"tpu_grpo.cli.{module}").main(rest)


def help_text() -> str:
    """Return the usage, and what each command does."""
    named = [f"  {name:11} {what}" for name, (_, what) in COMMANDS.items()]
    more = "tpu-grpo COMMAND --help explains a command; tpu-grpo run --help shows the settings."
    return "\n".join(["usage: tpu-grpo COMMAND ...", "", "Commands:", "", *named, "", more])
