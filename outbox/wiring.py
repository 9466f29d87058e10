"""The composition root: settings -> database, store, sender, doorbell, processor. One instance per process."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from datetime import datetime
from functools import cache
from time import monotonic
from typing import Any, TypeVar

from outbox import events, settings, store
from outbox.database import Connection, Database
from outbox.delivery import Endpoint, WebhookSender
from outbox.doorbell import QueueDoorbell
from outbox.errors import DatabaseUnavailable, DoorbellUnavailable, EventRefused
from outbox.message import TRACEPARENT, Enqueued
from outbox.processor import Policy, Processor, Report, Route
from outbox.retry import Backoff
from outbox.store import ClaimRules, PostgresStore
from outbox.transport import AiohttpTransport

log = logging.getLogger(__name__)
T = TypeVar("T")

DAY_SECONDS = 86_400
MAX_KEY_CHARS = 200
MAX_DELAY_SECONDS = 3650 * DAY_SECONDS
#: Connections of a drain: one claims while the other settles.
DRAIN_CONNECTIONS = 2
#: How long a wake-up that met a dead database waits for the next, time after time.
OUTAGE_SECONDS = (5, 10, 20, 40, 60)


class Outbox:
    """Everything that one process needs, built from settings. Opens no connection until it is used."""

    def __init__(self, config: settings.Settings, storage: settings.Storage) -> None:
        self.settings = config
        conninfo = config.database_url.get_secret_value()
        self.database = Database(conninfo, size=config.pool_size, prepare_threshold=config.prepare_threshold)
        # The drain's own, so that a full backlog takes no connection from a request.
        self._drain_database = Database(conninfo, size=DRAIN_CONNECTIONS, prepare_threshold=config.prepare_threshold)
        self.store = PostgresStore(
            self._drain_database,
            ClaimRules(
                lease_seconds=config.lease_seconds,
                max_attempts=config.max_attempts,
                give_up_seconds=config.give_up_after_seconds,
                max_payload_bytes=config.max_payload_bytes,
            ),
        )
        self.doorbell = QueueDoorbell(config.queue_name, storage)
        self._sender = WebhookSender(_endpoints(config), AiohttpTransport(config.allowed_private_networks))
        self.processor = Processor(
            self.store,
            self._sender,
            self.doorbell,
            Policy(
                routes={n: Route(config.timeout_of(n), config.concurrency_of(n)) for n in config.destinations},
                backoff=Backoff(config.backoff_base_seconds, config.backoff_cap_seconds),
                batch_size=config.batch_size,
                max_in_flight=config.max_in_flight,
                lease_seconds=config.lease_seconds,
                max_attempts=config.max_attempts,
                give_up_seconds=config.give_up_after_seconds,
                unknown_grace_seconds=config.unknown_grace_seconds,
            ),
        )
        self._loop = _BackgroundLoop()
        self._outages = 0
        self._rung_until = 0.0

    def enqueue(
        self,
        conn: Connection,
        event: events.Event,
        *,
        traceparent: str | None = None,
        ordering_key: str | None = None,
        dedupe_key: str | None = None,
        deliver_after: float | datetime | None = None,
    ) -> list[Enqueued]:
        payload = events.to_payload(event, max_bytes=self.settings.max_payload_bytes)
        for name, key in (("ordering_key", ordering_key), ("dedupe_key", dedupe_key)):
            _check_key(name, key)
        delay_seconds, due_at = _delay(deliver_after)
        names = [name for name, each in self.settings.destinations.items() if each.wants(event.event_type)]
        if not names:
            log.warning("event type=%s has no subscribed destination; nothing was stored", event.event_type)
            return []
        return store.enqueue(
            conn,
            event_type=event.event_type,
            payload=payload,
            destinations=names,
            traceparent=traceparent if traceparent and TRACEPARENT.fullmatch(traceparent) else None,
            ordering_key=ordering_key,
            dedupe_key=dedupe_key,
            delay_seconds=delay_seconds,
            due_at=due_at,
        )

    async def drain(self, budget_seconds: float | None = None) -> Report | None:
        budget = self.settings.drain_budget_seconds if budget_seconds is None else budget_seconds
        return await self._loop.run(self.processor.drain(budget))

    async def wake_up(self) -> None:
        try:
            await self.drain()
        except DatabaseUnavailable as error:
            await asyncio.get_running_loop().run_in_executor(None, self._ring_later, error)
        else:
            self._outages = 0

    async def sweep(self) -> None:
        loop = asyncio.get_running_loop()
        # A worker that ended between finishing a message and releasing the next has left that one waiting.
        if waiting := await loop.run_in_executor(None, self.store.waiting_keys):
            await loop.run_in_executor(None, self.store.release, waiting)
        await self.drain()
        purged = await loop.run_in_executor(None, self.store.purge, self.settings.retention_days * DAY_SECONDS)
        if purged:
            log.info("purged rows=%d older_than_days=%g", purged, self.settings.retention_days)

    def stop_draining(self) -> None:
        self._loop.call(self.processor.stop)

    async def close(self) -> None:
        """Close all connections; for a process that ends in its own time."""
        await self._loop.run(self._sender.aclose())
        self.doorbell.close()
        self.database.close()
        self._drain_database.close()

    def _ring_later(self, error: DatabaseUnavailable) -> None:
        """Keep the doorbell alive through an outage: failing would poison it, and it is not at fault.

        One later doorbell speaks for all that met the same outage. Raises DoorbellUnavailable.
        """
        if monotonic() < self._rung_until:
            return
        delay = OUTAGE_SECONDS[min(self._outages, len(OUTAGE_SECONDS) - 1)]
        self._outages += 1
        log.error("drain stopped error=%s; the doorbell rings again in %d s", error, delay)
        self.doorbell.ring(delay)
        self._rung_until = monotonic() + delay - 0.5


def _endpoints(config: settings.Settings) -> dict[str, Endpoint]:
    return {
        name: Endpoint.of(each.url, [secret.get_secret_value() for secret in each.secrets], config.timeout_of(name))
        for name, each in config.destinations.items()
    }


def _check_key(name: str, key: str | None) -> None:
    if key is None:
        return
    if not isinstance(key, str) or not 1 <= len(key) <= MAX_KEY_CHARS or "\0" in key or not _encodes(key):
        raise EventRefused(f"{name}: it should be a text of 1 to {MAX_KEY_CHARS} characters, without NUL")


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def _delay(deliver_after: float | datetime | None) -> tuple[float | None, datetime | None]:
    """Seconds or a time; the other is None."""
    if isinstance(deliver_after, datetime):
        if deliver_after.tzinfo is None:
            raise EventRefused("deliver_after: a time should have a time zone")
        return None, deliver_after
    if deliver_after is None:
        return None, None
    if not 0 <= deliver_after <= MAX_DELAY_SECONDS:  # not NaN either
        raise EventRefused(f"deliver_after: it should be 0 to {MAX_DELAY_SECONDS} seconds, or a time")
    return float(deliver_after), None


class _BackgroundLoop:
    """An event loop in a thread of its own: a drain's work never delays the loop that serves requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._started()))

    def call(self, function: Callable[[], None]) -> None:
        self._started().call_soon_threadsafe(function)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="outbox-loop", daemon=True).start()
            return self._loop


@cache
def configure() -> Outbox:
    """The process's Outbox, built from the environment on the first call.

    Raises SettingsError naming each setting that is missing or wrong. Opens no connection.
    """
    return Outbox(*settings.load())


def enqueue(
    conn: Connection,
    event: events.Event,
    *,
    traceparent: str | None = None,
    ordering_key: str | None = None,
    dedupe_key: str | None = None,
    deliver_after: float | datetime | None = None,
) -> list[Enqueued]:
    """Store `event` in the caller's transaction: one row for each subscribed destination. Ring after the commit.

    Messages with the same `ordering_key` go to a destination one after the other, in the order of their commits: the
    next when the one before is Processed or Failed. It holds a lock for the key until the commit, so a transaction that
    uses several keys should take them in sorted order. A second event with the same `dedupe_key` is not stored where
    the first still is. `deliver_after` is a delay in seconds, by the database's clock, or a time with a time zone.

    Returns (destination, id, created) of each row; none, with a warning, where no destination subscribes to the type.
    Raises EventRefused before anything is written where the event cannot be stored or is too large.
    """
    return configure().enqueue(
        conn,
        event,
        traceparent=traceparent,
        ordering_key=ordering_key,
        dedupe_key=dedupe_key,
        deliver_after=deliver_after,
    )


def transact(work: Callable[[Connection], T]) -> T:
    """Run `work(connection)` in a transaction and commit it, within 8 seconds.

    `work` must be idempotent: after a serialization failure, a deadlock or a lost connection it runs once more, also
    where the lost connection had committed. Raises DatabaseUnavailable; whatever `work` raises rolls back.
    """
    return configure().database.run(work)


def ring() -> None:
    """Wake a drain, after a commit. At most 2 seconds, never raises: a lost doorbell costs time, not an event."""
    configure().doorbell.ring_for_request()


async def wake_up() -> None:
    """What a doorbell does: drain. With the database down it rings again later and returns.

    Raises DoorbellUnavailable if it can do neither.
    """
    await configure().wake_up()


async def sweep() -> None:
    """What the timer does: drain, then housekeeping. Raises DatabaseUnavailable."""
    await configure().sweep()


def stop_draining() -> None:
    """Claim no more and finish what is in flight; for a process that is about to stop."""
    configure().stop_draining()


__all__ = [
    "DoorbellUnavailable", "Outbox", "configure", "enqueue", "ring", "stop_draining", "sweep", "transact", "wake_up",
]  # fmt: skip
