"""When a doorbell is armed, for which time, and how many."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from outbox.errors import DatabaseUnavailable, DoorbellUnavailable
from outbox.message import Delivered, Message, Retry
from outbox.processor import Processor, Report, Route
from outbox.retry import Backoff
from outbox.store import PostgresStore

from .support import Bell, Rows, Sender, until


def armed(rows: Rows) -> list[datetime]:
    (found,) = rows.conn.execute("SELECT armed FROM outbox_doorbell").fetchone() or ([],)
    return list(found)


def test_a_drain_arms_a_doorbell_just_before_the_earliest_retry(rows: Rows, drain: Callable[..., Report]) -> None:
    rows.add(1, "crm")
    rows.add(1, "erp", due_in=120)
    rows.add(1, "elsewhere", due_in=60)
    bell = Bell()
    drain(Sender(lambda m: Retry("http_500", "HTTP 500")), bell, backoff=Backoff(10, 10))
    assert rows.conn.execute("SELECT count(*) FROM outbox_messages WHERE attempt_count = 1").fetchone() == (1,)
    assert bell.rings[-1] in (8, 9)
    due = rows.conn.execute("SELECT min(next_attempt_at) FROM outbox_messages WHERE status = 'Pending'").fetchone()
    assert due is not None
    assert timedelta(seconds=1) <= due[0] - min(armed(rows)) < timedelta(seconds=3)


def test_whoever_set_it_the_earliest_row_counts(rows: Rows, drain: Callable[..., Report]) -> None:
    rows.add(due_in=50)
    rows.add(1, "elsewhere", due_in=40)
    bell = Bell()
    drain(bell=bell)
    (delay,) = bell.rings
    assert delay in (37, 38)


def test_a_watchdog_is_armed_for_the_lease_before_the_first_claim(
    rows: Rows, processor: Callable[..., Processor]
) -> None:
    rows.add()
    bell = Bell()
    before: list[list[float]] = []

    def look(message: Message) -> Delivered:
        before.append(list(bell.rings))
        return Delivered()

    asyncio.run(processor(Sender(look), bell, lease_seconds=20.0).drain(10))
    ((delay,),) = before
    assert delay in (18, 19)


def test_a_row_that_becomes_due_while_a_drain_waits_has_its_watchdog_too(
    rows: Rows, processor: Callable[..., Processor]
) -> None:
    rows.add(due_in=1.5)
    bell = Bell()
    seen: list[float] = []
    sender = Sender(lambda m: (seen.extend(bell.rings), Delivered())[1])  # type: ignore[func-returns-value]
    asyncio.run(processor(sender, bell, lease_seconds=20.0).drain(10))
    assert any(17 <= delay <= 20 for delay in seen)


def test_the_row_of_a_killed_host_goes_out_when_its_lease_ends(rows: Rows, drain: Callable[..., Report]) -> None:
    """All a killed host leaves is its row; any drain, for whatever reason it runs, arms for the lease's end."""
    (key,) = rows.add()
    rows.conn.execute(
        "UPDATE outbox_messages SET status = 'Processing', lease_token = gen_random_uuid(), attempt_count = 1,"
        " lease_expires_at = now() + interval '25 s', next_attempt_at = now() + interval '25 s'"
    )
    bell = Bell()
    drain(bell=bell)
    (delay,) = bell.rings
    assert delay in (22, 23)
    assert rows.get(key)["status"] == "Processing"


@pytest.mark.parametrize(("due_in", "rings"), [(290, 1), (310, 0), (4000, 0)])
def test_nothing_is_armed_beyond_five_minutes(
    rows: Rows, drain: Callable[..., Report], due_in: float, rings: int
) -> None:
    rows.add(due_in=due_in)
    bell = Bell()
    drain(bell=bell)
    assert len(bell.rings) == rings


def test_an_idle_table_rings_nothing(drain: Callable[..., Report]) -> None:
    bell = Bell()
    drain(bell=bell)
    assert bell.rings == []


def test_of_many_at_once_one_rings(rows: Rows, open_store: Callable[..., PostgresStore]) -> None:
    bell, start = Bell(), threading.Barrier(12)

    def arm() -> None:
        store = open_store()
        start.wait(10)
        for _ in range(5):
            store.arm(30, bell.ring)

    threads = [threading.Thread(target=arm) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(bell.rings) == 1


def test_no_later_doorbell_is_armed_while_an_earlier_is_to_ring_but_an_earlier_is(
    rows: Rows, store: PostgresStore
) -> None:
    bell = Bell()
    for delay in (60, 100, 200, 60):
        store.arm(delay, bell.ring)
    assert len(bell.rings) == 1
    store.arm(20, bell.ring)
    assert bell.rings == [59, 19]
    assert len(armed(rows)) == 2


def test_doorbells_that_have_rung_are_forgotten(rows: Rows, store: PostgresStore) -> None:
    rows.conn.execute(
        "UPDATE outbox_doorbell SET armed = ARRAY(SELECT now() - g * interval '5 s' FROM generate_series(1, 500) AS g)"
    )
    bell = Bell()
    store.arm(30, bell.ring)
    assert len(bell.rings) == len(armed(rows)) == 1


def test_a_doorbell_that_could_not_be_sent_is_not_noted(rows: Rows, store: PostgresStore) -> None:
    bell = Bell(broken=True)
    with pytest.raises(DoorbellUnavailable):
        store.arm(30, bell.ring)
    assert armed(rows) == []
    bell.broken = False
    store.arm(30, bell.ring)
    assert len(bell.rings) == 1


def test_with_the_queue_down_a_drain_delivers_all_the_same(rows: Rows, drain: Callable[..., Report]) -> None:
    rows.add(200)
    rows.add(due_in=60)
    assert drain(bell=Bell(broken=True), routes={"crm": Route(5, 300)}).delivered == 200


def test_an_undeliverable_row_and_many_wake_ups_leave_few_doorbells(rows: Rows, drain: Callable[..., Report]) -> None:
    """Each drain that a doorbell starts arms at most one for a second that has none yet."""
    rows.add()
    bell = Bell()
    for _ in range(30):
        drain(Sender(lambda m: Retry("http_500", "HTTP 500")), bell, backoff=Backoff(10, 10))
    assert len(bell.rings) <= 3


def test_at_most_one_doorbell_is_armed_for_a_second(rows: Rows, open_store: Callable[..., PostgresStore]) -> None:
    bell = Bell()
    stores = [open_store() for _ in range(4)]
    for step in range(200):
        stores[step % 4].arm(100 - step / 4, bell.ring)
    seconds = armed(rows)
    assert len(seconds) == len(set(seconds)) == len(bell.rings)
    assert all(second.microsecond == 0 for second in seconds)


def test_a_wake_up_that_meets_a_dead_database_rings_again_with_a_growing_delay(
    configure: Callable[..., Any], conninfo: str
) -> None:
    from psycopg.conninfo import make_conninfo

    box = configure(database_url=make_conninfo(conninfo, host="127.0.0.1", port=9))
    for _ in range(6):
        asyncio.run(box.wake_up())
        asyncio.run(box.wake_up())  # one doorbell speaks for both
        box._rung_until = 0.0
    assert box.doorbell.rings == [5, 10, 20, 40, 60, 60]
    with pytest.raises(DatabaseUnavailable):
        asyncio.run(box.sweep())
    box.doorbell.broken = True
    with pytest.raises(DoorbellUnavailable):
        asyncio.run(box.wake_up())


def test_the_timer_purges_after_its_drain(rows: Rows, configure: Callable[..., Any]) -> None:
    box = configure(retention_days="2")
    rows.add(3, status="Processed", processed_at="yesterday")
    rows.conn.execute("UPDATE outbox_messages SET processed_at = now() - interval '3 days' WHERE ctid = '(0,1)'")
    asyncio.run(box.sweep())
    until(lambda: rows.statuses() == {"Processed": 2}, 2)
