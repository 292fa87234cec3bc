"""The secret by which processes of one user on several machines know each other, and how they prove that they know it.

Each side sends a fresh nonce, then a code of both nonces and of which side it is (HMAC-SHA256). So nothing that was
heard can be said again, and a code of one side is none of the other's.
"""

from __future__ import annotations

import hmac
import os

TOKEN = "MINATO_GPU_TOKEN"
NONCE_BYTES = CODE_BYTES = 32


def token() -> bytes:
    """Returns the secret, from the environment variable MINATO_GPU_TOKEN. Raises ValueError where it is not set."""
    found = os.environ.get(TOKEN, "").encode()
    if not found:
        raise ValueError(
            f"{TOKEN} is not set: processes of several machines prove to each other that they know it. Set it to the "
            "same secret on every machine, for instance to what `openssl rand -hex 32` prints"
        )
    return found


def code(side: bytes, nonces: bytes) -> bytes:
    """Returns the 32 bytes by which a side proves that it knows the token. ``side``: its name; ``nonces``: those of
    both sides, in an order that both use. Raises ValueError without a token."""
    return hmac.digest(token(), side + nonces, "sha256")


def proves(said: bytes, side: bytes, nonces: bytes) -> bool:
    """Returns whether ``said`` is that side's ``code`` for these nonces. Raises ValueError without a token."""
    return hmac.compare_digest(said, code(side, nonces))
