"""The outbox table: one method for each statement in sql/."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import Any
from uuid import UUID

from psycopg.rows import dict_row, scalar_row, tuple_row

from outbox.database import Connection, Database, sql
from outbox.message import Due, Enqueued, Message, Settlement

PURGE_CHUNK = 5000
PROMOTE_CHUNK = 1000
#: How long before a row is due its doorbell rings, at least: hosts hear it late, and the drain waits for the row.
LEAD_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRules:
    lease_seconds: float
    max_attempts: int
    give_up_seconds: float
    max_payload_bytes: int


def enqueue(
    conn: Connection,
    *,
    event_type: str,
    payload: str,
    destinations: Sequence[str],
    traceparent: str | None = None,
    ordering_key: str | None = None,
    dedupe_key: str | None = None,
    delay_seconds: float | None = None,
    due_at: datetime | None = None,
) -> list[Enqueued]:
    """Write an event's rows, one for each destination, in the caller's own transaction."""
    names = list(destinations)
    values = {
        "event_id": uuid.uuid4(),
        "event_type": event_type,
        "payload": payload,
        "traceparent": traceparent,
        "ordering_key": ordering_key,
        "dedupe_key": dedupe_key,
        "delay_seconds": delay_seconds,
        "due_at": due_at,
    }
    cursor = conn.cursor(row_factory=tuple_row)  # whatever the caller's connection has
    if ordering_key is not None:
        cursor.execute(sql("lock_key"), {"ordering_key": ordering_key})
    made: dict[str, Enqueued] = {}
    while missing := [name for name in names if name not in made]:
        for destination, message_id in cursor.execute(sql("enqueue"), {**values, "destinations": missing}):
            made[destination] = Enqueued(destination, message_id)
        # Not written: there already. A second round only where a purge took it away in between.
        absent = [name for name in missing if name not in made]
        if absent:
            found = cursor.execute(sql("duplicates"), {"destinations": absent, "dedupe_key": dedupe_key})
            made.update((name, Enqueued(name, message_id, created=False)) for name, message_id in found)
    return [made[name] for name in names]


class PostgresStore:
    """The drain's side of the table. Every method is one transaction and raises DatabaseUnavailable."""

    def __init__(self, database: Database, rules: ClaimRules) -> None:
        self._database = database
        self._rules = rules

    def destinations(self) -> list[str]:
        """The destinations that rows at work name."""
        return self._rows("destinations", scalar_row)

    def claim(self, rooms: Mapping[str, int], limit: int) -> list[Message]:
        """Lease up to `limit` due rows, at most `rooms[destination]` for each destination, oldest first."""
        return self._claim("claim", destinations=list(rooms), rooms=list(rooms.values()), batch_size=limit)

    def claim_suspect(self, destinations: Sequence[str]) -> list[Message]:
        """Lease one row that lost two leases in a row, if one is due."""
        return self._claim("claim_suspect", destinations=list(destinations))

    def suspects(self, destinations: Sequence[str]) -> bool:
        """Whether a row waits to be claimed alone."""
        rows = self._rows(
            "suspects", scalar_row, destinations=list(destinations), max_attempts=self._rules.max_attempts
        )
        return bool(rows[0])

    def expire(self, destinations: Sequence[str]) -> list[dict[str, Any]]:
        """Make due rows Failed that are out of attempts or time, and return what became of which."""
        return self._rows(
            "expire",
            dict_row,
            destinations=list(destinations),
            max_attempts=self._rules.max_attempts,
            give_up_seconds=self._rules.give_up_seconds,
        )

    def promote(self) -> bool:
        """Find the heads among due messages with an ordering_key, and put the others away. True: there were heads."""
        heads = False
        while found := self._rows("promote", scalar_row, at_most=PROMOTE_CHUNK):
            heads = heads or any(found)
        return heads

    def release(self, keys: Iterable[tuple[str, str]]) -> int:
        """Make the next message of each (destination, ordering_key) claimable, when the one before it is finished."""
        pairs = sorted(set(keys))
        return len(
            self._rows("release", scalar_row, destinations=[name for name, _ in pairs], keys=[key for _, key in pairs])
        )

    def waiting_keys(self) -> list[tuple[str, str]]:
        """Each (destination, ordering_key) whose next message is put away though none before it is unfinished."""
        return self._rows("waiting_keys", tuple_row)

    def settle(self, results: Sequence[Settlement]) -> set[UUID]:
        """Record results; returns the ids of those that counted. The others' leases were lost."""
        now = monotonic()
        return set(
            self._rows(
                "settle",
                scalar_row,
                ids=[r.message.outbox_message_id for r in results],
                tokens=[r.message.lease_token for r in results],
                statuses=[r.status for r in results],
                delays=[max(0.0, r.delay_seconds - (now - r.ended)) for r in results],
                codes=[r.code for r in results],
                errors=[r.error for r in results],
            )
        )

    def give_back(self, messages: Iterable[Message]) -> set[UUID]:
        """Return claimed rows unstarted: due now, and the attempt is not counted."""
        messages = list(messages)
        return set(
            self._rows(
                "give_back",
                scalar_row,
                ids=[m.outbox_message_id for m in messages],
                tokens=[m.lease_token for m in messages],
            )
        )

    def due(self, destinations: Sequence[str], *, soon_seconds: float, horizon_seconds: float) -> Due:
        """Whether a row is due within `soon_seconds`, and how long until the next after that, within the horizon."""
        row = self._rows(
            "due",
            dict_row,
            destinations=list(destinations),
            soon_seconds=float(soon_seconds),
            horizon_seconds=float(horizon_seconds),
        )[0]
        return Due(row["soon"], row["next_in"])

    def arm(self, delay_seconds: float, ring: Callable[[float], None]) -> None:
        """Ring a doorbell just before `delay_seconds` have passed, unless one is armed for then or earlier.

        It is sent inside the transaction that notes it: a worker killed in between leaves no note of a doorbell that
        was never sent. The wait is whole seconds, as the queue has it, so the doorbell is heard in the second noted or
        the next, never before: whoever sees a note in the future can rely on it.
        """
        wait_seconds = max(0, int(delay_seconds - LEAD_SECONDS))

        def work(conn: Connection) -> None:
            if conn.execute(sql("arm"), {"wait_seconds": float(wait_seconds)}).fetchone() is not None:
                ring(wait_seconds)

        self._database.run(work)

    def backlog(self, destinations: Sequence[str], at_most: int) -> int:
        """How many rows are due, counted up to `at_most`."""
        return int(self._rows("backlog", scalar_row, destinations=list(destinations), at_most=at_most)[0])

    def purge(self, retention_seconds: float) -> int:
        """Delete Processed rows older than that; returns how many. A transaction for each chunk."""
        purged = 0
        while True:
            chunk = self._database.run(
                lambda conn: (
                    conn.execute(
                        sql("purge"), {"retention_seconds": float(retention_seconds), "chunk": PURGE_CHUNK}
                    ).rowcount
                )
            )
            purged += chunk
            if chunk < PURGE_CHUNK:
                return purged

    def stats(self) -> list[dict[str, Any]]:
        """Rows at work and failed, by destination."""
        return self._database.run(lambda conn: conn.cursor(row_factory=dict_row).execute(sql("stats")).fetchall())

    def _claim(self, statement: str, **parameters: Any) -> list[Message]:
        rules = self._rules
        sent = monotonic()
        rows = self._rows(
            statement,
            dict_row,
            lease_token=uuid.uuid4(),
            lease_seconds=float(rules.lease_seconds),
            max_attempts=rules.max_attempts,
            give_up_seconds=float(rules.give_up_seconds),
            max_payload_bytes=rules.max_payload_bytes,
            **parameters,
        )
        messages = [Message(**row, claimed_monotonic=sent, lease_seconds=rules.lease_seconds) for row in rows]
        return sorted(messages, key=lambda m: (m.created_at, m.outbox_message_id))  # RETURNING has no order

    def _rows(self, statement: str, row_factory: Any, **parameters: Any) -> list[Any]:
        def work(conn: Connection) -> list[Any]:
            return conn.cursor(row_factory=row_factory).execute(sql(statement), parameters).fetchall()

        return self._database.run(work, limits="drain_limits")
