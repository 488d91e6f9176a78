"""Compares how far this host is with what it does in step with others; heartbeats carry theirs.

Hosts that drive one engine and decide differently launch different programs, and wait in collectives that never end:
none of them gets to the comparison after the rollout. But each has noted what it decided before it launched it:

    host 0: replica 0 at step 7, digest a1     host 1: replica 0 at step 9, digest c4
    host 1 remembers b2 for its step 7: both end, and step 7, or an earlier one, is where they parted
"""

from collections.abc import Mapping
from itertools import islice

REMEMBERED = 4096
"""So many steps of each thing are kept for comparison."""


class Progress:
    """Holds what this host has noted; the main thread writes it, and the watch's threads read it."""

    def __init__(self) -> None:
        self._noted: dict[str, dict[int, str]] = {}

    def note(self, what: str, step: int, digest: str) -> None:
        """Remember what this host is about to do at a step, which hosts that do the same note alike."""
        noted = self._noted.setdefault(what, {})
        noted[step] = digest
        for old in list(islice(noted, max(0, len(noted) - REMEMBERED))):
            del noted[old]

    def latest(self) -> dict[str, tuple[int, str]]:
        """Return the last step of each thing, to be told to the others."""
        return {what: next(reversed(noted.items())) for what, noted in self._noted.copy().items() if noted}

    def contradiction(self, others: Mapping[str, tuple[int, str]]) -> str | None:
        """Say what another host did otherwise than this one, by what it told; None if nothing is known."""
        for what, (step, digest) in others.items():
            own = self._noted.get(what, {}).get(step)
            if own is not None and own != digest:
                return f"{what} at step {step}, {own[:12]} here and {digest[:12]} there"
        return None


progress = Progress()
"""This process notes its progress here."""
