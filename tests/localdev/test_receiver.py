"""The webhook receiver, over HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import standardwebhooks

from localdev.processes import answers, free_port, wait_until
from localdev.receiver import SECRETS_VARIABLE
from localdev.stack import Reply, request

SECRET = "whsec_bG9jYWwtdGVzdHMtb25seS1zZWNyZXQtMQ=="


@dataclass
class Running:
    url: str
    log: Path

    def deliver(self, message_id: str, body: bytes = b'{"a": 1}', *, secret: str = SECRET) -> Reply:
        now = int(time.time())
        signature = standardwebhooks.Webhook(secret).sign(message_id, datetime.fromtimestamp(now, UTC), body.decode())
        headers = {"webhook-id": message_id, "webhook-timestamp": str(now), "webhook-signature": signature}
        return request("POST", f"{self.url}/webhook/anything", body, headers)

    def script(self, *answers: dict[str, Any]) -> Reply:
        return request("POST", f"{self.url}/control", json.dumps({"next": answers}).encode())

    def verdicts(self) -> list[str]:
        return [delivery["verdict"] for delivery in request("GET", f"{self.url}/deliveries").json()]


def start(log: Path) -> tuple[subprocess.Popen[bytes], Running]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "localdev.receiver", "--port", str(port), "--log", str(log)],
        env={**os.environ, SECRETS_VARIABLE: SECRET},
        stdout=subprocess.DEVNULL,
    )
    wait_until(lambda: answers(port), 20, "the receiver's start")
    return process, Running(f"http://127.0.0.1:{port}", log)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    process, running = start(tmp_path_factory.mktemp("receiver") / "deliveries.jsonl")
    yield running
    process.terminate()
    assert process.wait(10) == 0


@pytest.fixture
def receiver(shared: Running) -> Running:
    assert request("DELETE", f"{shared.url}/deliveries").status == 204
    return shared


def test_an_id_is_processed_once(receiver: Running) -> None:
    assert [receiver.deliver(name).status for name in ("m1", "m1", "m2")] == [200, 200, 200]
    assert receiver.verdicts() == ["processed", "duplicate", "processed"]


def test_a_wrong_signature_is_refused_and_uses_up_no_scripted_answer(receiver: Running) -> None:
    receiver.script({"status": 500})
    assert receiver.deliver("m1", secret="whsec_" + "QUFB" * 8).status == 401
    assert receiver.deliver("m1").status == 500
    assert receiver.verdicts() == ["refused", "failed"]


def test_an_id_answered_with_an_error_is_processed_by_the_next_delivery(receiver: Running) -> None:
    receiver.script({"status": 503, "headers": {"Retry-After": "7"}, "body": "later"})
    failed = receiver.deliver("m1")
    assert (failed.status, failed.headers["retry-after"], failed.body) == (503, "7", b"later")
    assert receiver.deliver("m1").status == 200
    assert receiver.verdicts() == ["failed", "processed"]


def test_an_answer_can_wait_for_its_delivery(receiver: Running) -> None:
    receiver.script({"status": 500, "for_id": "m2"}, {"status": 418, "containing": '"b"'})
    assert [receiver.deliver("m1").status, receiver.deliver("m2").status] == [200, 500]
    assert receiver.deliver("m3", b'{"b": 1}').status == 418


def test_what_is_no_script_is_refused(receiver: Running) -> None:
    assert receiver.script({"statuss": 500}).status == 400


def test_hundreds_at_once(receiver: Running) -> None:
    receiver.script(*[{"delay": 0.5}] * 100)
    with ThreadPoolExecutor(100) as pool:
        statuses = list(pool.map(lambda n: receiver.deliver(f"m{n % 250}").status, range(500)))
    assert set(statuses) == {200}
    summary = request("GET", f"{receiver.url}/summary").json()
    assert (summary["processed"], summary["duplicate"], summary["disagreements"]) == (250, 250, 0)


def test_a_restarted_receiver_remembers(tmp_path: Path) -> None:
    log = tmp_path / "deliveries.jsonl"
    for expected in (["processed"], ["processed", "duplicate"]):
        process, running = start(log)
        running.deliver("m1", "ä€".encode())
        assert running.verdicts() == expected
        process.kill()
        process.wait()
