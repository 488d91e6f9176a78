"""Small Gemma 4 checkpoints with more layers than its pattern is long, and windows shorter than the tests' rows."""

from pathlib import Path
from typing import Any

from tests.models.random_checkpoint import GEMMA4_EXPERTS, write_random

PUBLISHED: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "final_logit_softcapping": 30.0,
    "layer_types": ([*["sliding_attention"] * 5, "full_attention"] * 2)[4:],
    "layers": 8,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}
SHAPES: dict[str, dict[str, Any]] = {
    "31b": PUBLISHED | {"heads": 8, "kv_heads": 4, "num_global_key_value_heads": 2, "sliding_window": 7},
    "26b": PUBLISHED | GEMMA4_EXPERTS | {"hidden": 48, "sliding_window": 10, "num_global_key_value_heads": 1},
    "values": PUBLISHED | {"attention_k_eq_v": False, "num_global_key_value_heads": None, "sliding_window": 5},
}
"""Options of `write_random`, after the published sizes of these names; the last one has values everywhere."""
TWO_KINDS: dict[str, Any] = {"layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
"""Options for the smallest model, of any Gemma, that has a layer with a window and one without."""


def write_shape(directory: Path, shape: str, **changed: Any) -> Path:
    return write_random("gemma4_text", directory, **(dict[str, Any](scale=0.12) | SHAPES[shape] | changed))
