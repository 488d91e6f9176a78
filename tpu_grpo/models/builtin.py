"""Provides the built-in models, which are taught on first use and then kept in a cache.

    directory = builtin_checkpoint("addition", seed=0, progress=True)     # a Hugging Face checkpoint directory

Each is taught on the built-in task of its name. The cache is ``$TPU_GRPO_CACHE``, or the user's cache directory. An
entry is named by task, seed and a digest of the recipe, so that a changed recipe makes a new one. An entry appears
whole or not at all, and a damaged one is made again. The recipes and the teaching are in builtin_teaching.py, the files
of an entry in builtin_files.py.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tpu_grpo.hosts.caching import CACHE_VARIABLE, cache_directory, exclusive
from tpu_grpo.models.builtin_files import hugging_face_config, is_whole, library_versions, write_checkpoint
from tpu_grpo.models.builtin_teaching import RECIPES, Recipe, teach
from tpu_grpo.models.tokenizers import builtin_tokenizer
from tpu_grpo.records.errors import CheckpointError, ConfigError
from tpu_grpo.tasks import TASKS
from tpu_grpo.tasks.lessons import Task

_FORMAT = 1  # the version of the written files, which is part of the digest


def builtin_checkpoint(name: str, seed: int, *, progress: bool, recipe: Recipe | None = None) -> Path:
    """Return the checkpoint directory of a built-in model, which is taught now if the cache has none.

    Processes that ask for the same model at once take turns: one teaches, the others find it done.

    Args:
        name: which model: that of a built-in task.
        seed: decides its first parameters and its lessons.
        progress: show a bar with the loss, on stderr, while teaching.
        recipe: how to teach; the default is what the demo is tuned for.

    Raises:
        ConfigError: for an unknown name.
        CheckpointError: when the cache cannot be written.
    """
    task = _task(name)
    recipe = recipe or RECIPES[name]
    cache = cache_directory()
    entry = cache / f"{name}-seed{seed}-{recipe_digest(recipe, task)}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
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
    """Write the config.json of a built-in model into a directory; nothing is taught.

    Raises:
        ConfigError: for an unknown name.
    """
    config = hugging_face_config(RECIPES[name], builtin_tokenizer(_task(name)))
    (directory / "config.json").write_text(json.dumps(config))


def _task(name: str) -> Task:
    if name not in TASKS:
        known = ", ".join(f"builtin:{task}" for task in TASKS)
        raise ConfigError(f"model.path must name a built-in model, got builtin:{name}; known: {known}")
    return TASKS[name]


def recipe_digest(recipe: Recipe, task: Task) -> str:
    """Digest everything that decides a taught model, except the seed, to 12 hex digits."""
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
    with _bar(name, recipe.steps, shown=progress) as bar:

        def on_step(step: int, loss: float) -> None:
            losses.append(loss)
            bar.update(bar.task_ids[0], completed=step, loss=f"{loss:.3f}")

        params = teach(recipe, task, seed=seed, on_step=on_step)
    record: dict[str, Any] = {
        "task": name,
        "seed": seed,
        "recipe": asdict(recipe),
        "last_loss": losses[-1],
        "seconds": round(time.perf_counter() - started, 1),
        "versions": library_versions(),
    }
    with tempfile.TemporaryDirectory(dir=entry.parent, prefix=f".{entry.name}-") as temporary:
        unfinished = Path(temporary) / entry.name
        unfinished.mkdir()
        write_checkpoint(unfinished, recipe, builtin_tokenizer(task), params, record)
        if entry.exists():  # damaged, or it would have been used
            shutil.rmtree(entry)
        os.replace(unfinished, entry)


def _bar(name: str, steps: int, *, shown: bool) -> Progress:
    columns = (
        TextColumn(f"teaching {name} (once, then cached)"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True), disable=not shown)
    bar.add_task("teaching", total=steps, loss="-")
    return bar
