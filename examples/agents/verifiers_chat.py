"""A verifiers harness that sends the conversation unchanged, without tools, and gets one answer to each user message.

verifiers' own harnesses start a program for every turn; this one runs within the process, which takes milliseconds.
It suits every taskset without tools:

    python examples/agents/verifiers_bridge.py TASKSET \\
        --env.agent.harness.id verifiers_chat --env.agent.runtime.type subprocess
"""

from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["ChatHarness"]


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """Requests one chat completion; verifiers launches it again for every turn, with the whole conversation."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Send a request to ``endpoint``, where verifiers records the reply; an HTTP error is a failed program."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages.extend(message_to_wire(message) for message in prompt or [])
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http,
            http.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            ) as reply,
        ):
            return vf.ProgramResult(exit_code=int(not reply.ok), stdout=await reply.text(), stderr="")
