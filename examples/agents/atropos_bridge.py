"""Joins a run to Atropos environments: python examples/agents/atropos_bridge.py --group-size 8

In Atropos an environment chooses its own tasks, asks the policy for tokens, and sends groups of scored trajectories to
the server run-api, where a trainer polls them. This lasting agent is both the policy and the trainer to them. It offers
the policy at --port in SGLang's form, and gives each trajectory to an open episode of the run, whose tokens the run
records. A group of the run holds trajectories of one prompt, so --group-size is algorithm.group_size of the run and
--env.group_size of the environment. From run-api it takes the scores, as rewards of those episodes.

Only trajectories as the policy sampled them can be learned from: with the tokens, masks and log-probabilities that
ManagedServer notes. Others are errors of their episodes.

Each line on stdin begins an episode: {"session", "base_url", "api_key", "task"}; episodes of one task are a group. A
line on stdout tells the end: {"session", "reward"} or {"session", "error"}.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

POLL_SECONDS = 0.1
MASKED, NO_LOGPROB = -100, 1.0  # Atropos' values for tokens that the policy did not sample


class Episode:
    """An episode of the run, which one trajectory fills."""

    def __init__(self, asked: dict[str, Any], group: "Group"):
        self.session, self.key = asked["session"], asked["api_key"]
        self.url = asked["base_url"].removesuffix("/v1") + "/generate"
        self.group = group
        self.tokens: list[int] = []
        self.masks: list[int] = []
        self.logprobs: list[float] = []

    def end(self, **result: Any) -> None:
        """Tell the run how it ended."""
        print(json.dumps({"session": self.session, **result}), flush=True)

    def add(self, prompt: list[int], meta: dict[str, Any]) -> None:
        """Note a turn as ManagedServer does."""
        new = len(prompt) - len(self.tokens)
        sampled = [token for _, token, _ in meta["output_token_logprobs"]]
        self.tokens = prompt + sampled
        self.masks += [MASKED] * new + sampled
        self.logprobs += [NO_LOGPROB] * new + [logprob for logprob, _, _ in meta["output_token_logprobs"]]


class Group:
    """Episodes of one task of the run, for trajectories of one prompt."""

    def __init__(self) -> None:
        self.prompt: list[int] | None = None
        self.opened = self.taken = 0
        self.free: asyncio.Queue[Episode] = asyncio.Queue()


class Bridge:
    """The episodes that are open, and who fills them."""

    def __init__(self, group_size: int):
        self._size = group_size
        self._groups: dict[str, Group] = {}
        """By task; the last group of each."""
        self._unclaimed: asyncio.Queue[Group] = asyncio.Queue()
        self._claimed: list[Group] = []
        """Those that wait for more trajectories of their prompt."""
        self._played: list[Episode] = []
        """Those that were asked for at least one turn and have no score yet."""
        self._claiming = asyncio.Lock()

    def open(self, asked: dict[str, Any]) -> None:
        """Add an episode of the run."""
        task = json.dumps(asked["task"], sort_keys=True)
        group = self._groups.get(task)
        if group is None or group.opened == self._size:
            group = self._groups[task] = Group()
            self._unclaimed.put_nowait(group)
        group.opened += 1
        group.free.put_nowait(Episode(asked, group))

    async def generate(self, request: web.Request) -> web.Response:
        """Answer a request for tokens: those of every trajectory come from an episode of its own."""
        body = await request.json()
        ids, sampling = body["input_ids"], dict(body["sampling_params"])
        count = sampling.pop("n", 1)
        episodes = [await self._episode(ids) for _ in range(count)]
        answers = await asyncio.gather(
            *(self._ask(request.app[CLIENT], episode, ids, sampling) for episode in episodes)
        )
        return web.json_response(answers if count > 1 else answers[0])

    async def _episode(self, ids: list[int]) -> Episode:
        """Return the episode that goes on with these tokens; for a new prompt, the next one of its group."""
        for index, episode in enumerate(self._played):
            if ids[: len(episode.tokens)] == episode.tokens:
                return self._played.pop(index)
        async with self._claiming:
            group = next((group for group in self._claimed if group.prompt == ids), None)
            if group is None:
                group = await self._unclaimed.get()
                group.prompt = ids
                self._claimed.append(group)
            group.taken += 1
            if group.taken == self._size:
                self._claimed.remove(group)
        return await group.free.get()

    async def _ask(self, client: ClientSession, episode: Episode, ids: list[int], sampling: dict[str, Any]) -> Any:
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
        async with client.post(episode.url, json=body, headers={"Authorization": f"Bearer {episode.key}"}) as response:
            if response.status != 200:
                error = await response.text()
                episode.end(error=error)
                raise web.HTTPBadGateway(text=error)
            answer = await response.json()
        episode.add(ids, answer["meta_info"])
        self._played.append(episode)
        return answer

    def score(self, group: dict[str, Any]) -> None:
        """End the episodes of a scored group."""
        logprobs = group.get("inference_logprobs") or [None] * len(group["tokens"])
        for tokens, masks, score, own in zip(group["tokens"], group["masks"], group["scores"], logprobs, strict=True):
            episode = next((episode for episode in self._played if episode.tokens == tokens), None)
            if episode is None:
                print(f"a trajectory must have the tokens that the policy sampled, got {tokens}", file=sys.stderr)
                continue
            self._played.remove(episode)
            if group.get("advantages") or group.get("overrides") or group.get("group_overrides"):
                episode.end(error="a trajectory must have a score alone, got advantages or overrides")
            elif own is None:
                episode.end(error="a trajectory must have inference_logprobs, got none; does it use managed_server?")
            elif (masks, own) != (episode.masks, episode.logprobs):
                episode.end(error="masks and inference_logprobs must be those that were sampled, got others")
            else:
                episode.end(reward=score)

    async def poll(self, client: ClientSession, url: str) -> None:
        """Register as the trainer, and take scored groups until cancelled."""
        registration = {"batch_size": self._size, "max_token_len": 2**31, "checkpoint_dir": "", "starting_step": 0}
        registration |= {"wandb_group": "", "wandb_project": "", "save_checkpoint_interval": -1, "num_steps": 2**31}
        registered = False
        while True:
            try:
                if not registered:
                    async with client.post(f"{url}/register", json=registration, raise_for_status=True):
                        registered = True
                async with client.get(f"{url}/batch", raise_for_status=True) as response:
                    batch = (await response.json())["batch"]
            except ClientError as error:
                print(
                    f"run-api must answer at {url}, got {error}; started again? then so must environments", flush=True
                )
                registered, batch = False, None
                await asyncio.sleep(1.0)
            for group in batch or ():
                self.score(group)
            if not batch:
                await asyncio.sleep(POLL_SECONDS)


CLIENT = web.AppKey("client", ClientSession)


async def main(group_size: int, port: int, run_api: str) -> None:
    """Serve environments until stdin closes."""
    bridge, app = Bridge(group_size), web.Application(client_max_size=2**24)

    async def clients(app: web.Application) -> AsyncIterator[None]:
        async with ClientSession(timeout=ClientTimeout(total=None), connector=TCPConnector(limit=0)) as app[CLIENT]:
            yield

    app.cleanup_ctx.append(clients)
    app.add_routes([web.post("/generate", bridge.generate)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    polling = asyncio.create_task(bridge.poll(app[CLIENT], run_api))
    lines = asyncio.StreamReader(limit=2**30)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async for line in lines:
        bridge.open(json.loads(line))
    polling.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await polling
    await runner.cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--port", type=int, default=9001)
    parser.add_argument("--run-api", default="http://127.0.0.1:8000")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.group_size, arguments.port, arguments.run_api))
