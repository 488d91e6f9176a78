"""A reward that lets a language model grade completions, over any OpenAI-compatible chat completions endpoint."""

import asyncio
import hashlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from tpu_grpo.records.untrusted_input import parse_json
from tpu_grpo.rewards.protocol import per_sample
from tpu_grpo.rewards.shipped.correctness import LogMetric, number

TEMPLATE = """Grade an answer to a question.

Question:
{prompt}

Answer:
{completion}

How good is the answer, from 0 (useless) to 10 (excellent)? Reply with the number alone."""
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")


class Judge:
    """Asks a model for a grade from 0 to ``out_of``; the score is this grade divided by ``out_of``, from 0 to 1.

    ``template`` may contain {prompt} (the user's text), {rendered_prompt} (the policy's input), {completion} and any
    column. The last number of the reply is the grade. Each process asks the same question only once; ``cache``, a file
    of JSON lines, stores the scores for later processes. A worker runs at most ``concurrency`` requests at a time, and
    starts at most ``per_minute`` requests per minute. A request that fails because of the network or the server is
    retried up to ``retries`` times, with growing pauses.
    """

    def __init__(
        self,
        url: str,
        model: str,
        template: str = TEMPLATE,
        out_of: float = 10.0,
        system: str = "",
        api_key_variable: str = "OPENAI_API_KEY",
        concurrency: int = 16,
        per_minute: float | None = None,
        retries: int = 4,
        seconds: float = 30.0,
        cache: str | None = None,
        parameters: dict[str, Any] | None = None,
    ):
        for name, value, least in (
            ("out_of", out_of, 1e-6),
            ("concurrency", concurrency, 1),
            ("retries", retries, 0),
            ("seconds", seconds, 0.1),
            ("per_minute", 1 if per_minute is None else per_minute, 1e-6),
        ):
            number(name, value, least)
        if "{completion}" not in template:
            raise ValueError(f"template must name {{completion}}, got {template!r}")
        self._model, self._template, self._system, self._out_of = model, template, system, out_of
        self._key = os.environ.get(api_key_variable) or "none"
        self._connection = {"base_url": url, "max_retries": retries, "timeout": seconds}
        self._parameters: dict[str, Any] = {"temperature": 0.0, **(parameters or {})}
        self._concurrency = concurrency
        self._pause = 0.0 if per_minute is None else 60.0 / per_minute
        self._next = 0.0
        self._path = None if cache is None else Path(cache)
        self._known: dict[str, asyncio.Future[float | None]] = {}

    async def setup(self) -> None:
        """Create the client, and read the cache."""
        self._client = AsyncOpenAI(api_key=self._key, **self._connection)
        self._places = asyncio.Semaphore(self._concurrency)
        if self._path is not None and self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                record = parse_json(line)
                known = self._known[record["key"]] = asyncio.get_running_loop().create_future()
                known.set_result(record["score"])

    async def close(self) -> None:
        """Close the client."""
        await self._client.close()

    @per_sample(concurrency=1024)  # the judge's own ``concurrency`` is the limit
    async def __call__(
        self,
        prompt: str,
        completion: str,
        rendered_prompt: str,
        log_metric: LogMetric | None = None,
        **columns: Any,
    ) -> float | None:
        """Return the score of one completion; None if the reply has no grade, which a completion can bring about."""
        texts = {"prompt": prompt, "completion": completion, "rendered_prompt": rendered_prompt}
        question = self._template.format(**columns, **texts)
        messages = [{"role": "system", "content": self._system}] if self._system else []
        messages.append({"role": "user", "content": question})
        asked = json.dumps([self._model, messages, self._parameters, self._out_of], sort_keys=True)
        key = hashlib.sha256(asked.encode()).hexdigest()
        if key in self._known:
            score = await asyncio.shield(self._known[key])
            if log_metric is not None:
                log_metric("ungraded", float(score is None))
            return score
        asking = self._known[key] = asyncio.ensure_future(self._ask(messages))
        try:
            score = await asking
        finally:
            if not asking.done() or asking.cancelled() or asking.exception() is not None:
                del self._known[key]  # so that the next call asks again
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "score": score}) + "\n")
        if log_metric is not None:
            log_metric("ungraded", float(score is None))
        return score

    async def _ask(self, messages: list[Any]) -> float | None:
        async with self._places:
            now = time.monotonic()
            at = max(now, self._next)  # when ``per_minute`` allows the request
            self._next = at + self._pause
            await asyncio.sleep(at - now)
            reply = await self._client.chat.completions.create(
                model=self._model,
                messages=messages,
                **self._parameters,
            )
        text = reply.choices[0].message.content or ""
        numbers = _NUMBER.findall(text)
        if not numbers or not 0.0 <= float(numbers[-1]) <= self._out_of:
            return None
        return float(numbers[-1]) / self._out_of
