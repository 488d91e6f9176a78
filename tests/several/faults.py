"""Lets users' code misbehave in workers of rewards and environments: only its own value may be lost, nothing else.

    uv run python -m tests.several.faults --faults 200

Each fault is drawn at random from ``--seed`` and its number: what is done (`tests.several.misbehaving`), and where: in
a reward with ``on_error`` skip or stop, or in a method of an environment with its own or a shared process. After each
fault the same pool must score a good row or play a good conversation. At the end no started process may be left.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from tests.environments.playing import call, open_pool
from tests.marks import marked
from tests.rewards.conftest import make_rollout
from tests.several.misbehaving import DAEMON, DEEDS, VALUES
from tpu_grpo.config import RewardSpec
from tpu_grpo.environments.actions import Answered, Ended, Reply
from tpu_grpo.environments.pool import EnvironmentPool
from tpu_grpo.records.episode import Failure
from tpu_grpo.records.errors import EpisodeError, RewardError
from tpu_grpo.rewards import RewardSet, open_rewards

FILE = "tests.several.misbehaving"
TIMEOUT = 1.0
HANGS_AFTER = 120.0
"""The seconds after which the main process counts as hung, even on a busy machine."""
GROWTH = 2**29
"""The most bytes by which the memory of the main process may have grown at the end."""
METHODS = ("reset", "poke", "get_reward", "close")


class EscapedError(Exception):
    """A fault was not contained; the text says how."""


@dataclass(frozen=True)
class Fault:
    """A misbehaviour and its place; equal for equal seed and number."""

    number: int
    kind: str
    rig: str
    where: str

    @classmethod
    def drawn(cls, seed: int, number: int) -> "Fault":
        """Draw the fault of a number at random."""
        draw = random.Random(seed * 10**9 + number)
        kind = draw.choice([*DEEDS, *VALUES])
        return cls(number, kind, draw.choice(RIGS), draw.choice(METHODS))


RIGS = ("reward, skip", "reward, stop", "environment", "shared environment")


def score(rewards: RewardSet, kind: str, seed: int) -> tuple[list[float], list[float]]:
    """Score a group of two completions; returns the values of the misbehaving reward and of the other reward."""
    row = {"kind": kind, "seed": seed}
    with rewards.begin((rollout := make_rollout(["p"], ["a", "bb"], [row], step=1)).batch) as scoring:
        [scores] = scoring.finish([rollout])
    return scores.by_name["reward"].tolist(), scores.by_name["good"].tolist()


def in_reward(rewards: RewardSet, fault: Fault) -> str:
    """Let a reward misbehave, and return the outcome in words; raises EscapedError if it is not allowed."""
    try:
        bad, good = score(rewards, fault.kind, fault.number)
    except RewardError as error:
        came = "an error"
        if fault.rig != "reward, stop" or "reward reward " not in str(error):
            raise EscapedError(f"the error does not say that the reward is at fault: {error}") from error
    else:
        came = "left out" if np.isnan(bad).all() else "values"
        if good != [1.0, 2.0]:
            raise EscapedError(f"the other reward gave {good}")
        if not np.isnan(bad).all() and not np.isfinite(bad).all():
            raise EscapedError(f"the reward gave {bad}")
    for _ in range(4):  # a worker that survived may lack modules; it is replaced after two calls
        with contextlib.suppress(RewardError):
            if score(rewards, "", 0) == ([1.0, 1.0], [1.0, 2.0]):
                return came
    raise EscapedError("the reward gives no good values any more")


def play(pool: EnvironmentPool, key: int, columns: dict[str, Any]) -> Iterator[Reply]:
    """Play a conversation, and yield the environment's replies."""
    pool.start(key, "", columns, seed=key)
    for ask in (None, lambda: pool.act(key, call("poke")), lambda: pool.end(key)):
        if ask is not None:
            ask()
        yield (reply := pool.take(key))
        if not isinstance(reply, Answered):
            return


def in_environment(pool: EnvironmentPool, fault: Fault) -> str:
    """Let an environment misbehave beside a good one, and return the outcome; raises EscapedError like `in_reward`."""
    good = {"kind": "", "seed": 0, "where": ""}
    beside = play(pool, 2 * fault.number, good)
    first = next(beside)
    *_, last = play(pool, 2 * fault.number + 1, {"kind": fault.kind, "seed": fault.number, "where": fault.where})
    if not isinstance(last, Ended | Failure):
        raise EscapedError(f"the conversation ended with {last}")
    replies = [first, *beside]
    shares = fault.rig == "shared environment" or fault.kind == "kills what forked it"
    if not shares and not isinstance(replies[-1], Ended):
        raise EscapedError(f"the conversation beside it got {replies[-1]}")
    for attempt in range(4):
        *_, reply = play(pool, -1 - attempt, good)
        if isinstance(reply, Ended) and reply.reward == 1.0:
            return f"failed: {last.kind}" if isinstance(last, Failure) else "ended"
    raise EscapedError(f"the environment plays no good conversation any more: {reply}")


def left_behind() -> list[int]:
    """Return the ids of the processes that faults have started and that are still alive."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        if process.info["cmdline"] == ["sleep", DAEMON] and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


@contextlib.contextmanager
def alarm() -> Iterator[None]:
    """Raise EscapedError if the block takes longer than HANGS_AFTER seconds."""

    def ring(*_: object) -> None:
        raise EscapedError(f"the main process hangs: nothing after {HANGS_AFTER:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, HANGS_AFTER)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def output_in(path: str) -> Iterator[None]:
    """Redirect stdout and stderr of this process and of all that it starts in the block to a file."""
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    with open(path, "wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        for descriptor, duplicate in zip((1, 2), kept, strict=True):
            os.dup2(duplicate, descriptor)
            os.close(duplicate)


def suffer(faults: int, seed: int, tell: Callable[[str], Any], rigs: Sequence[str] = RIGS) -> Counter[str]:
    """Let ``faults`` faults happen, and return the count of each outcome; ``tell`` gets a line per escaped fault.

    Raises:
        EscapedError: if faults escaped, processes are left, or memory has grown by more than GROWTH.
    """
    before, daemons, process = marked(), left_behind(), psutil.Process()
    counts: Counter[str] = Counter()
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory(prefix="tpu_grpo_faults_") as scratch:
        stack.enter_context(output_in(f"{scratch}/said"))
        opened: dict[str, Any] = {}
        for rig in rigs:
            if rig.startswith("reward"):
                limits = dict[str, Any](timeout=TIMEOUT, memory_gb=1.0, recycle=2, on_error=rig.split(", ")[1])
                specs = [RewardSpec(name=f"{FILE}:reward", **limits), RewardSpec(name="tests.rewards.faulty:good")]
                opened[rig] = stack.enter_context(open_rewards(specs, ["kind", "seed"]))
                score(opened[rig], "", 0)
            else:
                name = f"{FILE}:{'SharedGame' if rig.startswith('shared') else 'Game'}"
                opened[rig] = stack.enter_context(open_pool(name, timeout=TIMEOUT, memory_gb=1.0, workers=2))
                in_environment(opened[rig], Fault(0, "", rig, ""))
        size, escaped, number = process.memory_info().rss, 0, 0
        for number in range(1, faults + 1):
            fault = Fault.drawn(seed, number)
            if fault.rig not in opened:
                continue
            act = in_reward if fault.rig.startswith("reward") else in_environment
            try:
                with alarm():
                    counts[f"{fault.rig}: {act(opened[fault.rig], fault)}"] += 1
            except (EscapedError, EpisodeError, AssertionError) as error:
                escaped += 1
                tell(f"{fault}: {type(error).__name__}: {str(error)[:500]}")
            if number % 20 == 0:
                tell(f"{number} faults, {escaped} escaped")
        grown = process.memory_info().rss - size
    end = time.monotonic() + 10.0
    while (left := (marked() - before) | ({*left_behind()} - {*daemons})) and time.monotonic() < end:
        time.sleep(0.1)
    if escaped or left or grown > GROWTH:
        raise EscapedError(f"{escaped} of {number} faults escaped; left: {sorted(left)}; grown by {grown:,} bytes")
    return counts


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    err = os.fdopen(os.dup(2), "w", buffering=1)
    for came, count in sorted(suffer(options.faults, options.seed, lambda line: print(line, file=err)).items()):
        print(f"{count:4} {came}")


if __name__ == "__main__":
    main()
