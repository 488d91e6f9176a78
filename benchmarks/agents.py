"""Measures the cost of an agent's requests: python -m benchmarks.agents [--sessions 256] [--requests 10000] [--rollout]

A lasting agent sends HTTP requests for all sessions concurrently; each request is answered immediately with a text and
64 tokens, without a model. Printed are how many sessions got the right answer to every request, the CPU milliseconds
per request in the environments' process and in this one, and the memory of the environments' process.

With --rollout a model on the CPU samples 64 completions of 64 tokens, alternately as a plain rollout and as answers to
an agent. Printed is the agent's number of tokens per second, as a share of the plain rollout's.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil

from tests.models.random_checkpoint import edit_config
from tests.several.runs import settings, write_files
from tpu_grpo.config import EnvironmentSection, parse_config
from tpu_grpo.environments.actions import Action, Answered, Ended, SampledTurn
from tpu_grpo.environments.environment_classes import load_environment
from tpu_grpo.environments.pool import EnvironmentPool
from tpu_grpo.hosts import Hosts
from tpu_grpo.run.inputs import open_inputs
from tpu_grpo.run.parts import build_parts

AGENT = """
import asyncio, json, sys
import aiohttp

async def play(client, asked):
    count, good, messages = asked["task"]["count"], 0, [{"role": "user", "content": asked["task"]["name"]}]
    for number in range(count):
        url = asked["base_url"] + "/chat/completions"
        body = {"messages": messages, "logprobs": True, "return_token_ids": True}
        async with client.post(url, json=body, headers={"Authorization": "Bearer " + asked["api_key"]}) as answer:
            said = (await answer.json())["choices"][0]["message"]["content"]
        good += said == f"{asked['task']['name']} {number}"
    print(json.dumps({"session": asked["session"], "reward": good}), flush=True)

async def main():
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as client, asyncio.TaskGroup() as group:
        while line := await asyncio.to_thread(sys.stdin.readline):
            group.create_task(play(client, json.loads(line)))

asyncio.run(main())
"""
TOKENS = 64


def main() -> None:
    """Measure, and print one line for each round of sessions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rollout", action="store_true")
    options = parser.parse_args()
    if options.rollout:
        print(share_of_a_rollout(options.rounds))
        return
    each = -(-options.requests // options.sessions // options.rounds)
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "agent.py"
        program.write_text(AGENT)
        given = {"command": [sys.executable, str(program)], "lasting": True}
        loaded = load_environment("agent", given)
        section = EnvironmentSection(name="agent", options=given, recycle=10**6)
        pool = EnvironmentPool({"": loaded}, section, keep=False)
        try:
            for _ in range(options.rounds):
                print(round_of(pool, options.sessions, each), flush=True)
        finally:
            pool.close()


def round_of(pool: EnvironmentPool, sessions: int, each: int) -> str:
    """Play ``sessions`` episodes of ``each`` requests, and return the measurements as a line of text."""
    before, started, own = _cpu_seconds(), time.perf_counter(), time.process_time()
    for key in range(sessions):
        pool.start(key, "", {"name": f"n{key}", "count": each}, 0)
    made, rewards, ending = dict.fromkeys(range(sessions), 0), dict[int, float | None](), set[int]()
    while len(rewards) < sessions:
        for key in made:
            if key in rewards or not pool.ready(key):
                continue
            match pool.take(key):
                case Answered(done=True):
                    ending.add(key)
                    pool.end(key)
                case Answered():
                    sampled = SampledTurn((1,) * TOKENS, (2,) * TOKENS, (-0.5,) * TOKENS, is_cut=False)
                    text = f"n{key} {made[key]}"
                    pool.act(key, Action(text, text, sampled=sampled))
                    made[key] += 1
                case Ended(reward=reward):
                    rewards[key] = reward
                case failure:
                    raise SystemExit(json.dumps(vars(failure)))
    seconds, count = time.perf_counter() - started, sum(made.values())
    workers = 1000 * (_cpu_seconds() - before) / count
    here = 1000 * (time.process_time() - own) / count
    right = sum(reward == each for reward in rewards.values())
    return (
        f"{count} requests of {sessions} sessions in {seconds:.1f} s, {right} sessions got all answers right; CPU a "
        f"request {workers:.2f} ms in the environments' process, {here:.2f} ms here; its memory {_memory_mib():.0f} MiB"
    )


def share_of_a_rollout(rounds: int) -> str:
    """Sample as many tokens for an agent as in a plain rollout, ``rounds`` times each; returns a comparison as text."""
    with tempfile.TemporaryDirectory() as directory:
        files = write_files(Path(directory), layers=4, hidden=512, heads=8, head_dim=64, intermediate=1536)
        edit_config(files / "model", eos_token_id=259)  # hardly ever sampled by random weights
        program = files / "agent.py"
        program.write_text(AGENT)
        rows = [{"question": f"{n}+1=", "name": f"{n}+1=", "count": 1} for n in range(8)]
        (files / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        tree = settings(files / "run", algorithm={"group_size": 8})
        tree["model"], tree["data"] = {"path": str(files / "model")}, {"path": str(files / "rows.jsonl")}
        tree["data"] |= {"prompts_per_step": 8, "max_prompt_tokens": 40}
        tree["rollout"] = {"max_new_tokens": 64, "max_running_requests": 64, "batch_paddings": [64]}
        agent = {"name": "agent", "options": {"command": [sys.executable, str(program)], "lasting": True}}
        plain = {"rewards": [{"name": f"{files / 'rewards.py'}:ascii_share"}]}
        asked = {"environment": agent | {"max_turns": 1}, "rewards": [{"name": "environment"}]}
        built = [build_parts(open_inputs(parse_config(tree | sections)), Hosts()) for sections in (plain, asked)]
        seconds: list[list[float]] = [[], []]
        tokens = [0, 0]
        for number in range(rounds + 1):  # the first one compiles
            for index, parts in enumerate(built):
                started = time.perf_counter()
                rollout = parts.sampler.rollout(parts.task.prompts.at(number + 1, range(8)))
                seconds[index].append(time.perf_counter() - started)
                tokens[index] += sum(completion.sampled_tokens for completion in rollout.completions)
        for parts in built:
            parts.task.close()
    ratios = [one / other for one, other in zip(*(found[1:] for found in seconds), strict=True)]
    each = 1000 * median(seconds[0][1:]) / 64
    return (
        f"{tokens[1]} tokens for the agent and {tokens[0]} without it, a plain completion costs {each:.0f} ms: the "
        f"agent gets {median(ratios):.2f} of the plain speed ({min(ratios):.2f} to {max(ratios):.2f})"
    )


def _environments() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [process for process in children if "agent.py" not in " ".join(process.cmdline())]


def _cpu_seconds() -> float:
    return sum(process.cpu_times().user + process.cpu_times().system for process in _environments())


def _memory_mib() -> float:
    return max(process.memory_info().rss for process in _environments()) / 2**20


if __name__ == "__main__":
    main()
