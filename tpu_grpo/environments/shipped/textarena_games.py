"""Games of one player from the package textarena, which comes with the extra of that name.

    environment: {name: textarena, options: {game: GuessTheNumber-v0}}

``reset`` returns the game's rules. ``step`` returns the game's messages since the player's last turn, without the
player's own messages. The reward is 0 until the game ends, and then the reward that textarena gives the player.
"""

from importlib import import_module
from typing import Any

from tpu_grpo.config.plugins import need
from tpu_grpo.records.errors import EpisodeError

need("textarena", "the environment textarena", EpisodeError)
textarena: Any = import_module("textarena")


class TextArena:
    """A game of textarena."""

    _strips_thinking = True  # `step` gets what follows it

    def __init__(self, game: str = "GuessTheNumber-v0"):
        self.game = game
        self._game = textarena.make(f"{game}-raw")  # without the wrappers that repeat the whole game each turn

    def reset(self, seed: int) -> str:
        """Begin a game with a seed."""
        self._game.reset(num_players=1, seed=seed)
        return self._said()

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Play the move that a text describes. A game that raises for it is lost."""
        try:
            done, info = self._game.step(action)
        except Exception as error:  # games raise many types for moves that they do not expect
            self.reason = f"The move cannot be played: {type(error).__name__}."
            return self.reason, 0.0, True, {}
        if not done:
            return self._said(), 0.0, False, info
        rewards, about = self._game.close()
        self.reason = about[0].get("reason", "")
        return self.reason, float((rewards or {}).get(0, 0.0)), True, info

    def _said(self) -> str:
        _, observations = self._game.get_observation()
        return "\n".join(text for _, text, kind in observations if kind is not textarena.ObservationType.PLAYER_ACTION)
