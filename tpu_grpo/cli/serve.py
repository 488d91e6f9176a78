"""The command line of ``scripts/serve.py``: answers HTTP requests with a model, until it is stopped."""

import argparse
import ipaddress
import os
import signal
import sys
from collections.abc import Sequence

from tpu_grpo.cli.naming import named_model
from tpu_grpo.cli.starting import command_parser, exit_code_of, prepare
from tpu_grpo.records.errors import ConfigError

KEY = "TPU_GRPO_SERVE_KEY"
"""The environment variable with the key that requests have to show."""
ABOUT = f"""Answers HTTP requests with a model: for evaluation harnesses, agents and demos.

MODEL is what scripts/sample.py takes: the directory of a run, an export, another Hugging Face checkpoint directory, or
builtin:addition. Paths: /v1/chat/completions, /v1/completions, /inference/v1/generate, /generate, /v1/models, /health.
A request's sampling settings count; those that it leaves out are the run's, or for a model without one the defaults,
which section.key=value changes. The same request gets the same tokens, whatever else is asked; for several answers use
n or other seeds. Requests that arrive during a batch wait for its end.

It listens on loopback; for another address, put a key into {KEY}, which requests then have to show as a bearer token.
Ctrl-C or SIGTERM ends it."""
USAGE = (
    "python scripts/serve.py MODEL [--port 8000] [--host 127.0.0.1] [--rows 64] [--context N] [section.key=value ...]"
)


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    parser = command_parser(USAGE, ABOUT)
    parser.add_argument("model", metavar="MODEL", help="the model that answers")
    parser.add_argument("words", nargs="*", metavar="section.key=value", help="changes a setting of its config")
    parser.add_argument("--port", type=int, default=8000, help="8000 unless it is given; 0 for a free one")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on; loopback unless it is given")
    parser.add_argument("--rows", type=int, help="turns to sample at once; rollout.max_running_requests otherwise")
    parser.add_argument("--context", type=int, help="the most tokens of a prompt and its answer")
    options = parser.parse_intermixed_args(arguments)
    return exit_code_of(lambda: _serve(options))


def _serve(options: argparse.Namespace) -> None:
    key = os.environ.get(KEY) or None
    if key is None and not _is_loopback(options.host):
        raise ConfigError(
            f"--host must be an address of loopback unless requests have to show a key, got {options.host}; put a key "
            f"into the environment variable {KEY}"
        )
    if not 0 <= options.port < 2**16:
        raise ConfigError(f"--port must be from 0 to 65535, got {options.port}")
    for name, value in (("--rows", options.rows), ("--context", options.context)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    model = named_model(options.model, options.words)
    prepare(needs_hub=model.config.needs_hub)
    from tpu_grpo.serving.served_policy import ServedPolicy
    from tpu_grpo.serving.server import Server

    rows = options.rows or model.config.rollout.max_running_requests
    speaker = ServedPolicy(model.config, model.which, samples=rows, context=options.context)
    with Server(speaker, model.name, options.host, options.port, key) as server:
        print(f"loading {model.name}", file=sys.stderr)
        speaker.start()
        print("compiling the engine's programs", file=sys.stderr)
        speaker.compile_all()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: server.stop())
        shown = f"{model.name}{model.config.rollout.rounding_text}"
        print(f"serving {shown} at {server.address}; Ctrl-C ends it", file=sys.stderr, flush=True)
        server.serve(rows)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
