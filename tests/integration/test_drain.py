"""The drain on a real table, with a receiver by script."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest

from localdev.postgres import Postgres
from outbox.errors import DatabaseUnavailable
from outbox.message import Dead, Delivered, Message, Retry
from outbox.processor import Processor, Report, Route
from outbox.retry import Backoff

from .support import ROOT, Bell, Rows, Sender, connect, ids, until


async def until_async(condition: Callable[[], Any], seconds: float = 10) -> None:
    deadline = monotonic() + seconds
    while not condition():
        assert monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)


def test_everything_due_is_delivered_once(rows: Rows, drain: Callable[..., Report]) -> None:
    made = rows.add(700, "crm") + rows.add(50, "erp")
    sender = Sender()
    report = drain(sender)
    assert report == Report(claimed=750, delivered=750)
    assert sorted(ids(sender.sent)) == sorted(made)
    assert rows.statuses() == {"Processed": 750}


def test_a_receiver_that_answers_at_once_is_not_kept_waiting(rows: Rows, drain: Callable[..., Report]) -> None:
    """All deliveries may have landed by the time that a claim for the other destinations returns with nothing."""
    rows.add(640)
    started = monotonic()
    assert drain(routes={"crm": Route(5, 16), "erp": Route(5, 32)}).delivered == 640
    assert monotonic() - started < 5  # 40 claims; it was 0.2 s for each, and after five of those it gave up


def test_no_more_is_in_flight_than_the_settings_allow(rows: Rows, drain: Callable[..., Report]) -> None:
    for name in ("crm", "erp", "d1", "d2"):
        rows.add(100, name)
    routes = {"crm": Route(5, 4), "erp": Route(5, 8), "d1": Route(5, 32), "d2": Route(5, 32)}
    sender = Sender(seconds=0.01)
    drain(sender, routes=routes, max_in_flight=40, batch_size=16)
    assert sender.most["crm"] <= 4
    assert sender.most["erp"] <= 8
    assert 20 < sender.most["all"] <= 40


def test_a_drain_holds_no_more_rows_than_it_can_deliver(
    rows: Rows, processor: Callable[..., Processor], conninfo: str
) -> None:
    rows.add(1000)
    held = []

    def look(message: Message) -> Delivered:
        held.append(rows.statuses().get("Processing", 0))
        return Delivered()

    asyncio.run(processor(Sender(look), routes={"crm": Route(5, 10)}, max_in_flight=20).drain(10))
    assert max(held) <= 40
    assert rows.statuses() == {"Processed": 1000}


def test_a_failed_attempt_is_retried_until_it_succeeds(rows: Rows, drain: Callable[..., Report]) -> None:
    (key,) = rows.add()
    sender = Sender(lambda m: Retry("http_500", "HTTP 500") if m.attempt_count < 3 else Delivered())
    report = drain(sender, backoff=Backoff(0.2, 1))
    assert (report.claimed, report.retried, report.delivered) == (3, 2, 1)
    assert [m.attempt_count for m in sender.sent] == [1, 2, 3]
    assert {m.outbox_message_id for m in sender.sent} == {key}
    first, second = (b - a for a, b in zip(sender.times, sender.times[1:], strict=False))
    assert 0.2 <= first < 0.4 + 0.5
    assert 0.4 <= second < 0.6 + 0.5


@pytest.mark.parametrize(
    ("outcome", "columns", "code", "text"),
    [
        (Retry("http_500", "HTTP 500"), {"attempt_count": 2}, "attempts_exhausted", "HTTP 500"),
        (Retry("http_500", "HTTP 500", retry_after=60), {"attempt_count": 2}, "attempts_exhausted", "HTTP 500"),
        (Dead("gone", "HTTP 410"), {}, "gone", "HTTP 410"),
    ],
)
def test_the_last_failing_result_is_failed_at_once(
    rows: Rows, drain: Callable[..., Report], outcome: Any, columns: dict[str, Any], code: str, text: str
) -> None:
    (key,) = rows.add(**columns)
    assert drain(Sender(lambda m: outcome), max_attempts=3).failed == 1
    row = rows.get(key)
    assert (row["status"], row["failure_code"]) == ("Failed", code)
    assert text in row["last_error"]


def test_an_attempt_that_ends_past_the_give_up_time_is_the_last(rows: Rows, drain: Callable[..., Report]) -> None:
    (key,) = rows.add(age=99.5)
    drain(Sender(lambda m: Retry("http_500", "HTTP 500"), seconds=1), give_up_seconds=100)
    assert rows.get(key)["failure_code"] == "gave_up"


BAD_ROWS = [
    ({"event_type": "test.Unheard"}, "unknown_event_type"),
    ({"destination": "nowhere"}, "unknown_destination"),
    ({"payload": {"n": "no number"}}, "payload_mismatch"),
    ({"payload": "null"}, "payload_mismatch"),
    ({"payload": {"n": 1, "note": "x" * 2000}}, "payload_too_large"),
]


@pytest.mark.parametrize(("columns", "code"), BAD_ROWS)
def test_a_row_that_cannot_be_delivered_is_failed_and_the_rest_goes_on(
    rows: Rows, drain: Callable[..., Report], columns: dict[str, Any], code: str
) -> None:
    (bad,) = rows.add(**columns)
    rows.add(99)
    report = drain(max_payload_bytes=1000)
    assert (report.delivered, report.failed) == (99, 1)
    row = rows.get(bad)
    assert (row["status"], row["failure_code"]) == ("Failed", code)
    assert row["last_error"]


@pytest.mark.parametrize(("columns", "code"), BAD_ROWS)
def test_within_its_grace_such_a_row_is_retried(
    rows: Rows, drain: Callable[..., Report], columns: dict[str, Any], code: str
) -> None:
    (bad,) = rows.add(**columns)
    rules: dict[str, Any] = {"max_payload_bytes": 1000, "unknown_grace_seconds": 1.5, "backoff": Backoff(0.5, 1800)}
    sender = Sender()
    report = drain(sender, **rules)
    assert (report.retried >= 2, report.failed, sender.sent) == (True, 1, [])
    assert rows.get(bad)["failure_code"] == code
    row = rows.get(bad)
    assert 1.5 <= (row["failed_at"] - row["created_at"]).total_seconds() < 4


def test_a_sender_that_raises_costs_its_own_message_an_attempt(rows: Rows, drain: Callable[..., Report]) -> None:
    bad, *_ = rows.add(10)
    sender = Sender(lambda m: ZeroDivisionError("secret") if m.outbox_message_id == bad else Delivered())
    report = drain(sender)
    assert (report.delivered, report.retried) == (9, 1)
    assert rows.get(bad)["last_error"] == "ZeroDivisionError"


def test_a_destination_that_hangs_slows_no_other(rows: Rows, processor: Callable[..., Processor]) -> None:
    rows.add(300, "crm")  # older, and each of them hangs
    rows.add(300, "erp")
    done: list[float] = []

    class Hanging(Sender):
        async def send(self, message: Message) -> Any:
            if message.destination == "crm":
                await asyncio.sleep(2)
                return Retry("timeout", "no answer")
            done.append(monotonic())
            return Delivered()

    started = monotonic()
    asyncio.run(processor(Hanging()).drain(3))
    assert len(done) == 300
    assert max(done) - started < 1.9


def test_at_the_end_of_its_budget_a_drain_settles_what_flies_and_rings_for_the_rest(
    rows: Rows, drain: Callable[..., Report]
) -> None:
    rows.add(300)
    bell, sender = Bell(), Sender(seconds=0.2)
    report = drain(sender, bell, budget=0.5, routes={"crm": Route(5, 10)})
    assert 0 < report.delivered == len(sender.sent) < 300
    assert rows.statuses() == {"Processed": report.delivered, "Pending": 300 - report.delivered}
    assert rows.conn.execute("SELECT max(attempt_count) FROM outbox_messages WHERE status = 'Pending'").fetchone() == (
        0,
    )
    assert bell.rings.count(0) == 1


def test_a_drain_that_cannot_keep_up_rings_for_more_instances(rows: Rows, drain: Callable[..., Report]) -> None:
    rows.add(100)
    bell = Bell()
    drain(Sender(seconds=0.2), bell, budget=0.3, routes={"crm": Route(5, 2)}, batch_size=2)
    assert 2 <= bell.rings.count(0) <= 10


def test_a_lease_too_short_for_the_delivery_starts_none(rows: Rows, drain: Callable[..., Report]) -> None:
    (key,) = rows.add()
    sender = Sender()
    report = drain(sender, budget=1, lease_seconds=4.0, routes={"crm": Route(5, 32)})
    assert (sender.sent, report.given_back >= 1) == ([], True)
    row = rows.get(key)
    assert (row["status"], row["attempt_count"]) == ("Pending", 0)


def test_a_second_drain_returns_at_once_and_the_first_takes_its_row(
    rows: Rows, processor: Callable[..., Processor]
) -> None:
    rows.add(1, "crm")
    sender = Sender(seconds=0.5)

    async def both() -> tuple[Report | None, Report | None, float]:
        each = processor(sender)
        first = asyncio.create_task(each.drain(10))
        await until_async(lambda: sender.sent)
        rows.add(1, "erp")
        started = monotonic()
        second = await each.drain(10)
        took = monotonic() - started
        await until_async(lambda: len(sender.sent) == 2, 0.4)  # while the first row is still in flight
        return await first, second, took

    first, second, took = asyncio.run(both())
    assert first is not None and first.delivered == 2
    assert second is None
    assert took < 0.05


def test_a_wake_up_at_any_moment_of_a_drain_is_not_lost(rows: Rows, processor: Callable[..., Processor]) -> None:
    """Rows arrive one by one, each with a wake-up, for a while: none waits for anything else."""

    async def run() -> None:
        each, tasks = processor(Sender()), []
        for n in range(150):
            rows.add()
            tasks.append(asyncio.create_task(each.drain(10)))
            await asyncio.sleep(0.001 * (n % 13))
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert rows.statuses() == {"Processed": 150}


def test_a_row_due_within_two_seconds_is_waited_for(rows: Rows, drain: Callable[..., Report]) -> None:
    rows.add(due_in=1.2)
    rows.add(due_in=20)
    started = monotonic()
    assert drain().delivered == 1
    assert 1.1 < monotonic() - started < 2.5


def test_a_stopped_processor_finishes_what_flies_and_claims_no_more(
    rows: Rows, processor: Callable[..., Processor]
) -> None:
    rows.add(100)
    sender = Sender(seconds=0.2)

    async def run() -> Report | None:
        each = processor(sender, routes={"crm": Route(5, 10)})
        task = asyncio.create_task(each.drain(10))
        await until_async(lambda: sender.sent)
        each.stop()
        return await task

    report = asyncio.run(run())
    assert report is not None
    assert report.delivered == len(sender.sent) == 10
    assert rows.statuses() == {"Processed": 10, "Pending": 90}


def test_leases_that_run_out_in_mid_delivery_are_taken_over_and_the_late_result_is_not_recorded(
    rows: Rows, processor: Callable[..., Processor]
) -> None:
    """langwatch#7037: attempts must rise, and the late finisher must hear that it lost."""
    (key,) = rows.add()
    slow, quick = Sender(seconds=1.0), Sender(lambda m: Retry("http_500", "HTTP 500"))

    async def run() -> tuple[Any, Any]:
        late = asyncio.create_task(processor(slow).drain(10))
        await until_async(lambda: slow.sent)
        rows.run_out(*slow.sent)
        return await processor(quick, backoff=Backoff(60, 60)).drain(10), await late

    second, first = asyncio.run(run())
    assert (first.lost_leases, first.delivered) == (1, 0)
    assert second.retried == 1
    assert (rows.get(key)["status"], rows.get(key)["attempt_count"]) == ("Pending", 2)


def test_several_drains_at_once_deliver_each_row_once(rows: Rows, processor: Callable[..., Processor]) -> None:
    rows.add(1000, "crm")
    rows.add(1000, "erp")
    senders = [Sender(seconds=0.002) for _ in range(3)]

    async def run() -> None:
        await asyncio.gather(*(processor(sender).drain(20) for sender in senders))

    asyncio.run(run())
    counts = Counter(key for sender in senders for key in ids(sender.sent))
    assert len(counts) == counts.total() == 2000
    assert rows.statuses() == {"Processed": 2000}


WORKER = """
import asyncio, json, os, sys
sys.path[:0] = [{root!r}, {tests!r}]
from integration.support import Bell, Ping, Sender
from outbox.database import Database
from outbox.message import Delivered
from outbox.processor import Policy, Processor, Route
from outbox.retry import Backoff
from outbox.store import ClaimRules, PostgresStore

url, killer = sys.argv[1:]
rules = dict(lease_seconds=2.0, max_attempts=3, give_up_seconds=1e6)
store = PostgresStore(Database(url, size=2, prepare_threshold=None), ClaimRules(**rules, max_payload_bytes=100000))

def answer(message):
    if str(message.outbox_message_id) == killer:
        os._exit(1)
    return Delivered()

policy = Policy(routes={{"crm": Route(0.5, 32)}}, backoff=Backoff(10, 1800), batch_size=100, max_in_flight=256,
                unknown_grace_seconds=0.0, **rules)
asyncio.run(Processor(store, Sender(answer, 0.02), Bell(), policy).drain(60))
os._exit(0)
"""


def test_a_message_that_kills_its_worker_each_time_does_not_take_its_batch_along(rows: Rows, conninfo: str) -> None:
    keys = rows.add(100)
    killer = keys[17]
    script = WORKER.format(root=str(ROOT), tests=str(ROOT / "tests"))
    deaths = 0
    deadline = monotonic() + 40
    while rows.statuses() != {"Processed": 99, "Failed": 1}:
        assert monotonic() < deadline, rows.statuses()
        done = subprocess.run([sys.executable, "-c", script, conninfo, str(killer)], timeout=40)
        deaths += done.returncode == 1
        # an idle drain returns: the next begins when the leases of the killed one have run out
        next_in = "SELECT extract(epoch FROM min(next_attempt_at) - now())::float8 FROM outbox_messages WHERE status"
        found = rows.conn.execute(next_in + " IN ('Pending', 'Processing')").fetchone()
        time.sleep(max(0.0, (found and found[0]) or 0.0))
    assert deaths == 3
    row = rows.get(killer)
    assert (row["status"], row["attempt_count"], row["failure_code"]) == ("Failed", 3, "attempts_exhausted")
    most = rows.conn.execute("SELECT max(attempt_count) FROM outbox_messages WHERE status = 'Processed'").fetchone()
    assert most is not None and most[0] <= 3


def test_a_database_killed_in_mid_drain_loses_nothing(
    own_server: Postgres, processor: Callable[..., Processor]
) -> None:
    with connect(own_server.url()) as conn:
        Rows(conn).add(300)
    bell, sender = Bell(), Sender(seconds=0.3)
    rules: dict[str, Any] = {"url": own_server.url(), "lease_seconds": 4.0, "routes": {"crm": Route(1, 50)}}

    async def killed() -> float:
        drain = asyncio.create_task(processor(sender, bell, **rules).drain(30))
        await until_async(lambda: len(sender.sent) > 60)
        await asyncio.to_thread(own_server.stop, immediate=True)
        stopped = monotonic()
        with pytest.raises(DatabaseUnavailable):
            await drain
        return monotonic() - stopped

    assert asyncio.run(killed()) < 15
    own_server.start()
    with connect(own_server.url()) as conn:
        rows = Rows(conn)
        assert rows.count() == 300

        def again() -> bool:
            asyncio.run(processor(Sender(), bell, **rules).drain(30))
            return rows.statuses() == {"Processed": 300}

        until(again, 15)


def test_the_drain_of_a_database_that_is_down_says_so_in_time(
    processor: Callable[..., Processor], conninfo: str
) -> None:
    from psycopg.conninfo import make_conninfo

    started = monotonic()
    with pytest.raises(DatabaseUnavailable):
        asyncio.run(processor(url=make_conninfo(conninfo, host="127.0.0.1", port=9)).drain(30))
    assert monotonic() - started < 10
