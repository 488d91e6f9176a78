"""Engines on small random checkpoints, and what the trainer says about their tokens."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.models.forward import logprobs, trainer_mesh
from tpu_grpo.config import RunConfig
from tpu_grpo.engine.engine import Engine, engine_mesh
from tpu_grpo.engine.options import EngineOptions
from tpu_grpo.engine.replicas import Replica, Replicas
from tpu_grpo.hosts import Hosts
from tpu_grpo.models.checkpoint import read_checkpoint
from tpu_grpo.models.reference import reference_logprobs
from tpu_grpo.models.tunix_model import load_model
from tpu_grpo.records.stages import Completion, Request, SampleKey, SamplingParams
from tpu_grpo.weights.plan import named_leaves
from tpu_grpo.weights.sync import WeightSync

CONTEXT = 96
GREEDY = SamplingParams(max_new_tokens=16, temperature=0.0, ignore_stop=True)
SAMPLED = SamplingParams(max_new_tokens=16, ignore_stop=True)
PROMPTS = [tuple(range(5, 15)), tuple(range(20, 57)), (7, 7, 9), tuple(range(100, 131))]


def policy(checkpoint: Path, dtype: str = "float32") -> nnx.Module:
    """The trainer's model on one device."""
    return load_model(read_checkpoint(checkpoint), trainer_mesh(1, 1), dtype=jnp.dtype(dtype), remat="none")


def engine_options(**changed: Any) -> EngineOptions:
    """The options of a run without settings on a CPU, but for 8 rows of CONTEXT tokens, and as changed."""
    options = EngineOptions.from_config(RunConfig(), [1], replicas=1, platform="cpu")
    return replace(options, **(dict[str, Any](context_tokens=CONTEXT, max_running_requests=8) | changed))


def build_engine(checkpoint: Path, model: nnx.Module | None = None, tensor: int = 1, **options: Any) -> Engine:
    """An engine with the checkpoint's (or the model's) weights."""
    engine = Engine.build(checkpoint, engine_mesh(jax.devices()[:tensor]), engine_options(**options))
    install(engine, model if model is not None else policy(checkpoint, options.get("dtype", "float32")))
    return engine


def build_replicas(
    checkpoint: Path, model: nnx.Module, tensor: int, options: EngineOptions | None = None, devices: int | None = None
) -> tuple[Replicas, dict[str, jax.Array]]:
    """Replicas of so many devices with the model's weights, and these."""
    options = options or engine_options()
    replicas = Replicas.build(checkpoint, jax.devices()[:devices], tensor, options, Hosts())
    return replicas, install(replicas, model, checkpoint)


def alone(engine: Engine) -> Replicas:
    """A run's replicas that are this engine alone."""
    return Replicas([Replica(0, tuple(engine.mesh.devices.flat), (0,))], {0: engine}, Hosts())


def install(
    engine: Engine | Replicas, model: nnx.Module, checkpoint: Path | None = None, lora_alpha: float = 0.0
) -> dict[str, jax.Array]:
    """Sync the model's weights into the engine, or into replicas of this checkpoint; returns what was installed."""
    mesh = jax.tree.leaves(engine.weight_specs)[0].sharding.mesh
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    leaves = {k: jax.device_put(v, replicated) for k, v in named_leaves(nnx.state(model, nnx.Param)).items()}
    if isinstance(engine, Engine):
        checkpoint = Path(engine._scheduler.server_args.model_path)
    assert checkpoint is not None
    rules = read_checkpoint(checkpoint).weight_rules
    weights, _ = WeightSync(rules, leaves, engine.weight_specs, lora_alpha=lora_alpha)(leaves)
    engine.install_weights(weights)
    return weights


def requests(
    prompts: Sequence[Sequence[int]] = PROMPTS, sampling: SamplingParams = SAMPLED, group: int = 1, step: int = 0
) -> list[Request]:
    """``group`` requests per prompt, keyed by prompt and sample."""
    return [
        Request(tuple(prompt), sampling, SampleKey(seed=3, step=step, prompt=p, sample=g))
        for p, prompt in enumerate(prompts)
        for g in range(group)
    ]


_logprobs = nnx.jit(logprobs)


def trainer_logprobs(
    model: nnx.Module, asked: Sequence[Request], completions: Sequence[Completion]
) -> list[np.ndarray]:
    """Full log-probabilities [T, V] that the trainer gives at every sampled position, at the request's temperature."""
    width = max(len(r.token_ids) + len(c.token_ids) for r, c in zip(asked, completions, strict=True))
    rows = np.zeros((len(asked), width), np.int32)
    for row, request, completion in zip(rows, asked, completions, strict=True):
        ids = [*request.token_ids, *completion.token_ids]
        row[: len(ids)] = ids
    full = np.asarray(_logprobs(model, rows))
    picked = []
    for index, (request, completion) in enumerate(zip(asked, completions, strict=True)):
        first = len(request.token_ids) - 1
        logits = full[index, first : first + len(completion.token_ids)] / (request.sampling.temperature or 1.0)
        picked.append(np.asarray(jax.nn.log_softmax(logits)))
    return picked


def check_against_float64(
    directory: Path,
    model: nnx.Module,
    engine: Engine,
    asked: Sequence[Request],
    of_trainer: float = 3e-5,
    of_float64: float = 6e-5,
) -> None:
    """Compare sampled log-probabilities of engine and trainer with each other and with float64's, and all that the
    trainer gives, within these bounds; greedy tokens are float64's."""
    completions = engine.generate(asked)
    for request, completion, trainer_TV in zip(
        asked, completions, trainer_logprobs(model, asked, completions), strict=True
    ):
        ids, first = [*request.token_ids, *completion.token_ids], len(request.token_ids) - 1
        float64_TV = reference_logprobs(directory, np.array([ids]))[0, first:-1]
        sampled = np.arange(len(completion.token_ids)), completion.token_ids
        assert np.abs(completion.logprobs - trainer_TV[sampled]).max() <= of_trainer
        assert np.abs(completion.logprobs - float64_TV[sampled]).max() <= of_float64
        assert np.abs(trainer_TV - float64_TV).max() <= of_float64
        if request.sampling is GREEDY:
            assert completion.token_ids.tolist() == float64_TV.argmax(-1).tolist()


def disagreement(model: nnx.Module, asked: Sequence[Request], completions: Sequence[Completion]) -> float:
    """Largest difference between the engine's log-probabilities and the trainer's."""
    reference = trainer_logprobs(model, asked, completions)
    gaps = [
        np.abs(full[np.arange(len(c.token_ids)), c.token_ids] - c.logprobs).max()
        for full, c in zip(reference, completions, strict=True)
    ]
    return float(max(gaps))


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    """The sampled ids as plain lists."""
    return [c.token_ids.tolist() for c in completions]


def assert_alike(found: Sequence[Completion], expected: Sequence[Completion], atol: float = 1e-5) -> None:
    """The same tokens, with log-probabilities that differ by rounding."""
    assert tokens(found) == tokens(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=atol)
