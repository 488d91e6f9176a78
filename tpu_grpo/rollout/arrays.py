"""The array type of records that are filled with numpy on the host and read as jax arrays inside the compiled step."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    AnyArray = Any
    """Both at once, which a type checker cannot follow."""
else:
    AnyArray = jax.Array | np.ndarray
