"""The seconds of a learner's passes over micro-batches, from the tokens that they hold.

FLOPs are arithmetic, because the compiler counts a loop once and kernels not at all. Per token, with N parameters met
in the layers, V in the head, and S tokens of context, of which flash attention meets half:

    forward pass   2 N + 4 heads head_dim S per layer, and 2 V for each completion token
    update         of the layers three times that, four with remat; of the head four times, because its logits are
                   computed again; adapters take one less of both

Links of a pass: over fsdp devices parameters are gathered in the forward pass, and again in the backward pass, and
gradients are scattered, all for every micro-batch. The compiler fetches a layer's parameters while the one before
computes, so that the longest of products, memory and these links counts. Two things wait and are added: the first
gather of embedding and head, and, with tp, the all-reduces of every layer's activations.
"""

import math
from dataclasses import dataclass

from tpu_grpo.launching.tpus import Generation
from tpu_grpo.planning.rates import ALLREDUCE_SECONDS, FILL, LINKS, MEMORY, PRODUCTS
from tpu_grpo.planning.sizes import TokenCost


@dataclass(frozen=True)
class TrainerSizes:
    """What the learner's passes are over; bytes are per device."""

    fsdp: int
    tp: int
    layers: int
    token: TokenCost
    context: float
    """The tokens that a token attends to, a mean."""
    row_tokens: int
    """The tokens of a row that holds the longest prompt and completion, padded to whole blocks of attention."""
    pass_tokens: int
    """The tokens of a micro-batch, on all devices."""
    parameter_bytes: float
    trained_bytes: float
    outer_share: float
    """The share of the parameters that embedding and head have."""
    state_bytes: float
    """The activations of a token between layers."""
    layer_passes: int
    """How many forward passes the layers of an update cost."""
    head_passes: int
    """The same of the head."""


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one micro-batch."""

    parts: dict[str, float]
    """By cause; they add up."""
    beside: dict[str, float]
    """What goes on beside the longest of its kind, which is among the parts."""


def packed_passes(sizes: TrainerSizes, *, rows: int, mean_tokens: float) -> int:
    """Return the micro-batches that are filled by packing ``rows`` prompts with completions, of a mean length."""
    return math.ceil(rows * min(mean_tokens / FILL, sizes.row_tokens) / sizes.pass_tokens)


def pass_seconds(
    sizes: TrainerSizes, generation: Generation, *, head_tokens: float, accessed_bytes: float, updates: bool
) -> PassSeconds:
    """Return the seconds of one micro-batch, which is computed whole, whatever of it is padding.

    Args:
        sizes: of the micro-batch and the mesh.
        generation: of the chips.
        head_tokens: its completion tokens, on all devices.
        accessed_bytes: the compiler's count for its program, per device.
        updates: whether there is a backward pass.
    """
    devices, chip = sizes.fsdp * sizes.tp, generation.chip
    layer_passes, head_passes = (sizes.layer_passes, sizes.head_passes) if updates else (1, 1)
    layers = layer_passes * sizes.token.forward(sizes.pass_tokens, sizes.context, 0)
    flops = layers + head_passes * sizes.token.forward(0, 0, head_tokens)
    gathered = sizes.parameter_bytes * (sizes.fsdp - 1)
    first = gathered * sizes.outer_share
    moved = gathered - first + updates * (gathered + sizes.trained_bytes * (sizes.fsdp - 1))
    beside = {
        "products": flops / devices / (PRODUCTS * chip.flops_per_second),
        "memory": accessed_bytes / (MEMORY * chip.memory_bytes_per_second),
        "links": link_seconds(generation, devices, moved),
    }
    longest = max(beside, key=lambda cause: beside[cause])
    parts = {longest: beside.pop(longest)}
    waits = link_seconds(generation, devices, first) + layer_passes * _allreduce_seconds(sizes, generation)
    return PassSeconds(parts | {"links": parts.get("links", 0.0) + waits}, beside)


def link_seconds(generation: Generation, devices: int, sent: float) -> float:
    """Seconds in which each of so many devices sends ``sent`` bytes to others."""
    return sent / (LINKS * generation.sent_bytes_per_second(devices)) if sent else 0.0


def _allreduce_seconds(sizes: TrainerSizes, generation: Generation) -> float:
    """Seconds of adding up the activations of all layers, twice each, in one pass."""
    if sizes.tp == 1:
        return 0.0
    sent = 2 * (sizes.tp - 1) / sizes.tp * sizes.pass_tokens / sizes.fsdp * sizes.state_bytes
    return 2 * sizes.layers * (ALLREDUCE_SECONDS + link_seconds(generation, sizes.tp, sent))
