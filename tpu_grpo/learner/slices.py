"""Adds up what the trainers of several slices compute, over the data-center network that joins the slices.

Each slice holds all parameters and the optimizer's state, on a mesh of its own devices. The micro-batches of an update
go to the slices in turn. Before the optimizer's step, the slices add up their gradients by programs on the mesh that
joins theirs. All slices then make the same step, so that their parameters stay equal:

    slice 0    micro-batches 0, 2, 4    sum of gradients \\
                                                          > sum over slices    step on slice 0, step on slice 1
    slice 1    micro-batches 1, 3       sum of gradients /

No other program of an update runs on several slices.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array

from tpu_grpo.hosts import Hosts, own_slice, packed, unpacked
from tpu_grpo.hosts.sharded_arrays import alike, bytes_per_device, from_shards, mesh_axes
from tpu_grpo.learner.parameters import whole

AXIS = "slice"


class Slices:
    """The slices of a run, as seen from one of them.

    Args:
        joined: the trainers' meshes of all slices, along a first axis, ``slice``; None for one slice, which adds and
            exchanges nothing.
    """

    def __init__(self, joined: Mesh | None = None):
        self._joined: Any = joined
        self.count = 1 if joined is None else joined.shape[AXIS]
        self.index = 0 if joined is None else own_slice([list(grid.flat) for grid in np.asarray(joined.devices)])
        """The number of this process's slice."""
        self._programs: dict[tuple[P, ...], Any] = {}

    def own[T](self, items: Sequence[T], nothing: Callable[[], T]) -> list[T]:
        """Return this slice's share of the items, of which every slice gets equally many; ``nothing()`` fills up."""
        missing = -len(items) % self.count
        return [*items, *(nothing() for _ in range(missing))][self.index :: self.count]

    def of_all[T](self, name: str, own: Sequence[T], trainers: Hosts) -> list[T]:
        """Return the items of all slices, in the order in which ``own`` has dealt them; all trainers must call this.

        Args:
            name: describes the items, and must be the same on every host.
            own: trees of numbers on the host, with the same structure in all slices.
            trainers: the hosts with devices of a trainer.
        """
        if self.count == 1:
            return list(own)
        leaves, structure = jax.tree.flatten(list(own))
        read = lambda _, text: unpacked(text, len(leaves)).tolist()  # noqa: E731
        answers = trainers.share(name, packed(np.array(leaves, np.float64)), str, read)
        firsts = answers[:: len(answers) // self.count]  # hosts are numbered slice by slice
        return [item for turn in zip(*map(structure.unflatten, firsts), strict=True) for item in turn]

    def add[T](self, tree: T) -> T:
        """Add up arrays over the slices; each sum takes the buffer of its array, and its sharding.

        One program for all gradients of Qwen3-8B would need 2 GiB of temporary memory, and about one of code.
        """
        if self.count == 1:
            return tree
        leaves, structure = jax.tree.flatten(tree)
        sums: list[Any] = [leaf[None] if leaf.ndim == 0 else leaf for leaf in leaves]
        for places in alike(dict(enumerate(sums))):
            across = [from_shards(self._across(sums[place]), sums[place]) for place in places]
            for place, total in zip(places, self._adding(across)(across), strict=True):
                sums[place] = from_shards(sums[place], total)
        return structure.unflatten(
            [jax.device_put(s[0], x.sharding) if x.ndim == 0 else s for s, x in zip(sums, leaves, strict=True)]
        )

    def lower_add(self, tree: Any) -> jax.stages.Lowered:
        """Lower the program of `add` that adds the most bytes, for descriptions of arrays."""
        rows = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim]
        groups = [[self._across(rows[place]) for place in places] for places in alike(dict(enumerate(rows)))]
        largest = max(groups, key=lambda group: len(group) * bytes_per_device(group[0]))
        return self._adding(largest).lower(largest)

    def gathered(self, own: Iterable[Mapping[str, Array]]) -> list[dict[str, np.ndarray]]:
        """Gather the arrays of the micro-batches of all slices on every host, in the order in which `own` deals.

        Every host with devices of a trainer must call this.
        """

        def of_all(value: Array) -> np.ndarray:
            across = value if self.count == 1 else from_shards(self._across(value), value)
            return whole(across).reshape(self.count, *value.shape)

        turns = [{name: of_all(value) for name, value in arrays.items()} for arrays in own]
        return [{name: value[n] for name, value in turn.items()} for turn in turns for n in range(self.count)]

    def _adding(self, rows: Sequence[Any]) -> Any:
        """Return the program that sums arrays over the slices; ``rows`` are global arrays, or descriptions of them."""
        specs = tuple(row.sharding.spec for row in rows)
        if specs not in self._programs:
            add = lambda rows: [jax.lax.psum(row, AXIS) for row in rows]  # noqa: E731
            by_device = jax.shard_map(
                add, mesh=self._joined, in_specs=(list(specs),), out_specs=list(specs), check_vma=False
            )
            self._programs[specs] = jax.jit(by_device, donate_argnums=0)
        return self._programs[specs]

    def _across(self, row: Any) -> jax.ShapeDtypeStruct:
        """Describe the arrays of all slices as one array, whose first dimension has those of the slices in order."""
        first, *others = mesh_axes(row)
        sharding = NamedSharding(self._joined, P((AXIS, *first), *others))
        return jax.ShapeDtypeStruct((self.count * row.shape[0], *row.shape[1:]), row.dtype, sharding=sharding)


ONE_SLICE = Slices()
