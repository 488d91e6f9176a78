"""What is inside the scheduler: requests, and the launch that the devices are computing."""

from dataclasses import dataclass, field

import numpy as np
from sgl_jax.srt.managers.schedule_batch import FINISH_LENGTH, Req, ScheduleBatch

from tpu_grpo.engine.decode_loop import LaunchOutput
from tpu_grpo.engine.reservation import Reservation
from tpu_grpo.engine.step_arrays import StepOutput
from tpu_grpo.records.stages import Completion, Request


@dataclass(eq=False)
class RunningRequest:
    """A request inside the scheduler, with the log-probabilities of the tokens sampled so far."""

    request: Request
    req: Req
    stop_token_ids: frozenset[int]
    logprobs: list[float] = field(default_factory=list)
    kept: list[int] | None = None
    """How many tokens the filters kept for each, if the engine counts them."""

    @property
    def prefilled(self) -> bool:
        """Whether its prompt is in the cache, where requests with the same prompt can reuse it."""
        return bool(self.req.output_ids)

    def completion(self) -> Completion:
        """Build the finished completion; one whose last allowed token is a stop token counts as stopped."""
        stops = not self.request.sampling.ignore_stop and self.req.output_ids[-1] in self.stop_token_ids
        truncated = isinstance(self.req.finished_reason, FINISH_LENGTH) and not stops
        return Completion(
            token_ids=np.asarray(self.req.output_ids, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            finish_reason="length" if truncated else "stop",
            cached_tokens=self.req.cached_tokens,
            experts=self.req.routed_experts,
            kept=None if self.kept is None else np.asarray(self.kept, np.int32),
        )


@dataclass(frozen=True)
class InFlight:
    """A prefill step, or a launch of decode steps, that the devices are computing."""

    batch: ScheduleBatch
    reservation: Reservation | None
    """The cache slots of a launch of decode steps."""
    output: StepOutput | LaunchOutput


@dataclass(frozen=True)
class Ahead:
    """A launch that the devices got while they compute the one in flight, whose rows it takes up."""

    reservation: Reservation
    output: LaunchOutput
