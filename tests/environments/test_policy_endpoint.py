"""Clients that send too much, read too slowly or go in the middle, over real sockets."""

import asyncio
import gzip
import json
import os
import urllib.error
import urllib.request
from collections.abc import Awaitable
from typing import Any

import psutil
import pytest

from tpu_grpo.environments.actions import Action, SampledTurn
from tpu_grpo.environments.policy_endpoint import MOST_BYTES, MOST_WAITING, Endpoint, Session, settle
from tpu_grpo.environments.policy_requests import RefusedError, TurnRequest

MIB = 2**20
LONG = tuple(range(100_000))
TURN = Action("ok", "ok", sampled=SampledTurn((1,), LONG, (-0.5,) * len(LONG), False))
"""With log-probabilities an answer of 8 MiB, more than a socket's buffers hold."""


class Clients:
    """Raw clients of one session."""

    def __init__(self, endpoint: Endpoint, session: Session):
        self._port = int(endpoint.address.rpartition(":")[2])
        self._head = (
            f"POST /{session.name}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\n"
        )

    async def send(self, head: str, body: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect, and send this much of a request."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=MIB)
        writer.write((self._head + head).encode() + body)
        await writer.drain()
        return reader, writer

    async def ask(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a whole request."""
        body = json.dumps({"messages": [{"role": "user", "content": "x"}], "logprobs": True}).encode()
        return await self.send(f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n", body)

    async def pour(self, head: str, chunk: bytes) -> bytes:
        """Send 128 MiB of a body unless the server closes before, and return its status line."""
        reader, writer = await self.send(head)
        try:
            for _ in range(128):
                writer.write(chunk)
                await writer.drain()
        except ConnectionError:
            pass
        try:
            return await asyncio.wait_for(reader.readline(), 30)
        except ConnectionError:
            return b"closed"
        finally:
            writer.close()


async def policy(session: Session) -> None:
    """Answer every request at once."""
    forever = asyncio.get_running_loop().create_future()
    while await session.next(until=forever) is not None:
        session.answer(TURN)


@pytest.mark.full
def test_a_bad_client_costs_its_own_request_alone() -> None:
    async def scene() -> None:
        endpoint = Endpoint()
        await endpoint.listen()
        session = endpoint.open()
        clients, answering = Clients(endpoint, session), asyncio.create_task(policy(session))
        (await read_to_end(clients.ask()))  # imports and buffers of a first answer
        process, before = psutil.Process(os.getpid()), psutil.Process(os.getpid()).memory_info().rss
        open_before = len(process.net_connections())

        declared = [clients.pour(f"Content-Length: {2**30}\r\n\r\n", b" " * MIB) for _ in range(2)]
        endless = [clients.pour("Transfer-Encoding: chunked\r\n\r\n", b"100000\r\n" + b" " * MIB + b"\r\n")]
        for status in await asyncio.gather(*declared, *endless):
            assert status == b"closed" or b" 413 " in status, status
        assert process.memory_info().rss - before < 8 * MOST_BYTES

        slow = [await clients.ask() for _ in range(8)]  # none of them reads
        for cut in range(40):
            (await clients.send("Content-Length: 100\r\n\r\n", b"{" * cut))[1].close()
        trickling = [await clients.send("Content-") for _ in range(40)]

        answer = await asyncio.wait_for(read_to_end(clients.ask()), 30)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b" 200 " in head
        assert len(json.loads(body)["choices"][0]["logprobs"]["content"]) == len(LONG)

        answering.cancel()
        endpoint.forget(session)
        for _, writer in (*slow, *trickling):
            writer.close()
        await endpoint.close()
        await asyncio.sleep(0.1)
        assert len(process.net_connections()) < open_before

    asyncio.run(asyncio.wait_for(scene(), 120))


async def read_to_end(asked: Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> bytes:
    """Read an answer until the server closes."""
    reader, writer = await asked
    try:
        return await reader.read()
    finally:
        writer.close()


BODY = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()


CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ((CHAT, BODY, "gzip"), 400, "the body must be as the headers say"),
        ((CHAT, BODY, "deflate"), 400, "the body must be as the headers say"),
        ((CHAT, BODY, "zip"), 400, "Content-Encoding must be gzip, deflate or left out, got 'zip'"),
        ((CHAT, gzip.compress(b" " * 2**28, 1), "gzip"), 413, "Maximum request body size"),
        ((CHAT, gzip.compress(BODY), "gzip"), 200, ""),
        (("/v1/models/policy", None, ""), 200, ""),
        (("/v1/models/gpt/5", None, ""), 404, "the model must be policy, got 'gpt/5'"),
        (("/v1/nothing", BODY, ""), 404, "POST /v1/nothing"),
        (("/v1/chat/completions", None, ""), 405, "GET /v1/chat/completions"),
        (("/v1/completions", b'{"prompt": "x", "logprobs": 2}', ""), 400, "top_logprobs must be 0 in a run"),
        (("/v1/completions", b'{"prompt": [%s"a"]}' % (b'"a", ' * 256), ""), 400, "at most 256 turns"),
    ],
)
def test_every_refusal_is_an_error_in_openais_form(
    asked: tuple[str, bytes | None, str], status: int, said: str
) -> None:
    async def scene() -> tuple[int, Any]:
        endpoint = Endpoint()
        await endpoint.listen()
        answering = asyncio.create_task(policy(endpoint.open_root(None, MOST_WAITING)))
        path, body, encoding = asked
        try:
            return await asyncio.to_thread(fetched, endpoint.address + path, body, encoding)
        finally:
            answering.cancel()
            await endpoint.close()

    found, body = asyncio.run(asyncio.wait_for(scene(), 60))
    assert found == status
    assert status == 200 or said in body["error"]["message"]
    assert status == 200 or body["error"].keys() == {"message", "type", "param", "code"}


def fetched(url: str, body: bytes | None, encoding: str) -> tuple[int, Any]:
    try:
        headers = {"Content-Encoding": encoding} if encoding else {}
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_what_waits_is_bounded_and_shared_by_the_turns_of_a_request() -> None:
    async def scene() -> None:
        session = Endpoint().open()
        text = "x" * (15 * MIB)
        waiting = [asyncio.create_task(session.turns(TurnRequest(text=text, n=14))) for _ in range(17)]
        before = psutil.Process().memory_info().rss
        await asyncio.sleep(0)
        with pytest.raises(RefusedError, match="at most 256 turns of 268435456 bytes") as refused:
            await session.turns(TurnRequest(text=text))
        assert refused.value.status == 429
        assert psutil.Process().memory_info().rss - before < 100 * MIB  # 17 * 14 copies would be 3.5 GiB
        taken = await session.batch(2)
        settle(taken[1][1], RefusedError("no"))  # one turn is refused, and so the others of its request wait no more
        with pytest.raises(RefusedError, match="no"):
            await waiting[0]
        assert len(await session.batch(256)) == 16 * 14
        for task in waiting[1:]:
            task.cancel()
        await asyncio.wait(waiting[1:])
        assert session._bytes == 0

    asyncio.run(asyncio.wait_for(scene(), 60))
