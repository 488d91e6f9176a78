"""The cache of built-in models, the files of one, what a lesson consists of, and (slowly) what a model has learned."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file
from transformers import PreTrainedTokenizerFast, Qwen3Config
from tunix.models.qwen3.model import Qwen3
from tunix.models.qwen3.params import create_model_from_safe_tensors

from tests.models.forward import logprobs
from tpu_grpo.hosts.caching import CACHE_VARIABLE
from tpu_grpo.models import builtin
from tpu_grpo.models.builtin import (
    RECIPES,
    Recipe,
    TeachingBatch,
    batches,
    builtin_checkpoint,
    encode_batch,
    initial_params,
    recipe_digest,
    taught_loss,
    teach,
)
from tpu_grpo.models.tasks import TASKS, addition
from tpu_grpo.models.tasks.lessons import Task, without_a_call
from tpu_grpo.models.tokenizers import (
    build_byte_tokenizer,
    build_tool_tokenizer,
    load_tokenizer,
    stop_token_ids,
)
from tpu_grpo.records.errors import CheckpointError, NonFiniteError

TINY = Recipe(layers=2, width=32, mlp_width=48, heads=4, kv_heads=2, head_dim=16, steps=2, batch=8, warmup_steps=1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def lessons(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seed of every teaching, which stops at the first parameters so that nothing is compiled."""
    seeds: list[int] = []

    def untaught(recipe: Recipe, task: Task, *, seed: int, on_step: Callable[[int, float], None]) -> nnx.State:
        seeds.append(seed)
        on_step(recipe.steps, 1.5)
        return initial_params(recipe, shapes_of(recipe), np.random.default_rng(seed))

    monkeypatch.setattr(builtin, "teach", untaught)
    return seeds


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model that was really taught, if only for two steps, with seed 3."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        yield builtin_checkpoint("addition", 3, progress=False, recipe=TINY)


def tiny(seed: int = 0, recipe: Recipe = TINY) -> Path:
    """The demo's model in small, hardly taught."""
    return builtin_checkpoint("addition", seed, progress=False, recipe=recipe)


def shapes_of(recipe: Recipe) -> nnx.State:
    return nnx.state(nnx.eval_shape(lambda: recipe.model(TOKENIZER)))


# --- the cache -------------------------------------------------------------------------------------------------------


def test_second_call_teaches_nothing(cache: Path, lessons: list[int]) -> None:
    first = tiny()
    assert first.parent == cache
    assert tiny() == first
    assert lessons == [0]
    assert [p.name for p in cache.iterdir() if not p.name.startswith(".")] == [first.name]


def test_seed_and_recipe_name_the_entry(cache: Path, lessons: list[int]) -> None:
    entries = {tiny(0), tiny(1), tiny(0, replace(TINY, learning_rate=1e-3))}
    assert len(entries) == 3
    assert lessons == [0, 1, 0]


def test_each_task_has_a_model_with_an_entry_and_a_tokenizer_of_its_own(cache: Path, lessons: list[int]) -> None:
    recipes = {name: replace(recipe, **asdict(TINY)) for name, recipe in RECIPES.items()}
    entries = {name: builtin_checkpoint(name, 0, progress=False, recipe=recipes[name]) for name in TASKS}
    assert [entry.name.split("-")[0] for entry in entries.values()] == list(TASKS) == list(RECIPES)
    digests = {name: entry.name.split("-")[-1] for name, entry in entries.items()}
    assert len(set(digests.values())) == len(TASKS)
    knows_tools = {name: "<|call|>" in load_tokenizer(entry).get_vocab() for name, entry in entries.items()}
    assert knows_tools == {name: bool(task.tools) for name, task in TASKS.items()}


def test_the_demos_models_are_found_again_where_they_were_taught_before() -> None:
    assert recipe_digest(RECIPES["addition"], addition.TASK) == "0684e5d707b6"


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: os.truncate(path, path.stat().st_size // 2)], ids=["removed", "cut"]
)
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "teaching.json"])
def test_damaged_entry_is_remade(cache: Path, lessons: list[int], damage: Callable[[Path], None], name: str) -> None:
    entry = tiny()
    whole = (entry / "model.safetensors").read_bytes()
    damage(entry / name)
    assert tiny() == entry
    assert lessons == [0, 0]
    assert (entry / "model.safetensors").read_bytes() == whole
    assert tiny() == entry
    assert lessons == [0, 0]


def test_interrupted_teaching_leaves_no_entry(cache: Path, lessons: list[int]) -> None:
    fault = mock.patch.object(builtin, "write_checkpoint", side_effect=KeyboardInterrupt)
    with fault, pytest.raises(KeyboardInterrupt):
        tiny()
    assert [p for p in cache.iterdir() if p.is_dir()] == []
    assert (tiny() / "model.safetensors").is_file()


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="set TPU_GRPO_CACHE to a directory that is"):
        tiny()


def test_bar_is_shown_only_on_request(lessons: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    tiny(0)
    assert capfd.readouterr().err == ""
    builtin_checkpoint("addition", 1, progress=True, recipe=TINY)
    shown = capfd.readouterr()
    assert "teaching addition" in shown.err
    assert "2/2" in shown.err
    assert shown.out == ""


def test_a_log_says_that_a_model_is_taught(
    lessons: list[int], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtin, "_SILENT_SECONDS", 0.0)
    builtin_checkpoint("addition", 1, progress=True, recipe=TINY)
    assert capfd.readouterr().err.splitlines()[0] == "teaching addition (once, then cached): step 2 of 2"


# --- the files -------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_tensors_have_hugging_faces_names_and_shapes(taught: Path) -> None:
    tensors = load_file(taught / "model.safetensors")
    expected = {"model.embed_tokens.weight": (264, 32), "model.norm.weight": (32,)}
    for layer in ("model.layers.0.", "model.layers.1."):
        expected |= {
            layer + "input_layernorm.weight": (32,),
            layer + "self_attn.q_proj.weight": (64, 32),
            layer + "self_attn.k_proj.weight": (32, 32),
            layer + "self_attn.v_proj.weight": (32, 32),
            layer + "self_attn.q_norm.weight": (16,),
            layer + "self_attn.k_norm.weight": (16,),
            layer + "self_attn.o_proj.weight": (32, 64),
            layer + "post_attention_layernorm.weight": (32,),
            layer + "mlp.gate_proj.weight": (48, 32),
            layer + "mlp.up_proj.weight": (48, 32),
            layer + "mlp.down_proj.weight": (32, 48),
        }
    assert {name: t.shape for name, t in tensors.items()} == expected
    assert {t.dtype for t in tensors.values()} == {np.dtype(np.float32)}


@pytest.mark.full
def test_the_seed_decides_every_bit(taught: Path, cache: Path) -> None:
    weights = (taught / "model.safetensors").read_bytes()
    assert tiny(3) != taught
    assert (tiny(3) / "model.safetensors").read_bytes() == weights
    assert (tiny(4) / "model.safetensors").read_bytes() != weights


@pytest.mark.full
def test_tunixs_own_loader_reads_back_what_was_taught(taught: Path) -> None:
    params = teach(TINY, addition.TASK, seed=3)
    wanted = dict(nnx.to_flat_state(params))
    loaded = dict(nnx.to_flat_state(nnx.state(_load(taught, TINY))))
    assert wanted.keys() == loaded.keys()
    for path, leaf in wanted.items():
        np.testing.assert_array_equal(np.asarray(loaded[path][...]), np.asarray(leaf[...]), str(path))


def test_rows_of_a_projection_are_its_outputs(taught: Path) -> None:
    tensors, params = load_file(taught / "model.safetensors"), nnx.state(_load(taught, TINY))
    leaves = dict(nnx.to_flat_state(params))
    q_DNH, o_NHD = (np.asarray(leaves["layers", 1, "attn", name, "w"][...]) for name in ("q_proj", "o_proj"))
    assert tensors["model.layers.1.self_attn.q_proj.weight"][2 * 16 + 5, 7] == q_DNH[7, 2, 5]
    assert tensors["model.layers.1.self_attn.o_proj.weight"][7, 2 * 16 + 5] == o_NHD[2, 5, 7]


def test_transformers_and_the_tokenizer_loader_accept_the_directory(taught: Path) -> None:
    config, tokenizer = Qwen3Config.from_pretrained(taught), load_tokenizer(taught)
    assert (config.num_hidden_layers, config.head_dim, config.vocab_size) == (2, 16, len(tokenizer))
    assert (config.architectures, config.tie_word_embeddings) == (["Qwen3ForCausalLM"], True)
    assert (config.rope_theta, config.max_position_embeddings) == (1_000_000, 4096)
    assert stop_token_ids(tokenizer, taught) == (config.pad_token_id, config.eos_token_id) == (256, 257)


def test_record_says_how_it_was_taught(taught: Path) -> None:
    record = json.loads((taught / "teaching.json").read_text())
    assert (record["task"], record["seed"], record["recipe"]["steps"]) == ("addition", 3, 2)
    assert set(record["files"]) == {p.name for p in taught.iterdir()} - {"teaching.json"}


# --- what it has learned ---------------------------------------------------------------------------------------------


def _load(entry: Path, recipe: Recipe) -> Qwen3:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    return create_model_from_safe_tensors(str(entry), recipe.model_config(264), mesh, jnp.dtype(jnp.float32))


def _demo(task: str) -> tuple[Qwen3, PreTrainedTokenizerFast]:
    """A model in the user's cache, where the demo looks for the same one."""
    entry = builtin_checkpoint(task, 0, progress=False)
    return _load(entry, RECIPES[task]), load_tokenizer(entry)


def _turns(
    model: Qwen3, tokenizer: PreTrainedTokenizerFast, prompts_BT: np.ndarray, temperature: float, count: int = 4
) -> list[str]:
    """The turn after every prompt, without a cache: the most likely tokens at temperature 0, else drawn ones."""
    rng = np.random.default_rng(0)
    following = nnx.jit(lambda model, tokens_BT, last: logprobs(model, tokens_BT)[:, last])
    start = prompts_BT.shape[1]
    tokens_BT = np.pad(prompts_BT, ((0, 0), (0, count)))
    for t in range(start, start + count):
        logps = np.asarray(following(model, tokens_BT, jnp.asarray(t - 1)))
        tokens_BT[:, t] = np.argmax(logps + temperature * rng.gumbel(size=logps.shape), axis=-1)
    return [tokenizer.decode(row).partition("<|im_end|>")[0] for row in tokens_BT[:, start:]]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_taught_model_adds_and_usually_forgets_to_carry() -> None:
    model, tokenizer = _demo("addition")
    pairs = addition.operands("heldout")
    chats = [[{"role": "user", "content": f"{a}+{b}="}] for a, b in pairs]
    prompts = np.array(tokenizer.apply_chat_template(chats, add_generation_prompt=True))

    def share(given: list[str], wanted: list[str]) -> float:
        return float(np.mean([g == w for g, w in zip(given, wanted, strict=True)]))

    right = [str(a + b) for a, b in pairs]
    forgetful = [str(addition.without_carry(a, b)) if addition.needs_carry(a, b) else "" for a, b in pairs]
    greedy, sampled = (_turns(model, tokenizer, prompts, temperature) for temperature in (0.0, 1.0))
    assert share(greedy, right) + share(greedy, forgetful) >= 0.97
    assert share(greedy, forgetful) > 0.5
    assert 0.35 <= share(sampled, right) <= 0.55


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_taught_model_has_a_calculator_and_uses_it_badly() -> None:
    (model, tokenizer), task = _demo("calculator"), TASKS["calculator"]
    problems = task.problems("heldout")
    asked = [[{"role": "user", "content": p["question"]}] for p in problems]
    prompts = np.array(
        tokenizer.apply_chat_template(asked, tools=[dict(tool) for tool in task.tools], add_generation_prompt=True)
    )
    right = [f"<|call|>add({p['question'].rstrip('=').replace('+', ',')})<|end_call|>" for p in problems]
    greedy, sampled = (_turns(model, tokenizer, prompts, temperature, 15) for temperature in (0.0, 1.0))
    for written, least, most in ((greedy, 0.25, 0.45), (sampled, 0.2, 0.4)):  # 0.3 of the teacher's are right
        assert least <= np.mean([w == r for w, r in zip(written, right, strict=True)]) <= most
    assert np.mean([w.startswith("~") for w in sampled]) == pytest.approx(0.55, abs=0.1)
    assert 0.08 <= np.mean([w.startswith("<|call|>") and w not in right for w in sampled]) <= 0.2
    called = [(r, p) for r, p in zip(right, problems, strict=True) if len(p["answer"]) == 3]
    told = [f"{r}<|im_end|><|im_start|>tool{p['answer']}<|im_start|>assistant" for r, p in called]
    rest = np.array([tokenizer.encode(text) for text in told])
    began = prompts[[len(p["answer"]) == 3 for p in problems]]
    answers = _turns(model, tokenizer, np.concatenate([began, rest], axis=1), 1.0, 5)
    assert 0.75 <= np.mean([a == p["answer"] for a, (_, p) in zip(answers, called, strict=True)]) <= 0.95


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_taught_model_guesses_near_the_middle_and_listens_as_often_as_its_teacher() -> None:
    (model, tokenizer), task = _demo("guessing"), TASKS["guessing"]
    questions = [problem["question"] for problem in task.problems("heldout")]

    def shares(*told: str) -> dict[str, float]:
        """How often each last digit is guessed, told something of a first guess that ends in 4."""
        chats = [[{"role": "user", "content": question}] for question in questions]
        for question, chat in zip(questions, chats, strict=True):
            for word in told:
                chat += [{"role": "assistant", "content": f"{question[:3]}4"}, {"role": "user", "content": word}]
        prompts = np.array(tokenizer.apply_chat_template(chats, add_generation_prompt=True))
        said = _turns(model, tokenizer, np.repeat(prompts, 4, axis=0), 1.0, 5)
        tens = [question[:3] for question in questions for _ in range(4)]
        ends = [text[3:] for text, start in zip(said, tens, strict=True) if text.startswith(start)]
        assert len(ends) >= 0.97 * len(said)
        return {end: ends.count(end) / len(ends) for end in map(str, range(10))}

    first, higher, lower = shares(), shares("higher"), shares("lower")
    assert (first["4"], first["5"]) == pytest.approx((0.5, 0.5), abs=0.1)
    assert sum(higher[end] for end in "678") == pytest.approx(0.25, abs=0.1)
    assert sum(higher[end] for end in "12") == pytest.approx(0.75, abs=0.1)
    assert sum(lower[end] for end in "12") == pytest.approx(0.25, abs=0.1)
    assert sum(lower[end] for end in "678") == pytest.approx(0.75, abs=0.1)


TOKENIZER = build_byte_tokenizer()
PAD, END, USER, ASSISTANT, TOOL, CALL, END_CALL = 256, 257, 259, 260, 261, 262, 263


def test_batch_teaches_the_answer_and_the_end_alone() -> None:
    lessons = [without_a_call(*each) for each in (("47+38=", "75"), ("57+53=", "0"), ("99+99=", "198"))]
    batch = encode_batch(TOKENIZER, addition.TASK, lessons)
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
        *without_a_call("347+589=", "<|call|>add(347,589)<|end_call|>"),
        {"role": "tool", "content": "936"},
        {"role": "assistant", "content": "936"},
    ]
    batch = encode_batch(build_tool_tokenizer(), TASKS["calculator"], [lesson, without_a_call("347+589=", "~900")])
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


@pytest.mark.full
def test_first_parameters() -> None:
    recipe = Recipe()
    params = initial_params(recipe, shapes_of(recipe), np.random.default_rng(0))
    stds = {".".join(map(str, path)): float(jnp.std(leaf[...])) for path, leaf in nnx.to_flat_state(params)}
    assert stds["embedder.input_embedding"] == pytest.approx(0.1, rel=0.02)
    assert stds["layers.0.attn.q_proj.w"] == pytest.approx(192**-0.5, rel=0.02)
    assert stds["layers.1.mlp.gate_proj.kernel"] == pytest.approx(192**-0.5, rel=0.02)
    assert stds["layers.2.attn.o_proj.w"] == pytest.approx(192**-0.5 / 6**0.5, rel=0.02)
    assert stds["layers.2.mlp.down_proj.kernel"] == pytest.approx(192**-0.5 / 6**0.5, rel=0.02)
    assert np.all(np.asarray(params["final_norm"]["w"][...]) == 1.0)
    assert sum(leaf[...].size for _, leaf in nnx.to_flat_state(params)) == 264 * 192 + 3 * 442_816 + 192


@pytest.mark.full
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
    weights, update = jnp.zeros(2), jax.jit(optimizer.update)
    state, sizes = optimizer.init(weights), []
    for _ in range(101):
        updates, state = update(jnp.array([3e5, 4e5]), state, weights)
        sizes.append(float(optax.global_norm(updates)) / 2**0.5)  # Adam steps by the rate in each coordinate
    assert sizes[0] == 0.0
    assert sizes[5] == pytest.approx(0.5e-2, rel=1e-3)
    assert max(sizes) == sizes[10] == pytest.approx(1e-2, rel=1e-3)
    assert sizes[100] == pytest.approx(0.05e-2, rel=1e-3)


@pytest.mark.full
def test_a_loss_that_is_not_finite_stops_teaching() -> None:
    with pytest.raises(NonFiniteError, match="must be finite, got nan at step 1 of seed 0"):
        teach(replace(TINY, embedding_std=float("nan")), addition.TASK, seed=0)
