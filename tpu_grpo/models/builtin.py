"""The built-in models: small models that are taught on first use to imitate a task's teacher, then cached.

    directory = builtin_checkpoint("addition", seed=0, progress=True)     # a Hugging Face checkpoint directory

Each model is a Qwen3 or a Gemma 3, and learns the built-in task of the same name, by a loss on the assistant's tokens
only. Models are cached in ``$TPU_GRPO_CACHE``, or in the user's cache directory. A model's directory is named by task,
seed and a digest of the recipe, so that a changed recipe gets a new directory. The directory appears complete or not at
all. Its file ``teaching.json`` lists the digests of all other files, so that a damaged directory is detected and made
again.

Array suffixes: B rows of a batch, T tokens, L = T - 1 predicted tokens, V vocabulary.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import BatchEncoding, PreTrainedTokenizerFast
from tunix.models.qwen3.model import ModelConfig, Qwen3

from tpu_grpo.hosts.caching import CACHE_VARIABLE, cache_directory, exclusive
from tpu_grpo.models import tunix_repairs
from tpu_grpo.models.checkpoint import CONFIG_FILE, abstract_checkpoint
from tpu_grpo.models.families import FAMILIES
from tpu_grpo.models.tasks import TASKS
from tpu_grpo.models.tasks.lessons import Lesson, Task
from tpu_grpo.models.tokenizers import ASSISTANT, END, builtin_tokenizer
from tpu_grpo.models.tunix_model import by_name
from tpu_grpo.records.errors import CheckpointError, NonFiniteError
from tpu_grpo.records.untrusted_input import parse_json, read_file

RECORD = "teaching.json"
_SILENT_SECONDS = 30.0
_FORMAT = 1  # the version of the written files, which is part of the digest


@dataclass(frozen=True)
class Recipe:
    """The size of a built-in Qwen3 and how it is taught; recipe, task and seed determine its parameters."""

    layers: int = 3
    width: int = 192
    mlp_width: int = 576
    heads: int = 6
    kv_heads: int = 3
    head_dim: int = 32
    rope_theta: int = 1_000_000
    norm_eps: float = 1e-6
    embedding_std: float = 0.1
    steps: int = 400
    batch: int = 128
    """Problems per step. 400 steps of 128 problems teach more than 200 steps of 256, at the same cost."""
    learning_rate: float = 2e-3
    warmup_steps: int = 60
    final_rate: float = 0.05
    """The learning rate at the end of the cosine decay, as a share of ``learning_rate``."""
    b2: float = 0.95
    max_grad_norm: float = 1.0
    """The norm that gradients are clipped to; without clipping, learning to carry digits takes twice as long."""
    first_norm: ClassVar[float] = 1.0
    """The weights of norms at the start."""

    @property
    def own_settings(self) -> Mapping[str, Any]:
        """The settings of the model's ``config.json`` that are other than those of a Qwen3."""
        return {}

    def model(self, tokenizer: PreTrainedTokenizerFast) -> Any:
        """Build Tunix's model, in float32."""
        return Qwen3(self.model_config(len(tokenizer)), rngs=nnx.Rngs(0))

    def model_config(self, vocab_size: int) -> ModelConfig:
        """Return Tunix's config of the model, in float32."""
        return ModelConfig(
            num_layers=self.layers,
            vocab_size=vocab_size,
            embed_dim=self.width,
            hidden_dim=self.mlp_width,
            num_heads=self.heads,
            head_dim=self.head_dim,
            num_kv_heads=self.kv_heads,
            rope_theta=self.rope_theta,
            norm_eps=self.norm_eps,
            use_tied_embedding=True,
        )

    def optimizer(self) -> optax.GradientTransformation:
        """Return Adam on clipped gradients, with a linear warmup and a cosine decay of the learning rate."""
        rate = optax.warmup_cosine_decay_schedule(
            0.0, self.learning_rate, self.warmup_steps, self.steps, self.learning_rate * self.final_rate
        )
        clip = optax.clip_by_global_norm(self.max_grad_norm)
        return optax.chain(clip, optax.adam(rate, b2=self.b2))


@dataclass(frozen=True)
class GemmaRecipe(Recipe):
    """The size of a built-in Gemma 3, all of whose layers but the last have a window, and how it is taught."""

    window: int = 6
    """Shorter than any prompt of addition, so that the windows matter."""
    first_norm: ClassVar[float] = 0.0
    """Gemma's norms multiply by 1 + weight."""

    @property
    def own_settings(self) -> Mapping[str, Any]:
        """See `Recipe`."""
        family = FAMILIES["gemma3_text"]
        return {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": self.head_dim,
            "sliding_window": self.window,
            "sliding_window_pattern": self.layers,
        }

    def model(self, tokenizer: PreTrainedTokenizerFast) -> Any:
        """See `Recipe`."""
        tunix_repairs.apply()
        family = FAMILIES["gemma3_text"]
        settings = {**family.defaults, **hugging_face_config(self, tokenizer)}
        config = family.config(**{each.name: settings[each.name] for each in fields(family.config)})
        return family.model_class()(family.model_config(config, np.float32, "none", None), rngs=nnx.Rngs(0))


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "addition": Recipe(),
        "gemma_addition": GemmaRecipe(width=128, mlp_width=384, heads=4, kv_heads=2, steps=300),
        "careful_addition": Recipe(),
        "wordy_addition": Recipe(batch=64),  # lessons five times as long as addition's
        "calculator": Recipe(steps=300, batch=64, warmup_steps=40),  # lessons four times as long as addition's
        "guessing": Recipe(width=128, mlp_width=384, heads=4, kv_heads=2, steps=250, batch=64, warmup_steps=40),
    }
)
"""The recipe of each built-in model, by the name of its task."""


# --- the cache -------------------------------------------------------------------------------------------------------


def builtin_checkpoint(name: str, seed: int, *, progress: bool, recipe: Recipe | None = None) -> Path:
    """Return the checkpoint directory of a task's built-in model; a model that is not cached is taught first.

    If several processes ask for the same model concurrently, one teaches it and the others wait. The seed determines
    the initial parameters and the lessons. With ``progress``, a bar on stderr shows the loss during teaching.

    Raises:
        CheckpointError: when the cache cannot be written.
    """
    task = TASKS[name]
    recipe = recipe or RECIPES[name]
    cache = cache_directory()
    entry = cache / f"{name}-seed{seed}-{recipe_digest(recipe, task)}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not is_whole(entry):
            jax.local_devices()  # jax waits for all hosts here, so none may hold the lock yet
        with exclusive(cache / f".{entry.name}.lock"):
            if not is_whole(entry):
                _teach_into(entry, recipe, task, seed, progress)
    except OSError as error:
        raise CheckpointError(
            f"the cache of built-in models must be writable, got {error} in {cache}; set {CACHE_VARIABLE} to a "
            "directory that is"
        ) from error
    return entry


def write_builtin_config(name: str, directory: Path) -> None:
    """Write the config.json of a built-in model into a directory, without teaching it."""
    config = hugging_face_config(RECIPES[name], builtin_tokenizer(TASKS[name]))
    (directory / CONFIG_FILE).write_text(json.dumps(config))


def recipe_digest(recipe: Recipe, task: Task) -> str:
    """Hash everything that determines a taught model, except the seed, to 12 hex digits."""
    tokenizer = builtin_tokenizer(task)
    decides = {
        "format": _FORMAT,
        "recipe": asdict(recipe),
        "config": hugging_face_config(recipe, tokenizer),
        "chat_template": tokenizer.chat_template,
        "task": task.decides(),
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]


def _teach_into(entry: Path, recipe: Recipe, task: Task, seed: int, progress: bool) -> None:
    started = time.perf_counter()
    losses: list[float] = []
    name = entry.name.split("-")[0]
    columns = (
        TextColumn(f"teaching {name} (once, then cached)"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    console, printed = Console(stderr=True), started
    with Progress(*columns, console=console, disable=not progress) as bar:
        shown = bar.add_task("teaching", total=recipe.steps, loss="-")

        def on_step(step: int, loss: float) -> None:
            nonlocal printed
            losses.append(loss)
            bar.update(shown, completed=step, loss=f"{loss:.3f}")
            if progress and not console.is_terminal and time.perf_counter() - printed >= _SILENT_SECONDS:
                printed = time.perf_counter()
                console.print(f"teaching {name} (once, then cached): step {step} of {recipe.steps}", soft_wrap=True)

        params = teach(recipe, task, seed=seed, on_step=on_step)
    record: dict[str, Any] = {
        "task": name,
        "seed": seed,
        "recipe": asdict(recipe),
        "last_loss": losses[-1],
        "seconds": round(time.perf_counter() - started, 1),
        "versions": {name: version(name) for name in ("jax", "google-tunix", "optax", "transformers", "safetensors")},
    }
    if entry.exists():  # but is damaged
        shutil.rmtree(entry)
    from tpu_grpo.models.hf_directory import new_directory  # only needed here

    with new_directory(entry) as unfinished:
        write_checkpoint(unfinished, recipe, builtin_tokenizer(task), params, record)


# --- the files of an entry -------------------------------------------------------------------------------------------


def write_checkpoint(
    directory: Path, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, params: nnx.State, record: Mapping[str, Any]
) -> None:
    """Write weights, config and tokenizer into an empty directory, and ``record`` with the digests of these files."""
    (directory / CONFIG_FILE).write_text(json.dumps(hugging_face_config(recipe, tokenizer), indent=1) + "\n")
    from tpu_grpo.models.hf_directory import write_tensors  # only needed here

    leaves = by_name(params)
    write_tensors(
        directory, abstract_checkpoint(directory), lambda name: np.asarray(leaves[name]), np.dtype(np.float32)
    )
    tokenizer.save_pretrained(directory, save_jinja_files=False)
    files = {path.name: _digest(path) for path in sorted(directory.iterdir())}
    (directory / RECORD).write_text(json.dumps({**record, "files": files}, indent=1) + "\n")


def is_whole(directory: Path) -> bool:
    """Whether the directory holds a record and every file that the record lists, unchanged."""
    try:
        files = parse_json(read_file(directory / RECORD))["files"]
        return all(_digest(directory / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def hugging_face_config(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the content of the model's ``config.json``."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(tokenizer),
        "hidden_size": recipe.width,
        "intermediate_size": recipe.mlp_width,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": recipe.norm_eps,
        "rope_theta": recipe.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **recipe.own_settings,
    }


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- teaching --------------------------------------------------------------------------------------------------------


class TeachingBatch(NamedTuple):
    """A batch of lessons, as tokens."""

    tokens_BT: Int[np.ndarray, "B T"]
    """Tokens in int32: the conversation as the chat template writes it, then padding."""
    taught_BL: Float[np.ndarray, "B L"]
    """The loss mask: column l is 1 if token l + 1, the target, is the assistant's (end token included), else 0."""


def teach(
    recipe: Recipe, task: Task, *, seed: int, on_step: Callable[[int, float], None] = lambda step, loss: None
) -> nnx.State:
    """Teach a new model on a task's training split, and return its parameters.

    On one machine, the same seed gives bitwise equal parameters. ``on_step`` is called after every step with its
    number, from 1, and its loss in nats per taught token.

    Raises:
        NonFiniteError: when the loss is not finite.
    """
    tokenizer = builtin_tokenizer(task)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: recipe.model(tokenizer)))
    params = initial_params(recipe, shapes, np.random.default_rng([seed, 0]))
    optimizer = recipe.optimizer()
    moments = optimizer.init(params)  # a State is a pytree

    @jax.jit
    def train_step(params: nnx.State, moments: optax.OptState, batch: TeachingBatch):
        loss, grads = jax.value_and_grad(lambda p: taught_loss(nnx.merge(graph, p), batch))(params)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    with jax.default_matmul_precision("highest"):
        for step, batch in enumerate(batches(recipe, task, np.random.default_rng([seed, 1])), start=1):
            params, moments, loss = train_step(params, moments, batch)
            if not np.isfinite(loss):
                raise NonFiniteError(f"the loss of teaching must be finite, got {loss} at step {step} of seed {seed}")
            on_step(step, float(loss))
    return params


def initial_params(recipe: Recipe, shapes: nnx.State, rng: np.random.Generator) -> nnx.State:
    """Draw random matrices in float32, and set norms to ``first_norm``; Tunix's MLPs of zeros would get no gradient.

    The standard deviation is ``embedding_std`` for the embedding, and width^-1/2 for other matrices. It is divided by
    sqrt(2 * layers) for o_proj and down_proj, because 2 * layers such matrices add to the residual stream.
    """

    def initial(path: tuple[object, ...], leaf: jax.ShapeDtypeStruct) -> Array:
        name = jax.tree_util.keystr(path)
        if len(leaf.shape) == 1:
            return jnp.full(leaf.shape, recipe.first_norm, jnp.float32)
        std = recipe.embedding_std if "input_embedding" in name else recipe.width**-0.5
        if "o_proj" in name or "down_proj" in name:
            std /= (2 * recipe.layers) ** 0.5
        return jnp.asarray(std * rng.standard_normal(leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(initial, shapes)


def taught_loss(model: Any, batch: TeachingBatch) -> Float[Array, ""]:
    """Return the cross-entropy in nats, averaged over the taught tokens of the batch."""
    tokens_BT = jnp.asarray(batch.tokens_BT)
    inputs_BL, targets_BL = tokens_BT[:, :-1], tokens_BT[:, 1:]
    rows, length = inputs_BL.shape
    positions_BL = jnp.broadcast_to(jnp.arange(length), (rows, length))
    causal_BLL = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
    logits_BLV, _ = model(inputs_BL, positions_BL, None, causal_BLL)
    losses_BL = optax.softmax_cross_entropy_with_integer_labels(logits_BLV, targets_BL)
    return jnp.sum(losses_BL * batch.taught_BL) / jnp.sum(batch.taught_BL)


def batches(recipe: Recipe, task: Task, rng: np.random.Generator) -> Iterator[TeachingBatch]:
    """Yield ``recipe.steps`` batches of lessons on training problems, which are drawn with replacement."""
    problems, tokenizer = task.problems("train"), builtin_tokenizer(task)
    for _ in range(recipe.steps):
        drawn = [problems[i] for i in rng.integers(len(problems), size=recipe.batch)]
        yield encode_batch(tokenizer, task, [task.lesson(problem, rng) for problem in drawn])


def encode_batch(tokenizer: PreTrainedTokenizerFast, task: Task, lessons: Sequence[Lesson]) -> TeachingBatch:
    """Encode lessons by the chat template, padded on the right to the length of the task's longest lesson."""
    encoded = tokenizer.apply_chat_template(
        list(lessons),
        tools=[dict(tool) for tool in task.tools] or None,
        padding="max_length",
        max_length=task.longest,
        return_tensors="np",
        return_dict=True,
    )
    assert isinstance(encoded, BatchEncoding)
    tokens_BT = np.asarray(encoded["input_ids"], np.int32)
    # Only the assistant's messages end with END. So after l tokens, the next one is the assistant's if and only if more
    # messages of the assistant have been opened than closed; padding follows after the last one is closed.
    opened_BL, closed_BL = (
        np.cumsum(tokens_BT[:, :-1] == tokenizer.convert_tokens_to_ids(marker), axis=1) for marker in (ASSISTANT, END)
    )
    return TeachingBatch(tokens_BT, (opened_BL > closed_BL).astype(np.float32))
