"""The plan of a weight sync: which leaf of the trainer becomes which of the sampler, and in which groups they move.

    moves = plan_sync(checkpoint.weight_rules, named_leaves(trainer_params), replicas.weight_specs)
    groups = group_moves([move for move in moves if not move.shared], limit_bytes=32 * 2**20)

A leaf whose shape, type and layout are the same on both sides is shared, not copied; that is safe because the trainer
never donates its parameters. A leaf with an adapter is merged with it on the way.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array

from tpu_grpo.errors import WeightsError
from tpu_grpo.families import Transform, WeightRule, same
from tpu_grpo.weights.adapters import adapters_of, merged

Leaves = Mapping[str, Array]
Spec = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class LeafMove:
    """How one sampler leaf comes about."""

    sources: tuple[str, ...]
    """The trainer's leaf, and the two parts of its adapter if it has one."""
    target: str
    transform: Transform
    source_specs: tuple[Spec, ...]
    spec: Spec
    shared: bool
    frozen: bool = False
    """Whether no update changes it, so that it moves once."""
    scale: float = 0.0
    """Of the adapter: alpha / rank."""

    @property
    def source(self) -> str:
        """The trainer's leaf."""
        return self.sources[0]

    @property
    def merges(self) -> bool:
        """Whether it has an adapter."""
        return len(self.sources) > 1

    def result(self, leaves: Sequence[Array]) -> Array:
        """The sampler's leaf, of the values of the sources."""
        leaf = merged(leaves[0], leaves[1], leaves[2], self.scale) if self.merges else leaves[0]
        return self.transform(leaf, self.spec.shape).astype(self.spec.dtype)

    @property
    def bytes(self) -> int:
        """Size of the sampler's leaf; 0 when it is shared."""
        return 0 if self.shared else int(np.prod(self.spec.shape)) * self.spec.dtype.itemsize

    @property
    def bytes_per_device(self) -> int:
        """What of it lies on one of the sampler's devices."""
        return bytes_per_device(self.spec)

    @property
    def signature(self) -> tuple[Any, ...]:
        """What a program that carries it out depends on; the names are not among it."""
        specs = (*self.source_specs, self.spec)
        return self.transform, self.scale, *((s.shape, s.dtype, s.sharding) for s in specs)


def bytes_per_device(spec: Spec) -> int:
    """Size of a leaf's shard."""
    assert isinstance(spec.sharding, NamedSharding)
    return int(np.prod(spec.sharding.shard_shape(spec.shape))) * spec.dtype.itemsize


def named_leaves(params: nnx.State) -> dict[str, Array]:
    """The arrays of a trainer's state by dotted path, e.g. ``layers.0.attn.q_proj.w``."""
    return {".".join(map(str, path)): leaf.value for path, leaf in nnx.to_flat_state(params)}


def plan_sync(
    rules: Sequence[WeightRule],
    source: Leaves | Mapping[str, Spec],
    target: Mapping[str, Spec],
    *,
    lora_alpha: float = 0.0,
    frozen: Collection[str] = (),
) -> tuple[LeafMove, ...]:
    """Match every leaf of the trainer with a leaf of the sampler.

    ``lora_alpha`` is that of the adapters among the leaves, and ``frozen`` names leaves that no update changes.

    Raises:
        WeightsError: listing the names that match on one side only, or leaves whose shapes do not correspond.
    """
    adapters = adapters_of(source)
    parts = {part for pair in adapters.values() for part in pair}
    found = {name: _match(name, rules) for name in source if name not in parts}
    filled_by = {match[1]: (name, match[0]) for name, match in found.items() if match is not None}
    unknown = sorted(name for name, match in found.items() if match is None)
    missing, extra = sorted(target.keys() - filled_by.keys()), sorted(filled_by.keys() - target.keys())
    if unknown or missing or extra:
        raise WeightsError(
            f"trainer and sampler parameters do not correspond: trainer leaves without a rule {unknown}, "
            f"sampler leaves that nothing fills {missing}, rules whose target the sampler lacks {extra}"
        )
    moves = []
    for name, spec in target.items():
        leaf, rule = filled_by[name]
        sources = {part: source[part] for part in (leaf, *adapters.get(leaf, ()))}
        moves.append(_move(sources, rule, name, spec, lora_alpha, leaf in frozen and leaf not in adapters))
    return tuple(moves)


def group_moves(moves: Sequence[LeafMove], limit_bytes: int) -> list[tuple[LeafMove, ...]]:
    """Moves that are carried out by one program each, of at most ``limit_bytes`` per device; a larger leaf is alone.

    As many whole layers as fit make a group; of a layer that does not fit, as many leaves as do. So the groups of equal
    layers are alike and share programs.
    """
    groups: list[list[LeafMove]] = [[]]
    for layer in _layers(moves):
        fits = _bytes_per_device(layer) <= limit_bytes
        for unit in [layer] if fits else [[move] for move in layer]:
            if groups[-1] and _bytes_per_device([*groups[-1], *unit]) > limit_bytes:
                groups.append([])
            groups[-1] += unit
        if not fits:
            groups.append([])
    return [tuple(group) for group in groups if group]


def _layers(moves: Iterable[LeafMove]) -> Iterable[list[LeafMove]]:
    """The moves of every layer, and each that is outside of them."""
    layers: dict[str, list[LeafMove]] = {}
    for move in moves:
        layer = re.search(r"\.\d+\.", move.target)
        layers.setdefault(layer[0] if layer else move.target, []).append(move)
    return layers.values()


def _bytes(moves: Iterable[LeafMove]) -> int:
    return sum(move.bytes for move in moves)


def _bytes_per_device(moves: Iterable[LeafMove]) -> int:
    return sum(move.bytes_per_device for move in moves)


def _match(name: str, rules: Sequence[WeightRule]) -> tuple[WeightRule, str] | None:
    for rule in rules:
        if found := re.fullmatch(re.escape(rule.source).replace(r"\*", r"(\d+)"), name):
            return rule, rule.target.replace("*", found.group(1)) if found.groups() else rule.target
    return None


def _move(
    sources: Mapping[str, Array | Spec], rule: WeightRule, target: str, spec: Spec, alpha: float, frozen: bool
) -> LeafMove:
    (name, leaf), *adapter = sources.items()
    try:
        shape = jax.eval_shape(lambda x: rule.transform(x, spec.shape), leaf).shape
    except (TypeError, ValueError, IndexError) as error:
        raise WeightsError(f"{name} {list(leaf.shape)} cannot become {list(spec.shape)}: {error}") from error
    if shape != spec.shape:
        raise WeightsError(f"{name} {list(leaf.shape)} becomes {list(shape)}, the sampler wants {list(spec.shape)}")
    alike = leaf.dtype == spec.dtype and _same_layout(leaf.sharding, spec.sharding, leaf.ndim)
    return LeafMove(
        sources=tuple(sources),
        target=target,
        transform=rule.transform,
        source_specs=tuple(jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=s.sharding) for s in sources.values()),
        spec=spec,
        shared=rule.transform is same and alike and not adapter,
        frozen=frozen,
        scale=alpha / adapter[0][1].shape[-1] if adapter else 0.0,
    )


def _same_layout(source: Any, target: Any, rank: int) -> bool:
    return source is not None and source.device_set == target.device_set and source.is_equivalent_to(target, rank)


def describe_plan(moves: Sequence[LeafMove], groups: int) -> list[str]:
    """A line per kind of leaf (layers together), and the sums."""
    kinds: dict[tuple[str, ...], list[LeafMove]] = {}
    for move in moves:
        names = (re.sub(r"\.\d+\.", ".*.", name) for name in (move.source, move.target))
        how = "shared" if move.shared else getattr(move.transform, "__name__", str(move.transform))
        how = "merged, " * move.merges + how + ", once" * move.frozen
        types = f"{move.source_specs[0].dtype} -> {move.spec.dtype}"
        kinds.setdefault((*names, how, types), []).append(move)
    lines = [
        f"  {len(found):3d} x {source} -> {target}  {how}, {types}, {_bytes(found) / 2**20:,.1f} MiB"
        for (source, target, how, types), found in kinds.items()
    ]
    shared = sum(move.shared for move in moves)
    total = f"{len(moves)} leaves, {shared} shared, {_bytes(moves) / 2**20:,.1f} MiB move in {groups} programs"
    return [total, *lines]
