"""The doorbell's queue: on a real Azurite, and on sockets that do not answer."""

from __future__ import annotations

import base64
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import count
from time import monotonic
from typing import Any

import pytest
from azure.storage.queue import QueueClient

from localdev.azurite import ACCOUNT, KEY, Azurite
from outbox import doorbell
from outbox.doorbell import QueueDoorbell
from outbox.errors import DoorbellUnavailable, SettingsError
from outbox.settings import Storage

from .support import until

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


class Deaf:
    """A queue service that takes connections and never answers; or answers byte by byte, without an end (`drips`)."""

    def __init__(self, port: int = 0, drips: bool = False) -> None:
        self._listener = socket.create_server(("127.0.0.1", port), backlog=100)
        self.port = int(self._listener.getsockname()[1])
        self._drips = drips
        self._over = threading.Event()
        self.knocks = 0
        self.open = 0
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Deaf:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)

    def _start(self, function: Callable[..., None], *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=function, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.knocks += 1
            with self._lock:
                self.open += 1
            self._start(self._hold, client)

    def _hold(self, client: socket.socket) -> None:
        """Keep the connection until the other end lets go of it."""
        with client:
            client.settimeout(0.2)
            while not self._over.is_set():
                try:
                    if not client.recv(65536):
                        break
                except TimeoutError:
                    pass
                except OSError:
                    break
                try:
                    client.sendall(b"H" if self._drips else b"")
                except OSError:
                    break
        with self._lock:
            self.open -= 1


@pytest.fixture
def silent() -> Iterator[Deaf]:
    with Deaf() as deaf:
        yield deaf


@pytest.fixture
def dripping() -> Iterator[Deaf]:
    with Deaf(drips=True) as deaf:
        yield deaf


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


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize(("delay", "heard_in"), [(0, 0), (0.9, 0), (61.9, 61), (300, 300)])
def test_a_doorbell_is_heard_after_its_delay_and_kept_ten_minutes_more(
    opened: Open,
    azurite: str,
    queue: QueueClient,
    monkeypatch: pytest.MonkeyPatch,
    exists: bool,
    delay: float,
    heard_in: int,
) -> None:
    if exists:
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


@pytest.mark.parametrize("kind", ["silent", "dripping", "refusing"])
def test_a_queue_that_does_not_answer_is_given_two_seconds(
    opened: Open, request: pytest.FixtureRequest, kind: str
) -> None:
    queue = request.getfixturevalue(kind)
    bell = opened(at(queue if isinstance(queue, int) else queue.port))
    began = monotonic()
    with pytest.raises(DoorbellUnavailable, match="did not take a doorbell"):
        bell.ring()
    assert monotonic() - began < 2.5


def test_a_queue_that_does_not_answer_is_asked_once_and_let_go_of(opened: Open, silent: Deaf) -> None:
    """What is left of a doorbell that was given up occupies a thread that the next one needs."""
    bell = opened(at(silent.port))
    began = monotonic()
    with pytest.raises(DoorbellUnavailable):
        bell.ring()
    until(lambda: not silent.open, 10)
    assert monotonic() - began < 2.5
    bell._threads.shutdown(wait=True)  # no more comes of it
    assert silent.knocks == 1


def test_a_queue_that_is_down_is_told_once_to_many_requests_and_then_left_alone(
    opened: Open, silent: Deaf, caplog: pytest.LogCaptureFixture
) -> None:
    bell = opened(at(silent.port))
    began = monotonic()
    with ThreadPoolExecutor(50) as threads:
        for done in [threads.submit(bell.ring_for_request) for _ in range(200)]:
            done.result()
    assert monotonic() - began < 3  # together, not one after the other
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "doorbell failed" in warning.getMessage()
    assert KEY not in caplog.text
    bell._threads.shutdown(wait=True)
    assert silent.knocks <= 30  # what had not begun when the requests gave up was withdrawn
    knocks = silent.knocks
    bell.ring_for_request()  # no thread is left to try with: it would raise
    assert silent.knocks == knocks
    assert len(caplog.records) == 1


def test_after_a_failure_requests_leave_the_queue_alone_for_thirty_seconds(
    opened: Open, refusing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = monotonic()
    monkeypatch.setattr(doorbell, "monotonic", lambda: now)
    bell = opened(at(refusing))
    bell.ring_for_request()
    with Deaf(refusing) as queue:
        now += 29
        bell.ring_for_request()
        assert queue.knocks == 0
        now += 2
        bell.ring_for_request()
        assert queue.knocks == 1


def test_a_queue_that_was_down_is_tried_again_later(
    opened: Open, refusing: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(doorbell, "MUTE_SECONDS", 0.3)
    bell = opened(at(refusing))
    bell.ring_for_request()
    with Deaf(refusing) as queue:
        until(lambda: (bell.ring_for_request(), queue.knocks)[1])  # type: ignore[func-returns-value]
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
