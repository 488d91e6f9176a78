"""A tiny policy and rollouts made up for it, with the engine's log-probabilities from an independent forward pass."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.sharding import Mesh
from tunix.models.qwen3 import model as qwen3

from tpu_grpo.algorithms import open_algorithm
from tpu_grpo.config import AlgorithmSection, RunConfig, parse_config
from tpu_grpo.learner import Learner, LearnerInputs
from tpu_grpo.learner.loss import LossSettings, TrainBatch
from tpu_grpo.learner.parameters import by_name
from tpu_grpo.learner.signal import Signal
from tpu_grpo.records.stages import Completion, Prompt, PromptBatch, Rollout, ScoredRollout, Scores
from tpu_grpo.tunix_loop.adapter import SampledTexts

PAD, EOS, VOCAB = 0, 2, 64
PROMPT_TOKENS, NEW_TOKENS = 6, 5


class Tokenizer:
    """A character per token, from 3 on."""

    letters = "abcdefghijklmnopqrstuvwxyz"

    def encode(self, text: str, **_: Any) -> list[int]:
        return [3 + self.letters.index(letter) for letter in text]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(self.letters[(i - 3) % 26] for i in ids)

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return PAD


class RecordingEngine:
    """Answers with made-up completions and remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.installed: list[nnx.State] = []
        self.answers: list[SampledTexts] = []

    def generate_texts(self, prompts: Sequence[str], config: Any) -> SampledTexts:
        self.calls.append("generate")
        rng = np.random.default_rng(len(self.calls))
        ids = tuple(tuple(Tokenizer().encode(p)) for p in prompts)
        completions = tuple(
            Completion(np.array([5, 6, 7, EOS][: n + 1], np.int32), np.full(n + 1, -2.5, np.float32), "stop", 0)
            for n in rng.integers(1, 4, len(prompts))
        )
        self.answers.append(SampledTexts(ids, completions, tuple("x" * len(c.token_ids) for c in completions)))
        return self.answers[-1]

    def install(self, params: nnx.State) -> None:
        self.calls.append("install")
        self.installed.append(params)


def make_mesh(fsdp: int = 2, tp: int = 1) -> Mesh:
    return Mesh(np.array(jax.devices()[: fsdp * tp]).reshape(fsdp, tp), ("fsdp", "tp"))


def make_model(
    mesh: Mesh,
    seed: int = 0,
    scale: float = 0.3,
    flash_block: int | None = None,
    *,
    layers: int = 1,
    remat: bool = False,
) -> qwen3.Qwen3:
    """Width 64, all matrices random: Tunix leaves the MLP at zero."""
    with mesh:
        return _maker(mesh, flash_block, layers, remat)(jax.random.key(seed), jnp.float32(scale))


@cache
def _maker(mesh: Mesh, flash_block: int | None, layers: int, remat: bool) -> Callable[..., qwen3.Qwen3]:
    """One program for all seeds and scales."""
    flash: dict[str, Any] = (
        {"use_flash_attention": True, "flash_attention_block_size": flash_block} if flash_block else {}
    )
    config = qwen3.ModelConfig(
        num_layers=layers,
        vocab_size=VOCAB,
        embed_dim=64,
        hidden_dim=96,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
        remat_config=qwen3.RematConfig.DECODER if remat else qwen3.RematConfig.NONE,
        **flash,
    )

    @nnx.jit
    def create(key: jax.Array, scale: jax.Array) -> qwen3.Qwen3:
        model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
        state = nnx.state(model)
        leaves, treedef = jax.tree.flatten(state)
        keys = jax.random.split(key, len(leaves))
        drawn = [
            scale * jax.random.normal(k, x.shape, x.dtype) if x.ndim > 1 else x
            for k, x in zip(keys, leaves, strict=True)
        ]
        state = jax.tree.unflatten(treedef, drawn)
        nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
        return model

    return create


def interpreted_flash() -> AbstractContextManager[Any]:
    """Programs that are traced inside interpret Tunix's flash attention on a CPU."""
    return mock.patch.object(splash, "make_splash_mha", partial(splash.make_splash_mha, interpret=True))


def make_config(directory: Path, tree: dict[str, Any] | None = None) -> RunConfig:
    base: dict[str, Any] = {
        "run": {"dir": str(directory), "max_steps": 20},
        "data": {"prompts_per_step": 4, "max_prompt_tokens": PROMPT_TOKENS},
        "rollout": {"max_new_tokens": NEW_TOKENS},
        "algorithm": {"group_size": 2},
        "optimizer": {"learning_rate": 1e-3},
    }
    for section, values in (tree or {}).items():
        base[section] = values if isinstance(values, list) else {**base.get(section, {}), **values}
    return parse_config(base)


def settings_of(
    section: AlgorithmSection | None = None, temperature: float = 1.0, mesh: Mesh | None = None, **algorithm: Any
) -> LossSettings:
    section = section or AlgorithmSection.model_validate(algorithm)
    return LossSettings(open_algorithm(section), section, temperature, mesh or make_mesh(1))


def make_learner(config: RunConfig, mesh: Mesh | None = None, seed: int = 0, **replaced: Any) -> Learner:
    mesh = mesh or make_mesh()
    arguments: dict[str, Any] = {
        "model": make_model(mesh, seed),
        "reference": make_model(mesh, seed + 100) if config.algorithm.beta else None,
        "mesh": mesh,
    }
    return Learner(config, LearnerInputs(**{**arguments, **replaced}))


def signal_of(learner: Learner, scored: ScoredRollout) -> Signal:
    return learner._signal(scored)


def micro_batches(learner: Learner, scored: ScoredRollout) -> list[TrainBatch]:
    """Of an update on the whole step."""
    return learner._placed([(signal_of(learner, scored), {})])[0]


@nnx.jit
def _logits(model: qwen3.Qwen3, ids: jax.Array) -> jax.Array:
    rows, length = ids.shape
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
    return model(ids, jnp.broadcast_to(jnp.arange(length), ids.shape), None, mask)[0]


def model_logps(
    model: qwen3.Qwen3, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float = 1.0
) -> list[np.ndarray]:
    """float64 log-probability of every completion token: rows start at position 0, and the softmax is NumPy's."""
    ids = np.zeros((len(prompts), PROMPT_TOKENS + NEW_TOKENS), np.int32)
    for line, prompt, completion in zip(ids, prompts, completions, strict=True):
        line[: len(prompt) + len(completion)] = [*prompt, *completion]
    scores = np.asarray(_logits(model, jnp.asarray(ids)), np.float64) / temperature
    peak = scores.max(axis=-1, keepdims=True)
    normal = scores - peak - np.log(np.exp(scores - peak).sum(axis=-1, keepdims=True))
    return [
        line[len(p) - 1 + np.arange(len(c)), list(c)] for line, p, c in zip(normal, prompts, completions, strict=True)
    ]


def make_scored(model: qwen3.Qwen3, config: RunConfig, step: int = 1, seed: int = 0) -> ScoredRollout:
    """Uneven random rows with log-probabilities of ``model`` and random rewards."""
    rng = np.random.default_rng([seed, step])
    group, width = config.algorithm.group_size, config.rollout.max_new_tokens
    prompts = tuple(
        Prompt("", tuple(map(int, rng.integers(3, VOCAB, rng.integers(1, config.data.max_prompt_tokens + 1)))))
        for _ in range(config.data.prompts_per_step)
    )
    ids = [rng.integers(3, VOCAB, rng.integers(1, width + 1)).astype(np.int32) for _ in range(config.batch_rows)]
    row_prompts = [p.token_ids for p in prompts for _ in range(group)]
    logps = model_logps(model, row_prompts, [i.tolist() for i in ids], config.rollout.temperature)
    completions = [Completion(i, line.astype(np.float32), "length", 0) for i, line in zip(ids, logps, strict=True)]
    rollout = Rollout(PromptBatch(step, prompts), group, tuple(completions), ("",) * len(completions), 0.0)
    total = rng.normal(size=len(completions))
    return ScoredRollout(rollout, Scores(total, {"made_up": total}, 0.0))


def with_completion(scored: ScoredRollout, row: int, **changes: Any) -> ScoredRollout:
    completions = list(scored.rollout.completions)
    completions[row] = replace(completions[row], **changes)
    return replace(scored, rollout=replace(scored.rollout, completions=tuple(completions)))


def with_noise(scored: ScoredRollout, scale: float, seed: int = 0) -> ScoredRollout:
    """The same rollout from an engine whose log-probabilities are off by a normal of this scale."""
    rng = np.random.default_rng(seed)
    for row, completion in enumerate(scored.rollout.completions):
        noise = rng.normal(scale=scale, size=len(completion.logprobs)).astype(np.float32)
        scored = with_completion(scored, row, logprobs=completion.logprobs + noise)
    return scored


def flat_params(learner: Learner) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in by_name(learner.params()).items()}


@contextmanager
def counted_compilations() -> Iterator[list[str]]:
    """Grows by one name per program that XLA is asked for."""
    names: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            names.append(event)

    listener = cast(Any, listen)
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
