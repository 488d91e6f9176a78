"""An agent written with the openai package: it asks the policy for sums of three-digit numbers, with a tool that adds.

One process plays all episodes of a run; configs/demo_agent_cpu.yaml starts it.
"""

import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI, BadRequestError

NUMBER = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}]
CLIENT = AsyncOpenAI(base_url="http://localhost", api_key="none", max_retries=0)


async def play(line: str) -> None:
    """Play the episode that a line of JSON describes, and write its reward to stdout."""
    asked = json.loads(line)
    client = CLIENT.with_options(base_url=asked["base_url"], api_key=asked["api_key"])
    messages: list[Any] = [{"role": "user", "content": asked["task"]["question"]}]
    said = ""
    for _ in range(3):
        try:
            answered = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        except BadRequestError:  # the policy's tokens of this episode are used up
            break
        message = answered.choices[0].message
        said = (message.content or "").strip()
        messages.append(message.model_dump(exclude_none=True))
        calls: list[Any] = message.tool_calls or []
        for call in calls:
            try:
                told = str(sum(json.loads(call.function.arguments)[name] for name in ("a", "b")))
            except (KeyError, TypeError):
                told = "Error"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
        if not calls:
            break
    reward = float(said == asked["task"]["answer"])
    print(json.dumps({"session": asked["session"], "reward": reward}), flush=True)


async def main() -> None:
    """Play episodes concurrently until stdin closes."""
    async with asyncio.TaskGroup() as playing:
        while line := await asyncio.to_thread(sys.stdin.readline):
            playing.create_task(play(line))


if __name__ == "__main__":
    asyncio.run(main())
