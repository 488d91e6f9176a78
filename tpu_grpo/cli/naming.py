"""Finds the model that a command names, and the config that gives its prompt format and sampling settings.

    runs/mine              a run: its newest checkpoint;  runs/mine@best, runs/mine@40, runs/mine@initial
    my_model               a model or adapters that scripts/export.py wrote
    Qwen3-0.6B             any other Hugging Face checkpoint directory
    builtin:addition       a built-in model

A run and an export have their own config; any other model uses the defaults.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tpu_grpo.cli.starting import run_config
from tpu_grpo.config import (
    BUILTIN,
    ExportSection,
    HostsSection,
    LoraSection,
    MeshesSection,
    ModelSection,
    RunConfig,
    Section,
    changed_config,
    load_config,
)
from tpu_grpo.models.checkpoint import ADAPTER_SETTINGS_FILE, read_json
from tpu_grpo.observe.run_files import CONFIG_FILE, EXPORTED_CONFIG_FILE
from tpu_grpo.records.errors import ConfigError

MODEL_FILE = "config.json"


class NamedModel(NamedTuple):
    """A named model, and its config, adapted to this machine."""

    name: str
    config: RunConfig
    which: str
    """The checkpoint: a step, latest, best, or initial for the model at ``model.path``."""


def named_model(name: str, words: Sequence[str]) -> NamedModel:
    """Find the named model and its config, with overrides in ``words``; raises ConfigError for anything wrong."""
    config, which = _own_config(name)
    here = {  # reset settings that depend on the run's slice
        "meshes": MeshesSection(),
        "hosts": HostsSection(),
        "rollout": config.rollout.model_copy(update=dict.fromkeys(("attention", "kv_dtype", "weights_dtype"), "auto")),
        "algorithm": config.algorithm.model_copy(update={"routing_replay": False, "staleness": 0}),
    }
    settings = config.model_copy(update=here).model_dump(mode="json")
    return NamedModel(name, changed_config(settings, words), which)


def _own_config(name: str) -> tuple[RunConfig, str]:
    """Return (the config that comes with a model, or the defaults; the checkpoint that the name selects)."""
    if name.startswith(BUILTIN):
        return RunConfig().model_copy(update=_model_at(name, ModelSection())), "initial"
    text, which = name, "latest"
    if not Path(name).exists() and (found := re.fullmatch(r"(.+)@(latest|best|initial|\d+)", name)):
        text, which = found[1], found[2]
    directory = Path(text).expanduser()
    if (directory / CONFIG_FILE).is_file():
        return run_config(directory), which
    if text == name and (directory / EXPORTED_CONFIG_FILE).is_file():
        config, adapters = load_config(directory / EXPORTED_CONFIG_FILE), directory / ADAPTER_SETTINGS_FILE
        if not adapters.is_file():
            return config.model_copy(update=_model_at(str(directory), config.model)), "initial"
        base = read_json(adapters).get("base_model_name_or_path")
        if not isinstance(base, str):
            raise ConfigError(f"{adapters} must name its base_model_name_or_path, got {base!r}; export it again")
        lora = config.model.lora.model_copy(update={"path": directory})
        model = config.model.model_copy(update={"path": base, "lora": lora})
        return config.model_copy(update={"model": model}), "initial"
    if text == name and (directory / MODEL_FILE).is_file():
        return RunConfig().model_copy(update=_model_at(name, ModelSection())), "initial"
    raise ConfigError(
        f"a model must be the directory of a run, also as RUN@best or RUN@STEP, one that scripts/export.py wrote, a "
        f"Hugging Face checkpoint directory, or builtin:NAME, got {name}; correct the path"
    )


def _model_at(path: str, section: ModelSection) -> dict[str, Section]:
    """Return the sections of a config with the model at ``path`` in place of the section's, without adapters."""
    changed = {"path": path, "lora": LoraSection(), "train_layers": None}
    return {"model": section.model_copy(update=changed), "export": ExportSection()}
