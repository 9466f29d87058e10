"""The whole app in real processes, with its long waits shortened by settings. Nothing here imports the outbox."""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from azure.core.exceptions import ResourceNotFoundError
from azure.storage.queue import QueueClient

from localdev.stack import Stack

#: No test here is helped by the timer: it is called by hand where a test is about it.
SHORT = {
    "AzureWebJobs.outbox_timer.Disabled": "true",
    "OUTBOX_BACKOFF_BASE_SECONDS": "1",
    "OUTBOX_LEASE_SECONDS": "4",
    "OUTBOX_DELIVERY_TIMEOUT_SECONDS": "2",
    "OUTBOX_UNKNOWN_GRACE_SECONDS": "0",
    "OUTBOX_MAX_ATTEMPTS": "3",
}


@dataclass
class App:
    """A running stack, with what a test asks of it again and again."""

    stack: Stack
    said: list[str] = field(default_factory=list)

    def sql(self, statement: str, *parameters: Any) -> list[Any]:
        with psycopg.connect(self.stack.database_url, autocommit=True, connect_timeout=5) as conn:
            cursor = conn.execute(statement.encode(), parameters)
            return cursor.fetchall() if cursor.description else []

    def new_orders(self, count: int, status: str = "Pending") -> list[str]:
        ids = [str(uuid.uuid4()) for _ in range(count)]
        self.sql("INSERT INTO orders (order_id, status) SELECT unnest(%s::uuid[]), %s", ids, status)
        return ids

    def insert_message(self, order_id: str | None = None) -> None:
        """A row that somebody wrote by hand: valid, due now, and announced by no doorbell."""
        self.sql(
            "INSERT INTO outbox_messages (outbox_message_id, event_type, destination, payload)"
            " VALUES (gen_random_uuid(), 'OrderCompleted', 'receiver', jsonb_build_object('orderId', %s::text))",
            order_id or str(uuid.uuid4()),
        )

    def messages(self, order_ids: list[str]) -> list[tuple[str, str, int, str | None]]:
        """(id, status, attempts, failure code) of the orders' messages."""
        return self.sql(
            "SELECT outbox_message_id::text, status, attempt_count, failure_code FROM outbox_messages"
            " WHERE payload->>'orderId' = ANY(%s) ORDER BY created_at",
            order_ids,
        )

    def arrivals(self, message_id: str) -> list[dict[str, Any]]:
        return [d for d in self.stack.deliveries() if d["id"] == message_id]

    def ring(self, text: str = '{"requestedAt": "2026-01-01T00:00:00Z"}') -> None:
        self.stack.queue.send_message(base64.b64encode(text.encode()).decode())

    def queue_length(self, suffix: str = "") -> int:
        queue = QueueClient.from_connection_string(
            self.stack.storage_connection_string, self.stack.env["OUTBOX_QUEUE_NAME"] + suffix
        )
        try:
            return int(queue.get_queue_properties().approximate_message_count or 0)
        except ResourceNotFoundError:
            return 0


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until `condition()` holds, and fail with `what` where it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"not within {seconds} s: {what}")
        time.sleep(0.05)


def started(env: dict[str, str] | None = None, **arguments: Any) -> Iterator[App]:
    said: list[str] = []
    with Stack.temporary(env={**SHORT, **(env or {})}, say=said.append, **arguments) as stack:
        yield App(stack, said)


def destinations(**urls: str) -> str:
    secret = "whsec_" + "YWNjZXB0YW5jZSB0ZXN0cyBvbmx5LCBub3QgYSBzZWNyZXQ="
    return json.dumps({name: {"url": url, "secret": secret} for name, url in urls.items()})
