"""The command line of ``scripts/export.py``: exports one checkpoint of a run, in one process on a CPU.

Modules that import jax are imported only after ``prepare`` has chosen jax's platform, here always the CPU.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from tpu_grpo.cli.starting import command_parser, exit_code_of, prepare, run_config
from tpu_grpo.config import RunConfig
from tpu_grpo.hosts import Hosts
from tpu_grpo.models.fetching import push
from tpu_grpo.models.hf_directory import check_free
from tpu_grpo.records.errors import CheckpointError

ABOUT = """Writes the model of a checkpoint as a Hugging Face directory, which transformers and this package load.

RUN is the directory of a run, which may still be going. Of a run with adapters they are merged into the model, or with
--adapter are written alone, in the format of PEFT. The command runs in one process on the CPU, whatever trained the
model, and needs the memory that the model takes once. Settings are those of the run; the section `export` says more."""
USAGE = """python scripts/export.py RUN [--step N | --best | --last] --out DIR
                                [--push OWNER/NAME] [--adapter] [--dtype float32|bfloat16] [section.key=value ...]"""
MIB = 2**20


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    parser = command_parser(USAGE, ABOUT)
    parser.add_argument("run", metavar="RUN", type=Path, help="the directory of a run")
    parser.add_argument("words", nargs="*", metavar="section.key=value", help="settings that are not the run's")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="the checkpoint of this step")
    which.add_argument("--best", action="store_true", help="the checkpoint of the best evaluation")
    which.add_argument("--last", action="store_true", help="the newest checkpoint, which is the default")
    parser.add_argument("--out", type=Path, required=True, help="the directory to write, which must not be there")
    pushed = "also upload it to the Hugging Face hub; a new repository is private"
    parser.add_argument("--push", metavar="OWNER/NAME", help=pushed)
    parser.add_argument("--adapter", action="store_true", help="write the adapters alone: export.kind=adapter")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="the type of the tensors: export.dtype")
    options = parser.parse_intermixed_args(arguments)
    return exit_code_of(lambda: _export(options))


def _export(options: argparse.Namespace) -> None:
    words = [*options.words]
    words += ["export.kind=adapter"] if options.adapter else []
    words += [f"export.dtype={options.dtype}"] if options.dtype else []
    config = run_config(options.run, words)
    check_free(options.out)
    os.environ["JAX_PLATFORMS"] = "cpu"  # leave a TPU to the run
    if options.push is not None:
        os.environ.setdefault("HF_HUB_OFFLINE", "0")
    prepare(needs_hub=config.needs_hub)
    which = "best" if options.best else "latest" if options.step is None else str(options.step)
    print(export_checkpoint(config, which, options.out))
    if options.push is not None:
        print(f"it is also at {push(options.out, options.push)}")


def export_checkpoint(config: RunConfig, which: str, directory: Path) -> str:
    """Export a checkpoint (latest, best, or a step) into a new directory, and return a line that says what was written.

    Raises:
        ConfigError: the directory, or a file of that name, exists already.
        CheckpointError: the run has no such checkpoint, or it is damaged.
        OSError: writing failed.
    """
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from tpu_grpo.run.exporting import Policy, export_policy
    from tpu_grpo.run.inputs import check_model, open_model
    from tpu_grpo.run.policies import choose, exported_values, load_policy

    directory = directory.expanduser().absolute()
    chosen = choose(config.run_dir, which)
    if chosen.step is None:
        raise CheckpointError(
            "the best step of this run must be a checkpoint, and is 0: no evaluation was better than that before the "
            f"first step; use {config.model.path}, the model that the run started from, or name --step or --last"
        )
    checkpoint, tokenizer = open_model(config.model, config.run.seed, Hosts())
    check_model(config, checkpoint)
    one_device = Mesh(np.array(jax.devices("cpu")[:1]).reshape(1, 1), ("fsdp", "tp"))
    model = load_policy(config.model, config.run.seed, checkpoint, one_device, chosen)
    stepped = exported_values(config.export, config.model, model, chosen)
    export_policy(config, Policy(model, chosen.step, checkpoint, tokenizer, stepped), directory)
    files = [file.stat().st_size for file in directory.glob("*.safetensors")]
    return (
        f"the {config.export.kind} of step {chosen.step} is in {directory}: {sum(files) / MIB:,.1f} MiB in "
        f"{len(files)} {'file' if len(files) == 1 else 'files'} of {config.export.dtype or config.model.dtype}"
    )
