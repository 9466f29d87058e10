"""Checking a Standard Webhooks signature, apart from the code that makes them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping, Sequence

import standardwebhooks

TOLERANCE_SECONDS = 300


def verify(secrets: Sequence[str], headers: Mapping[str, str], body: bytes, now: float) -> str | None:
    """None when a signature by one of the secrets fits and is recent; otherwise what is wrong.

    `headers` have lower-case names.
    """
    message_id = headers.get("webhook-id")
    timestamp = headers.get("webhook-timestamp")
    signatures = headers.get("webhook-signature")
    if not (message_id and timestamp and signatures):
        return "a webhook-id, webhook-timestamp or webhook-signature header is missing"
    if not (timestamp.isascii() and timestamp.isdigit()) or len(timestamp) > 15:
        return "webhook-timestamp is not a number of seconds"
    if abs(now - int(timestamp)) > TOLERANCE_SECONDS:
        return "webhook-timestamp is too far from now"
    signed = f"{message_id}.{timestamp}.".encode() + body
    expected = [hmac.new(_key(secret), signed, hashlib.sha256).digest() for secret in secrets]
    parts = [signature.partition(",") for signature in signatures.split(" ")]
    given = [_decoded(encoded) for scheme, _, encoded in parts if scheme == "v1"]
    fits = any(hmac.compare_digest(one, digest) for one in given for digest in expected)
    return None if fits else "no signature fits"


def verify_with_reference(secrets: Sequence[str], headers: Mapping[str, str], body: bytes) -> str | None:
    """The same judgement by the reference library."""
    problem: str | None = "no secret"
    for secret in secrets:
        try:
            standardwebhooks.Webhook(secret).verify(body, dict(headers), json_parse=False)
        except Exception as error:  # it lets ValueError and others through on malformed input
            problem = str(error) or type(error).__name__
        else:
            return None
    return problem


def _key(secret: str) -> bytes:
    return base64.b64decode(secret.removeprefix("whsec_") + "==")


def _decoded(signature: str) -> bytes:
    try:
        return base64.b64decode(signature, validate=True)
    except (binascii.Error, ValueError):
        return b""
