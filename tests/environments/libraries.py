"""Environments in the manner of other libraries, without these libraries."""

from types import SimpleNamespace
from typing import Any


class _Action:
    """As OpenEnv's, of pydantic."""

    model_fields = {  # noqa: RUF012
        "message": SimpleNamespace(is_required=lambda: True),
        "metadata": SimpleNamespace(is_required=lambda: False),
    }

    def __init__(self, message: str):
        self.message = message


class EnvClient[A, O]:
    __module__ = "openenv.core.env_client"

    def __init__(self, base_url: str):
        self.base_url = base_url

    async def reset(self, **columns: Any) -> Any: ...

    async def step(self, action: A) -> Any: ...

    def sync(self) -> Any:
        return _Sync(self.base_url)


class _Sync:
    def __init__(self, base_url: str):
        self.base_url, self.is_connected = base_url, False

    def connect(self) -> None:
        self.is_connected = True

    def reset(self, **columns: Any) -> Any:
        assert self.is_connected
        return SimpleNamespace(observation=_Observation(echoed=f"{self.base_url} {sorted(columns)}", length=None))

    def step(self, action: _Action) -> Any:
        observation = _Observation(echoed=action.message, length=len(action.message))
        return SimpleNamespace(observation=observation, reward=0.5, done=action.message == "stop")

    def close(self) -> None:
        pass


class _Observation:
    def __init__(self, **fields: Any):
        self.fields = fields

    def model_dump(self) -> dict[str, Any]:
        return {**self.fields, "reward": 0.5, "done": False, "metadata": {}}


class Echo(EnvClient[_Action, _Observation]):
    """As OpenEnv's client of the echo environment."""


class Silent:
    """Takes texts, and shows nothing of what they do."""

    def reset(self, shows: Any) -> None:
        self.shows = shows

    def step(self, action: str) -> tuple[Any, float, bool, dict[str, Any]]:
        return self.shows, 0.5, action == "stop", {}
