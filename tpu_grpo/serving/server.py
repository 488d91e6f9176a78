"""Serves a model: one thread reads and writes HTTP, and the main thread samples, batch by batch.

with Server(speaker, "runs/mine", "127.0.0.1", 8000, key=None) as server:
    speaker.start()
    server.serve(rows=64)               # up to 64 turns in a batch, until server.stop() is called
"""

import asyncio
import threading
from concurrent.futures import CancelledError
from typing import Any, Self

from tpu_grpo.environments.actions import Action
from tpu_grpo.environments.policy_endpoint import Endpoint, Session, settle
from tpu_grpo.environments.policy_requests import RefusedError, most_bytes
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.serving.served_policy import ServedPolicy

MOST_WAITING = 4096
"""The most turns that wait; further requests are refused with 429."""


class Server:
    """The HTTP server, which listens from ``__enter__`` on."""

    def __init__(self, speaker: ServedPolicy, model: str, host: str, port: int, key: str | None):
        self._speaker, self._listening = speaker, (host, port)
        self._endpoint = Endpoint(model, most_bytes(speaker.context_tokens()), in_run=False)
        self._session: Session = self._endpoint.open_root(key, MOST_WAITING)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._taking: Any = None
        self._stopped = False

    def __enter__(self) -> Self:
        """Begin to listen. Raises ConfigError for an address that cannot be bound."""
        self._thread.start()
        host, port = self._listening
        try:
            asyncio.run_coroutine_threadsafe(self._endpoint.listen(host, port), self._loop).result()
        except OSError as error:
            self._end()
            raise ConfigError(
                f"--host and --port must be an address of this machine that is free, got {host}:{port}: {error}; "
                "choose another"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        """Refuse the requests that still wait, and end the server."""
        reason = RefusedError("the server must be there until the answer, got one that was stopped", 503, "stopped")
        self._loop.call_soon_threadsafe(self._session.close, reason)
        self._end()

    @property
    def address(self) -> str:
        """The address, such as http://127.0.0.1:8000."""
        return self._endpoint.address

    def serve(self, rows: int) -> None:
        """Answer requests, in batches of up to ``rows`` turns, until ``stop`` is called."""
        while not self._stopped:
            self._taking = asyncio.run_coroutine_threadsafe(self._session.batch(rows), self._loop)
            if self._stopped:  # by a signal that arrived in between
                self._taking.cancel()
            try:
                taken = self._taking.result()
            except CancelledError:
                return
            failed = RefusedError("a batch must be sampled, got an error; the server's output has it", 500, "failed")
            turns: list[Action | RefusedError] = [failed] * len(taken)
            try:
                turns = self._speaker.turns([asked for asked, _ in taken])
            finally:
                for (_, future), turn in zip(taken, turns, strict=True):
                    self._loop.call_soon_threadsafe(settle, future, turn)

    def stop(self) -> None:
        """End ``serve`` after the current batch; may be called by a signal's handler."""
        self._stopped = True
        if self._taking is not None:
            self._taking.cancel()

    def _end(self) -> None:
        asyncio.run_coroutine_threadsafe(self._endpoint.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
