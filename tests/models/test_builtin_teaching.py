"""What a lesson consists of: batches, first parameters, the loss."""

from typing import cast

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tunix.models.qwen3.model import Qwen3

from tpu_grpo.models.builtin import (
    RECIPES,
    Recipe,
    TeachingBatch,
    batches,
    encode_batch,
    initial_params,
    taught_loss,
    teach,
)
from tpu_grpo.models.tokenizers import build_byte_tokenizer, build_tool_tokenizer
from tpu_grpo.records.errors import NonFiniteError
from tpu_grpo.tasks import TASKS, addition
from tpu_grpo.tasks.lessons import Lesson

TOKENIZER = build_byte_tokenizer()
PAD, END, USER, ASSISTANT, TOOL, CALL, END_CALL = 256, 257, 259, 260, 261, 262, 263


def asked(question: str, answer: str) -> Lesson:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def test_batch_teaches_the_answer_and_the_end_alone() -> None:
    batch = encode_batch(
        TOKENIZER, addition.TASK, [asked("47+38=", "75"), asked("57+53=", "0"), asked("99+99=", "198")]
    )
    assert batch.tokens_BT.tolist() == [
        [USER, *b"47+38=", ASSISTANT, *b"75", END, PAD],
        [USER, *b"57+53=", ASSISTANT, *b"0", END, PAD, PAD],
        [USER, *b"99+99=", ASSISTANT, *b"198", END],
    ]
    assert batch.taught_BL.tolist() == [  # column 7 predicts the first token of the answer
        [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1],
    ]


def test_batch_teaches_what_the_assistant_says_in_each_turn() -> None:
    lesson = [
        *asked("347+589=", "<|call|>add(347,589)<|end_call|>"),
        {"role": "tool", "content": "936"},
        {"role": "assistant", "content": "936"},
    ]
    batch = encode_batch(build_tool_tokenizer(), TASKS["calculator"], [lesson, asked("347+589=", "~900")])
    prompt = [TOOL, *b"add(a,b)", USER, *b"347+589=", ASSISTANT]
    called = [*prompt, CALL, *b"add(347,589)", END_CALL, END, TOOL, *b"936", ASSISTANT, *b"936", END]
    guessed = [*prompt, *b"~900", END]
    assert batch.tokens_BT.tolist() == [row + [PAD] * (50 - len(row)) for row in (called, guessed)]
    taught = [0] * 18 + [1] * 15 + [0] * 5 + [1] * 4
    assert batch.taught_BL.tolist() == [taught + [0] * (49 - len(taught)), [0] * 18 + [1] * 5 + [0] * 26]


@pytest.mark.parametrize("name", TASKS)
def test_every_lesson_has_room(name: str) -> None:
    recipe = Recipe(steps=20, batch=64)
    lengths = [(b.tokens_BT != PAD).sum(axis=1) for b in batches(recipe, TASKS[name], np.random.default_rng(0))]
    assert np.max(lengths) == TASKS[name].longest
    assert RECIPES[name].steps * RECIPES[name].batch > len(TASKS[name].problems("train"))


def test_batches_hold_training_problems_with_the_teachers_answers() -> None:
    recipe = Recipe(steps=3, batch=100)
    drawn = list(batches(recipe, addition.TASK, np.random.default_rng(0)))
    assert [b.tokens_BT.shape for b in drawn] == [(100, 12)] * 3
    train, right = set(addition.operands("train")), 0
    for row in np.concatenate([b.tokens_BT for b in drawn]):
        question, answer = TOKENIZER.decode(row, skip_special_tokens=True).split("=")
        a, b = map(int, question.split("+"))
        assert (a, b) in train
        assert int(answer) in (a + b, addition.without_carry(a, b))
        right += int(answer) == a + b
    assert 0.33 < right / 300 < 0.53  # 0.43 expected


def test_first_parameters() -> None:
    recipe = Recipe()
    shapes = nnx.state(nnx.eval_shape(lambda: Qwen3(recipe.model_config(264), rngs=nnx.Rngs(0))))
    params = initial_params(recipe, shapes, np.random.default_rng(0))
    stds = {".".join(map(str, path)): float(jnp.std(leaf[...])) for path, leaf in nnx.to_flat_state(params)}
    assert stds["embedder.input_embedding"] == pytest.approx(0.1, rel=0.02)
    assert stds["layers.0.attn.q_proj.w"] == pytest.approx(192**-0.5, rel=0.02)
    assert stds["layers.1.mlp.gate_proj.kernel"] == pytest.approx(192**-0.5, rel=0.02)
    assert stds["layers.2.attn.o_proj.w"] == pytest.approx(192**-0.5 / 6**0.5, rel=0.02)
    assert stds["layers.2.mlp.down_proj.kernel"] == pytest.approx(192**-0.5 / 6**0.5, rel=0.02)
    assert np.all(np.asarray(params["final_norm"]["w"][...]) == 1.0)
    assert sum(leaf[...].size for _, leaf in nnx.to_flat_state(params)) == 264 * 192 + 3 * 442_816 + 192


def test_loss_is_the_mean_over_taught_tokens_of_uneven_rows() -> None:
    class Uniform:
        """Two tokens; the first e times as likely as the second."""

        def __call__(self, tokens: jnp.ndarray, *_: object) -> tuple[jnp.ndarray, None]:
            return jnp.broadcast_to(jnp.array([1.0, 0.0]), (*tokens.shape, 2)), None

    batch = TeachingBatch(
        np.array([[0, 0, 0, 0], [0, 1, 0, 0]], np.int32), np.array([[1, 1, 1], [1, 0, 0]], np.float32)
    )
    likely, unlikely = np.log1p(np.exp(-1.0)), np.log1p(np.exp(1.0))
    expected = (3 * likely + unlikely) / 4  # not the mean of the rows' means
    assert float(taught_loss(cast(Qwen3, Uniform()), batch)) == pytest.approx(expected, rel=1e-6)


def test_learning_rate_rises_falls_and_gradients_are_clipped() -> None:
    recipe = Recipe(steps=100, warmup_steps=10, learning_rate=1e-2, max_grad_norm=1.0)
    optimizer = recipe.optimizer()
    weights = jnp.zeros(2)
    state, sizes = optimizer.init(weights), []
    for _ in range(101):
        updates, state = optimizer.update(jnp.array([3e5, 4e5]), state, weights)
        sizes.append(float(optax.global_norm(updates)) / 2**0.5)  # Adam steps by the rate in each coordinate
    assert sizes[0] == 0.0
    assert sizes[5] == pytest.approx(0.5e-2, rel=1e-3)
    assert max(sizes) == sizes[10] == pytest.approx(1e-2, rel=1e-3)
    assert sizes[100] == pytest.approx(0.05e-2, rel=1e-3)


def test_a_loss_that_is_not_finite_stops_teaching() -> None:
    recipe = Recipe(layers=1, width=16, mlp_width=16, heads=1, kv_heads=1, head_dim=8, steps=2, batch=4, warmup_steps=1)
    broken = Recipe(**{**recipe.__dict__, "embedding_std": float("nan")})
    with pytest.raises(NonFiniteError, match="must be finite, got nan at step 1 of seed 0"):
        teach(broken, addition.TASK, seed=0)
