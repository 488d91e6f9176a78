"""The array type of records that are filled with numpy on the host and read as jax arrays inside the compiled step."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    AnyArray = Any
    """A field is a numpy array on the host and a jax array in the step; no type checker can follow that."""
else:
    AnyArray = jax.Array | np.ndarray
