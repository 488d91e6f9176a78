"""Joins a run to Atropos environments: python examples/agents/atropos_bridge.py --group-size 8

In Atropos an environment chooses its own tasks, asks the policy for tokens, and sends groups of scored trajectories to
the server run-api, where a trainer polls them. To environments this lasting agent is both the policy and the trainer.
It answers SGLang's HTTP requests at --port with tokens of the policy, and assigns each trajectory to an open episode of
the run, which records the tokens. It takes scores from run-api and reports them as the episodes' rewards. A group of
the run holds trajectories of one prompt, so --group-size must be algorithm.group_size of the run and
--env.group_size of the environment.

A trajectory must be as the policy sampled it: with the tokens, masks and log-probabilities that ManagedServer records.
The episode of any other trajectory fails.

Each line on stdin begins an episode: {"session", "base_url", "api_key", "task"}; episodes of one task are a group. A
line on stdout reports its end: {"session", "reward"} or {"session", "error"}.
"""

import argparse
import asyncio
import json
import sys
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

POLL_SECONDS = 0.1
MASKED, NO_LOGPROB = -100, 1.0
"""What Atropos writes for tokens that the policy did not sample."""


class Episode:
    """An episode of the run, for one trajectory."""

    def __init__(self, asked: dict[str, Any]):
        self.session = asked["session"]
        self.url, self.headers = asked["base_url"].removesuffix("/v1"), {"Authorization": f"Bearer {asked['api_key']}"}
        self.tokens: list[int] = []
        self.masks: list[int] = []
        self.logprobs: list[float] = []

    def end(self, **result: Any) -> None:
        """Tell the run how the episode ended."""
        print(json.dumps({"session": self.session, **result}), flush=True)

    def is_like(self, masks: list[int], logprobs: list[float] | None) -> bool:
        """Whether a trajectory was sampled so; equal trajectories may differ in the last bits of log-probabilities."""
        pairs = zip(self.logprobs, logprobs or (), strict=False)
        return masks == self.masks and len(logprobs or ()) == len(masks) and all(abs(a - b) < 1e-2 for a, b in pairs)

    def add(self, prompt: list[int], sampled: list[tuple[float, int, None]]) -> None:
        """Record a turn as ManagedServer does."""
        new, ids = len(prompt) - len(self.tokens), [token for _, token, _ in sampled]
        self.tokens = prompt + ids
        self.masks += [MASKED] * new + ids
        self.logprobs += [NO_LOGPROB] * new + [logprob for logprob, _, _ in sampled]


class Group:
    """The episodes of one task of the run."""

    def __init__(self) -> None:
        self.prompt: list[int] | None = None
        self.opened = 0
        self.free: deque[Episode] = deque()


class Bridge:
    """Assigns trajectories to the open episodes of the run, and scores to trajectories."""

    def __init__(self, group_size: int, client: ClientSession):
        self._size, self._client = group_size, client
        self._last: dict[str, Group] = {}
        """The last group of each task."""
        self._groups: deque[Group] = deque()
        """Groups that have a free episode, oldest first."""
        self._played: list[Episode] = []
        """Episodes that had a turn, newest last: they wait for another request or for their score."""
        self._failed: deque[list[int]] = deque(maxlen=1000)
        """The tokens of trajectories that have failed."""
        self._opened = asyncio.Condition()

    async def open(self, asked: dict[str, Any]) -> None:
        """Add an episode of the run."""
        task = json.dumps(asked["task"], sort_keys=True)
        group = self._last.get(task)
        if group is None or group.opened == self._size:
            group = self._last[task] = Group()
        if not group.free:
            self._groups.append(group)
        group.opened += 1
        group.free.append(Episode(asked))
        async with self._opened:
            self._opened.notify_all()

    async def generate(self, request: web.Request) -> web.Response:
        """Answer a request of SGLang's form; each of its ``n`` trajectories gets an episode of its own."""
        body = await request.json()
        ids, sampling = body["input_ids"], dict(body["sampling_params"])
        count = sampling.pop("n", 1)
        if any(ids[: len(tokens)] == tokens for tokens in self._failed):
            raise web.HTTPBadRequest(text="this trajectory has failed, and cannot go on")
        known = await self._going_on(ids)
        if known is not None and count > 1:
            self._played.append(known)
            raise web.HTTPBadRequest(text="a trajectory goes on alone: n must be 1 behind tokens that were sampled")
        episodes = [known] if known is not None else await self._take(ids, count)
        try:
            answers = await asyncio.gather(*(self._ask(episode, ids, sampling) for episode in episodes))
        except BaseException as error:  # that of one trajectory is that of all, and so is a client that has gone
            for episode in episodes:
                episode.end(error=f"the policy was asked in vain: {getattr(error, 'text', None) or error!r}")
                self._failed += [episode.tokens] if episode.tokens else []  # Atropos asks again
            raise
        self._played += episodes
        return web.json_response(answers if count > 1 else answers[0])

    async def _going_on(self, ids: list[int]) -> Episode | None:
        """Take the episode whose tokens these begin with, if there is one; the longest, and of equals the newest."""
        fitting = [episode for episode in reversed(self._played) if ids[: len(episode.tokens)] == episode.tokens]
        for episode in sorted(fitting, key=lambda episode: -len(episode.tokens)):
            if episode in self._played:
                self._played.remove(episode)
                if await self._is_live(episode):
                    return episode
        return None

    async def _take(self, ids: list[int], count: int) -> list[Episode]:
        """Wait for free episodes of one group, whose other trajectories have the same prompt."""
        async with self._opened:
            while True:
                fitting = [group for group in self._groups if group.prompt in (ids, None) and len(group.free) >= count]
                for group in sorted(fitting, key=lambda group: group.prompt is None):
                    if not await self._is_live(group.free[0]):  # the run has given it up
                        group.free.popleft()
                        group.opened -= 1
                        if not group.free:
                            self._groups.remove(group)
                        break
                    group.prompt = ids
                    taken = [group.free.popleft() for _ in range(count)]
                    if not group.free:
                        self._groups.remove(group)
                    return taken
                else:
                    await self._opened.wait()

    async def _is_live(self, episode: Episode) -> bool:
        try:
            async with self._client.get(f"{episode.url}/health", headers=episode.headers) as response:
                return response.status == 200
        except ClientError:
            return False

    async def _ask(self, episode: Episode, ids: list[int], sampling: dict[str, Any]) -> Any:
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
        async with self._client.post(f"{episode.url}/generate", json=body, headers=episode.headers) as response:
            if response.status != 200:
                raise web.HTTPBadGateway(text=await response.text())
            answer = await response.json()
        episode.add(ids, answer["meta_info"]["output_token_logprobs"])
        return answer

    def score(self, group: dict[str, Any]) -> None:
        """End the episodes of a scored group."""
        given = group.get("inference_logprobs") or [None] * len(group["tokens"])
        others = [name for name in ("advantages", "overrides", "group_overrides") if group.get(name)]
        for tokens, masks, logprobs, score in zip(group["tokens"], group["masks"], given, group["scores"], strict=True):
            alike = [episode for episode in self._played if episode.tokens == tokens]
            same = [episode for episode in alike if episode.is_like(masks, logprobs)]
            if not alike:
                print(f"a trajectory must have the tokens that the policy sampled, got {tokens}", file=sys.stderr)
                continue
            episode = (same or alike)[-1]
            self._played.remove(episode)
            if others:
                episode.end(error=f"a trajectory must have a score alone, got {', '.join(others)}")
            elif same:
                episode.end(reward=score)
            elif logprobs is None:
                episode.end(error="a trajectory must have inference_logprobs, got none; ask through managed_server")
            else:
                episode.end(error="masks and inference_logprobs must be as ManagedServer records them, got others")

    async def poll(self, url: str) -> None:
        """Register as the trainer, and take scored groups until cancelled."""
        registration = {"batch_size": self._size, "max_token_len": 2**31, "checkpoint_dir": "", "starting_step": 0}
        registration |= {"wandb_group": "", "wandb_project": "", "save_checkpoint_interval": -1, "num_steps": 2**31}
        registered = False
        while True:
            try:
                if not registered:
                    async with self._client.post(f"{url}/register", json=registration, raise_for_status=True):
                        registered = True
                async with self._client.get(f"{url}/batch", raise_for_status=True) as response:
                    batch = (await response.json())["batch"]
            except ClientError as error:
                print(f"run-api must answer at {url}, got {error}; start it, then the environments", file=sys.stderr)
                registered, batch = False, None
                await asyncio.sleep(1.0)
            for group in batch or ():
                try:
                    self.score(group)
                except (ValueError, KeyError, TypeError) as error:
                    print(f"a scored group must be complete, got {error!r} in {group}", file=sys.stderr)
            if not batch:
                await asyncio.sleep(POLL_SECONDS)


async def lines_of_stdin() -> AsyncIterator[bytes]:
    """Yield lines until stdin closes."""
    lines = asyncio.StreamReader(limit=2**30)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async for line in lines:
        yield line


async def main(group_size: int, port: int, run_api: str) -> None:
    """Serve environments until stdin closes."""
    connector = TCPConnector(limit=0)  # aiohttp allows 100 connections, and a step has more episodes
    async with ClientSession(timeout=ClientTimeout(total=None), connector=connector) as client:
        bridge, app = Bridge(group_size, client), web.Application(client_max_size=2**24)
        app.add_routes([web.post("/generate", bridge.generate)])
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        async with asyncio.TaskGroup() as tasks:
            polling = tasks.create_task(bridge.poll(run_api))
            async for line in lines_of_stdin():
                await bridge.open(json.loads(line))
            polling.cancel()
        await runner.cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--port", type=int, default=9001)
    parser.add_argument("--run-api", default="http://127.0.0.1:8000")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.group_size, arguments.port, arguments.run_api))
