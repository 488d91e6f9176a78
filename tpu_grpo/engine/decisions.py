"""What an engine decided and sampled, as one digest that hosts compare."""

import hashlib
from collections.abc import Sequence

import numpy as np
from sgl_jax.srt.managers.schedule_batch import ScheduleBatch

from tpu_grpo.engine.decode_loop import Sampled
from tpu_grpo.engine.reservation import Reservation


class DecisionLog:
    """Every request and launch so far: the prompts, which requests ran, in which cache slots, and what was sampled."""

    def __init__(self) -> None:
        self._log = hashlib.sha256()

    @property
    def digest(self) -> str:
        """The sha256 of the log."""
        return self._log.hexdigest()

    def submitted(self, token_ids: Sequence[int]) -> None:
        """Note the prompt of a request: in a conversation it holds what an environment answered."""
        self._log.update(np.asarray(token_ids, np.int32).tobytes())

    def launched(self, batch: ScheduleBatch, reservation: Reservation | None) -> None:
        """Note a launch of a batch; one of decode steps has a reservation."""
        rids = ",".join(req.rid for req in batch.reqs)
        slots, lengths, left = batch.out_cache_loc, batch.seq_lens, 0
        if reservation is not None:
            slots, lengths, left = reservation.slots, reservation.lengths, reservation.left
        self._log.update(f"{batch.forward_mode.name} {rids} {left} ".encode())
        self._log.update(np.asarray(lengths, np.int64).tobytes())
        self._log.update(np.asarray(slots, np.int64).tobytes())

    def sampled(self, sampled: Sampled) -> None:
        """Note the tokens of a launch."""
        self._log.update(sampled.count.tobytes() + sampled.tokens.tobytes())
