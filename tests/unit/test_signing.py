"""Standard Webhooks signatures: what a receiver that follows the standard accepts, and nothing else."""

from __future__ import annotations

import base64
from datetime import UTC, datetime

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from outbox.signing import decode_secret, sign

OLD, NEW, OTHER = ("whsec_" + base64.b64encode(letter * 32).decode() for letter in (b"o", b"n", b"x"))
BODY = '{"type":"test.Ping","data":{"text":"grün 😀"}}'.encode()


def headers(*secrets: str) -> dict[str, str]:
    now = int(datetime.now(UTC).timestamp())
    signature = sign([decode_secret(secret) for secret in secrets], "msg_1", now, BODY)
    return {"webhook-id": "msg_1", "webhook-timestamp": str(now), "webhook-signature": signature}


def test_the_standards_own_example_comes_out() -> None:
    key = decode_secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    signature = sign([key], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_the_standards_own_library_verifies_a_signature() -> None:
    Webhook(NEW).verify(BODY, headers(NEW))


@pytest.mark.parametrize("changed", ["secret", "id", "timestamp", "body"])
def test_a_signature_is_over_the_secret_the_id_the_timestamp_and_the_body(changed: str) -> None:
    secret, body, got = NEW, BODY, headers(NEW)
    match changed:
        case "secret":
            secret = OTHER
        case "id":
            got["webhook-id"] = "msg_2"
        case "timestamp":
            got["webhook-timestamp"] = str(int(got["webhook-timestamp"]) + 1)
        case "body":
            body += b" "
    with pytest.raises(WebhookVerificationError, match="signature"):
        Webhook(secret).verify(body, got)


def test_while_a_secret_is_rotated_receivers_of_the_old_and_of_the_new_one_verify() -> None:
    rotating = headers(NEW, OLD)
    Webhook(NEW).verify(BODY, rotating)
    Webhook(OLD).verify(BODY, rotating)
    with pytest.raises(WebhookVerificationError):
        Webhook(OTHER).verify(BODY, rotating)
    newest, oldest = rotating["webhook-signature"].split(" ")
    assert newest == sign([decode_secret(NEW)], "msg_1", int(rotating["webhook-timestamp"]), BODY)
    assert newest != oldest


@pytest.mark.parametrize("size", [24, 64])
def test_a_secret_of_24_to_64_bytes_is_taken(size: int) -> None:
    assert decode_secret("whsec_" + base64.b64encode(b"\xff" * size).decode()) == b"\xff" * size


@pytest.mark.parametrize(
    ("secret", "says"),
    [
        (base64.b64encode(b"k" * 32).decode(), "whsec_"),
        ("", "whsec_"),
        ("WHSEC_" + base64.b64encode(b"k" * 32).decode(), "whsec_"),
        ("whsec_", "holds 0"),
        ("whsec_" + base64.b64encode(b"k" * 23).decode(), "holds 23"),
        ("whsec_" + base64.b64encode(b"k" * 65).decode(), "holds 65"),
        ("whsec_" + base64.urlsafe_b64encode(b"\xff" * 32).decode(), "base64"),
        ("whsec_" + base64.b64encode(b"k" * 32).decode().rstrip("="), "base64"),
        ("whsec_" + base64.b64encode(b"k" * 32).decode() + "\n", "base64"),
        ("whsec_" + "é" * 32, "base64"),
        ("whsec_\ud800" + "A" * 31, "base64"),
    ],
)
def test_any_other_secret_is_refused_and_not_shown(secret: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        decode_secret(secret)
    text = secret.removeprefix("whsec_").strip()
    assert not text or text not in str(caught.value)
