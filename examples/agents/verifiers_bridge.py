"""Plays a verifiers environment with the policy of a run: python examples/agents/verifiers_bridge.py TASKSET [options]

TASKSET is an installed taskset, or a Python file such as verifiers_guessing.py beside this one. Options are those of
vf-eval that begin with --env, --sampling and --select, or @ options.toml; of --sampling, a run only uses max_tokens.
verifiers 0.4.0 needs a virtual environment of its own. Each row of the data is a task of the taskset; --rows data.jsonl
writes such rows instead of playing.

Each line on stdin begins an episode: {"session", "base_url", "api_key", "task"}, where task is a row. The policy plays
every seat that has no model and client of its own in the options. When an episode is over, a line on stdout has its
result: {"session", "reward"}, where the reward is the mean over the seats that verifiers calls trainable, or
{"session", "error"}. A row that is not a task of the taskset ends the program.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

import verifiers.v1 as vf
from pydantic import SerializeAsAny, model_validator
from pydantic_config import cli
from verifiers.v1.cli.resolve import narrow_config


class Options(vf.BaseConfig):
    """The options; ``env`` gets the config type that belongs to the taskset."""

    env: SerializeAsAny[vf.EnvConfig] = vf.SingleAgentEnvConfig()
    sampling: vf.SamplingConfig = vf.SamplingConfig()
    select: vf.SelectConfig = vf.SelectConfig()
    rows: Path | None = None

    @model_validator(mode="before")
    @classmethod
    def _env(cls, data: Any) -> Any:
        return vf.resolve_env_field(data, vf.narrowed_env_annotation(cls))


async def outcome(options: Options, asked: dict[str, Any]) -> dict[str, Any]:
    """Play one episode and return its reward or error."""
    env = vf.load_environment(options.env)  # anew, because it keeps a client per base_url until serving ends
    task_type = type(env.taskset).task_type()
    task = task_type(task_type.data_type().model_validate(asked["task"]), options.env.taskset.task)
    variable = f"API_KEY_{asked['session']}"  # verifiers reads keys only from variables
    os.environ[variable] = asked["api_key"]
    client = vf.EvalClientConfig(base_url=asked["base_url"], api_key_var=variable)
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext("policy", client, options.sampling))
    del os.environ[variable]
    if env.complete(episode):
        return {"reward": fmean(trace.reward for trace in episode.traces if trace.agent.trainable)}
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return {"error": "; ".join(f"{error.type}: {error.message}" for error in errors)}


async def serve(options: Options, results: TextIO) -> None:
    """Play episodes concurrently until stdin closes; cancel those that are not over then."""

    async def play(asked: dict[str, Any]) -> None:
        print(json.dumps({"session": asked["session"], **await outcome(options, asked)}), file=results, flush=True)

    lines = asyncio.StreamReader(limit=2**30)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with asyncio.TaskGroup() as group:
        playing = [group.create_task(play(json.loads(line))) async for line in lines]
        for task in playing:
            task.cancel()


if __name__ == "__main__":
    taskset, *flags = sys.argv[1:]
    sys.path.append(str(Path(taskset).parent))
    sys.argv[1:] = ["--env.taskset.id", Path(taskset).stem if taskset.endswith(".py") else taskset, *flags]
    options = cli(narrow_config(Options, sys.argv[1:]))
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what environments and their programs print goes to stderr
    if options.rows:
        tasks = vf.load_taskset(options.env.taskset).select(options.select)
        options.rows.write_text("".join(f"{task.data.model_dump_json(exclude_unset=True)}\n" for task in tasks))
    else:
        asyncio.run(serve(options, results))
