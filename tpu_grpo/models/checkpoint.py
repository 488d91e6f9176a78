"""Reads and verifies a Hugging Face checkpoint directory, and loads it as Tunix's model on the trainer's mesh.

    checkpoint = read_checkpoint(Path("Qwen3-0.6B"))     # verifies everything; reads headers only, needs no jax
    check_mesh(checkpoint, fsdp=4, tp=2)                 # needs no jax either
    model = load_model(checkpoint, mesh, dtype=jnp.bfloat16, remat="decoder")

Tunix's loader does not notice a config.json that asks for something its model lacks, files that did not arrive, or
tensors of several dtypes in one file. Therefore all of that is decided here before it runs: a setting is honoured, or
refused with its name, its value and a remedy.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from tpu_grpo.config import HUB
from tpu_grpo.models.families import DecoderConfig, Family, Remat, Shape, WeightRule
from tpu_grpo.models.hf_config import CONFIG_FILE, read_hf_config
from tpu_grpo.models.json_files import read_json
from tpu_grpo.models.messages import listed
from tpu_grpo.records.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import jax
    from flax import nnx
    from jax.typing import DTypeLike

INDEX_FILE = "model.safetensors.index.json"
STORED_DTYPES = ("BF16", "F16", "F32", "F64")
"""The dtypes that Tunix's loader can read; it would take the bytes of any other for float64."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory that was read and found complete and supported."""

    directory: Path
    hf_config: Mapping[str, Any]
    """The content of config.json, unchanged."""
    family: Family
    config: DecoderConfig
    files: tuple[Path, ...]
    """The safetensors files, sorted."""

    @property
    def parameter_count(self) -> int:
        """The number of trainable values; a tied embedding counts once."""
        return sum(math.prod(shape) for shape in self.family.tensor_shapes(self.config).values())

    @property
    def weight_rules(self) -> tuple[WeightRule, ...]:
        """The rules that say which leaf of Tunix's model becomes which leaf of the sampler's."""
        return self.family.weight_rules(self.config)


@dataclass(frozen=True)
class _Tensor:
    file: Path
    dtype: str
    shape: Shape


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read config.json and the headers of the safetensors files, and verify that Tunix can load exactly this model.

    Raises:
        CheckpointError: for a directory or file that is missing or broken, an unsupported family or setting, and
            tensors that are missing, unexpected, of another shape or of mixed dtypes.
    """
    directory = directory.expanduser()
    if not directory.is_dir():
        raise CheckpointError(
            f"model.path must be a checkpoint directory on this machine, got {directory}, which is not one; "
            f"{_hint(directory)}"
        )
    hf_config, family, config = read_hf_config(directory)
    files = _safetensors_files(directory)
    _verify_tensors(_read_headers(files), config, family, directory)
    return Checkpoint(directory, hf_config, family, config, files)


def _hint(directory: Path) -> str:
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(directory)):
        return f"did you mean {HUB}{directory}, a model of the Hugging Face hub, which is fetched?"
    return f"correct it, or name a model of the Hugging Face hub as {HUB}OWNER/NAME"


def check_mesh(checkpoint: Checkpoint, fsdp: int, tp: int) -> None:
    """Verify that the trainer's mesh axes divide every dimension of the parameters that is split over them.

    Raises:
        ConfigError: naming the axis, the settings of config.json that it does not divide, and sizes that would.
    """
    for axis, size in (("fsdp", fsdp), ("tp", tp)):
        wrong, possible = _divisors(checkpoint, axis, size)
        if wrong:
            raise ConfigError(
                f"meshes.trainer.{axis} must divide {', '.join(wrong)} of the model in {checkpoint.directory}, got "
                f"{size}; sizes that divide all it splits: {', '.join(map(str, possible))}"
            )


def check_sampler_mesh(checkpoint: Checkpoint, tensor: int) -> None:
    """Verify that the sampler can split the model over ``tensor`` devices; it may repeat key-value heads.

    Raises:
        ConfigError: naming the settings of config.json that do not fit, and sizes that would.
    """
    wrong, _ = _divisors(checkpoint, "tensor", tensor)
    kv_heads, fitting = checkpoint.config.num_key_value_heads, sampler_sizes(checkpoint)
    if wrong or tensor not in fitting:
        unmet = ", ".join(wrong) or f"num_key_value_heads={kv_heads} (or be a multiple of it)"
        raise ConfigError(
            f"meshes.sampler.tensor must divide {unmet} of the model in {checkpoint.directory}, got {tensor}; "
            f"use as many devices as one of {fitting}"
        )


def sampler_sizes(checkpoint: Checkpoint) -> list[int]:
    """Return the numbers of devices that the sampler can split the model over, ascending."""
    _, possible = _divisors(checkpoint, "tensor", 1)
    kv_heads = checkpoint.config.num_key_value_heads
    return [size for size in possible if kv_heads % size == 0 or size % kv_heads == 0]


def _divisors(checkpoint: Checkpoint, axis: str, size: int) -> tuple[list[str], list[int]]:
    """Return ("name=value" of every setting that the axis must divide and does not, the sizes that divide all)."""
    values = {name: getattr(checkpoint.config, name) for name in checkpoint.family.divisible[axis]}
    common = math.gcd(*values.values())
    wrong = [f"{name}={value}" for name, value in values.items() if size < 1 or value % size]
    return wrong, [divisor for divisor in range(1, common + 1) if common % divisor == 0]


def load_model(
    checkpoint: Checkpoint,
    mesh: jax.sharding.Mesh,
    *,
    dtype: DTypeLike,
    remat: Remat,
    flash_block: int | None = None,
    param_dtype: DTypeLike | None = None,
) -> nnx.Module:
    """Load the parameters with Tunix's loader, sharded over ``mesh`` (axes "fsdp" and "tp").

    ``dtype`` (float32 or bfloat16) is that of the computation, and of the parameters unless ``param_dtype`` is given:
    they must then be cast to ``dtype`` before the model is called. Logits are float32. ``remat`` says what the backward
    pass recomputes: nothing, the attention and MLP blocks, or whole decoder layers.
    ``flash_block`` is the block that `families.flash_attention.flash_block` chose; None takes dot attention.

    Raises:
        ConfigError: for a mesh that does not fit the model, a dtype Tunix's loader cannot cast to, or a version of
            Tunix that was not reviewed.
        CheckpointError: when the loader leaves a parameter without a value.
    """
    import jax.numpy as jnp

    from tpu_grpo.models import repairs

    if missing := {"fsdp", "tp"} - set(mesh.axis_names):
        raise ConfigError(f"the trainer's mesh must have axes fsdp and tp, got {mesh.axis_names}; add {missing}")
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        raise ConfigError(f"model.dtype must be float32 or bfloat16, got {jnp.dtype(dtype).name}; use one of them")
    check_mesh(checkpoint, mesh.shape["fsdp"], mesh.shape["tp"])
    repairs.apply()
    family = checkpoint.family
    config = repairs.fitted_config(family.model_config(checkpoint.config, dtype, remat, flash_block), mesh)
    model = family.load(checkpoint.directory, config, mesh, dtype if param_dtype is None else param_dtype)
    _refuse_abstract(model, checkpoint.directory)
    return model


# --- safetensors -----------------------------------------------------------------------------------------------------


def _safetensors_files(directory: Path) -> tuple[Path, ...]:
    """All of the directory's, as Tunix's loader reads them; every file the index names must be among them."""
    files = tuple(sorted(directory.glob("*.safetensors")))
    indexed: set[str] = set()
    if (directory / INDEX_FILE).exists():
        weight_map = read_json(directory / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{directory / INDEX_FILE} must hold a weight_map, which it lacks; copy it again")
        indexed = set(map(str, weight_map.values()))
    if absent := sorted(indexed - {file.name for file in files}):
        raise CheckpointError(f"{directory} lacks {listed(absent)}, named in {INDEX_FILE}; copy what is missing")
    if not files:
        others = sorted(file.name for file in directory.glob("*.bin"))
        raise CheckpointError(
            f"{directory} must hold *.safetensors files, got {listed(others)}; "
            "save the checkpoint in the safetensors format"
        )
    return files


def _read_headers(files: Iterable[Path]) -> dict[str, _Tensor]:
    tensors: dict[str, _Tensor] = {}
    for file in files:
        header = _read_header(file)
        _require_one_dtype(file, header)
        if twice := sorted(header.keys() & tensors.keys()):
            raise CheckpointError(
                f"{file} and {tensors[twice[0]].file.name} both hold {listed(twice)}; Tunix reads every *.safetensors "
                "file of the directory: move the one that does not belong elsewhere"
            )
        tensors |= header
    return tensors


def _read_header(file: Path) -> dict[str, _Tensor]:
    """Read a file's tensors; the safetensors library verifies length, offsets and shapes against each other."""
    try:
        with safe_open(file, framework="numpy"):  # it takes a millisecond to describe one tensor of thousands
            header = _header_of_whole_file(file)
    except (OSError, SafetensorError) as error:
        size = file.stat().st_size if file.exists() else 0
        raise CheckpointError(
            f"{file} ({size} bytes) is not a whole safetensors file: {error}; it may be cut off: copy it again"
        ) from error
    return {name: _Tensor(file, tensor["dtype"], tuple(tensor["shape"])) for name, tensor in header.items()}


def _header_of_whole_file(file: Path) -> dict[str, Any]:
    """Read the header: its length in eight bytes, then JSON with the dtype, shape and place of each name."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    header.pop("__metadata__", None)
    return header


def _require_one_dtype(file: Path, header: Mapping[str, _Tensor]) -> None:
    """Refuse several dtypes in a file, because Tunix's loader reads a whole file in its first tensor's dtype."""
    dtypes = sorted({tensor.dtype for tensor in header.values()})
    if len(dtypes) != 1 or dtypes[0] not in STORED_DTYPES:
        raise CheckpointError(
            f"{file} must hold tensors of one dtype of {', '.join(STORED_DTYPES)}, got "
            f"{', '.join(dtypes) or 'no tensor'}; save the checkpoint in one dtype"
        )


def _verify_tensors(tensors: Mapping[str, _Tensor], config: DecoderConfig, family: Family, directory: Path) -> None:
    expected = family.tensor_shapes(config)
    missing = [name for name in expected if name not in tensors]
    unexpected = sorted(tensors.keys() - expected.keys() - family.ignored_tensors(config))
    misshapen = [
        f"{name} (expected {list(shape)}, got {list(tensors[name].shape)})"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    lists = {"missing": missing, "unexpected": unexpected, "of another shape": misshapen}
    if found := [f"{len(names)} {kind}: {listed(names)}" for kind, names in lists.items() if names]:
        raise CheckpointError(
            f"the tensors in {directory} do not follow from its {CONFIG_FILE}; {'; '.join(found)}; see that every file "
            "arrived and that all belong to one model"
        )


def _refuse_abstract(model: nnx.Module, directory: Path) -> None:
    """Refuse a model in which Tunix's loader left a parameter as a shape without a value."""
    import jax
    from flax import nnx

    leaves = jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(model)))
    without = [jax.tree_util.keystr(path) for path, leaf in leaves if not isinstance(leaf, jax.Array)]
    if without:
        raise CheckpointError(
            f"Tunix's loader left {len(without)} parameters of the model in {directory} without a value: "
            f"{listed(without)}; see that no file of the checkpoint changed meanwhile"
        )
