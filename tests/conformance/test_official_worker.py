"""The official worker logic loads function_app.py and runs its functions: indexing, triggers, results."""

from __future__ import annotations

import base64
import json
import sys
import uuid
from typing import Any

import psycopg
import pytest
from azure.storage.queue import QueueClient

from localdev.processes import free_port

from .harness import ROOT, OfficialWorker, Receiver, complete, doorbell, tick

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 13), reason="the official worker logic (azure-functions-runtime) needs Python 3.13 or newer"
)

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def new_order(db: psycopg.Connection, status: str = "Pending") -> str:
    order_id = str(uuid.uuid4())
    db.execute("INSERT INTO orders (order_id, status) VALUES (%s, %s)", [order_id, status])
    return order_id


def order_status(db: psycopg.Connection, order_id: str) -> Any:
    row = db.execute("SELECT status FROM orders WHERE order_id = %s", [order_id]).fetchone()
    return row and row[0]


def new_message(db: psycopg.Connection) -> str:
    message_id = str(uuid.uuid4())
    db.execute(
        "INSERT INTO outbox_messages (outbox_message_id, event_type, destination, payload) "
        "VALUES (%s, 'OrderCompleted', 'receiver', jsonb_build_object('orderId', gen_random_uuid()))",
        [message_id],
    )
    return message_id


def messages(db: psycopg.Connection) -> list[tuple[Any, ...]]:
    return db.execute(
        "SELECT outbox_message_id::text, event_type, destination, status, payload, traceparent FROM outbox_messages"
    ).fetchall()


def statuses(db: psycopg.Connection) -> dict[str, str]:
    return {row[0]: row[3] for row in messages(db)}


def on_the_wire(queue: QueueClient) -> list[str]:
    return [message.content for message in queue.peek_messages(max_messages=32)]


def test_the_worker_finds_and_loads_the_three_functions(worker: OfficialWorker) -> None:
    life = worker.live()
    assert life.init.ok, life.init.error
    expected: dict[str, dict[str, Any]] = {
        "complete_order": {
            "type": "httpTrigger",
            "route": "orders/{order_id}/complete",
            "methods": ["POST"],
            "authLevel": "FUNCTION",
        },
        "outbox_wakeup": {
            "type": "queueTrigger",
            "queueName": "%OUTBOX_QUEUE_NAME%",
            "connection": "AzureWebJobsStorage",
        },
        "outbox_timer": {
            "type": "timerTrigger",
            "schedule": "0 */5 * * * *",
            "runOnStartup": False,
            "useMonitor": True,
        },
    }
    assert {name: life.trigger(name) for name in life.functions} == expected
    assert {name: answer.ok for name, answer in life.load.items()} == dict.fromkeys(expected, True)


def test_completing_an_order_stores_its_event_and_rings_in_base64(
    worker: OfficialWorker, db: psycopg.Connection, queue: QueueClient
) -> None:
    order_id = new_order(db)
    first, again = worker.live(
        complete(order_id.upper(), traceparent=TRACEPARENT), complete(order_id, traceparent=TRACEPARENT)
    ).answers

    assert (first.ok, first.status, first.headers["content-type"]) == (True, 200, "application/json")
    assert first.json().keys() == {"orderId", "status", "completedAt"}
    assert (first.json()["orderId"], first.json()["status"]) == (order_id, "Completed")
    assert (again.status, again.body) == (200, first.body)

    assert order_status(db, order_id) == "Completed"
    ((_, *message),) = messages(db)
    assert message == ["OrderCompleted", "receiver", "Pending", {"orderId": order_id}, TRACEPARENT]

    # The host takes base64 off each message, or moves it to the poison queue unread.
    assert json.loads((ROOT / "host.json").read_text("utf-8"))["extensions"]["queues"]["messageEncoding"] == "base64"
    rings = on_the_wire(queue)
    assert len(rings) == 2
    for ring in rings:
        assert json.loads(base64.b64decode(ring, validate=True)).keys() == {"requestedAt"}


def test_a_refused_request_changes_nothing(worker: OfficialWorker, db: psycopg.Connection) -> None:
    cancelled = new_order(db, "Cancelled")
    expected = {str(uuid.uuid4()): 404, "42": 400, uuid.uuid4().hex: 400, "": 400, cancelled: 409}
    life = worker.live(*map(complete, expected))
    for answer, status in zip(life.answers, expected.values(), strict=True):
        assert (answer.ok, answer.status) == (True, status)
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["status"] == status
    assert order_status(db, cancelled) == "Cancelled"
    assert messages(db) == []


def test_without_a_database_a_request_is_503_a_doorbell_lives_on_and_the_timer_fails(
    worker: OfficialWorker, queue: QueueClient
) -> None:
    nobody = f"postgresql://postgres:hidden@127.0.0.1:{free_port()}/outbox"
    request, wakeup, timer = worker.live(
        complete(uuid.uuid4()), doorbell("{}"), tick(), OUTBOX_DATABASE_URL=nobody
    ).answers
    assert (request.ok, request.status) == (True, 503)
    assert int(request.headers["retry-after"]) > 0
    assert wakeup.ok, wakeup.error  # a failure would move a good doorbell towards the poison queue
    assert queue.get_queue_properties().approximate_message_count == 1
    assert not timer.ok
    assert str(timer.error).startswith("DatabaseUnavailable: ")
    assert "hidden" not in request.body + str(timer.error)


def test_a_doorbell_drains_whatever_it_says(worker: OfficialWorker, db: psycopg.Connection, receiver: Receiver) -> None:
    order_id = new_order(db)
    worker.live(complete(order_id, traceparent=TRACEPARENT))
    ((message_id, *_),) = messages(db)

    life = worker.live(doorbell("neither \x00 JSON nor ☃ base64 }{"), doorbell(""), doorbell("[]"))

    assert [answer.error for answer in life.answers] == [None, None, None]
    assert statuses(db) == {message_id: "Processed"}
    (event,) = receiver.verified()
    assert (event["type"], event["data"]) == ("OrderCompleted", {"orderId": order_id})
    ((headers, _),) = receiver.requests
    assert (headers["webhook-id"], headers["traceparent"]) == (message_id, TRACEPARENT)


def test_the_timer_drains_on_time_or_late(worker: OfficialWorker, db: psycopg.Connection, receiver: Receiver) -> None:
    message_ids = {new_message(db) for _ in range(3)}

    life = worker.live(tick(past_due=True), tick())

    assert [answer.error for answer in life.answers] == [None, None]
    assert statuses(db) == dict.fromkeys(message_ids, "Processed")
    assert sorted(headers["webhook-id"] for headers, _ in receiver.requests) == sorted(message_ids)
    assert len(receiver.verified()) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OUTBOX_DATABASE_URL", None),
        ("OUTBOX_DATABASE_URL", "hidden://not a connection string"),
        ("OUTBOX_QUEUE_NAME", "Hidden_Queue"),
        ("OUTBOX_DESTINATIONS", '{"hidden": '),
        ("OUTBOX_BATCH_SIZE", "hidden"),
        ("OUTBOX_LEASE_SECONDS", "3"),
        ("AzureWebJobsStorage", None),
    ],
)
def test_a_wrong_setting_fails_the_start_and_is_named(worker: OfficialWorker, name: str, value: str | None) -> None:
    life = worker.live(**{name: value})
    assert not life.init.ok
    assert str(life.init.error).startswith("SettingsError: ")
    assert name in str(life.init.error)
    assert "hidden" not in str(life.init.error).lower()
