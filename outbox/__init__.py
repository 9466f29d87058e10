"""A transactional outbox: store an event in your own transaction, have it delivered to webhooks at least once.

    with your transaction as conn:
        ...                                   # the business change
        outbox.enqueue(conn, OrderCompleted(orderId=order_id))
    outbox.ring()

Where to find what:

    events.py      event types and their registry        sql/claim.sql   the claim
    processor.py   the drain: claim, deliver, settle     retry.py        the retry policy
    delivery.py    the webhook and its status table      signing.py      Standard Webhooks signatures
    transport.py   the HTTP connections under it         addresses.py    which addresses a webhook may go to
    store.py       one method for each statement         doorbell.py     the queue
    database.py    pool, limits, driver errors           errors.py       every error
    settings.py    every setting                         wiring.py       puts it together
    message.py     the values that travel                __main__.py     the operator's commands
    migrations/    the schema
"""

from outbox.errors import DatabaseUnavailable, DoorbellUnavailable, EventRefused, OutboxError, SettingsError
from outbox.events import Event
from outbox.message import Enqueued
from outbox.wiring import configure, enqueue, ring, stop_draining, sweep, transact, wake_up

__all__ = [
    "DatabaseUnavailable",
    "DoorbellUnavailable",
    "Enqueued",
    "Event",
    "EventRefused",
    "OutboxError",
    "SettingsError",
    "configure",
    "enqueue",
    "ring",
    "stop_draining",
    "sweep",
    "transact",
    "wake_up",
]
