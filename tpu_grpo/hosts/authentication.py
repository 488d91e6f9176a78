"""Proves who wrote what hosts tell each other, with a secret that only they have: HMAC-SHA256 (RFC 2104).

Every process of a run gets the secret in TPU_GRPO_SECRET, which the launcher makes and passes on. When hosts meet, each
brings a nonce, and the key of this run is made of the secret and all nonces. So what was recorded of another run with
the same secret proves nothing in this one.
"""

import hashlib
import hmac
import os
from collections.abc import MutableMapping, Sequence

from tpu_grpo.records.errors import ConfigError

VARIABLE = "TPU_GRPO_SECRET"
FEWEST_CHARACTERS = 16
SIGNATURE_BYTES = hashlib.sha256().digest_size


def take_secret(environment: MutableMapping[str, str] = os.environ) -> bytes:
    """Return the run's secret, empty if there is none, and remove it: what this process starts does not get it.

    Raises:
        ConfigError: it is so short that it can be guessed.
    """
    secret = environment.pop(VARIABLE, "")
    if 0 < len(secret) < FEWEST_CHARACTERS:
        raise ConfigError(
            f"{VARIABLE} must have at least {FEWEST_CHARACTERS} characters, got {len(secret)}; make one with `openssl "
            "rand -hex 32`, the same for every host"
        )
    return secret.encode()


def signature(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC of some parts, none of which can be taken for a piece of its neighbour; empty without a key."""
    framed = b"".join(len(part).to_bytes(8) + part for part in parts)
    return hmac.digest(key, framed, "sha256") if key else b""


def is_signed(proof: bytes, key: bytes, *parts: bytes) -> bool:
    """Say whether a signature was made of these parts with this key; without a key none may be there."""
    return hmac.compare_digest(proof, signature(key, *parts))


def session_key(secret: bytes, nonces: Sequence[str]) -> bytes:
    """Return the key of one run from the nonces of its hosts, host 0's first; empty without a secret."""
    return signature(secret, b"session", *(nonce.encode() for nonce in nonces))
