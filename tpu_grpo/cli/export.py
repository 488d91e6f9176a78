"""This is the command line of ``scripts/export.py``: it parses, calls, prints and returns an exit code.

Nothing that imports jax is imported before ``prepare`` has chosen jax's platform, which is the CPU here.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from tpu_grpo.cli.starting import exit_code_of, prepare, run_config
from tpu_grpo.config import RunConfig
from tpu_grpo.models.hf_directory import check_free

ABOUT = """Writes the model of a checkpoint as a Hugging Face directory, which transformers and this package load.

RUN is the directory of a run, which may still be going. Of a run with adapters they are merged into the model, or with
--adapter are written alone, in the format of PEFT. The command runs in one process on the CPU, whatever trained the
model, and needs the memory that the model takes once. Settings are those of the run; the section `export` says more."""
USAGE = """python scripts/export.py RUN [--step N | --best | --last] --out DIR
                                [--adapter] [--dtype float32|bfloat16] [section.key=value ...]"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_intermixed_args(arguments)
    return exit_code_of(lambda: _export(_config(options), options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage=USAGE, description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the directory of a run")
    parser.add_argument("words", nargs="*", metavar="section.key=value", help="settings that are not the run's")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="the checkpoint of this step")
    which.add_argument("--best", action="store_true", help="the checkpoint of the best evaluation")
    which.add_argument("--last", action="store_true", help="the newest checkpoint, which is the default")
    parser.add_argument("--out", type=Path, required=True, help="the directory to write, which must not be there")
    parser.add_argument("--adapter", action="store_true", help="write the adapters alone: export.kind=adapter")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="the type of the tensors: export.dtype")
    return parser


def _config(options: argparse.Namespace) -> RunConfig:
    words = [*options.words]
    words += ["export.kind=adapter"] if options.adapter else []
    words += [f"export.dtype={options.dtype}"] if options.dtype else []
    return run_config(options.run, words)


def _export(config: RunConfig, options: argparse.Namespace) -> None:
    check_free(options.out)
    os.environ["JAX_PLATFORMS"] = "cpu"  # a TPU belongs to the run
    prepare(config)
    from tpu_grpo.cli.checkpoint_export import export_checkpoint

    which = "best" if options.best else "latest" if options.step is None else str(options.step)
    print(export_checkpoint(config, which, options.out))
