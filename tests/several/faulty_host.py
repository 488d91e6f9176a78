"""A host of a run with something wrong: python faulty_host.py FAULT [CONFIG.yaml] [section.key=value ...]

The fault happens on the last host only; the other hosts run the command unchanged. The text after a colon is the
fault's argument. Functions marked ``@look``, which observe the run or change it alike everywhere, apply to all hosts.
"""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAULTS: dict[str, Callable[..., None]] = {}
LOOKS: dict[str, Callable[..., None]] = {}


def fault[F: Callable[..., None]](function: F) -> F:
    FAULTS[function.__name__] = function
    return function


def look[F: Callable[..., None]](function: F) -> F:
    LOOKS[function.__name__] = function
    return function


# --- before the run: what hosts are started with ---------------------------------------------------------------------


@fault
def setting(text: str) -> None:
    """Override a setting on this host only."""
    sys.argv.append(text)


@fault
def variable(text: str) -> None:
    """Set an environment variable on this host only; the text is appended to an existing value."""
    name, _, value = text.partition("=")
    os.environ[name] = f"{os.environ.get(name, '')} {value}".strip()


@fault
def file(name: str) -> None:
    """Change the last byte of a file, in a copy of all files; a missing file is created."""
    path = in_a_copy(name)
    data = bytearray(path.read_bytes() if path.exists() else b"a")
    data[-1] ^= 1
    path.write_bytes(data)


@fault
def line(name: str) -> None:
    """Change the answer in one line of a data file, in a copy of all files."""
    path = in_a_copy(name)
    lines = path.read_text().splitlines(keepends=True)
    lines[7] = lines[7].replace('"answer": "', '"answer": "1')
    path.write_text("".join(lines))


def in_a_copy(name: str) -> Path:
    """Go to a copy of all files, and return the path of one there."""
    copy = Path(tempfile.mkdtemp()) / "files"
    shutil.copytree(Path.cwd(), copy)
    os.chdir(copy)
    return copy / name


@fault
def version(name: str) -> None:
    """Report another version of a package."""
    from importlib import metadata

    original = metadata.version
    metadata.version = lambda distribution_name: "0.0.1" if distribution_name == name else original(distribution_name)


# --- during the run: what hosts compute ------------------------------------------------------------------------------


@fault
def sampled_token(_: str) -> None:
    """Change the tokens that the third launch of the engine returns."""
    from tpu_grpo.engine.decode_loop import Sampled

    calls = []

    def wrong(original: Any) -> Any:
        def sampled(*args: Any) -> Any:
            found = original(*args)
            calls.append(found)
            return found._replace(tokens=found.tokens ^ 1) if len(calls) == 3 else found

        return sampled

    Sampled.of_prefill, Sampled.of_launch = wrong(Sampled.of_prefill), wrong(Sampled.of_launch)


@fault
def order(_: str) -> None:
    """Start groups in another order."""
    from tpu_grpo.engine.generation import Generation

    original = Generation.hold
    Generation.hold = lambda self, groups: original(self, list(groups)[::-1])


@fault
def dealing(_: str) -> None:
    """Give the last group to another replica, on this host only."""
    from tpu_grpo.engine.load_balancing import Dealer

    original = Dealer.deal

    def deal(self: Any, loads: Any) -> Any:
        dealt = original(self, loads)
        group = dealt[-1].pop()
        dealt[0].append(group)
        self._owners[group.number] = 0
        return dealt

    Dealer.deal = deal


@fault
def gathered_token(_: str) -> None:
    """Change a token after the hosts have exchanged their completions."""
    from tpu_grpo.engine import replicas

    original, calls = replicas.exchange_completions, []

    def gathered(*args: Any) -> Any:
        completions, senders = original(*args)
        calls.append(args)
        if len(calls) > 1:  # the first is the probe's
            completions[3].token_ids[0] ^= 1
        return completions, senders

    replicas.exchange_completions = gathered  # pyrefly: ignore[bad-assignment]


@fault
def sampler_parameter(name: str) -> None:
    """Change one bit of a parameter of this host's sampler at the second sync."""
    from tpu_grpo.weights.sync import WeightSync

    original, calls = WeightSync.__call__, []

    def sync(self: Any, source: Any) -> Any:
        weights, result = original(self, source)
        calls.append(name)
        return (weights | {name: flipped(weights[name])} if len(calls) == 2 else weights), result

    WeightSync.__call__ = sync


@fault
def trainer_parameter(name: str) -> None:
    """Change one bit of this host's copies of a trainer's parameter before the sync after the first update."""
    from tpu_grpo.run import engines

    install, original, installed = engines.SyncedEngines.install, engines.named_leaves, []

    def flipped_leaves(params: Any) -> Any:
        leaves = original(params)
        return leaves | {name: flipped(leaves[name])}

    def install_flipped(self: Any, params: Any) -> Any:
        if installed:  # the first sync is that of the loaded model
            engines.named_leaves = flipped_leaves
        installed.append(name)
        return install(self, params)

    engines.SyncedEngines.install = install_flipped


@fault
def prompts(_: str) -> None:
    """Read other prompts on this host."""
    from tpu_grpo.data.stream import PromptStream

    original = PromptStream.at
    calls: list[int] = []

    def at(self: Any, step: int, positions: Any, number: int = 0) -> Any:
        calls.append(step)
        moved = [position + (len(calls) > 1) for position in positions]  # the first are the probe's
        return original(self, step, moved, number)

    PromptStream.at = at


@fault
def schedule(_: str) -> None:
    """Make this host's cache smaller than that of the other hosts."""
    from tpu_grpo.engine.options import EngineOptions

    EngineOptions.cache_tokens = property(lambda self: 20 + 2)  # pyrefly: ignore[bad-assignment]


@look
def windows(_: str) -> None:
    """Say when the pool of layers with a window is used."""
    from tpu_grpo.engine.window_pages import WindowPages

    take = WindowPages.take

    def told(self: WindowPages, *args: Any) -> Any:
        print("pages of windows were taken")
        return take(self, *args)

    WindowPages.take = told  # pyrefly: ignore[bad-assignment]


@look
def pressure(_: str) -> None:
    """Admit requests optimistically, so that memory runs out; count requests put back and cache tokens evicted."""
    import atexit

    from sgl_jax.srt.managers.schedule_batch import ScheduleBatch
    from sgl_jax.srt.mem_cache.radix_cache import RadixCache

    from tpu_grpo.engine.scheduler import SteppedScheduler

    counts = {"put back": 0, "evicted": 0}
    retract, evict, build = ScheduleBatch.retract_decode, RadixCache.evict, SteppedScheduler.__init__

    def optimistic(self: Any, *args: Any) -> None:
        build(self, *args)
        self.init_new_token_ratio = self.new_token_ratio = 0.01

    def counted_retract(self: Any, *args: Any) -> Any:
        result = retract(self, *args)
        counts["put back"] += len(result[0])
        return result

    def counted_evict(self: Any, asked: Any) -> Any:
        result = evict(self, asked)
        counts["evicted"] += result.num_tokens_evicted
        return result

    ScheduleBatch.retract_decode, RadixCache.evict = counted_retract, counted_evict  # pyrefly: ignore[bad-assignment]
    SteppedScheduler.__init__ = optimistic  # pyrefly: ignore[bad-assignment]
    atexit.register(lambda: print(*(f"{name} {count}" for name, count in counts.items()), flush=True))


# --- a host that is lost ---------------------------------------------------------------------------------------------


@fault
def lost(text: str) -> None:
    """Send this process a signal in a stage: ``lost:SIGKILL,rollout of step 2``; ``start-up`` means before the start.

    ``launch 4`` means while the devices compute the engine's fourth launch, and ``point 1`` the first time that groups
    are dealt again.
    """
    name, _, stage = text.partition(",")
    number = signal.Signals[name]
    if stage == "start-up":
        os.kill(os.getpid(), number)
        return
    if stage.startswith("launch "):
        lose_in_launch(number, int(stage.removeprefix("launch ")))
        return
    if stage.startswith("point "):
        lose_at_point(number, int(stage.removeprefix("point ")))
        return
    at_stage(stage, lambda: os.kill(os.getpid(), number))


@fault
def limited(text: str) -> None:
    """Limit this host's files to 5,000 bytes from a stage on: ``limited:saving step 1``."""
    import resource

    at_stage(text, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)))


def at_stage(stage: str, act: Callable[[], None]) -> None:
    """Call ``act`` when this host comes to a stage."""
    from tpu_grpo.hosts.watch import Watch

    original = Watch.stage

    def watched(self: Any, entered: str) -> Any:
        if entered == stage:
            act()
        return original(self, entered)

    Watch.stage = watched  # pyrefly: ignore[bad-assignment]


def lose_in_launch(number: signal.Signals, launch: int) -> None:
    from tpu_grpo.engine.scheduler import SteppedScheduler

    original = SteppedScheduler._launch

    def launched(self: Any, *args: Any) -> Any:
        output = original(self, *args)
        if self.forward_ct == launch:
            os.kill(os.getpid(), number)
        return output

    SteppedScheduler._launch = launched  # pyrefly: ignore[bad-assignment]


def lose_at_point(number: signal.Signals, point: int) -> None:
    from tpu_grpo.engine.replicas import Serving

    original, calls = Serving._gather, []

    def gathered(self: Any, clock: int) -> Any:
        calls.append(clock)
        if len(calls) == point:
            os.kill(os.getpid(), number)
        return original(self, clock)

    Serving._gather = gathered  # pyrefly: ignore[bad-assignment]


@fault
def slow(seconds: str) -> None:
    """Make every update on this host take ``seconds`` longer, in calls that keep the interpreter busy."""
    import time

    from tpu_grpo.learner import Learner

    original = Learner.update

    def update(self: Any, scored: Any) -> Any:
        end = time.monotonic() + float(seconds)
        while time.monotonic() < end:
            sum(range(1000))
        return original(self, scored)

    Learner.update = update  # pyrefly: ignore[bad-assignment]


# --- functions that apply to all hosts -------------------------------------------------------------------------------


@look
def unknown_lengths(_: str) -> None:
    """Hide the lengths of earlier completions, which determine the order of groups and thereby rounding."""
    from tpu_grpo.data.prompt_draw import PromptHistory

    PromptHistory.last = lambda self, name, records: [None] * len(records)


@look
def late_weights(_: str) -> None:
    """Give the engines the parameters of the step before (those of the first step twice), and hide lengths."""
    unknown_lengths("")
    import jax

    from tpu_grpo.run.engines import SyncedEngines

    install, kept = SyncedEngines.install, []

    def late(self: Any, params: Any) -> Any:
        kept.append(jax.tree.map(lambda leaf: leaf.copy(), params))
        return install(self, kept[max(0, len(kept) - 2)])

    SyncedEngines.install = late


@look
def shapes(_: str) -> None:
    """Print the shapes of the rows with which the loss is traced."""
    from tpu_grpo.learner import loss

    original = loss.agreement_sums

    def sums(trainer: Any, engine: Any, mask: Any) -> Any:
        print("traced rows", trainer.shape, engine.shape, mask.shape, flush=True)
        return original(trainer, engine, mask)

    loss.agreement_sums = sums  # pyrefly: ignore[bad-assignment]


def flipped(array: Any) -> Any:
    """Return the array with the lowest bit of one element changed in every shard of this process."""
    import jax
    import numpy as np

    shards = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        data.view(f"uint{8 * data.dtype.itemsize}").flat[0] ^= 1
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


if __name__ == "__main__":
    from tpu_grpo.cli.train import main

    name, _, argument = sys.argv.pop(1).partition(":")
    name, _, faulty = name.partition("@")
    told = dict(word.split("=", 1) for word in sys.argv[1:] if word.startswith("hosts."))
    if name in LOOKS:
        LOOKS[name](argument)
    elif name != "none" and int(told["hosts.index"]) == int(faulty or int(told["hosts.count"]) - 1):
        FAULTS[name](argument)
    sys.exit(main(sys.argv[1:]))
