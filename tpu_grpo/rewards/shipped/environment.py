"""The reward that a conversation's environment gives."""

from collections.abc import Sequence


def environment(environment_rewards: Sequence[float | None]) -> list[float | None]:
    """Return what each environment gave: by ``get_reward``, or what its ``step`` returned, added up; or None."""
    return list(environment_rewards)
