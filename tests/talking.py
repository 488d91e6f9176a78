"""A random model that ends its turns after a few tokens, and environments for it, for tests of whole runs."""

import sys
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from tests.models.random_checkpoint import edit_config, write_random
from tpu_grpo.models.tokenizers import build_tool_tokenizer

ENVIRONMENT = '''
import hashlib
import json
import random
import time


def slowly():
    """Answer after a delay that nothing can know, also not the seed."""
    time.sleep(random.SystemRandom().uniform(0.0, 0.06))


def number(text):
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "backslashreplace")).digest()[:2], "big")


class Echo:
    """Answers every turn with a number made of it and of what was said before; over after up to eight turns."""

    def __init__(self, turns=8):
        self.most = turns

    def reset(self, question, **columns):
        slowly()
        self.said = [question]
        return f"{random.randint(0, 9)}?"

    def step(self, action):
        slowly()
        self.said.append(action)
        value = number(json.dumps(self.said))
        done = len(self.said) > self.most or value % 13 == 0
        return str(value % 1000), value / 65536, done, {}
'''
AGENT = '''
import asyncio
import json
import random
import sys
import zlib

import aiohttp


async def play(client, asked):
    """Ask up to four times: go on, begin anew, or ask for two turns at once, by what the policy says."""

    async def ask(messages, n=1):
        await asyncio.sleep(random.SystemRandom().uniform(0.0, 0.1))
        url, body = asked["base_url"] + "/chat/completions", {"messages": messages, "n": n, "max_tokens": 10}
        async with client.post(url, json=body, headers={"Authorization": "Bearer " + asked["api_key"]}) as answer:
            return [choice["message"] for choice in (await answer.json())["choices"]]

    messages, said = [{"role": "user", "content": asked["task"]["question"]}], []
    for _ in range(3):
        turns = await ask(messages, 1 + len(said) % 2)
        said += [turn["content"] for turn in turns]
        value = zlib.crc32("".join(said).encode())
        if value % 5 == 0:
            break
        messages = messages if value % 3 == 0 else [*messages, turns[0], {"role": "user", "content": str(value % 100)}]
    if "lucky" in sys.argv:  # what an agent that reads a clock might say
        said.append(str(random.SystemRandom().random()))
    print(json.dumps({"session": asked["session"], "reward": zlib.crc32("".join(said).encode()) / 2**32}), flush=True)


async def main():
    async with aiohttp.ClientSession() as client, asyncio.TaskGroup() as group:
        while line := await asyncio.to_thread(sys.stdin.readline):
            group.create_task(play(client, json.loads(line)))


asyncio.run(main())
'''
"""An agent whose requests depend on what the policy says, and arrive in any order."""
AGENT_SETTINGS = {
    "name": "agent",
    "options": {"command": [sys.executable, "agent.py"], "lasting": True},
    "max_turns": 8,
}
SIZES = {
    "data": {"path": "data.jsonl", "prompts_per_step": 4, "max_prompt_tokens": 24},
    "rollout": {"max_new_tokens": 72, "prefill_tokens": 64, "batch_paddings": [16], "max_running_requests": 16},
    "environment": {"name": "echo.py:Echo", "max_turns": 8, "max_turn_tokens": 10},
    "rewards": [{"name": "environment"}],
}
"""Settings of runs with these, beside those of tests/several/runs.py."""


def write_talking_files(directory: Path, layers: int = 2) -> Path:
    """Write model, data and environment; the model ends a turn at about every third token."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tool_tokenizer()
    model = write_random("qwen3", directory / "model", layers=layers, vocab=len(tokenizer), kv_heads=4, scale=0.3)
    tokenizer.save_pretrained(str(model))
    end: Any = tokenizer.eos_token_id
    edit_config(model, eos_token_id=end, pad_token_id=tokenizer.pad_token_id)
    [path] = model.glob("*.safetensors")
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][end] *= 5.0  # its logit has five times the spread of the others
    if "lm_head.weight" in tensors:
        tensors["lm_head.weight"][end] *= 5.0
    save_file(tensors, path, metadata={"format": "pt"})
    (directory / "echo.py").write_text(ENVIRONMENT)
    (directory / "agent.py").write_text(AGENT)
    lines = [f'{{"question": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(8)]
    (directory / "data.jsonl").write_text("".join(lines))
    return directory
