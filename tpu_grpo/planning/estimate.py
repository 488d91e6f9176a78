"""Seconds of a step by rooflines: of each stage the largest of what products, memory and links take.

Products and bytes are the larger of what the compiler counts (loops once, kernels not at all) and the arithmetic below
(a decode step's bytes are the arithmetic's), per device, with D devices, N parameters that a token meets in a layer or
the head, S its context:

    forward pass    2 N + 4 heads head_dim S per layer, a token; flash attention meets half of S
    update          three times that, four with remat; adapters one less
    decode step     every weight once, and the cache of all rows that run, at half of their completions
    links           update: parameters gathered twice, gradients scattered once; sync: what moves
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tpu_grpo.families.flash_attention import whole_blocks
from tpu_grpo.launching.tpus import Chip
from tpu_grpo.planning.programs import Compiled, takes_logprobs
from tpu_grpo.planning.sizes import Sizes
from tpu_grpo.run.abstract import AbstractRun

COMPUTE, MEMORY, LINKS = 0.5, 0.8, 0.8
"""Shares of a chip's speeds that programs are taken to reach."""
HOST_SECONDS = 0.002
"""Of an engine's step, for scheduling and for taking tokens in."""
ASSUMPTIONS = (
    f"programs reach {COMPUTE:.0%} of the chip's products, {MEMORY:.0%} of its memory's and {LINKS:.0%} of its links' "
    "speed",
    f"an engine's step takes {HOST_SECONDS * 1000:g} ms on the host; rewards, evaluation and checkpoints take no time",
    "every prompt has data.max_prompt_tokens and every completion rollout.max_new_tokens tokens",
)


@dataclass(frozen=True)
class Work:
    """One stage of a step, per device."""

    stage: str
    flops: float
    memory_bytes: float
    link_bytes: float
    host_seconds: float = 0.0

    def seconds(self, chip: Chip) -> float:
        """The longest of the three, and the host's part."""
        return self.host_seconds + max(self.parts(chip).values())

    def parts(self, chip: Chip) -> dict[str, float]:
        """Seconds by what limits."""
        return {
            "products": self.flops / (COMPUTE * chip.flops_per_second),
            "memory": self.memory_bytes / (MEMORY * chip.memory_bytes_per_second),
            "links": self.link_bytes / (LINKS * chip.link_bytes_per_second),
        }


@dataclass(frozen=True)
class Arithmetic:
    """Of a model: what a token costs."""

    layers: float
    """Parameters that a token meets in all layers."""
    head: float
    attention: float
    """Products per token of context, all layers."""

    @classmethod
    def of(cls, outline: AbstractRun) -> "Arithmetic":
        """By the tensors of the checkpoint; of experts, those that a token uses."""
        config, shapes = outline.checkpoint.config, outline.checkpoint.family.tensor_shapes(outline.checkpoint.config)
        used = getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_experts", 1)
        met = 0.0
        for name, shape in shapes.items():
            if ".layers." in name and len(shape) == 2:
                met += shape[0] * shape[1] * (used if ".experts." in name else 1.0)
        heads = config.num_attention_heads * config.head_dim
        return cls(met, config.vocab_size * config.hidden_size, 4.0 * heads * config.num_hidden_layers)

    def forward(self, tokens: float, context: float, predicted: float) -> float:
        """Products of a forward pass over tokens, of which some are predicted."""
        return tokens * (2 * self.layers + self.attention * context) + 2 * self.head * predicted


def stages(outline: AbstractRun, held: Sizes, programs: Sequence[Compiled]) -> list[Work]:
    """What a step does, in order."""
    by_stage = {program.stage: program for program in programs}
    moved = sum(move.bytes for move in outline.sync.moves if not move.frozen) / len(outline.meshes.sampler_devices)
    works = [_prefill(outline, programs), _decode(outline, held, programs)]
    if takes_logprobs(outline.config):
        works.append(_learner(outline, held, by_stage["logprobs"]))
    return [*works, _learner(outline, held, by_stage["update"]), Work("sync", 0.0, 2 * moved, moved)]


def _prefill(outline: AbstractRun, programs: Sequence[Compiled]) -> Work:
    config, shapes, arithmetic = outline.config, outline.options.shapes, Arithmetic.of(outline)
    prompts = -(-config.data.prompts_per_step // outline.meshes.replicas)
    tokens, length = prompts * config.data.max_prompt_tokens, config.data.max_prompt_tokens
    program = next(p for p in programs if p.name.startswith("prefill"))
    calls = -(-tokens // shapes.prefill[-1])
    flops = arithmetic.forward(tokens, length / 2, prompts) / outline.meshes.tensor
    flops = max(flops, program.flops * calls)
    return Work("prefill", flops, program.accessed_bytes * calls, _sums(outline, tokens), HOST_SECONDS * calls)


def _decode(outline: AbstractRun, held: Sizes, programs: Sequence[Compiled]) -> Work:
    config, shapes, arithmetic = outline.config, outline.options.shapes, Arithmetic.of(outline)
    rows = -(-config.data.prompts_per_step // outline.meshes.replicas) * config.algorithm.group_size
    running = min(rows, shapes.max_rows)
    steps = -(-rows // shapes.max_rows) * config.rollout.max_new_tokens
    context = config.data.max_prompt_tokens + config.rollout.max_new_tokens / 2
    program = next(p for p in programs if p.name.startswith("decode"))
    cached = held.cache / outline.options.cache_tokens * running * context
    flops = max(program.flops, arithmetic.forward(running, context, running) / outline.meshes.tensor)
    memory = held.sampler + held.shared + cached  # the compiler's count holds all of the cache, and early fetches twice
    return Work("decode", flops * steps, memory * steps, _sums(outline, running) * steps, HOST_SECONDS * steps)


def _learner(outline: AbstractRun, held: Sizes, program: Compiled) -> Work:
    """All micro-batches of a step, and iterations."""
    config, arithmetic, mesh = outline.config, Arithmetic.of(outline), outline.meshes.trainer.shape
    updates, prompts = program.stage == "update", config.data.prompts_per_step
    calls = prompts // (config.algorithm.micro_batch_prompts or prompts)
    rows, length = config.batch_rows, whole_blocks(config.context_tokens, block := outline.meshes.flash_block)
    forward = arithmetic.forward(
        rows * length, length if block is None else length / 2, rows * config.rollout.max_new_tokens
    )
    passes = 3 + (config.model.remat != "none") - (config.model.lora.rank is not None) if updates else 1
    repeats = config.algorithm.iterations if updates else _forward_passes(outline)
    gathered = held.parameters * (mesh["fsdp"] - 1) * (3 if updates else 1)
    links = gathered * calls + _sums(outline, rows * length / mesh["fsdp"], mesh["tp"]) * passes
    flops = max(program.flops * calls, passes * forward / (mesh["fsdp"] * mesh["tp"]))
    return Work(program.stage, flops * repeats, program.accessed_bytes * calls * repeats, links * repeats)


def _forward_passes(outline: AbstractRun) -> int:
    """Of a step, beside those of the update: the reference's and the old policy's."""
    algorithm = outline.config.algorithm
    return (algorithm.beta > 0.0) + (algorithm.old_policy == "trainer")


def _sums(outline: AbstractRun, tokens: float, devices: int | None = None) -> float:
    """Link bytes of adding up activations twice a layer over devices that split it."""
    devices, config = devices or outline.meshes.tensor, outline.checkpoint.config
    size = 2 if outline.config.model.dtype == "bfloat16" else 4
    return 4.0 * config.num_hidden_layers * tokens * config.hidden_size * size * (devices - 1) / devices
