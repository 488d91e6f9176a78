"""Computes the seconds that parts of a step take: an engine's steps, and the learner's micro-batches.

The sizes follow from a model's config.json and the tensors of its checkpoint; nothing is compiled for them. An engine's
step takes the time of its matrix products or of reading its weights, whichever is longer. Added to that are:

    decode    reading the cache, sampling, the all-reduces, and the host's time
    prefill   the all-reduces, and the host's time

The FLOPs of a learner's pass are computed, too, because the compiler counts the body of a loop once and kernels not at
all. Per token, with N parameters used in the layers, V in the head, and S tokens of context (half for flash attention):

    forward pass   2 N + 4 heads head_dim S per layer, and 2 V for each completion token
    update         the layers cost 3 forward passes, 4 with remat; the head costs 4, because its logits are
                   recomputed; with adapters, the matrices of both cost one forward pass less

Published speeds of decoding come from sglang-jax's cookbook (Qwen3-8B and Qwen3-32B on v6e-4, tensor 4, prompts of
1,024 to 8,192 tokens, completions of 1,024, 16 to 256 rows in a batch) and its pull request 194. They were measured
with an earlier kernel: a cache speed of 0.74 TB/s and `Rates.prefill` are fitted to these seven points, within 7 %.
`Rates.products` is fitted by generation to published trainings: 61 and 67 % MFU of models of 16B and 32B on v5e-256,
64.6 % of Llama2-70B on v5p, 57 % of 22B on v4, 52.3 % of Llama-3.1-70B on v7x-128, and 7,139 tokens a second and chip
of Llama-3.1-8B on v6e-8; a wider model reaches more, and a narrower one less (NARROW). No other rate of v7x is fitted.
The sources of other constants are stated with them.
tests/planning/test_costs.py checks this.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tpu_grpo.launching.tpus import Generation
from tpu_grpo.models.checkpoint import Checkpoint

LAUNCH_SECONDS, ARRAY_SECONDS, ROW_SECONDS, TOKEN_SECONDS = 0.5e-3, 0.75e-6, 6e-6, 2e-6
"""Host time of a launch of an engine: fixed, per array and device of the engine, per row to schedule, and per token to
collect. The first three are fitted within 14 % to one-step launches of this package's engines, which take 0.97 to
4.3 ms; the last is fitted to launches of 1 to 32 steps for 64 rows, which take 1.4 to 2.3 us per token."""
STEP_INPUTS = 7
"""Arrays that a launch of decode steps takes besides weights and cache: rows, limits, and five for attention."""
FILL = 0.95
"""The share of the tokens in packed training rows that is not padding."""
WIDE, NARROW = 4096, 683
"""Rates of the learner's products are those of models ``WIDE`` wide. What is not a product takes as long as a product
with a width of ``NARROW`` would: libtpu's cycles for an update's layer on v5e are 22.6 ms for Qwen3-8B and 2,048 tokens
(73 % of the peak), and 8.5 ms for Qwen3-0.6B, whose width is 1,024, and 6,144 tokens (51 %)."""
HEAD_BYTES = 37
"""Bytes of memory that a micro-batch takes per parameter of the head to clear, cast and add the head's gradient: the
cycles of Qwen3-0.6B on v5e are 8.8 ms with the vocabulary in one block, as on several devices, and 7.0 ms in blocks."""
SAMPLING_PASSES = 18
"""How often a decode step passes over its float32 logits. For 64 rows of Qwen3-8B on four chips of v5e, sampling takes
0.26 ms by the cycles."""
HEAD_READ = 1.18
"""How much longer the head takes in a decode step than other weights of its size, by the same program: 0.56 ms."""
HALF_BLOCK = 1024
"""Tokens that the kernel reads besides a row's window, on average: half a block of 2,048 keys."""
INT8_BYTES = 1.24
"""Bytes of bfloat16 that are read as fast as an int8 weight is read and converted: products of 64 rows take 0.62 of the
cycles that they take with bfloat16 on v5e."""

EMBEDDING = "model.embed_tokens.weight"
VOCABULARY = (EMBEDDING, "lm_head.weight")

Seconds = Mapping[str, float]
"""Cause -> seconds; the total is their sum."""


def add(total: dict[str, float], more: Seconds, times: float = 1.0) -> None:
    """Add the seconds of ``more``, multiplied by ``times``, to ``total``."""
    for cause, seconds in more.items():
        total[cause] = total.get(cause, 0.0) + times * seconds


def link_seconds(generation: Generation, devices: int, sent: float) -> float:
    """Return the seconds that each of the devices needs to send ``sent`` bytes to other devices."""
    return sent / (generation.rates.links * generation.sent_bytes_per_second(devices)) if sent else 0.0


def allreduce_seconds(generation: Generation, devices: int, held: float) -> float:
    """Return the seconds of one all-reduce of ``held`` bytes per device; 0 for a single device."""
    if devices == 1:
        return 0.0
    return generation.rates.allreduce_seconds + link_seconds(generation, devices, 2 * (devices - 1) / devices * held)


def network_seconds(generation: Generation, slices: int, held: float) -> float:
    """Return the seconds of adding ``held`` bytes per device over slices, through the data-center network."""
    sent = 2 * (slices - 1) / slices * held
    return sent / (generation.rates.links * generation.chip.network_bytes_per_second)


def memory_seconds(generation: Generation, count: float) -> float:
    """Return the seconds that a device needs to read or write ``count`` bytes of its memory."""
    return count / (generation.rates.memory * generation.chip.memory_bytes_per_second)


@dataclass(frozen=True)
class TokenCost:
    """What a token costs in a forward pass of a model."""

    layers: float
    """The number of parameters used for a token in all layers."""
    head: float
    """The number of parameters in the output head."""
    attention: float
    """FLOPs per token of context, in all layers."""
    width: int = WIDE
    """The numbers of a token between layers."""

    @property
    def slowdown(self) -> float:
        """How much longer a FLOP of the learner takes than in a model that is WIDE wide."""
        return (1 + NARROW / self.width) / (1 + NARROW / WIDE)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "TokenCost":
        """Compute the cost from the checkpoint's tensors; of the experts, only those that a token uses count."""
        config, shapes = checkpoint.config, checkpoint.shapes
        experts, of_token = config.experts
        met = 0.0
        for name, shape in shapes.items():
            if ".layers." in name and len(shape) > 1:
                met += math.prod(shape) * (of_token / experts if ".experts." in name else 1.0)
        return cls(met, config.vocab_size * config.hidden_size, 4.0 * config.query_widths, config.hidden_size)

    def forward(self, tokens: float, context: float, predicted: float) -> float:
        """FLOPs of a forward pass over ``tokens`` tokens, of which ``predicted`` get logits."""
        return tokens * (2 * self.layers + self.attention * context) + 2 * self.head * predicted


# --- a step of an engine ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineSizes:
    """The sizes that set an engine step's time: bytes read and sent per device, and arrays passed at its launch."""

    tensor: int
    """The devices of the engine."""
    layers: int
    token: TokenCost
    weight_bytes: float
    """Weights that every step reads completely: all except the experts and an embedding that is not tied to the head.
    Of such an embedding, a step reads only a row per token."""
    expert_bytes: float
    experts: int
    """The number of experts in a layer; 1 for a model without experts."""
    used_experts: int
    """The number of experts that a token uses in a layer."""
    cache_bytes: float
    """Keys and values of one token, in the layers without a window."""
    state_bytes: float
    """The activations of one token between layers, which every device holds completely."""
    arrays: int
    """The number of arrays that are passed to the program of a step."""
    head_bytes: float
    """The bytes of the output head, which are among the weights."""
    logits: float
    """The logits of a token on a device."""
    cache_itemsize: int = 2
    """Bytes per number in the cache."""
    windows: Mapping[int, float] = field(default_factory=dict)
    """A window in tokens -> keys and values of one token, in the layers with this window."""

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        *,
        tensor: int,
        itemsize: int,
        split_vocabulary: bool,
        cache_bytes: float,
        cache_itemsize: int = 2,
        windows: Mapping[int, float] | None = None,
        int8: bool = False,
    ) -> "EngineSizes":
        """Compute the sizes of an engine of ``tensor`` devices whose weights have ``itemsize`` bytes per number, but
        with ``int8`` the layers' matrices INT8_BYTES."""
        config, shapes = checkpoint.config, checkpoint.shapes
        weights = experts = 0.0
        for name, shape in shapes.items():
            is_small = int8 and ".layers." in name and len(shape) == 2
            size = math.prod(shape) * (INT8_BYTES if is_small else itemsize)
            if ".experts." in name:
                experts += size / tensor
            elif name != EMBEDDING or config.tie_word_embeddings:
                weights += size / (tensor if name not in VOCABULARY or split_vocabulary else 1)
        names = {re.sub(r"\.experts\.\d+\.", ".experts.", name) for name in shapes}
        return cls(
            tensor=tensor,
            layers=config.num_hidden_layers,
            token=TokenCost.of(checkpoint),
            weight_bytes=weights,
            expert_bytes=experts,
            experts=config.experts[0],
            used_experts=config.experts[1],
            cache_bytes=cache_bytes,
            state_bytes=config.hidden_size * itemsize,
            arrays=len(names) + config.num_hidden_layers + STEP_INPUTS,
            head_bytes=config.vocab_size * config.hidden_size * itemsize / (tensor if split_vocabulary else 1),
            logits=config.vocab_size / (tensor if split_vocabulary else 1),
            cache_itemsize=cache_itemsize,
            windows=windows or {},
        )

    def read_bytes(self, tokens: float) -> float:
        """Return the bytes of weights that a step over ``tokens`` reads; experts count by their chance of use."""
        idle = (1 - self.used_experts / self.experts) ** tokens
        return self.weight_bytes + self.expert_bytes * (1 - idle)

    def cached_bytes(self, rows: int, tokens: float) -> float:
        """Return the bytes of keys and values that a decode step reads, for rows that have these tokens together."""
        seen = (size * min(tokens, rows * (window + HALF_BLOCK)) for window, size in self.windows.items())
        return self.cache_bytes * tokens + sum(seen)


def decode_step(sizes: EngineSizes, generation: Generation, rows: int, cached_tokens: float) -> dict[str, float]:
    """Return the device seconds of a decode step of ``rows`` rows, which have ``cached_tokens`` tokens together.

    "sampling" includes what the output head takes in addition to reading it as fast as other weights.
    """
    flops = sizes.token.forward(rows, cached_tokens / rows, rows) / sizes.tensor
    cached = sizes.cached_bytes(rows, cached_tokens)
    computed = cached * max(1, 2 / sizes.cache_itemsize) / generation.rates.cache_bytes_per_second
    read = max(memory_seconds(generation, cached), computed)
    step = _engine_step(sizes, generation, rows, flops, generation.rates.products)
    passed = (HEAD_READ - 1) * sizes.head_bytes + SAMPLING_PASSES * 4 * rows * sizes.logits
    return step | {"cache": read, "sampling": memory_seconds(generation, passed)}


def prefill_step(sizes: EngineSizes, generation: Generation, tokens: float, context: float) -> dict[str, float]:
    """Return the device seconds of a prefill step of ``tokens`` prompt tokens, each with ``context`` tokens before.

    Logits are counted for a single token only; more would hardly change the result.
    """
    flops = sizes.token.forward(tokens, context, 1) / sizes.tensor
    return _engine_step(sizes, generation, tokens, flops, generation.rates.prefill)


def _engine_step(
    sizes: EngineSizes, generation: Generation, tokens: float, flops: float, share: float
) -> dict[str, float]:
    """Return the seconds of the all-reduces, and the longer of reading the weights and computing the products.

    Products reach this ``share`` of the chip's FLOP/s. Activations are all-reduced twice per layer, and once for the
    embedding.
    """
    products = flops / (share * generation.chip.flops_per_second)
    weights = memory_seconds(generation, sizes.read_bytes(tokens))
    each = allreduce_seconds(generation, sizes.tensor, tokens * sizes.state_bytes)
    longer = {"products": products} if products > weights else {"weights": weights}
    return longer | {"links": (2 * sizes.layers + 1) * each}


def host_seconds(sizes: EngineSizes, rows: int, steps: float = 1) -> float:
    """Return the host's seconds to launch ``steps`` steps of ``rows`` rows and to collect their tokens."""
    arrays = ARRAY_SECONDS * sizes.arrays * sizes.tensor
    return LAUNCH_SECONDS + arrays + (ROW_SECONDS + TOKEN_SECONDS * steps) * rows


def round_seconds(engines: Sequence[tuple[Seconds, float]], *, ahead: bool = False) -> dict[str, float]:
    """Return the seconds of one round of a host's engines, given (device seconds, host seconds) of each.

    One thread drives the engines of a host in turn: it waits for the tokens of an engine's step, processes them and
    launches the engine's next step, while the devices of other engines work. A round takes the longer of

        the host times of all engines                           the thread is never idle
        the device time plus the host time of one engine        its next step needs the tokens of this step

    The result has the device seconds of the slowest engine, and as "host" the time for which its devices wait. With
    ``ahead``, the next launch is queued before the host processes the tokens of this one; devices then wait only if
    the thread is never idle.
    """
    device, own = max(engines, key=lambda engine: sum(engine[0].values()) + engine[1])
    working = sum(device.values())
    whole = max(sum(host for _, host in engines), working if ahead else working + own)
    return {**device, "host": whole - working}


# --- a micro-batch of the learner ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainerSizes:
    """The sizes of the learner's forward and backward passes; bytes are per device."""

    fsdp: int
    tp: int
    layers: int
    token: TokenCost
    context: float
    """The mean number of tokens that a token attends to."""
    row_tokens: int
    """The tokens of a row with the longest prompt and completion, padded to whole attention blocks, times the number
    of devices that compute the same rows."""
    pass_tokens: int
    """The tokens of a micro-batch on all devices together."""
    gathered_bytes: float
    """The parameters that every pass gathers over fsdp: all but experts, to which tokens are sent instead."""
    reduced_bytes: float
    """The gathered parameters that are trained; their gradients are reduce-scattered."""
    state_bytes: float
    """The bytes of a token's activations between layers."""
    layer_passes: int
    """The cost of the layers in an update, in units of a forward pass."""
    head_passes: int
    """The cost of the head in an update, in units of a forward pass."""
    experts_of_token: int = 0
    """The experts to which every layer sends a token; 0 for a model without experts."""
    trains_adapters: bool = False
    """Whether ``layer_passes`` and ``head_passes`` leave out the gradients of frozen matrices."""
    is_padded: bool = False
    """Whether every completion has its own padded row, and the head also computes prompts (Tunix's learner)."""


class PassSeconds(NamedTuple):
    """Seconds of one micro-batch."""

    parts: dict[str, float]
    """Seconds by cause; their sum is the duration."""
    beside: dict[str, float]
    """Seconds, by cause, of work that overlaps the longest part and so adds nothing to the duration."""


def shared_tokens(*, row_tokens: int, prompt: float, completion: float, group: int) -> float:
    """Return the tokens that a completion and its share of a prompt take in packed rows, if groups share prompts.

    As many completions of mean length as a row has room for share one copy; all but one need one token more.
    """
    fit = int((FILL * row_tokens - prompt) // (completion + 1))
    copies = math.ceil(group / max(1, min(group, fit)))
    return min(prompt + completion, (copies * prompt + group * (completion + 1)) / group)


def filled_passes(sizes: TrainerSizes, *, rows: int, mean_tokens: float) -> int:
    """Return the number of micro-batches for ``rows`` prompts with completions of ``mean_tokens`` tokens, packed."""
    packed = sizes.row_tokens if sizes.is_padded else min(mean_tokens / FILL, sizes.row_tokens)
    return math.ceil(rows * packed / sizes.pass_tokens)


def pass_seconds(
    sizes: TrainerSizes, generation: Generation, *, head_tokens: float, accessed_bytes: float, updates: bool
) -> PassSeconds:
    """Return the seconds of one micro-batch; padding costs as much as tokens.

    Over fsdp devices, parameters are gathered in the forward pass and again in the backward pass, and gradients are
    reduce-scattered, in every micro-batch. The compiler gathers a layer's parameters while the previous layer computes,
    so only the longest of products, memory and these transfers counts. Two other transfers do not overlap, and are
    added, as is the memory traffic of the head's gradient (HEAD_BYTES). With tp, each pass all-reduces activations
    twice per layer. With experts, the forward pass sends tokens to the experts and back, and the backward pass sends
    inputs, gradients and the gradients of inputs.

    ``head_tokens`` counts completion tokens on all devices, ``accessed_bytes`` is the compiler's count for the program
    per device, and ``updates`` says whether there is a backward pass.
    """
    devices = sizes.fsdp * sizes.tp
    layer_passes, head_passes = (sizes.layer_passes, sizes.head_passes) if updates else (1, 1)
    layers = layer_passes * sizes.token.forward(sizes.pass_tokens, sizes.context, 0)
    if updates and sizes.trains_adapters:  # attention has no matrices whose gradients are left out
        layers += sizes.pass_tokens * sizes.token.attention * sizes.context
    flops = layers + head_passes * sizes.token.forward(0, 0, head_tokens)
    others = sizes.fsdp - 1
    moved = others * (sizes.gathered_bytes + updates * (sizes.gathered_bytes + sizes.reduced_bytes))
    reached = generation.rates.products * generation.chip.flops_per_second / sizes.token.slowdown
    beside = {
        "products": flops / devices / reached,
        "memory": memory_seconds(generation, accessed_bytes),
        "links": link_seconds(generation, devices, moved),
    }
    longest = max(beside, key=lambda cause: beside[cause])
    parts = {longest: beside.pop(longest)}
    each = allreduce_seconds(generation, sizes.tp, sizes.pass_tokens / sizes.fsdp * sizes.state_bytes)
    copies = sizes.layers * sizes.experts_of_token * sizes.pass_tokens / sizes.fsdp * others / sizes.fsdp
    exchanged = (5 if updates else 2) * copies * sizes.state_bytes
    waits = layer_passes * 2 * sizes.layers * each + link_seconds(generation, devices, exchanged)
    added = HEAD_BYTES * sizes.token.head / devices if updates and not sizes.trains_adapters else 0.0
    head = {"head": memory_seconds(generation, added)} if added else {}
    return PassSeconds(parts | {"links": parts.get("links", 0.0) + waits} | head, beside)
