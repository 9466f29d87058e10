"""Standard Webhooks signatures (github.com/standard-webhooks/standard-webhooks, spec/standard-webhooks.md)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence

PREFIX = "whsec_"


def decode_secret(secret: str) -> bytes:
    """The key bytes of a `whsec_…` secret. Raises ValueError, without the secret, unless it holds 24 to 64 bytes."""
    if not secret.startswith(PREFIX):
        raise ValueError(f"a secret is {PREFIX} followed by base64")
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"a secret is {PREFIX} followed by base64; this one is not valid base64") from None
    if not 24 <= len(key) <= 64:
        raise ValueError(f"a secret holds 24 to 64 bytes in base64; this one holds {len(key)}")
    return key


def sign(keys: Sequence[bytes], message_id: str, timestamp: int, body: bytes) -> str:
    """The `webhook-signature` header: one `v1,…` per key, newest first, so that a secret can be rotated."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    return " ".join("v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode() for key in keys)
