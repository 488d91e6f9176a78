"""What an update leaves: its record, the state for the next one, and the sums of its passes before it."""

from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

from tpu_grpo.learner.entropy import EntropyState, EntropySums

Values = dict[str, Any]
"""Arrays, or their descriptions, by the dotted names of the trained parameters."""


class PassSums(NamedTuple):
    """Adds up over the passes of an update."""

    gradients: Values
    loss: Float[Array, ""]
    """float32: it is not finite if that of a pass is not."""
    entropy: EntropySums | tuple[()]
    """What the bonus is adapted to, if it is."""


class UpdateRecord(NamedTuple):
    """Says what an update was; scalars on the devices."""

    grad_norm: Float[Array, ""]
    """The global norm of the step's gradient before clipping."""
    learning_rate: Float[Array, ""]
    step_kept: Float[Array, ""]
    """How far the parameters moved along the step that was meant, over its length; 1 if nothing was lost. What rounding
    at random adds lies across the step, and does not count."""
    finite: Bool[Array, ""]
    """Whether loss and norm are finite. If not, the update was left out: parameters and state are what they were."""
    entropy_coefficient: Float[Array, ""] | None = None
    """That of the update's entropy bonus, if it is adapted."""


class UpdateState(NamedTuple):
    """Holds what the next update needs beside the model's parameters; this is saved."""

    count: Int[Array, ""]
    """This many updates were made so far."""
    optimizer: Any
    kept: Values
    """What the model's parameters lack of those that are stepped: float32 copies, or int8 residuals; empty if
    nothing."""
    entropy: EntropyState | tuple[()] = ()
    """The coefficient of the entropy bonus, if it is adapted."""
