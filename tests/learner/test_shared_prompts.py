"""Completions that share one copy of their prompt: the layout by hand, gradients, and when rows are saved."""

import inspect
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
    splash_attention_mask as masks,
)

from tests.learner.test_loss import batch_of, distance
from tests.learner.toy import (
    interpreted_flash,
    make_config,
    make_learner,
    make_mesh,
    make_model,
    make_scored,
    micro_batches,
    model_logps,
    settings_of,
    signal_of,
)
from tests.models.random_checkpoint import write_random
from tpu_grpo.config import LoraSection, load_config
from tpu_grpo.learner import FrozenModel, TeacherInputs
from tpu_grpo.learner.forward import attention_mask
from tpu_grpo.learner.loss import policy_loss
from tpu_grpo.learner.parameters import by_name
from tpu_grpo.learner.rows import ReplayShape, RowShape, train_rows, unpacked
from tpu_grpo.models.checkpoint import read_checkpoint
from tpu_grpo.models.families.trainer_attention import require_reviewed_jax
from tpu_grpo.models.lora import adapted_modules, apply_lora
from tpu_grpo.models.tunix_model import load_model
from tpu_grpo.records.episode import Episode, Failure
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.stages import Completion

VOCAB, TEMPERATURE = 300, 0.8


def completion(count: int, rng: np.random.Generator, experts: Any = None) -> Completion:
    ids, logps = rng.integers(1, VOCAB, count).astype(np.int32), rng.uniform(-5.8, -5.6, count).astype(np.float32)
    return Completion(ids, logps, "length", 0, experts=experts)


def test_the_first_completion_keeps_the_prompt_and_others_begin_with_its_last_token() -> None:
    rng = np.random.default_rng(0)
    answers = [completion(count, rng) for count in (2, 3, 1)]
    shape = RowShape(3, 3, tokens=12, micro_batch=1, group_size=3, shares=True)
    batch, packing = train_rows([[7, 8, 9]] * 3, answers, np.array([1.0, 2.0, 3.0]), shape, "sequence-mean-token-sum")
    second, first, third = (answers[row].token_ids.tolist() for row in (0, 1, 2))  # the longest is the first
    rows = batch.rows
    assert rows.token_ids.tolist() == [[7, 8, 9, *first, 9, *second, 9, *third, 0]]
    assert rows.segments.tolist() == [[1] * 6 + [2] * 3 + [3] * 2 + [0]]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 4, 5, 2, 3, 4, 2, 3, 0]]
    assert rows.mask.tolist() == [[False] * 3 + [True] * 3 + [False, True, True, False, True, False]]
    assert rows.shared.tolist() == [[1, 1, 0, 0, 0, 0, -1, -1, -1, -1, -1, 0]]
    assert batch.advantages.tolist() == [[0, 0, 0, 2, 2, 2, 0, 1, 1, 0, 3, 0]]
    np.testing.assert_array_equal(
        unpacked(batch.rollout_logps, packing, 3, 3), [np.pad(a.logprobs, (0, 3 - len(a.logprobs))) for a in answers]
    )
    seen = attention_mask(jnp.asarray(rows.segments), jnp.asarray(rows.shared))[0]
    assert np.flatnonzero(seen[7]).tolist() == [0, 1, 6, 7]  # the second: the copy but its last token, and its own
    assert np.flatnonzero(seen[10]).tolist() == [0, 1, 9, 10]
    assert np.flatnonzero(seen[5]).tolist() == [0, 1, 2, 3, 4, 5]
    assert np.flatnonzero(seen[1]).tolist() == [0, 1]


def test_prompts_are_shared_only_where_that_saves_micro_batches() -> None:
    """8 completions of 1 token and 8 of 9, in rows of 20 tokens: 6 or 1 of a group fit behind a prompt of 9."""
    rng = np.random.default_rng(1)
    short, long = ([completion(count, rng) for _ in range(8)] for count in (1, 9))
    counts = {}
    for name, answers in (("short", short), ("long", long)):
        for shares in (False, True):
            shape = RowShape(9, 9, tokens=20, micro_batch=1, group_size=8, shares=shares)
            batch, packing = train_rows([list(range(1, 10))] * 8, answers, np.zeros(8), shape)
            counts[name, shares] = packing.count
            assert batch.rows.mask.sum() == sum(len(answer.token_ids) for answer in answers)
    assert counts == {("short", False): 4, ("short", True): 2, ("long", False): 8, ("long", True): 8}
    shape = RowShape(9, 9, tokens=20, micro_batch=2, group_size=2, shares=True)  # two rows make one micro-batch anyway
    batch, packing = train_rows([list(range(1, 10))] * 2, short[:2], np.zeros(2), shape)
    assert not batch.rows.shared.any()
    assert packing.lenders.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("prompt", "new", "words", "row", "rows"),
    [
        (64, 64, [], 193, 4),  # a prompt and two completions; 8 of a group make 4 rows
        (256, 64, [], 515, 2),  # with four completions
        (63, 64, [], 127, 8),  # prompts are short
        (66, 200, [], 266, 8),  # or shorter than usual completions
        (33, 100, ["algorithm.row_tokens=436"], 436, 2),
        (33, 100, ["algorithm.row_tokens=233"], 233, 8),  # has no room for a second completion
    ],
)
def test_rows_have_room_for_completions_that_share_a_prompt(
    prompt: int, new: int, words: list[str], row: int, rows: int
) -> None:
    sizes = [f"data.max_prompt_tokens={prompt}", f"rollout.max_new_tokens={new}", "data.prompts_per_step=1"]
    config = load_config(None, ["model.path=x", "data.path=x", "algorithm.group_size=8", *sizes, *words])
    assert (config.row_tokens, config.update_rows, config.shares_prompts) == (row, rows, row not in (127, 266, 233))


def test_the_reviewed_backward_pass_of_splash_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = inspect.signature(splash._splash_attention_bwd).parameters
    kernel = splash.make_splash_mha(masks.MultiHeadMask([masks.CausalMask((128, 128))]), head_shards=1, q_seq_shards=1)
    assert set(found) == {*kernel.kwargs, "res", "do"}
    residuals = "q k v segment_ids sinks out logsumexp dq_mask_info dkv_mask_info"
    assert len(get_args(splash.SplashResidualsType)) == len(residuals.split())
    require_reviewed_jax()
    monkeypatch.setattr(jax, "__version__", "0.10.3")
    with pytest.raises(ConfigError, match=r"needs jax 0\.10\.2, found 0\.10\.3"):
        require_reviewed_jax()


GROUPS = [(40, [30, 9, 1, 16]), (5, [3, 22, 8, 0]), (1, [4, 2, 7, 6]), (33, [12, 12, 1, 30])]
"""Tokens of (prompt, its completions); 0 for a conversation that never began."""


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        "qwen3",
        "qwen2",
        pytest.param("llama", marks=pytest.mark.slow),
        pytest.param("gemma2", marks=pytest.mark.slow),
        pytest.param("gemma3_text", marks=pytest.mark.slow),
        pytest.param("lora", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", marks=pytest.mark.slow),
        pytest.param("flash", marks=pytest.mark.slow),
        pytest.param("qwen2 flash", marks=pytest.mark.slow),
        pytest.param("gemma3_text flash", marks=pytest.mark.slow),
        pytest.param("gemma4_text", marks=pytest.mark.slow),
        pytest.param("gemma4_text flash", marks=pytest.mark.slow),
    ],
)
def test_shared_prompts_give_the_gradient_of_copied_ones(tmp_path: Path, case: str) -> None:
    """Also of windows that are shorter than prompts, and of replayed experts."""
    family = case.split()[0] if case not in ("lora", "flash") else "qwen3"
    options: dict[str, Any] = {"qwen3_moe": {"num_experts_per_tok": 2}, "gemma3_text": {"sliding_window": 16}}
    path = write_random(family, tmp_path / "model", vocab=VOCAB, **options.get(family, {}))
    checkpoint, block = read_checkpoint(path), 128 if "flash" in case else None
    settings: dict[str, Any] = {"remat": "decoder" if block else "none", "flash_block": block}
    model: Any = load_model(checkpoint, make_mesh(1), dtype=jnp.float32, **settings)
    kind: Any = nnx.Param
    if case == "lora":
        section = LoraSection(rank=2, alpha=4.0)
        model, kind = apply_lora(model, adapted_modules(checkpoint, section), section, seed=0), nnx.LoRAParam
        nnx.update(model, jax.tree.map(lambda leaf: leaf + 0.02, nnx.state(model, kind)))
    rng, prompts, answers = np.random.default_rng(3), list[list[int]](), list[Completion]()
    replay = ReplayShape(model) if family == "qwen3_moe" else None
    for tokens, lengths in GROUPS:
        prompt, of_prompt = rng.integers(1, VOCAB, tokens).tolist(), rng.integers(0, 4, (tokens, 2, 2))
        for count in lengths:
            own = rng.integers(0, 4, (max(count - 1, 0), 2, 2))
            experts = None if replay is None else np.concatenate([of_prompt, own]).astype(replay.dtype)
            answer = completion(count, rng, experts)
            if not count:
                never = Episode("", (), (), "failed", (), "Toy", failure=Failure("died", "died"))
                answer = Completion(
                    answer.token_ids, answer.logprobs, "length", 0, sampled=np.zeros(0, bool), episode=never
                )
            prompts.append(prompt)
            answers.append(answer)
    advantages, loss_settings = rng.normal(size=len(answers)), settings_of(make_config(tmp_path).algorithm, TEMPERATURE)
    definition, trained, others = nnx.split(model, kind, ...)
    found, rows = {}, {}
    for shares in (False, True):
        shape = RowShape(40, 88, 128, 1, replay, group_size=4, shares=shares)
        packed, packing = train_rows(prompts, answers, advantages, shape, "sequence-mean-token-mean")
        batch, rows[shares] = batch_of(packed), packing.count
        value = jax.jit(
            jax.value_and_grad(lambda t, b=batch: policy_loss(nnx.merge(definition, t, others), b, loss_settings)[0])
        )
        with interpreted_flash(), make_mesh(1):
            found[shares] = value(trained)
    assert rows[True] < rows[False]
    assert float(found[True][0]) == pytest.approx(float(found[False][0]), rel=2e-6)
    assert distance(by_name(found[True][1]), by_name(found[False][1])) < 5e-6


@pytest.mark.full
def test_a_teacher_with_a_hint_and_the_reference_read_shared_prompts(tmp_path: Path) -> None:
    """What they say is what NumPy's softmax gives for each completion alone; the gradient is that of copied prompts."""
    mesh, gradients = make_mesh(1), {}
    inserted = lambda prompts: [(*prompt.token_ids[:1], 30, 31, *prompt.token_ids[1:]) for prompt in prompts]  # noqa: E731
    for row in (11, 53):  # room for the longest prompt with one completion, or with eight
        tree = {
            "algorithm": {"group_size": 8, "beta": 0.1, "row_tokens": row, "micro_batch_prompts": 1},
            "teachers": [{"path": "x", "label": "a", "hint": "x", "max_prompt_tokens": 8}],
        }
        config = make_config(tmp_path / str(row), tree)
        learner = make_learner(config, mesh, teachers=(TeacherInputs(FrozenModel(make_model(mesh, 7)), inserted),))
        scored = make_scored(make_model(mesh), config, seed=32)  # prompts of 5, 6, 6 and 4 tokens
        gradients[row] = learner.gradients(scored)
    signal, teacher = signal_of(learner, scored), learner._parts.teachers.teachers[0]
    hinted, completions = teacher.prompts(scored, range(32))
    of_teacher = train_rows(hinted, completions, np.zeros(32), teacher.shape)[0]
    assert of_teacher.rows.shared.any()
    assert any(np.asarray(batch.rows.shared).any() for batch in micro_batches(learner, scored))
    said = learner._parts.teachers.read(scored, learner._per_token, learner._hosts).known["teacher_logps"]
    compared = learner._per_token(signal.prompts, signal.completions, learner._parts.batches.compared)
    answers = [completion.token_ids.tolist() for completion in completions]
    for found, seed, prompts in ((said, 7, hinted), (compared["reference_logps"], 100, signal.prompts)):
        short = [n for n in range(32) if len(prompts[n]) + len(answers[n]) <= 11]
        assert len(short) > 16
        wanted = model_logps(make_model(mesh, seed), [prompts[n] for n in short], [answers[n] for n in short])
        for n, line in zip(short, wanted, strict=True):
            np.testing.assert_allclose(found[n, : len(line)], line, atol=1e-5)
    assert distance(gradients[53], gradients[11]) < 5e-6
