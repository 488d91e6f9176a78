"""Adds LoRA adapters to a model with qwix, and writes and reads files of adapters.

    modules = adapted_modules(checkpoint, config.model.lora)      # reads no tensor and needs no jax
    model = apply_lora(model, modules, config.model.lora, seed=config.run.seed)

A module computes ``x W + (x A) B * alpha / rank``. At first A is random and B zero, so the model equals the base. The
returned model shares the base's arrays. A and B are ``nnx.LoRAParam`` named after W (width D, N heads of width H):

    layers.3.attn.q_proj.w [D, N, H]   w_lora_a [D, rank]      w_lora_b [rank, N, H]
    layers.3.attn.o_proj.w [N, H, D]   w_lora_a [N, H, rank]   w_lora_b [rank, D]

If one module computes keys and values, as Gemma's ``kv_einsum`` does, it gets one adapter, with one A for both.

Files have the layout of Hugging Face's PEFT library:

    <directory>/adapter_model.safetensors   the two matrices of every module
    <directory>/adapter_config.json         rank, alpha, modules and base model

Names and shapes in the files and, below each, in the trainer's model:

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   [rank, D]
    layers.0.attn.q_proj.w_lora_a                                    [D, rank]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   [N*H, rank]
    layers.0.attn.q_proj.w_lora_b                                    [rank, N, H]

A module of P > 1 projections has one A, and a B of [rank, P, N, H]. Files hold it as P modules with equal A.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from tpu_grpo.config import LoraSection, parse_layers
from tpu_grpo.models.checkpoint import ADAPTER_SETTINGS_FILE, Checkpoint, listed, read_json
from tpu_grpo.models.families.leaves import projections
from tpu_grpo.models.hf_directory import save_tensors
from tpu_grpo.records.errors import CheckpointError, ConfigError
from tpu_grpo.records.json_files import write_json

if TYPE_CHECKING:
    from flax import nnx

TENSORS_FILE, SETTINGS_FILE = "adapter_model.safetensors", ADAPTER_SETTINGS_FILE
_ADAPTABLE = re.compile(r"(layers\.\d+\.(?:attn|mlp)\.\w+_(?:proj|einsum))\.\w+")
"""Matches the weights of modules that are one matrix product. Experts do not match: one module holds all of them."""


def adaptable_modules(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the paths of all modules that can have an adapter, layer by layer."""
    leaves = checkpoint.family.all_leaves(checkpoint.config)
    found = [_ADAPTABLE.fullmatch(leaf.source) for leaf in leaves]
    return tuple(dict.fromkeys(match[1] for match in found if match))


def adapted_modules(checkpoint: Checkpoint, section: LoraSection) -> tuple[str, ...]:
    """Return the paths of the modules that get adapters: ``targets`` matches their path, or all of their projections'.

    Raises:
        ConfigError: for layers that the model lacks, or targets that match no module, only some projections of a
            module, or the embedding or output head.
    """
    possible = adaptable_modules(checkpoint)
    for other in ("lm_head", "embedder", "embed_tokens"):  # unless the expression matches everything
        if re.search(section.targets, other) and not re.search(section.targets, "layers.0"):
            raise ConfigError(
                f"model.lora.targets must name modules of the layers, got {section.targets!r}, which is found in "
                f"{other}: embedding and output head get no adapters; leave it out, or train all parameters without "
                "model.lora.rank"
            )
    named = [name for name in possible if _is_named(name, section.targets)]
    if not named:
        first = (projection for name in possible if name.startswith("layers.0.") for projection in projections(name))
        kinds = ", ".join(projection.removeprefix("layers.0.") for projection in first)
        raise ConfigError(
            f"model.lora.targets must be found in the path of a module, got {section.targets!r}; every layer N has "
            f"layers.N. and {kinds}"
        )
    if section.layers is None:
        return tuple(named)
    layers = existing_layers(checkpoint, "model.lora.layers", section.layers)
    chosen = tuple(name for name in named if int(name.split(".")[1]) in layers)
    if not chosen:
        raise ConfigError(
            f"model.lora.targets={section.targets!r} must be found in a module of model.lora.layers={section.layers}, "
            f"found only in {named[0]} to {named[-1]}; change one of them"
        )
    return chosen


def _is_named(module: str, targets: str) -> bool:
    parts = projections(module)
    found = [re.search(targets, part) is not None for part in parts]
    if any(found) and not all(found):
        raise ConfigError(
            f"model.lora.targets must be found in all of {', '.join(parts)} or in none, because they are one module "
            f"with one adapter, got {targets!r}; name all of them"
        )
    return all(found) or re.search(targets, module) is not None


def existing_layers(checkpoint: Checkpoint, setting: str, text: str) -> frozenset[int]:
    """Return the numbers of the layers that a setting selects; raises ConfigError for a layer that the model lacks."""
    layers, count = parse_layers(text), checkpoint.config.num_hidden_layers
    if layers[-1] >= count:
        raise ConfigError(
            f"{setting} must name layers of the model in {checkpoint.directory}, which has {count} (0-{count - 1}), "
            f"got {text}"
        )
    return frozenset(layers)


def apply_lora(model: nnx.Module, modules: Collection[str], section: LoraSection, *, seed: int) -> nnx.Module:
    """Return the model with adapters: A is random (He et al. 2015) and B is zero.

    The values depend on the seed, but not on devices or hosts. An adapter is sharded like its weight along the
    dimensions that they share. The adapters of an abstract model are abstract.
    """
    import jax
    import qwix
    from flax import nnx

    from tpu_grpo.models.tunix_model import dotted, is_abstract, with_shardings

    paths = "|".join(re.escape(name.replace(".", "/")) for name in modules)
    provider = qwix.LoraProvider(module_path=paths, rank=section.rank, alpha=section.alpha)
    definition, base = nnx.split(model)
    definitions: list[Any] = []

    def adapters(base: nnx.State) -> nnx.State:
        # qwix makes adapters in a forward pass, the rest of which is eliminated in the compiled program
        plain: Any = nnx.merge(definition, base)
        with_lora = qwix.apply_lora_to_model(plain, provider, **plain.get_model_input(), rngs=nnx.Rngs(seed))
        adapted_definition, lora, _ = nnx.split(with_lora, nnx.LoRAParam, ...)
        definitions.append(adapted_definition)
        return lora

    mesh = jax.tree.leaves(base)[0].sharding.mesh
    lora = with_shardings(jax.eval_shape(adapters, base), mesh)
    if not is_abstract(base):
        lora = jax.jit(adapters, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, lora))(base)
    made = {dotted(path[:-1]) for path, _ in nnx.to_flat_state(lora)}
    assert made == set(modules), f"qwix made no adapters for {set(modules) - made}"
    return nnx.merge(definitions[-1], lora, base, copy=True)  # new variables that share the arrays


def cast_adapters(model: nnx.Module, dtype: str) -> None:
    """Cast the adapters (abstract ones too) to a dtype, in place."""
    import jax
    from flax import nnx

    from tpu_grpo.models.tunix_model import cast

    nnx.update(model, jax.tree.map(lambda leaf: cast(leaf, jax.numpy.dtype(dtype)), nnx.state(model, nnx.LoRAParam)))


# --- files -----------------------------------------------------------------------------------------------------------


def write_adapters(directory: Path, adapters: Mapping[str, np.ndarray], section: LoraSection, base: str) -> None:
    """Write the trainer's adapters, given by dotted name, for the base model ``base``; replaces the directory."""
    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write_adapter_files(unfinished, adapters, section, base)
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)


def write_adapter_files(directory: Path, adapters: Mapping[str, np.ndarray], section: LoraSection, base: str) -> None:
    """Write the adapters' two files (see the module) into an existing directory."""
    tensors = {part: matrix for name, value in adapters.items() for part, matrix in _published(name, value).items()}
    save_tensors(directory / TENSORS_FILE, tensors)
    write_json(directory / SETTINGS_FILE, _settings(section, {name.rpartition(".")[0] for name in adapters}, base))


def load_adapters(model: nnx.Module, section: LoraSection, checkpoint: Checkpoint) -> None:
    """Load the adapters in ``section.path`` into the model. All hosts read. Raises the errors of `read_adapters`."""
    import jax
    from flax import nnx

    from tpu_grpo.models.tunix_model import dotted

    own, state = read_adapters(model, section, checkpoint), nnx.state(model, nnx.LoRAParam)
    for path, leaf in nnx.to_flat_state(state):
        old, values = leaf[...], own[dotted(path)]
        leaf[...] = jax.make_array_from_callback(old.shape, old.sharding, lambda index, own=values: own[index])
    nnx.update(model, state)


def read_adapters(model: nnx.Module, section: LoraSection, checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Return the adapters in ``section.path`` by dotted name, in the shapes and dtypes of the model's own adapters.

    The tensors say which modules have adapters, and the settings their scales, by the rules of PEFT 0.21.2. B is
    multiplied by its scale / (alpha / rank). Lower ranks are padded with zeros, which training does not change.

    Raises:
        CheckpointError: for missing or broken files, adapters whose rank, alpha or modules are not the model's, and
            settings or tensors that change a model otherwise.
    """
    from flax import nnx

    from tpu_grpo.models.tunix_model import by_name

    assert section.path is not None
    assert section.rank is not None
    directory, leaves = section.path.expanduser(), by_name(nnx.state(model, nnx.LoRAParam))
    if not directory.is_dir():
        raise CheckpointError(
            f"model.lora.path must be a directory with {TENSORS_FILE} and {SETTINGS_FILE}, got {directory}, which is "
            "none; a run leaves its own under adapters/<step>"
        )
    pairs = _pairs(directory, section.alpha / section.rank, checkpoint)
    weights = {name.removesuffix("_lora_a"): name.rpartition(".")[0] for name in leaves if name.endswith("_a")}
    _check_modules(set(pairs), set(weights.values()), checkpoint, directory)
    found = {w: _joined([pairs.get(part) for part in _published_modules(m)]) for w, m in weights.items()}
    settings, rank = read_json(directory / SETTINGS_FILE), max(len(b) for _, b in found.values())
    alphas = settings.get("lora_alpha"), section.alpha
    for name, what, theirs, ours in (("alpha", "that", *alphas), ("rank", "a module's largest", rank, section.rank)):
        if theirs != ours:
            raise CheckpointError(
                f"model.lora.{name} must be {theirs}, {what} of the adapters in {directory}, got {ours}; set it so"
            )
    padded = {}
    for weight, (a, b) in found.items():
        more = rank - len(b)
        padded[f"{weight}_lora_a"] = np.pad(a, ((0, 0), (0, more)))
        padded[f"{weight}_lora_b"] = np.pad(b, ((0, more), (0, 0), (0, 0)))
    return {name: padded[name].reshape(leaf.shape).astype(leaf.dtype) for name, leaf in leaves.items()}


_Pair = tuple[np.ndarray, np.ndarray]
"""A [r, inputs] and B [outputs, r] of a projection, in float32."""


def _pairs(directory: Path, unit: float, checkpoint: Checkpoint) -> dict[str, _Pair]:
    """Return the pairs of all projections with an adapter, by their names in the checkpoint; B is multiplied by its
    scale / ``unit``. The adapter of a fused projection is split as the projection is."""
    settings, file = _peft_settings(directory / SETTINGS_FILE), directory / TENSORS_FILE
    try:
        left = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}; copy it again") from error
    parts_of: dict[str, tuple[str, ...]]
    parts_of = {part: (part,) for module in adaptable_modules(checkpoint) for part in _published_modules(module)}
    for whole, names in checkpoint.family.fused_tensors(checkpoint.config).items():
        if set(parts := tuple(name.removesuffix(".weight") for name in names)) <= parts_of.keys():
            parts_of[whole.removesuffix(".weight")] = parts
    pairs, shapes = dict[str, _Pair](), checkpoint.shapes
    for whole, parts in parts_of.items():
        names = [f"base_model.model.{whole}.lora_{x}.weight" for x in "AB"]
        if not left.keys() & set(names):
            continue
        rank, scale = _rank_and_scale(settings, whole, directory / SETTINGS_FILE)
        rows = [shapes[f"{part}.weight"][0] for part in parts]
        wanted = {names[0]: (rank, shapes[f"{parts[0]}.weight"][1]), names[1]: (sum(rows), rank)}
        for name, shape in wanted.items():
            if name not in left or left[name].shape != shape:
                has = list(left[name].shape) if name in left else "none"
                raise CheckpointError(
                    f"{file} must hold {name} {list(shape)}, got {has}; give the adapters of this model"
                )
        a, b = (left.pop(name).astype(np.float32) for name in names)
        own = np.split(b * np.float32(scale / unit), np.cumsum(rows)[:-1])
        pairs |= {part: (a, each) for part, each in zip(parts, own, strict=True)}
    if left or not pairs:
        raise CheckpointError(
            f"{file} must hold adapters of projections in the model's layers and nothing else, got {len(pairs)} of "
            f"them, else {listed(sorted(left), most=3)} (bias={settings.get('bias')!r} in {SETTINGS_FILE}); {_MERGE}"
        )
    return pairs


_MERGE = "merge them into their model (PEFT's merge_and_unload), save that, and set model.path to it"
_READ = (
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "peft_type"),
    *("bias", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),  # as the tensors say
    *("task_type", "base_model_name_or_path", "revision", "auto_mapping", "peft_version", "inference_mode"),
    *("lora_dropout", "fan_in_fan_out", "megatron_core", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
)
"""Settings of PEFT that are applied, or do not change what a trained adapter computes in the models here."""
_KEEPS_BASE = ("none", "true", "false", "gaussian", "eva", "orthogonal", "mica")
"""The values of init_lora_weights that leave the base model's weights as they are."""


def _peft_settings(path: Path) -> dict[str, Any]:
    """Read adapter_config.json; raises CheckpointError if it has settings that change the model in other ways."""
    settings = read_json(path)
    wrong = [name for name, value in settings.items() if value and name not in _READ]
    allowed = {"peft_type": ("lora",), "init_lora_weights": _KEEPS_BASE}
    wrong += [name for name, values in allowed.items() if str(settings.get(name)).lower() not in values]
    if wrong:
        raise CheckpointError(
            f"{path} must have no setting that changes the model in another way than A and B, got "
            f"{', '.join(f'{name}={str(settings.get(name))[:60]}' for name in wrong)}; {_MERGE}"
        )
    return settings


def _rank_and_scale(settings: Mapping[str, Any], module: str, path: Path) -> tuple[int, float]:
    """Return the rank and scale of a module's adapter: of patterns the first whose end of a path matches counts."""

    def value(patterns: str, default: str) -> Any:
        found = (settings.get(patterns) or {}).items()
        return next((v for key, v in found if re.match(rf"(.*\.)?({key})$", module)), settings.get(default))

    try:
        rank, alpha = value("rank_pattern", "r"), value("alpha_pattern", "lora_alpha")
        return rank, alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    except (re.error, AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(
            f"{path} must give r, lora_alpha and their patterns as PEFT does, got for {module}: {error}; copy it again"
        ) from error


def _check_modules(pairs: Collection[str], ours: set[str], checkpoint: Checkpoint, directory: Path) -> None:
    possible = adaptable_modules(checkpoint)
    theirs = [module for module in possible if any(part in pairs for part in _published_modules(module))]
    if set(theirs) == ours:
        return
    layers_of: dict[str, list[str]] = {}
    for module in theirs:
        _, layer, kind = module.split(".", 2)
        layers_of.setdefault(kind, []).append(layer)
    count = checkpoint.config.num_hidden_layers
    targets = (kind if len(at) == count else f"layers.({'|'.join(at)}).{kind}" for kind, at in layers_of.items())
    besides, lacks = sorted(set(theirs) - ours), sorted(ours - set(theirs))
    raise CheckpointError(
        f"model.lora.targets and model.lora.layers must give the modules of the adapters in {directory}, which has "
        f"{listed(besides, most=3)} besides and lacks {listed(lacks, most=3)}; set "
        f"model.lora.targets='{'|'.join(targets)}' and leave out model.lora.layers"
    )


def _joined(pairs: Sequence[_Pair | None]) -> _Pair:
    """Return A [inputs, r] and B [r, P, outputs] of a module of P projections, some of which may have no adapter.

    Projections with the same A share its columns; r is the sum of the ranks of different ones.
    """
    columns: list[np.ndarray] = []
    for a, _ in filter(None, pairs):
        if not any(np.array_equal(a, other) for other in columns):
            columns.append(a)
    outputs = next(len(pair[1]) for pair in pairs if pair is not None)

    def rows(a: np.ndarray) -> list[np.ndarray]:
        none = np.zeros((len(a), outputs), np.float32)
        return [none if pair is None or not np.array_equal(pair[0], a) else pair[1].T for pair in pairs]

    return np.concatenate(columns).T, np.concatenate([np.stack(rows(a), axis=1) for a in columns])


def _settings(section: LoraSection, modules: Collection[str], base: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": section.rank,
        "lora_alpha": section.alpha,
        "target_modules": sorted(part for module in modules for part in _published_modules(module)),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _published_modules(module: str) -> list[str]:
    return [f"model.{part.replace('.attn.', '.self_attn.')}" for part in projections(module)]


def _published(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """Convert an adapter's leaf to PEFT's matrices, by their names in the file.

    ``w_lora_a`` [*inputs, rank] becomes lora_A [rank, inputs]; ``w_lora_b`` becomes lora_B [outputs, rank]. All
    projections of a module get the same lora_A, and each gets its own part of lora_B.
    """
    module, _, leaf = name.rpartition(".")
    names = [f"base_model.model.{part}.lora_{leaf[-1].upper()}.weight" for part in _published_modules(module)]
    is_a = name.endswith("_a")
    parts = [value] * len(names) if is_a or len(names) == 1 else np.moveaxis(value, 1, 0)
    matrices = [part.reshape(-1, part.shape[-1]) if is_a else part.reshape(part.shape[0], -1) for part in parts]
    return {name: np.ascontiguousarray(matrix.T) for name, matrix in zip(names, matrices, strict=True)}
