"""Packed rows give the loss and the gradient of padded ones: every family, experts, adapters and turns, a KL penalty.

What is compared to is Tunix's forward pass over one sequence a row, padded on both sides, with whole logits.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tunix.rl import common

from tests.learner.test_loss import batch_of, distance
from tests.learner.toy import make_config, make_mesh, settings_of
from tests.models.random_checkpoint import write_random
from tpu_grpo.config import LoraSection
from tpu_grpo.learner.loss import LossSettings, policy_loss
from tpu_grpo.learner.parameters import by_name
from tpu_grpo.learner.rows import Packing, RowShape, token_weights, train_rows
from tpu_grpo.models.checkpoint import read_checkpoint
from tpu_grpo.models.families import FAMILIES
from tpu_grpo.models.lora import adapted_modules, apply_lora
from tpu_grpo.models.tunix_model import load_model
from tpu_grpo.records.stages import Completion

PAD, VOCAB, TEMPERATURE = 0, 300, 0.8
LENGTHS = [(4, 9), (7, 2), (1, 5), (6, 1), (3, 12), (5, 8)]
"""Tokens of (prompt, completion); rows of 24 hold two or three of them."""
SHAPE = RowShape(max_prompt_tokens=7, max_new_tokens=12, tokens=24, micro_batch=2)
BETA = 0.3


@pytest.fixture(scope="module")
def sequences() -> dict[str, Any]:
    rng = np.random.default_rng(2)
    prompts = [rng.integers(1, VOCAB, n).tolist() for n, _ in LENGTHS]
    ids = [rng.integers(1, VOCAB, n).astype(np.int32) for _, n in LENGTHS]
    # the old policy is near the model's own log-probabilities, about -log 300, so that the clip does not decide
    old = [rng.uniform(-5.8, -5.6, n).astype(np.float32) for _, n in LENGTHS]
    completions = [Completion(tokens, line, "length", 0) for tokens, line in zip(ids, old, strict=True)]
    return {"prompts": prompts, "completions": completions, "advantages": rng.normal(size=len(LENGTHS))}


def with_answers(sequences: dict[str, Any]) -> dict[str, Any]:
    """The same, with some tokens of the longer completions not sampled, but answered by an environment."""
    answered = [np.isin(np.arange(count), (1, 2, 6)) & (count > 4) for _, count in LENGTHS]
    completions = [
        replace(completion, sampled=~mask, logprobs=np.where(mask, np.float32(0), completion.logprobs))
        for completion, mask in zip(sequences["completions"], answered, strict=True)
    ]
    return {**sequences, "completions": completions}


def packed_table(lines: list[np.ndarray], packing: Packing) -> jax.Array:
    table = np.zeros((packing.count, SHAPE.tokens), np.float32)
    for line, (prompt, count), row, start in zip(lines, LENGTHS, packing.rows, packing.starts, strict=True):
        table[row, start + prompt : start + prompt + count] = line
    return jnp.asarray(table)


def packed_gradient(model: Any, kind: Any, sequences: Any, settings: LossSettings, reference: Any) -> Any:
    rows, packing = train_rows(**sequences, shape=SHAPE, aggregation="sequence-mean-token-mean")
    assert 2 < max(packing.segments) + 1 <= 4
    assert packing.count < len(LENGTHS)
    penalty = None if reference is None else packed_table(reference, packing)
    batch = batch_of(rows, reference_logps=penalty)
    definition, trained, others = nnx.split(model, kind, ...)

    @jax.jit
    def gradient(trained: Any) -> Any:
        return jax.value_and_grad(lambda t: policy_loss(nnx.merge(definition, t, others), batch, settings)[0])(trained)

    return gradient(trained)


def padded_gradient(
    model: Any, kind: Any, sequences: Any, settings: LossSettings, reference: Any, longest: int = 7
) -> Any:
    """Tunix's forward pass; the loss is put together from the same formulas, row by row."""
    prompts, completions, advantages = sequences.values()
    ids = np.array([[PAD] * (longest - len(p)) + p for p in prompts])
    answers = np.array([[*c.token_ids, *[PAD] * (12 - len(c.token_ids))] for c in completions])
    sampled = np.zeros((len(LENGTHS), 12), bool)
    for line, completion in zip(sampled, completions, strict=True):
        line[: len(completion.token_ids)] = True if completion.sampled is None else completion.sampled
    weights = token_weights(sampled.sum(axis=1), "sequence-mean-token-mean", 12)[:, None] * sampled
    old = jnp.asarray([np.pad(c.logprobs, (0, 12 - len(c.logprobs))) for c in completions])
    penalty = None if reference is None else jnp.asarray([np.pad(r, (0, 12 - len(r))) for r in reference])
    definition, trained, others = nnx.split(model, kind, ...)

    @jax.jit
    def gradient(trained: Any) -> Any:
        def loss(trained: Any) -> Any:
            now: Any = common.compute_per_token_logps(
                *nnx.split(nnx.merge(definition, trained, others)),
                prompt_tokens=jnp.asarray(ids),
                completion_tokens=jnp.asarray(answers),
                pad_id=PAD,
                eos_id=VOCAB - 1,
                stop_gradient=False,
                temperature=TEMPERATURE,
            )
            losses = settings.algorithm.token_losses(now, old, jnp.broadcast_to(advantages[:, None], now.shape)).loss_BT
            if penalty is not None:
                losses += BETA * (jnp.exp(penalty - now) - (penalty - now) - 1)  # k3
            return (jnp.asarray(weights, jnp.float32) * losses).sum()

        return jax.value_and_grad(loss)(trained)

    return gradient(trained)


SLOW = ("llama", "mistral", "phi3", "qwen2", "penalty")
"""These differ least from the others: families by positions or biases, the penalty by one more forward pass."""


@pytest.mark.full
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in (*FAMILIES, "lora", "penalty")]
)
def test_packed_rows_give_the_gradient_of_padded_ones(tmp_path: Path, sequences: Any, case: str) -> None:
    family = case if case in FAMILIES else "qwen3"
    options: dict[str, Any] = {"num_experts_per_tok": 2} if family == "qwen3_moe" else {}
    tied = case in ("qwen3", "gemma4_text")
    checkpoint = read_checkpoint(write_random(family, tmp_path / "model", vocab=VOCAB, tied=tied, **options))
    model, kind = load_model(checkpoint, make_mesh(1), dtype=jnp.dtype("float32"), remat="none"), nnx.Param
    if case == "lora":  # and conversations, whose observed tokens are context
        sequences = with_answers(sequences)
        section = LoraSection(rank=2, alpha=4.0)
        model, kind = apply_lora(model, adapted_modules(checkpoint, section), section, seed=0), nnx.LoRAParam
        state = nnx.state(model, kind)
        nnx.update(model, jax.tree.map(lambda leaf: leaf + 0.02, state))  # B is zero at first
    reference = [c.logprobs + 0.2 for c in sequences["completions"]] if case == "penalty" else None
    config = make_config(tmp_path, {"algorithm": {"beta": BETA if reference else 0.0}})
    settings = settings_of(config.algorithm, TEMPERATURE)
    loss, gradient = packed_gradient(model, kind, sequences, settings, reference)
    expected, slopes = padded_gradient(model, kind, sequences, settings, reference)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    bound = 1e-6
    if case == "gemma4_text":  # float32 programs of other shapes differ by more: how much, two paddings tell
        _, longer = padded_gradient(model, kind, sequences, settings, reference, longest=11)
        rounding = distance(by_name(longer), by_name(slopes))
        assert rounding < 1e-5
        bound = 2 * rounding
    assert distance(by_name(gradient), by_name(slopes)) < bound
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient))
