"""The seconds of one step of an engine, by cause. Nothing overlaps but products and the reading of weights.

    decode    max(weights, products) + cache + all-reduces on the devices, and the host's time
    prefill   max(weights, products) + all-reduces, and the host's time

The engines of a host are driven by one thread, one after the other (rollout/replicas.py): it waits for the tokens of an
engine's step, takes them in and launches the next one, while the other engines' devices work. A round of all engines
therefore takes the larger of

    the host times of all its engines                      the thread is never idle
    the device's time and the host time of one engine      its next step cannot be launched before its tokens are there
"""

from collections.abc import Mapping, Sequence

from tpu_grpo.launching.tpus import Generation
from tpu_grpo.planning.rates import (
    ALLREDUCE_SECONDS,
    ARRAY_SECONDS,
    CACHE_BYTES_PER_SECOND,
    LAUNCH_SECONDS,
    LINKS,
    MEMORY,
    PREFILL,
    PRODUCTS,
    ROW_SECONDS,
    TOKEN_SECONDS,
)
from tpu_grpo.planning.sizes import EngineSizes

Seconds = Mapping[str, float]
"""Seconds by what they are spent on; they add up."""


def decode_step(sizes: EngineSizes, generation: Generation, rows: int, cached_tokens: float) -> dict[str, float]:
    """Seconds on the devices of a step of ``rows`` rows, that have ``cached_tokens`` tokens of context together."""
    flops = sizes.token.forward(rows, cached_tokens / rows, rows) / sizes.tensor
    products = flops / (PRODUCTS * generation.chip.flops_per_second)
    read = sizes.cache_bytes / (MEMORY * generation.chip.memory_bytes_per_second)
    computed = sizes.cache_bytes * max(1, 2 / sizes.cache_itemsize) / CACHE_BYTES_PER_SECOND
    return _products_or_weights(sizes, generation, products, rows) | {
        "cache": cached_tokens * max(read, computed),
        "links": allreduce_seconds(sizes, generation, rows),
    }


def prefill_step(sizes: EngineSizes, generation: Generation, tokens: float, context: float) -> dict[str, float]:
    """Seconds on the devices of a step that takes in ``tokens`` tokens of prompts with ``context`` tokens before each.

    One of them gets logits; so little is computed for these that it does not count.
    """
    products = sizes.token.forward(tokens, context, 1) / sizes.tensor / (PREFILL * generation.chip.flops_per_second)
    return _products_or_weights(sizes, generation, products, tokens) | {
        "links": allreduce_seconds(sizes, generation, tokens)
    }


def _products_or_weights(
    sizes: EngineSizes, generation: Generation, products: float, tokens: float
) -> dict[str, float]:
    weights = sizes.read_bytes(tokens) / (MEMORY * generation.chip.memory_bytes_per_second)
    return {"products": products} if products > weights else {"weights": weights}


def allreduce_seconds(sizes: EngineSizes, generation: Generation, tokens: float) -> float:
    """Seconds of adding up the activations of a step: twice a layer, and once for the embedding."""
    if sizes.tensor == 1:
        return 0.0
    sent = 2 * (sizes.tensor - 1) / sizes.tensor * tokens * sizes.state_bytes
    each = ALLREDUCE_SECONDS + sent / (LINKS * generation.sent_bytes_per_second(sizes.tensor))
    return (2 * sizes.layers + 1) * each


def host_seconds(sizes: EngineSizes, rows: int, steps: float = 1) -> float:
    """Seconds that the host takes to schedule and launch ``steps`` steps of ``rows`` rows and to take in the tokens."""
    arrays = ARRAY_SECONDS * sizes.arrays * sizes.tensor
    return LAUNCH_SECONDS + arrays + (ROW_SECONDS + TOKEN_SECONDS * steps) * rows


def round_seconds(engines: Sequence[tuple[Seconds, float]], *, ahead: bool = False) -> dict[str, float]:
    """Seconds of a round of the engines of a host, each with its (seconds on the devices, seconds of the host).

    The devices' are those of the slowest engine; "host" is the time for which its devices wait. With ``ahead`` they
    have the next launch before the host takes in the tokens of this one, and wait only for a host with too much to do.
    """
    device, own = max(engines, key=lambda engine: sum(engine[0].values()) + engine[1])
    working = sum(device.values())
    whole = max(sum(host for _, host in engines), working if ahead else working + own)
    return {**device, "host": whole - working}


def add(total: dict[str, float], more: Seconds, times: float = 1.0) -> None:
    """Add ``times`` the seconds of ``more`` to ``total``."""
    for cause, seconds in more.items():
        total[cause] = total.get(cause, 0.0) + times * seconds
