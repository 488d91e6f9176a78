"""What an agent's requests cost the host: python -m benchmarks.agents [--sessions 256] [--requests 10000]

A lasting agent asks over HTTP, all sessions at once; the policy answers at once with a text and 64 tokens, without a
model. Says whether every request was answered once and by its own answer, and gives the milliseconds of CPU a request,
of the environments' process and of this one, and how the memory of that process grows.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tpu_grpo.config import EnvironmentSection
from tpu_grpo.environments.actions import Action, Answered, Ended, SampledTurn
from tpu_grpo.environments.environment_classes import load_environment
from tpu_grpo.environments.pool import EnvironmentPool

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
    options = parser.parse_args()
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
    """Play ``sessions`` episodes of ``each`` requests, and describe what was found."""
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


def _environments() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [process for process in children if "agent.py" not in " ".join(process.cmdline())]


def _cpu_seconds() -> float:
    return sum(process.cpu_times().user + process.cpu_times().system for process in _environments())


def _memory_mib() -> float:
    return max(process.memory_info().rss for process in _environments()) / 2**20


if __name__ == "__main__":
    main()
