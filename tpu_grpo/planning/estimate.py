"""The seconds of a step by rooflines: each stage takes the largest of its times for FLOPs, memory and links.

FLOPs and bytes are the larger of what the compiler counts (loops once, kernels not at all) and the arithmetic below
(the bytes of a decode step are the arithmetic's). They are per device; a token meets N parameters in the layers or the
head, and has S tokens of context:

    forward pass    2 N + 4 heads head_dim S per layer, for each token; flash attention meets half of S
    update          three times that, four with remat; adapters take one less
    decode step     every weight once, and the cache of all running rows, each halfway through its completion
    links           update: parameters gathered twice and gradients scattered once; sync: what moves
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tpu_grpo.config import RunConfig
from tpu_grpo.families.flash_attention import whole_blocks
from tpu_grpo.launching.tpus import Chip
from tpu_grpo.planning.programs import GRADIENTS, OPTIMIZER_STEP, CompiledProgram, takes_logprobs
from tpu_grpo.planning.resident import ResidentBytes
from tpu_grpo.run.abstract import AbstractRun

COMPUTE, MEMORY, LINKS = 0.5, 0.8, 0.8
"""The shares of a chip's speeds that programs are assumed to reach."""
HOST_SECONDS = 0.002
"""The time that the host takes for each step of an engine, to schedule it and to take its tokens in."""
ASSUMPTIONS = (
    f"programs reach {COMPUTE:.0%} of the chip's products, {MEMORY:.0%} of its memory's and {LINKS:.0%} of its links' "
    "speed",
    f"an engine's step takes {HOST_SECONDS * 1000:g} ms on the host; rewards, evaluation and checkpoints take no time",
    "every prompt has data.max_prompt_tokens and every completion rollout.max_new_tokens tokens",
)


@dataclass(frozen=True)
class StageCost:
    """What one stage of a step computes and moves, per device."""

    stage: str
    flops: float
    memory_bytes: float
    link_bytes: float
    host_seconds: float = 0.0

    def seconds(self, chip: Chip) -> float:
        """The longest of the three times, and the host's time."""
        return self.host_seconds + max(self.parts(chip).values())

    def parts(self, chip: Chip) -> dict[str, float]:
        """Seconds that each limit alone would take."""
        return {
            "products": self.flops / (COMPUTE * chip.flops_per_second),
            "memory": self.memory_bytes / (MEMORY * chip.memory_bytes_per_second),
            "links": self.link_bytes / (LINKS * chip.link_bytes_per_second),
        }


@dataclass(frozen=True)
class TokenCost:
    """What a token costs in a forward pass of a model."""

    layers: float
    """The parameters that a token meets in all layers."""
    head: float
    """The parameters of the output head."""
    attention: float
    """FLOPs per token of context, in all layers."""

    @classmethod
    def of(cls, run: AbstractRun) -> "TokenCost":
        """Compute it from the checkpoint's tensors; of the experts, only those that a token uses count."""
        config, shapes = run.checkpoint.config, run.checkpoint.family.tensor_shapes(run.checkpoint.config)
        used = getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_experts", 1)
        met = 0.0
        for name, shape in shapes.items():
            if ".layers." in name and len(shape) == 2:
                met += shape[0] * shape[1] * (used if ".experts." in name else 1.0)
        heads = config.num_attention_heads * config.head_dim
        return cls(met, config.vocab_size * config.hidden_size, 4.0 * heads * config.num_hidden_layers)

    def forward(self, tokens: float, context: float, predicted: float) -> float:
        """FLOPs of a forward pass over ``tokens`` tokens, of which ``predicted`` get logits."""
        return tokens * (2 * self.layers + self.attention * context) + 2 * self.head * predicted


def stage_costs(run: AbstractRun, resident: ResidentBytes, programs: Sequence[CompiledProgram]) -> list[StageCost]:
    """Return the cost of every stage of a step, in order."""
    by_name = {program.name: program for program in programs}
    moved = sum(move.bytes for move in run.sync.moves if not move.frozen) / len(run.meshes.sampler_devices)
    costs = [_prefill(run, programs), _decode(run, resident, programs)]
    if takes_logprobs(run.config):
        costs.append(_learner(run, resident, next(p for p in programs if p.stage == "logprobs")))
    update = _with_steps(run, _learner(run, resident, by_name[GRADIENTS]), by_name[OPTIMIZER_STEP])
    return [*costs, update, StageCost("sync", 0.0, 2 * moved, moved)]


def _prefill(run: AbstractRun, programs: Sequence[CompiledProgram]) -> StageCost:
    config, shapes, token = run.config, run.options.shapes, TokenCost.of(run)
    prompts = -(-config.data.prompts_per_step // run.meshes.replicas)
    tokens, length = prompts * config.data.max_prompt_tokens, config.data.max_prompt_tokens
    program = next(p for p in programs if p.name.startswith("prefill"))
    calls = -(-tokens // shapes.prefill[-1])
    flops = token.forward(tokens, length / 2, prompts) / run.meshes.tensor
    flops = max(flops, program.flops * calls)
    return StageCost(
        "prefill", flops, program.accessed_bytes * calls, _allreduce_bytes(run, tokens), HOST_SECONDS * calls
    )


def _decode(run: AbstractRun, resident: ResidentBytes, programs: Sequence[CompiledProgram]) -> StageCost:
    config, shapes, token = run.config, run.options.shapes, TokenCost.of(run)
    rows = -(-config.data.prompts_per_step // run.meshes.replicas) * config.algorithm.group_size
    running = min(rows, shapes.max_rows)
    steps = -(-rows // shapes.max_rows) * config.rollout.max_new_tokens
    context = config.data.max_prompt_tokens + config.rollout.max_new_tokens / 2
    program = next(p for p in programs if p.name.startswith("decode"))
    cached = resident.cache / run.options.cache_tokens * running * context
    flops = max(program.flops, token.forward(running, context, running) / run.meshes.tensor)
    # the compiler's count of bytes holds all of the cache, and early fetches twice
    memory = resident.sampler + resident.shared + cached
    links = _allreduce_bytes(run, running)
    return StageCost("decode", flops * steps, memory * steps, links * steps, HOST_SECONDS * steps)


def _learner(run: AbstractRun, resident: ResidentBytes, program: CompiledProgram) -> StageCost:
    """Return the cost of a learner's program over all micro-batches and iterations of a step."""
    config, token, mesh = run.config, TokenCost.of(run), run.meshes.trainer.shape
    updates, calls = program.stage == "update", config.micro_batches
    rows, length = config.batch_rows, whole_blocks(config.context_tokens, block := run.meshes.flash_block)
    forward = token.forward(
        rows * length, length if block is None else length / 2, rows * config.rollout.max_new_tokens
    )
    passes = 3 + (config.model.remat != "none") - (config.model.lora.rank is not None) if updates else 1
    repeats = config.algorithm.iterations if updates else _forward_passes(config)
    gathered = resident.parameters * (mesh["fsdp"] - 1) * (3 if updates else 1)
    links = gathered * calls + _allreduce_bytes(run, rows * length / mesh["fsdp"], mesh["tp"]) * passes
    flops = max(program.flops * calls, passes * forward / (mesh["fsdp"] * mesh["tp"]))
    return StageCost(program.stage, flops * repeats, program.accessed_bytes * calls * repeats, links * repeats)


def _with_steps(run: AbstractRun, update: StageCost, step: CompiledProgram) -> StageCost:
    """Add the optimizer's steps to the micro-batches of an update."""
    count = run.config.algorithm.iterations
    flops, memory = update.flops + count * step.flops, update.memory_bytes + count * step.accessed_bytes
    return replace(update, flops=flops, memory_bytes=memory)


def _forward_passes(config: RunConfig) -> int:
    """Count a step's forward passes beside those of the update: the reference's and the old policy's."""
    return (config.algorithm.beta > 0.0) + (config.algorithm.old_policy == "trainer")


def _allreduce_bytes(run: AbstractRun, tokens: float, devices: int | None = None) -> float:
    """Link bytes of adding up activations twice a layer over the devices that split it, a replica's by default."""
    devices, config = devices or run.meshes.tensor, run.checkpoint.config
    size = 2 if run.config.model.dtype == "bfloat16" else 4
    return 4.0 * config.num_hidden_layers * tokens * config.hidden_size * size * (devices - 1) / devices
