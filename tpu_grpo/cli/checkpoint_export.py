"""Exports one checkpoint of a run, in one process on a CPU, which is what scripts/export.py does."""

from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from tpu_grpo.config import RunConfig
from tpu_grpo.hosts import Hosts
from tpu_grpo.records.errors import CheckpointError
from tpu_grpo.run.exporting import Policy, export_policy
from tpu_grpo.run.parts import open_model
from tpu_grpo.run.saved import choose, load_policy

MIB = 2**20


def export_checkpoint(config: RunConfig, which: str, directory: Path) -> str:
    """Export a checkpoint (latest, best, or a step) into a new directory, and say what was written.

    Raises:
        ConfigError: something of the directory's name is there.
        CheckpointError: the run has no such checkpoint, or it is damaged.
        OSError: the disk does not take it.
    """
    directory = directory.expanduser().absolute()
    chosen = choose(config, which)
    if chosen.step is None:
        raise CheckpointError(
            "the best step of this run must be a checkpoint, and is 0: no evaluation was better than that before the "
            f"first step; use {config.model.path}, the model that the run started from, or name --step or --last"
        )
    checkpoint, tokenizer = open_model(config, Hosts())
    one_device = Mesh(np.array(jax.devices("cpu")[:1]).reshape(1, 1), ("fsdp", "tp"))
    model = load_policy(config, checkpoint, one_device, chosen)
    export_policy(config, Policy(model, chosen.step, checkpoint, tokenizer), directory)
    files = [file.stat().st_size for file in directory.glob("*.safetensors")]
    return (
        f"the {config.export.kind} of step {chosen.step} is in {directory}: {sum(files) / MIB:,.1f} MiB in "
        f"{len(files)} {'file' if len(files) == 1 else 'files'} of {config.export.dtype or config.model.dtype}"
    )
