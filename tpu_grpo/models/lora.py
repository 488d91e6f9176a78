"""Puts LoRA adapters on a model with qwix: chooses the modules that get one, and sets their first values.

    modules = adapted_modules(checkpoint, config.model.lora)      # reads no tensor and needs no jax
    model = apply_lora(model, modules, config.model.lora, seed=config.run.seed)

A module computes ``x W + (x A) B * alpha / rank``. A is random and B zero at first, so the model is the base's. The
returned model shares the base's arrays. A and B are ``nnx.LoRAParam`` beside W, and have its name as a prefix:

    layers.3.attn.q_proj.w [D, N, H]   w_lora_a [D, rank]      w_lora_b [rank, N, H]
    layers.3.attn.o_proj.w [N, H, D]   w_lora_a [N, H, rank]   w_lora_b [rank, D]

Keys and values that are one module, as Gemma's ``kv_einsum``, get one adapter: they have A in common.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from tpu_grpo.config import LoraSection, parse_layers
from tpu_grpo.models.checkpoint import Checkpoint
from tpu_grpo.models.families import projections
from tpu_grpo.records.errors import ConfigError

if TYPE_CHECKING:
    from flax import nnx

_ADAPTABLE = re.compile(r"layers\.\*\.((?:attn|mlp)\.\w+_(?:proj|einsum))\.\w+")
"""Matches the weights of modules that are one matrix product; experts are parameters of a larger module."""


def adaptable_modules(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return all modules that can have an adapter, layer by layer."""
    found = [_ADAPTABLE.fullmatch(rule.source) for rule in checkpoint.weight_rules]
    names = dict.fromkeys(match[1] for match in found if match)
    return tuple(f"layers.{layer}.{name}" for layer in range(checkpoint.config.num_hidden_layers) for name in names)


def adapted_modules(checkpoint: Checkpoint, section: LoraSection) -> tuple[str, ...]:
    """Return the modules that get an adapter: those in which, or in all of whose projections, the targets are found.

    Raises:
        ConfigError: for layers the model lacks, or an expression that is found in no module or in a part of one.
    """
    possible = adaptable_modules(checkpoint)
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
    """Return the numbers of the layers that a setting names.

    Raises:
        ConfigError: for one that the model lacks.
    """
    layers, count = parse_layers(text), checkpoint.config.num_hidden_layers
    if layers[-1] >= count:
        raise ConfigError(
            f"{setting} must name layers of the model in {checkpoint.directory}, which has {count} (0-{count - 1}), "
            f"got {text}"
        )
    return frozenset(layers)


def apply_lora(model: nnx.Module, modules: Collection[str], section: LoraSection, *, seed: int) -> nnx.Module:
    """Return the model with adapters: A is random (He et al. 2015) and B is zero.

    The values depend on the seed, and not on devices or hosts. An adapter is split over the mesh as the weight is along
    the dimensions that both have. The adapters of an abstract model are abstract.
    """
    import jax
    import qwix
    from flax import nnx

    from tpu_grpo.models.abstract import is_abstract, with_shardings

    paths = "|".join(re.escape(name.replace(".", "/")) for name in modules)
    provider = qwix.LoraProvider(module_path=paths, rank=section.rank, alpha=section.alpha)
    definition, base = nnx.split(model)
    definitions: list[Any] = []

    def adapters(base: nnx.State) -> nnx.State:
        # qwix makes them in a forward pass, of which nothing else is left in the compiled program
        plain: Any = nnx.merge(definition, base)
        with_lora = qwix.apply_lora_to_model(plain, provider, **plain.get_model_input(), rngs=nnx.Rngs(seed))
        adapted_definition, lora, _ = nnx.split(with_lora, nnx.LoRAParam, ...)
        definitions.append(adapted_definition)
        return lora

    mesh = jax.tree.leaves(base)[0].sharding.mesh
    lora = with_shardings(jax.eval_shape(adapters, base), mesh)
    if not is_abstract(base):
        lora = jax.jit(adapters, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, lora))(base)
    made = {".".join(map(str, path[:-1])) for path, _ in nnx.to_flat_state(lora)}
    assert made == set(modules), f"qwix made no adapters for {set(modules) - made}"
    return nnx.merge(definitions[-1], lora, base, copy=True)  # own variables, same arrays


def cast_adapters(model: nnx.Module, dtype: str) -> None:
    """Cast the adapters, abstract ones too, to a type in place."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype), sharding=leaf.sharding)
        return leaf.astype(dtype)

    nnx.update(model, jax.tree.map(cast, nnx.state(model, nnx.LoRAParam)))
