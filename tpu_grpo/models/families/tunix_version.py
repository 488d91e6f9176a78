"""The version of google-tunix that this package was reviewed for."""

from importlib import metadata

from tpu_grpo.records.errors import ConfigError

TUNIX_VERSION = "0.1.7"


def require_reviewed_tunix() -> None:
    """Refuse any other version of google-tunix than the one whose repairs were reviewed.

    Raises:
        ConfigError: with the installed version.
    """
    if (installed := metadata.version("google-tunix")) != TUNIX_VERSION:
        raise ConfigError(
            f"google-tunix must be {TUNIX_VERSION}, got {installed}; install google-tunix=={TUNIX_VERSION}, or review "
            f"the repairs in models/repairs.py and tunix_loop/cluster.py for {installed} and raise TUNIX_VERSION in "
            f"{__name__}"
        )
