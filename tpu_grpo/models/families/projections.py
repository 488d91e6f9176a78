"""Names the projections that a module of Tunix's models holds; most hold the one that they are named after."""

from collections.abc import Mapping

_HELD: Mapping[str, tuple[str, ...]] = {
    "q_einsum": ("q_proj",),
    "kv_einsum": ("k_proj", "v_proj"),
    "qkv_einsum": ("q_proj", "k_proj", "v_proj"),
    "attn_vec_einsum": ("o_proj",),
}


def projections(module: str) -> tuple[str, ...]:
    """Return the paths of a module's projections.

    >>> projections("layers.3.attn.kv_einsum")
    ('layers.3.attn.k_proj', 'layers.3.attn.v_proj')
    >>> projections("layers.3.mlp.up_proj")
    ('layers.3.mlp.up_proj',)
    """
    parent, _, name = module.rpartition(".")
    return tuple(f"{parent}.{projection}" for projection in _HELD.get(name, (name,)))
