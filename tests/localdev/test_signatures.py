"""The receiver's own signature check agrees with the reference library."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest
import standardwebhooks

from localdev.signatures import verify, verify_with_reference

SECRET = "whsec_bG9jYWwtdGVzdHMtb25seS1zZWNyZXQtMQ=="
OTHER = "whsec_bG9jYWwtdGVzdHMtb25seS1zZWNyZXQtMg=="


def headers(secrets: list[str], *, late: int = 0, **changes: str) -> dict[str, str]:
    at = int(time.time()) - late
    moment = datetime.fromtimestamp(at, UTC)
    signatures = [standardwebhooks.Webhook(secret).sign("msg_1", moment, '{"a": 1}') for secret in secrets]
    made = {"webhook-id": "msg_1", "webhook-timestamp": str(at), "webhook-signature": " ".join(signatures)}
    return made | {name.replace("_", "-"): value for name, value in changes.items()}


@pytest.mark.parametrize(
    ("secrets", "changes", "fits"),
    [
        ([SECRET], {}, True),
        ([OTHER, SECRET], {}, True),  # the secret is being rotated
        ([OTHER], {}, False),
        ([SECRET], {"webhook_id": "msg_2"}, False),
        ([SECRET], {"late": 400}, False),
        ([SECRET], {"late": -400}, False),
        ([SECRET], {"webhook_signature": "v1,"}, False),
        ([SECRET], {"webhook_signature": "v1a,AAAA"}, False),
        ([SECRET], {"webhook_signature": "no comma"}, False),
        ([SECRET], {"webhook_signature": ""}, False),
        ([SECRET], {"webhook_timestamp": "soon"}, False),
    ],
)
def test_verdict(secrets: list[str], changes: dict[str, Any], fits: bool) -> None:
    sent = headers(secrets, **changes)
    assert (verify([SECRET], sent, b'{"a": 1}', time.time()) is None) is fits
    assert (verify_with_reference([SECRET], sent, b'{"a": 1}') is None) is fits


def test_any_of_several_secrets_fits() -> None:
    assert verify([OTHER, SECRET], headers([SECRET]), b'{"a": 1}', time.time()) is None


def test_another_body_does_not_fit() -> None:
    assert verify([SECRET], headers([SECRET]), b'{"a": 2}', time.time()) == "no signature fits"
