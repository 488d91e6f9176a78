"""Authenticates messages between hosts with a secret that only the hosts have: HMAC-SHA256 (RFC 2104).

Every process of a run gets the secret in TPU_GRPO_SECRET, which the launcher generates and passes on. When hosts meet,
each sends a nonce, and the run's key is derived from the secret and all nonces. So a message recorded in another run
is not accepted, even if the secret is the same.
"""

import hashlib
import hmac
import os
from collections.abc import Sequence

from tpu_grpo.records.errors import ConfigError

VARIABLE = "TPU_GRPO_SECRET"
FEWEST_CHARACTERS = 16
SIGNATURE_BYTES = hashlib.sha256().digest_size


def take_secret() -> bytes:
    """Return the run's secret (empty if there is none), and unset its variable, so that children do not inherit it.
    Raises ConfigError if the secret has fewer than FEWEST_CHARACTERS."""
    secret = os.environ.pop(VARIABLE, "")
    if 0 < len(secret) < FEWEST_CHARACTERS:
        raise ConfigError(
            f"{VARIABLE} must have at least {FEWEST_CHARACTERS} characters, got {len(secret)}; make one with `openssl "
            "rand -hex 32`, the same for every host"
        )
    return secret.encode()


def signature(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC of the parts, each preceded by its length; empty bytes if ``key`` is empty."""
    framed = b"".join(len(part).to_bytes(8) + part for part in parts)
    return hmac.digest(key, framed, "sha256") if key else b""


def session_key(secret: bytes, nonces: Sequence[str]) -> bytes:
    """Derive the run's key from its secret and its hosts' nonces, in the order of the hosts; empty without a secret."""
    return signature(secret, b"session", *(nonce.encode() for nonce in nonces))
