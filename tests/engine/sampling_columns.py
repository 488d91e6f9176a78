"""Sampling settings of some rows, for tests of the sampler."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from tpu_grpo.engine.sampling import SamplingColumns


def columns(rows: int = 1, **settings: Any) -> SamplingColumns:
    """Return the same settings for all rows, with a sample number per row; filters are neutral unless given."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | settings
    key = np.zeros((rows, 4), np.uint32)
    key[:, 0], key[:, 3] = 11, np.arange(rows)  # one seed, a sample number per row
    return SamplingColumns(
        temperature=jnp.full(rows, values["temperature"], jnp.float32),
        top_k=jnp.full(rows, values["top_k"], jnp.int32),
        top_p=jnp.full(rows, values["top_p"], jnp.float32),
        min_p=jnp.full(rows, values["min_p"], jnp.float32),
        key=jnp.asarray(key),
        position=jnp.full(rows, 7, jnp.int32),
    )
