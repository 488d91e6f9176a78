"""The HTTP server that gives agents turns of the policy; it listens on loopback, and every session has its own key.

    endpoint = Endpoint()
    await endpoint.listen()                                 # http://127.0.0.1:PORT
    session = endpoint.open()                               # http://127.0.0.1:PORT/SESSION/v1, with the key session.key
    request = await session.next(until=agent_has_ended)     # the next request for one turn; None once the agent ended
    session.answer(turn)
    session.close(RefusedError(...))                        # the response to all further requests

Requests of a session are answered one after another, in the order in which they arrived; a request for n turns counts
as n requests. ``tpu-grpo serve`` has one session, whose paths have no prefix, and answers requests in batches.
"""

import asyncio
import contextlib
import hmac
import json
import math
import secrets
import time
from collections import deque
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from tpu_grpo.environments.actions import Action
from tpu_grpo.environments.policy_requests import FORMS, RefusedError, TurnRequest, streamed
from tpu_grpo.records.errors import LARGEST_REWARD
from tpu_grpo.records.untrusted_input import parse_json

MOST_BYTES = 2**24
"""The largest body of a request, 16 MiB."""
MOST_WAITING = 256
"""The most turns that may wait in a session's queue."""
MOST_WAITING_BYTES = 2**28
"""The most bytes of all requests that a session may have open, 256 MiB."""


class Session:
    """The requests of one agent."""

    def __init__(self, name: str, key: str | None, most: int, most_bytes: int):
        """``key`` is the bearer token that requests need, None for no token; at most ``most`` turns may wait, and a
        request for one prompt has at most ``most_bytes``."""
        self.name, self.key, self._most, self._most_bytes = name, key, most, most_bytes
        self.reward: float | None = None
        """The reward that the agent has posted; None if it has posted none."""
        self._waiting: deque[tuple[TurnRequest, int, asyncio.Future[Action]]] = deque()
        """Each request with the number of its turn."""
        self._bytes = 0
        self._asked: asyncio.Future[Action] | None = None
        self._closed: RefusedError | None = None
        self._arrived = asyncio.Event()

    async def turns(self, asked: TurnRequest) -> list[Action]:
        """Wait for the turns that a request asks for; raises RefusedError once the session is closed."""
        if self._closed is not None:
            raise self._closed
        text = f"at most {self._most} turns of {MOST_WAITING_BYTES} bytes may be asked for at once, got more"
        too_many = RefusedError(text, 400 if asked.turns > self._most else 429, "too_many")
        if len(self._waiting) + asked.turns > self._most:
            raise too_many
        sizes = [len(asked.for_one(index)) for index in range(0, asked.turns, asked.n)]
        if (size := max(sizes)) > self._most_bytes:
            text = f"a request must have at most {self._most_bytes} bytes for a prompt, got {size}; shorten it"
            raise RefusedError(text, code="context_length_exceeded")
        if self._bytes + sum(sizes) > MOST_WAITING_BYTES:
            raise too_many
        futures = [asyncio.get_running_loop().create_future() for _ in range(asked.turns)]
        self._waiting.extend((asked, index, future) for index, future in enumerate(futures))
        self._bytes += sum(sizes)
        self._arrived.set()
        try:
            return list(await asyncio.gather(*futures))
        finally:
            self._bytes -= sum(sizes)
            for future in futures:  # the other turns of a request of which one is refused
                future.cancel()

    async def next(self, until: "asyncio.Future[Any]") -> str | None:
        """Wait for the next request, and return it in JSON. If ``until`` is done before a request arrives, raise the
        exception of ``until``, or return None if it has no exception."""
        while True:
            arrived = asyncio.ensure_future(self._arrived.wait())
            await asyncio.wait({arrived, until}, return_when=asyncio.FIRST_COMPLETED)
            arrived.cancel()
            if taken := self._take(1):
                asked, index, self._asked = taken[0]
                return asked.for_one(index)
            if until.done():
                await until
                return None

    async def batch(self, most: int) -> list[tuple[TurnRequest, asyncio.Future[Action]]]:
        """Wait for a request, and take up to ``most`` turns that wait; the caller sets the futures' results."""
        while not (taken := self._take(most)):
            await self._arrived.wait()
        return [(asked.one(index), future) for asked, index, future in taken]

    def _take(self, most: int) -> list[tuple[TurnRequest, int, asyncio.Future[Action]]]:
        """Take up to ``most`` turns that wait; those whose client has gone are dropped."""
        taken: list[tuple[TurnRequest, int, asyncio.Future[Action]]] = []
        while self._waiting and len(taken) < most:
            asked, index, future = self._waiting.popleft()
            if not future.done():
                taken.append((asked, index, future))
        if not self._waiting:
            self._arrived.clear()
        return taken

    def answer(self, turn: Action) -> None:
        """Answer the request that ``next`` returned last."""
        if self._asked is not None:
            settle(self._asked, turn)

    def close(self, reason: RefusedError) -> None:
        """Refuse all open and later requests."""
        self._closed = reason
        for future in (*(future for *_, future in self._waiting), *([self._asked] if self._asked else [])):
            settle(future, reason)
        self._waiting.clear()


def settle(future: "asyncio.Future[Action]", turn: Action | RefusedError) -> None:
    """Answer a request, unless its client has gone."""
    if future.done():
        return
    if isinstance(turn, RefusedError):
        future.set_exception(turn)
        future.exception()  # marks it as retrieved, since a client that is gone never awaits it
    else:
        future.set_result(turn)


_SESSION = web.RequestKey("session", Session)


class Endpoint:
    """The server, and the sessions that it answers."""

    def __init__(self, model: str = "policy", most_bytes: int = MOST_BYTES, *, in_run: bool = True):
        """``model`` is the model's name in responses; a request has at most ``most_bytes`` for a prompt, and at most
        16 times as many for several. In a run, the likeliest tokens in a token's place are not known."""
        self._model, self._in_run, self._most_bytes = model, in_run, most_bytes
        self._sessions: dict[str, Session] = {}
        self._opened, self._created = 0, int(time.time())
        self.address = ""
        app = web.Application(client_max_size=min(16 * most_bytes, MOST_BYTES), middlewares=[self._with_key])
        for prefix in ("", "/{session}"):
            for path in FORMS:
                app.router.add_post(f"{prefix}{path}", self._ask)
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", self._models)
            app.router.add_get(f"{prefix}/health", self._health)
        app.router.add_post("/{session}/reward", self._reward)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Begin to listen, by default on a free port of loopback. Raises OSError for a port that is taken."""
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        host, port = self._runner.addresses[0][:2]
        self.address = f"http://{host}:{port}"

    async def close(self) -> None:
        """Stop the server, once the open responses are written."""
        await self._runner.cleanup()

    def open(self) -> Session:
        """Open a session with a key of its own."""
        self._opened += 1
        name = f"s{self._opened}"
        session = self._sessions[name] = Session(name, secrets.token_urlsafe(24), MOST_WAITING, self._most_bytes)
        return session

    def open_root(self, key: str | None, most: int) -> Session:
        """Open the session whose paths have no prefix."""
        session = self._sessions[""] = Session("", key, most, self._most_bytes)
        return session

    def forget(self, session: Session) -> None:
        """Close a session and remove it."""
        session.close(RefusedError("the session must be open, got one that has ended", 404, "ended"))
        self._sessions.pop(session.name, None)

    def url(self, session: Session) -> str:
        """Return the base URL of a session for OpenAI's clients; other paths begin before its /v1."""
        return f"{self.address}/{session.name}/v1"

    @web.middleware
    async def _with_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Handle a request if it has the key of an open session; otherwise respond with the reason for the refusal."""
        try:
            if (unknown := request.match_info.http_exception) is not None:
                raise unknown
            session = self._sessions.get(request.match_info.get("session", ""))
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if session is None or (
                session.key is not None
                and not hmac.compare_digest(given.encode(errors="surrogateescape"), session.key.encode())
            ):
                raise RefusedError(
                    "a request must have the key of an open session, as a bearer token", 401, "no_access"
                )
            request[_SESSION] = session
            return await handler(request)
        except RefusedError as error:
            return web.json_response(error.body, status=error.status)
        except web.HTTPClientError as error:
            code = error.reason.lower().replace(" ", "_")
            refused = RefusedError(f"{request.method} {request.path:.200}: {error.text}", code=code)
            return web.json_response(refused.body, status=error.status)

    async def _body(self, request: web.Request) -> bytes:
        """Read a request's body."""
        encoding = request.headers.get("Content-Encoding", "").lower()
        if encoding not in ("", "identity", "gzip", "deflate"):
            raise RefusedError(f"Content-Encoding must be gzip, deflate or left out, got {encoding!r:.100}")
        try:
            return await request.read()
        except web.RequestPayloadError as error:
            raise RefusedError(f"the body must be as the headers say, got one that is not: {error!r:.200}") from error

    async def _ask(self, request: web.Request) -> web.StreamResponse:
        session = request[_SESSION]
        form = FORMS[request.path.removeprefix(f"/{session.name}" if session.name else "")]
        asked = form.read(await self._body(request))
        if self._in_run and asked.likeliest > (asked.messages is None):
            text = (
                f"top_logprobs must be 0 in a run (logprobs of a text at most 1), got {asked.likeliest}; leave it out"
            )
            raise RefusedError(text, code="unsupported_parameter", param="top_logprobs")
        answer = form.write(asked, await session.turns(asked), self._model)
        if not (asked.streams and "object" in answer):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        with contextlib.suppress(ConnectionResetError):  # the client has gone
            await response.prepare(request)
            for chunk in streamed(answer, with_usage=asked.streams_usage):
                await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
        return response

    async def _reward(self, request: web.Request) -> web.Response:
        try:
            reward = float(parse_json(await self._body(request))["reward"])
        except (ValueError, TypeError, KeyError, OverflowError):
            reward = math.nan
        if not abs(reward) <= LARGEST_REWARD:
            raise RefusedError('the body must be {"reward": a finite number, at most 1e15}, got another')
        request[_SESSION].reward = reward
        return web.json_response({"reward": reward})

    async def _models(self, request: web.Request) -> web.Response:
        """Describe the model, alone if the path names it, or as the only one of a list."""
        described = {"id": self._model, "object": "model", "created": self._created, "owned_by": "tpu_grpo"}
        if (name := request.match_info.get("model")) not in (None, self._model):
            raise RefusedError(f"the model must be {self._model}, got {name!r:.200}", 404, "model_not_found", "model")
        return web.json_response(described if name else {"object": "list", "data": [described]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})
