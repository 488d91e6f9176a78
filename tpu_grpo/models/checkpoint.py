"""Reads and verifies a Hugging Face checkpoint directory; tpu_grpo/models/tunix_model.py loads it.

    checkpoint = read_checkpoint(Path("Qwen3-0.6B"))     # verifies everything; reads headers only, needs no jax
    check_mesh(checkpoint, fsdp=4, tp=2)                 # needs no jax either

Tunix and sglang-jax do not notice if config.json asks for what their models lack, or if files are missing. Therefore
this module checks everything. Its error for an unsupported setting gives the setting's name, its value and a remedy.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from tpu_grpo.config import HUB
from tpu_grpo.models.families import FAMILIES, REFUSED
from tpu_grpo.models.families.family import DecoderConfig, Family
from tpu_grpo.models.families.leaves import Shape, WeightRule
from tpu_grpo.models.families.rope import with_older_names
from tpu_grpo.records.errors import CheckpointError, ConfigError
from tpu_grpo.records.untrusted_input import open_file, parse_json, read_file

CONFIG_FILE, INDEX_FILE = "config.json", "model.safetensors.index.json"
TOKENIZER_SETTINGS_FILE = "tokenizer_config.json"
ADAPTER_SETTINGS_FILE = "adapter_config.json"
STORED_DTYPES: Mapping[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
"""The supported dtypes of stored tensors, by their names in safetensors headers."""
MOST = 10_000
"""The most layers of a model, and the most experts of a layer."""
_KINDS = {"int": "a whole number >= 1 and < 2**31", "float": "a number > 0 and < 1e38", "bool": "true or false"}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory that was read and found complete and supported."""

    directory: Path
    hf_config: Mapping[str, Any]
    """The content of config.json, under the names of transformers 4; of a model that also sees images, what its text
    model's own would be."""
    family: Family
    config: DecoderConfig
    tensors: Mapping[str, "StoredTensor"]
    """The stored tensors by name; fused tensors are split into their parts. Empty after `abstract_checkpoint`."""
    left_out: tuple[str, ...] = ()
    """The names of stored tensors that are not the text model's, such as a vision tower's."""

    @property
    def notes(self) -> list[str]:
        """What a user should know of the checkpoint, in sentences."""
        if not self.left_out:
            return []
        return [
            f"{len(self.left_out)} tensors for images are left out ({listed(sorted(self.left_out), 1)}): the text "
            "model is trained alone, and exported as such"
        ]

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts."""
        return self.config.experts[1] > 0

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of every tensor that follows from config.json, by name; fused tensors are given as parts."""
        return self.family.tensor_shapes(self.config)

    @property
    def parameter_count(self) -> int:
        """The number of trainable values; a tied embedding counts once."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def weight_rules(self) -> tuple[WeightRule, ...]:
        """The rules by which leaves (parameter arrays) of Tunix's model become leaves of the sampler's model."""
        return tuple(
            WeightRule(leaf.source, target, transform, leaf.input_axis)
            for leaf in self.family.leaves(self.config)
            for target, transform in leaf.targets
        )


@dataclass(frozen=True)
class StoredTensor:
    """The dtype and shape of a tensor, and where its bytes are in a safetensors file."""

    file: Path
    dtype: str
    """A key of STORED_DTYPES, once the header is verified."""
    shape: Shape
    start: int
    """The offset of the tensor's first byte from the start of the file, in bytes."""

    def array(self) -> np.ndarray:
        """Return the tensor memory-mapped, so that values are read from the file when they are used."""
        return np.memmap(self.file, STORED_DTYPES[self.dtype], "r", self.start, self.shape)


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read config.json and the headers of the safetensors files, and verify that both describe the same tensors.

    Raises:
        CheckpointError: for a directory or file that is missing or broken, an unsupported family or setting, and
            tensors that are missing, unexpected, or of another shape or dtype.
    """
    directory = directory.expanduser()
    if not directory.is_dir():
        hint = f"correct it, or name a model of the Hugging Face hub as {HUB}OWNER/NAME"
        if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(directory)):
            hint = f"did you mean {HUB}{directory}, a model of the Hugging Face hub, which is fetched?"
        raise CheckpointError(
            f"model.path must be a checkpoint directory on this machine, got {directory}, which is not one; {hint}"
        )
    checkpoint = _of_text(abstract_checkpoint(directory), _read_headers(_safetensors_files(directory)))
    checkpoint = replace(checkpoint, tensors=_apart(dict(checkpoint.tensors), checkpoint))
    _verify_tensors(checkpoint)
    return checkpoint


def check_mesh(checkpoint: Checkpoint, fsdp: int, tp: int) -> None:
    """Verify that the trainer's mesh axes divide every dimension of the parameters that is split over them.

    Raises:
        ConfigError: naming the axis, the settings of config.json that it does not divide, and sizes that fit.
    """
    for axis, size in (("fsdp", fsdp), ("tp", tp)):
        wrong, possible = _divisors(checkpoint, axis, size)
        if wrong:
            raise ConfigError(
                f"meshes.trainer.{axis} must divide {', '.join(wrong)} of the model in {checkpoint.directory}, got "
                f"{size}; sizes that divide all it splits: {', '.join(map(str, possible))}"
            )


def check_sampler_mesh(checkpoint: Checkpoint, tensor: int) -> None:
    """Verify that the sampler, which may replicate key-value heads, can split the model over ``tensor`` devices.

    Raises:
        ConfigError: naming the settings of config.json that do not fit, and numbers of devices that do.
    """
    wrong, _ = _divisors(checkpoint, "tensor", tensor)
    kv_heads, fitting = checkpoint.config.num_key_value_heads, sampler_sizes(checkpoint)
    if tensor not in fitting:
        unmet = ", ".join(wrong) or f"num_key_value_heads={kv_heads} (or be a multiple of it)"
        raise ConfigError(
            f"meshes.sampler.tensor must divide {unmet} of the model in {checkpoint.directory}, got {tensor}; "
            f"use as many devices as one of {fitting}"
        )


def sampler_sizes(checkpoint: Checkpoint) -> list[int]:
    """Return the numbers of devices that the sampler can split the model over, ascending."""
    _, possible = _divisors(checkpoint, "tensor", 1)
    counts = {checkpoint.config.num_key_value_heads, checkpoint.config.global_kv_heads}
    return [size for size in possible if all(heads % size == 0 or size % heads == 0 for heads in counts)]


def _divisors(checkpoint: Checkpoint, axis: str, size: int) -> tuple[list[str], list[int]]:
    """Return the axis's settings that ``size`` does not divide, as "name=value", and sizes that divide all of them."""
    named = {name: getattr(checkpoint.config, name) for name in checkpoint.family.divisible[axis]}
    values = {name: value for name, value in named.items() if value is not None}
    common = math.gcd(*values.values())
    wrong = [f"{name}={value}" for name, value in values.items() if size < 1 or value % size]
    return wrong, [divisor for divisor in range(1, common + 1) if common % divisor == 0]


# --- config.json -----------------------------------------------------------------------------------------------------


def abstract_checkpoint(directory: Path) -> Checkpoint:
    """Read only the config.json of a checkpoint, whose weights need not exist.

    Raises:
        CheckpointError: for a missing or broken file, an unsupported family, or an unsupported setting.
    """
    path = directory.expanduser() / CONFIG_FILE
    if path.with_name(ADAPTER_SETTINGS_FILE).is_file() and not path.is_file():
        raise CheckpointError(
            f"model.path must be a whole model, got {directory}, which holds adapters alone; merge them into their "
            "model (PEFT's merge_and_unload) and save that, or set model.path to the base and model.lora.path to this"
        )
    hf_config = read_json(path)
    kind = str(hf_config.get("model_type")).removesuffix("_text")
    if kind in ("gemma3", "gemma4"):  # no other model imports these families
        hf_config = import_module(f"tpu_grpo.models.families.{kind}").text_settings(hf_config)
    else:
        hf_config = with_older_names(hf_config)
    family = _family_of(hf_config, path)
    for rule in family.rules:
        if rule.setting not in hf_config:
            if rule.required:
                raise CheckpointError(
                    f"{path}: {rule.setting} must be {rule.accepted}, and it is left out; {rule.remedy}"
                )
        elif not rule.accepts(value := hf_config[rule.setting]):
            raise CheckpointError(f"{path}: {rule.setting} must be {rule.accepted}, got {value!r}; {rule.remedy}")
    return Checkpoint(directory, hf_config, family, _decoder_config(hf_config, family, path), tensors={})


def _family_of(hf_config: Mapping[str, Any], path: Path) -> Family:
    model_type = hf_config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        reason, near = REFUSED.get(str(model_type), ("", ""))
        raise CheckpointError(
            f"{path}: model_type must be one of the supported families ({', '.join(FAMILIES)}), got {model_type!r}"
            f"{f' ({reason})' if reason else ''}; choose a checkpoint of one of them"
            f"{f', such as {near}' if near else ''}"
        )
    architectures = hf_config.get("architectures")
    if architectures != [family.architecture]:
        raise CheckpointError(
            f"{path}: architectures must be [{family.architecture!r}] for model_type {model_type}, got "
            f"{architectures!r}; choose the causal language model's checkpoint"
        )
    return family


def _decoder_config(hf_config: Mapping[str, Any], family: Family, path: Path) -> DecoderConfig:
    wanted = fields(family.config)
    values: dict[str, Any] = {"rope_scaling": None, **family.defaults, **hf_config}
    sizes: list[Any] = [values.get(name) for name in ("hidden_size", "num_attention_heads")]
    if "head_dim" not in family.defaults and values.get("head_dim") is None and all(_is_a("int", n) for n in sizes):
        values["head_dim"] = sizes[0] // sizes[1]
    if missing := [field.name for field in wanted if field.name not in values]:
        raise CheckpointError(f"{path} must give {', '.join(missing)}, which it lacks; copy the model's own again")
    longest = {} if values.get("max_position_embeddings") is None else {"max_position_embeddings": "int"}
    kinds = {field.name: str(field.type) for field in wanted} | longest
    for name, given in kinds.items():
        value, kind = values[name], given.removesuffix(" | None")
        if kind in _KINDS and (value is not None or kind == given) and not _is_a(kind, value):
            raise CheckpointError(f"{path}: {name} must be {_KINDS[kind]}, got {value!r}; copy the model's own again")
    for name in ("num_hidden_layers", "num_experts"):
        if name in kinds and (values[name] or 0) > MOST:
            raise CheckpointError(
                f"{path}: {name} must be at most {MOST}, got {values[name]}; copy the model's own again"
            )
    config = family.config(**{field.name: values[field.name] for field in wanted})
    if contradiction := config.contradiction():
        raise CheckpointError(f"{path}: {contradiction}; copy the model's own config.json again")
    return config


def _is_a(kind: str, value: Any) -> bool:
    if kind == "bool" or isinstance(value, bool):
        return kind == "bool" and isinstance(value, bool)
    numbers, most = (int, 2**31) if kind == "int" else ((int, float), 1e38)  # as many as int32 and float32 hold
    return isinstance(value, numbers) and 0 < value < most


# --- safetensors -----------------------------------------------------------------------------------------------------


def _safetensors_files(directory: Path) -> tuple[Path, ...]:
    """Return the directory's safetensors files, which must include every file that the index names."""
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


def _read_headers(files: Iterable[Path]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        header = _read_header(file)
        dtypes = {tensor.dtype for tensor in header.values()}
        if not dtypes or not dtypes <= STORED_DTYPES.keys():
            raise CheckpointError(
                f"{file} must hold tensors of {', '.join(STORED_DTYPES)}, got "
                f"{', '.join(sorted(dtypes)) or 'no tensor'}; save the checkpoint in one of them"
            )
        if twice := sorted(header.keys() & tensors.keys()):
            raise CheckpointError(
                f"{file} and {tensors[twice[0]].file.name} both hold {listed(twice)}; every *.safetensors file of the "
                "directory is read: move the one that does not belong elsewhere"
            )
        tensors |= header
    return tensors


def _of_text(checkpoint: Checkpoint, tensors: dict[str, StoredTensor]) -> Checkpoint:
    """Add the stored tensors that are the text model's, under its names; raises CheckpointError if there are none."""
    own = {stored: name for stored in tensors if (name := checkpoint.family.renamed(stored)) is not None}
    left_out = tuple(tensors.keys() - own.keys())
    if not own:
        raise CheckpointError(
            f"{checkpoint.directory} must hold the tensors of a text model, got {len(tensors)} for images alone: "
            f"{listed(sorted(left_out), 3)}; copy all *.safetensors files of the model"
        )
    return replace(checkpoint, tensors={name: tensors[stored] for stored, name in own.items()}, left_out=left_out)


def _apart(tensors: dict[str, StoredTensor], checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Split fused tensors into their parts, except those of a wrong size, which `_verify_tensors` then reports."""
    shapes = checkpoint.shapes
    for name, parts in checkpoint.family.fused_tensors(checkpoint.config).items():
        sizes = [math.prod(shapes[part]) for part in parts]
        fused = tensors.get(name)
        if fused is None or math.prod(fused.shape) != sum(sizes) or fused.shape[-1:] != shapes[parts[0]][-1:]:
            continue
        del tensors[name]
        start = fused.start
        for part, size in zip(parts, sizes, strict=True):
            tensors[part] = replace(fused, shape=shapes[part], start=start)
            start += size * STORED_DTYPES[fused.dtype].itemsize
    return tensors


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """Read a file's header: its length in eight bytes, then JSON with the dtype, shape and offsets of each tensor.

    ``safe_open`` only verifies the header, because with thousands of tensors it takes a millisecond to return each.
    """
    try:
        with open_file(file) as opened, safe_open(file, framework="numpy"):
            length = int.from_bytes(opened.read(8), "little")
            header = parse_json(opened.read(length))
    except (OSError, ValueError, SafetensorError) as error:
        size = file.stat().st_size if file.exists() else 0
        raise CheckpointError(
            f"{file} ({size} bytes) is not a whole safetensors file: {error}; it may be cut off: copy it again"
        ) from error
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(file, tensor["dtype"], tuple(tensor["shape"]), 8 + length + tensor["data_offsets"][0])
        for name, tensor in header.items()
    }


def _verify_tensors(checkpoint: Checkpoint) -> None:
    expected, tensors = checkpoint.shapes, checkpoint.tensors
    ignored = {"lm_head.weight"} if checkpoint.config.tie_word_embeddings else set[str]()  # as Hugging Face ignores it
    missing = [name for name in expected if name not in tensors]
    unexpected = sorted(tensors.keys() - expected.keys() - ignored)
    misshapen = [
        f"{name} (expected {list(shape)}, got {list(tensors[name].shape)})"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    lists = {"missing": missing, "unexpected": unexpected, "of another shape": misshapen}
    if found := [f"{len(names)} {kind}: {listed(names)}" for kind, names in lists.items() if names]:
        raise CheckpointError(
            f"the tensors in {checkpoint.directory} do not follow from its {CONFIG_FILE}; {'; '.join(found)}; see that "
            "every file arrived and that all belong to one model"
        )


# --- what all readers of a directory share ---------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        CheckpointError: when the file is missing, is not JSON, or holds JSON that is not an object.
    """
    try:
        value = parse_json(read_file(path), whole=True)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; a checkpoint directory needs it beside its *.safetensors files"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}; copy it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got a {type(value).__name__}; copy it again")
    return value


def check_tokenizer_files(directory: Path) -> None:
    """Check that tokenizer_config.json and tokenizer.json exist; raises CheckpointError if one does not."""
    for name in (TOKENIZER_SETTINGS_FILE, "tokenizer.json"):
        if not (directory / name).is_file():
            raise CheckpointError(
                f"a checkpoint directory must hold {name}, not found in {directory}; copy it from the model's "
                "publisher, or write it with transformers' save_pretrained of a fast tokenizer"
            )


def tokenizer_settings(directory: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, with names of transformers 5 changed to those of transformers 4; empty if missing.

    Raises:
        CheckpointError: when the file is not JSON, or holds JSON that is not an object.
    """
    path = directory / TOKENIZER_SETTINGS_FILE
    settings = read_json(path) if path.is_file() else {}
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    if "backend" in settings:  # of transformers 5; transformers 4 would make a LlamaTokenizer, which adds a BOS
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    return settings


def listed(names: Sequence[str], most: int = 10) -> str:
    """Join the first names and count the rest: ``listed(["a", "b", "c"], 2) == "a, b and 1 more"``; "none" if empty."""
    rest = len(names) - most
    return (", ".join(names[:most]) or "none") + (f" and {rest} more" if rest > 0 else "")
