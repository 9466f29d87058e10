"""The doorbell's queue: on a real Azurite, and on sockets that do not answer."""

from __future__ import annotations

import base64
import json
import logging
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import count
from time import monotonic
from typing import Any

import pytest
from azure.storage.queue import QueueClient

from localdev.azurite import ACCOUNT, KEY, Azurite
from localdev.processes import wait_until
from outbox import doorbell
from outbox.doorbell import QueueDoorbell
from outbox.errors import DoorbellUnavailable, SettingsError
from outbox.settings import Storage

Open = Callable[..., QueueDoorbell]
_names = count()


def storage(connection_string: str) -> Storage:
    return Storage.model_validate({"AzureWebJobsStorage": connection_string})


def at(port: int) -> str:
    """The connection string of a queue service on this port."""
    return (
        f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
        f"QueueEndpoint=http://127.0.0.1:{port}/{ACCOUNT};"
    )


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    azurite = Azurite(tmp_path_factory.mktemp("azurite"))
    azurite.start()
    yield azurite.connection_string
    azurite.stop()


@pytest.fixture
def queue(azurite: str) -> QueueClient:
    """A queue that does not exist yet."""
    return QueueClient.from_connection_string(azurite, f"doorbell-{next(_names)}")


@pytest.fixture
def opened() -> Iterator[Open]:
    made: list[QueueDoorbell] = []

    def opened(connection_string: str, name: str = "doorbell") -> QueueDoorbell:
        made.append(QueueDoorbell(name, storage(connection_string)))
        return made[-1]

    yield opened
    for each in made:
        each.close()


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        yield listener


@pytest.fixture
def refusing() -> int:
    """A port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_a_doorbell_is_the_time_in_base64_and_nothing_else(opened: Open, azurite: str, queue: QueueClient) -> None:
    before = datetime.now(UTC)
    opened(azurite, queue.queue_name).ring()  # the queue is created where there is none
    (message,) = queue.receive_messages()
    body = json.loads(base64.b64decode(message.content, validate=True))
    assert set(body) == {"requestedAt"}
    assert before <= datetime.fromisoformat(body["requestedAt"]) <= datetime.now(UTC)


@pytest.mark.parametrize(("delay", "heard_in"), [(0, 0), (0.9, 0), (61.9, 61), (300, 300)])
def test_a_doorbell_is_heard_after_its_delay_and_kept_ten_minutes_more(
    opened: Open, azurite: str, queue: QueueClient, monkeypatch: pytest.MonkeyPatch, delay: float, heard_in: int
) -> None:
    queue.create_queue()
    answers: list[Any] = []
    send = QueueClient.send_message

    def note(self: QueueClient, *args: Any, **options: Any) -> Any:
        answers.append(send(self, *args, **options))
        return answers[-1]

    monkeypatch.setattr(QueueClient, "send_message", note)
    opened(azurite, queue.queue_name).ring(delay)
    (answer,) = answers  # what the queue itself says of the message
    assert (answer.next_visible_on - answer.inserted_on).total_seconds() == heard_in
    assert (answer.expires_on - answer.inserted_on).total_seconds() == heard_in + 600
    assert len(queue.peek_messages()) == (heard_in == 0)


def test_a_queue_that_does_not_answer_is_given_two_seconds(opened: Open, silent: socket.socket) -> None:
    bell = opened(at(silent.getsockname()[1]))
    began = monotonic()
    with pytest.raises(DoorbellUnavailable, match="did not take a doorbell"):
        bell.ring()
    assert monotonic() - began < doorbell.RING_SECONDS + 0.5


def test_a_queue_that_is_down_is_told_once_to_many_requests_and_then_left_alone(
    opened: Open, silent: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    bell = opened(at(silent.getsockname()[1]))
    began = monotonic()
    with ThreadPoolExecutor(50) as threads:
        for done in [threads.submit(bell.ring_for_request) for _ in range(200)]:
            done.result()
    assert monotonic() - began < doorbell.RING_SECONDS + 1  # together, not one after the other
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "doorbell failed" in warning.getMessage()
    silent.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            silent.accept()[0].close()
    bell.ring_for_request()
    with pytest.raises(BlockingIOError):
        silent.accept()  # nobody knocked again
    assert KEY not in caplog.text


def test_a_queue_that_was_down_is_tried_again_later(
    opened: Open, refusing: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(doorbell, "MUTE_SECONDS", 0.3)
    bell = opened(at(refusing))
    bell.ring_for_request()
    with socket.create_server(("127.0.0.1", refusing)) as listener:
        listener.setblocking(False)

        def knocked() -> bool:
            bell.ring_for_request()
            try:
                listener.accept()[0].close()
            except BlockingIOError:
                return False
            return True

        wait_until(knocked, 10, "another try")
    assert "doorbell failed" in caplog.text


@pytest.mark.parametrize("text", ["AccountKey=s3cret", "s3cret", ";;", "AccountName=a;AccountKey"])
def test_a_wrong_connection_string_is_a_wrong_setting_and_is_not_shown(text: str) -> None:
    with pytest.raises(SettingsError, match=r"AzureWebJobsStorage") as caught:
        QueueDoorbell("doorbell", storage(text))
    assert "s3cret" not in str(caught.value)


def test_the_log_holds_no_headers_and_no_key(
    opened: Open, azurite: str, queue: QueueClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    opened(azurite, queue.queue_name).ring()
    assert caplog.text == ""
