"""What a message may ask for when it is enqueued: an order, no duplicate, a delay."""

from __future__ import annotations

import asyncio
import random
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from psycopg.rows import dict_row

import outbox
from outbox.errors import EventRefused
from outbox.message import Dead, Delivered, Message, Outcome, Retry
from outbox.processor import Processor, Report
from outbox.store import PostgresStore
from outbox.wiring import Outbox

from .support import Bell, Ping, Rows, Sender, connect, ids, until

Drain = Callable[..., Report]


@pytest.fixture
def box(configure: Callable[..., Outbox]) -> Outbox:
    return configure()


def add(rows: Rows, n: int, **options: Any) -> uuid.UUID:
    """Enqueue for `crm`; returns the id."""
    (made,) = outbox.enqueue(rows.conn, Ping(n=n), **options)
    return made.outbox_message_id


# -- order -------------------------------------------------------------------------------------------------------------


def test_messages_with_one_key_are_delivered_one_after_the_other_in_the_order_of_their_commits(
    rows: Rows, box: Outbox, drain: Drain
) -> None:
    keys = [add(rows, n, ordering_key="k") for n in range(20)]
    sender = Sender(seconds=0.005)
    report = drain(sender)
    assert ids(sender.sent) == keys
    assert sender.most["crm"] == 1
    assert report.delivered == 20


def test_the_order_is_that_of_the_commits_not_of_the_calls(rows: Rows, box: Outbox, conninfo: str) -> None:
    with connect(conninfo) as first, first.transaction():
        one = outbox.enqueue(first, Ping(n=1), ordering_key="k")[0].outbox_message_id
        other = connect(conninfo)
        with ThreadPoolExecutor(1) as thread, other:
            second = thread.submit(lambda: outbox.enqueue(other, Ping(n=2), ordering_key="k"))
            waiting = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            until(lambda: rows.conn.execute(waiting).fetchone())
            assert not second.done()
            first.execute("COMMIT")
            two = second.result()[0].outbox_message_id
            first.execute("BEGIN")
    assert rows.get(one)["order_no"] < rows.get(two)["order_no"]
    assert (rows.get(one)["is_head"], rows.get(two)["is_head"]) == (True, False)


def test_a_later_message_waits_for_the_retry_of_an_earlier_one(rows: Rows, box: Outbox, drain: Drain) -> None:
    first, second, third = (add(rows, n, ordering_key="k") for n in range(3))
    failing = iter([Retry("http_500", "HTTP 500")])
    sender = Sender(lambda message: next(failing, Delivered()))
    drain(sender)
    assert ids(sender.sent) == [first]
    assert rows.get(first)["due_in"] > 5
    rows.update(first, next_attempt_at=datetime.now(UTC) - timedelta(seconds=1))
    drain(sender)
    assert ids(sender.sent) == [first, first, second, third]


@pytest.mark.parametrize("how", ["dead", "attempts", "gave_up"])
def test_the_next_goes_on_when_the_one_before_has_failed(rows: Rows, box: Outbox, drain: Drain, how: str) -> None:
    first, second = add(rows, 1, ordering_key="k"), add(rows, 2, ordering_key="k")
    if how == "attempts":
        rows.update(first, attempt_count=50)
    if how == "gave_up":
        rows.update(first, created_at=datetime.now(UTC) - timedelta(days=9))
    sender = Sender(lambda message: Dead("gone", "HTTP 410") if message.outbox_message_id == first else Delivered())
    drain(sender)
    assert (rows.get(first)["status"], rows.get(second)["status"]) == ("Failed", "Processed")


def test_keys_and_destinations_do_not_wait_for_each_other(rows: Rows, box: Outbox, drain: Drain) -> None:
    for n in range(3):
        add(rows, n, ordering_key="a")
        add(rows, n, ordering_key="b")
        rows.add(1, "erp", ordering_key="a")
        add(rows, n)
    stuck = Retry("http_500", "HTTP 500")
    blocked = rows.conn.execute("SELECT outbox_message_id FROM outbox_messages WHERE ordering_key = 'a' AND is_head")
    (first,) = blocked.fetchone() or (None,)
    drain(Sender(lambda message: stuck if message.outbox_message_id == first else Delivered()))
    left = rows.conn.execute(
        "SELECT destination, ordering_key, count(*) FROM outbox_messages WHERE status = 'Pending' GROUP BY 1, 2"
    ).fetchall()
    assert left == [("crm", "a", 3)]


def test_give_up_time_does_not_run_while_a_message_waits_for_its_turn(rows: Rows, box: Outbox, drain: Drain) -> None:
    first, second = add(rows, 1, ordering_key="k"), add(rows, 2, ordering_key="k")
    later = iter([Retry("http_500", "HTTP 500")])
    drain(Sender(lambda message: next(later, Delivered())))  # puts the second away
    rows.update(second, created_at=datetime.now(UTC) - timedelta(days=9))
    rows.update(first, next_attempt_at=datetime.now(UTC) - timedelta(seconds=1))
    assert drain(Sender()).delivered == 2


def test_messages_that_wait_for_their_turn_arm_no_doorbell(rows: Rows, box: Outbox, drain: Drain) -> None:
    first, _ = add(rows, 1, ordering_key="k"), add(rows, 2, ordering_key="k")
    bell = Bell()
    drain(Sender(lambda message: Retry("http_500", "HTTP 500", retry_after=1000)), bell)
    assert rows.get(first)["due_in"] > 900
    quiet = Bell()
    assert drain(Sender(), quiet).claimed == 0
    assert quiet.rings == []


def test_a_next_message_that_a_lost_worker_did_not_release_is_found_by_the_timer(
    rows: Rows, box: Outbox, drain: Drain, configure: Callable[..., Outbox]
) -> None:
    first, second = add(rows, 1, ordering_key="k"), add(rows, 2, ordering_key="k")
    drain(Sender(lambda message: Retry("http_500", "HTTP 500")))
    rows.update(first, status="Processed", processed_at=datetime.now(UTC), last_error=None)  # and then it was killed
    assert drain(Sender()).claimed == 0
    sender = box.processor.sender = Sender()
    asyncio.run(box.sweep())
    assert ids(sender.sent) == [second]


def test_a_long_queue_behind_one_key_does_not_slow_the_claim_of_others(
    rows: Rows, store: PostgresStore, box: Outbox
) -> None:
    rows.conn.execute(
        "INSERT INTO outbox_messages (outbox_message_id, event_type, destination, payload, ordering_key, order_no)"
        " SELECT gen_random_uuid(), 'test.Ping', 'crm', '{\"n\": 1}', 'k', nextval('outbox_order_no')"
        " FROM generate_series(1, 5000)"
    )
    (behind,) = rows.add(1, "crm")
    store.promote()
    messages = store.claim({"crm": 100}, 100)
    assert len(messages) == 2
    assert behind in ids(messages)
    due = "SELECT count(*) FROM outbox_messages WHERE status = 'Pending' AND next_attempt_at <= now()"
    assert rows.conn.execute(due).fetchone() == (0,)  # so that no claim reads them again


class Recorder(Sender):
    """A receiver that fails now and then, and the log of what began and what was delivered."""

    def __init__(self, log: list[tuple[str, uuid.UUID]], seed: int) -> None:
        dice = random.Random(seed)
        super().__init__(lambda _: Delivered() if dice.random() < 0.8 else Retry("http_500", "HTTP 500"), 0.001)
        self._log = log

    async def send(self, message: Message) -> Outcome:
        self._log.append(("begins", message.outbox_message_id))
        outcome = await super().send(message)
        if isinstance(outcome, Delivered):
            self._log.append(("delivered", message.outbox_message_id))
        return outcome


def test_many_writers_and_drains_keep_the_order_of_every_key(
    rows: Rows, box: Outbox, conninfo: str, processor: Callable[..., Processor]
) -> None:
    log: list[tuple[str, uuid.UUID]] = []
    written = threading.Event()

    def write(seed: int) -> None:
        dice = random.Random(seed)
        with connect(conninfo) as conn:
            for n in range(20):
                with conn.transaction():
                    outbox.enqueue(conn, Ping(n=n), ordering_key=f"k{dice.randrange(3)}")

    def work(seed: int) -> None:
        unfinished = "SELECT FROM outbox_messages WHERE status IN ('Pending', 'Processing')"
        due_now = (
            "UPDATE outbox_messages SET next_attempt_at = now() WHERE status = 'Pending'"
            " AND next_attempt_at BETWEEN now() AND now() + interval '1 day'"
        )
        worker = processor(Recorder(log, seed))
        with connect(conninfo) as conn:
            while True:
                last = written.is_set()
                asyncio.run(worker.drain(20))
                if last and not conn.execute(unfinished).fetchall():
                    return
                conn.execute(due_now)  # the retries

    with ThreadPoolExecutor(6) as threads:
        workers = [threads.submit(work, seed) for seed in range(2)]
        for done in [threads.submit(write, seed) for seed in range(4)]:
            done.result()
        written.set()
        for done in workers:
            done.result()
    assert rows.statuses() == {"Processed": 80}
    stored = rows.conn.execute("SELECT outbox_message_id, ordering_key, order_no FROM outbox_messages")
    numbers = {key: (name, number) for key, name, number in stored}
    delivered: set[tuple[str, int]] = set()
    for what, key in log:
        name, number = numbers[key]
        if what == "delivered":
            delivered.add((name, number))
        else:
            assert {each for each in numbers.values() if each[0] == name and each[1] < number} <= delivered


# -- no duplicate ------------------------------------------------------------------------------------------------------


def test_a_second_event_with_the_same_dedupe_key_is_the_first(rows: Rows, box: Outbox) -> None:
    one = outbox.enqueue(rows.conn, Ping(n=1), dedupe_key="order 7")
    two = outbox.enqueue(rows.conn, Ping(n=2), dedupe_key="order 7")
    other = outbox.enqueue(rows.conn, Ping(n=3), dedupe_key="order 8")
    assert [(each.destination, each.created) for each in one + two + other] == [
        ("crm", True), ("crm", False), ("crm", True),
    ]  # fmt: skip
    assert two[0].outbox_message_id == one[0].outbox_message_id != other[0].outbox_message_id
    assert rows.get(one[0].outbox_message_id)["payload"] == {"n": 1}
    assert rows.count() == 2


def test_of_two_at_once_with_one_dedupe_key_one_is_stored(rows: Rows, box: Outbox, conninfo: str) -> None:
    start = threading.Barrier(8)

    def enqueue() -> tuple[uuid.UUID, bool]:
        with connect(conninfo) as conn, conn.transaction():
            start.wait(10)
            (made,) = outbox.enqueue(conn, Ping(n=1), dedupe_key="once")
            return made.outbox_message_id, made.created

    with ThreadPoolExecutor(8) as threads:
        made = [done.result() for done in [threads.submit(enqueue) for _ in range(8)]]
    assert len({message_id for message_id, _ in made}) == 1
    assert sorted(created for _, created in made) == [False] * 7 + [True]


@pytest.mark.parametrize("end", ["purged", "discarded"])
def test_a_message_that_is_purged_or_discarded_frees_its_dedupe_key(
    rows: Rows, box: Outbox, store: PostgresStore, end: str
) -> None:
    first = add(rows, 1, dedupe_key="k")
    long_ago = datetime.now(UTC) - timedelta(days=99)
    if end == "purged":
        rows.update(first, status="Processed", processed_at=long_ago)
        assert not outbox.enqueue(rows.conn, Ping(n=2), dedupe_key="k")[0].created
        assert store.purge(86_400) == 1
    else:
        rows.update(first, status="Failed", failed_at=long_ago, last_error="x", discarded_at=long_ago)
    (again,) = outbox.enqueue(rows.conn, Ping(n=2), dedupe_key="k")
    assert again.created
    assert again.outbox_message_id != first


def test_the_callers_row_factory_does_not_matter(rows: Rows, box: Outbox) -> None:
    rows.conn.row_factory = dict_row
    (one,) = outbox.enqueue(rows.conn, Ping(n=1), dedupe_key="k")
    (two,) = outbox.enqueue(rows.conn, Ping(n=1), dedupe_key="k")
    assert one.outbox_message_id == two.outbox_message_id
    assert one.destination == "crm"


# -- a delay -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 60, 0.5, 3600.0])
def test_a_message_may_wait_for_so_many_seconds_or_until_a_time(rows: Rows, box: Outbox, delay: float) -> None:
    seconds = rows.get(add(rows, 1, deliver_after=delay))
    moment = rows.get(add(rows, 2, deliver_after=datetime.now(UTC) + timedelta(seconds=delay)))
    for row in (seconds, moment):
        assert delay - 1 < row["due_in"] <= delay


def test_the_give_up_time_of_a_delayed_message_starts_when_it_is_due(rows: Rows, box: Outbox, drain: Drain) -> None:
    key = add(rows, 1, deliver_after=10)
    rows.update(key, created_at=datetime.now(UTC) - timedelta(days=9), next_attempt_at=datetime.now(UTC))
    assert drain(Sender()).delivered == 1


def test_a_doorbell_is_armed_for_the_end_of_a_delay(rows: Rows, box: Outbox, drain: Drain) -> None:
    add(rows, 1, deliver_after=60)
    bell = Bell()
    assert drain(Sender(), bell).claimed == 0
    (delay,) = bell.rings
    assert 55 < delay <= 60


NAIVE = datetime(2030, 1, 1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        *[({name: key}, f"{name}: it should be a text of 1 to 200 characters")
          for name in ("ordering_key", "dedupe_key") for key in ("", "x" * 201, "a\0b", "\ud800", 7)],
        *[({"deliver_after": value}, "deliver_after: it should be 0 to") for value in (-1, float("nan"), float("inf"))],
        ({"deliver_after": NAIVE}, "deliver_after: a time should have a time zone"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_for_is_refused_by_name(
    rows: Rows, box: Outbox, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(EventRefused, match=says):
        outbox.enqueue(rows.conn, Ping(n=1), **options)
    assert rows.count() == 0
