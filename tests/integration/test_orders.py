"""Enqueueing an event and completing an order: one transaction, whatever goes wrong on the way."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import orders
import outbox
from outbox.wiring import Outbox

from .support import Ping, Proxy, Rows, connect, until


@pytest.fixture
def box(configure: Callable[..., Outbox]) -> Outbox:
    return configure()


@pytest.fixture
def order(rows: Rows) -> uuid.UUID:
    return add_order(rows)


def add_order(rows: Rows, status: str = "Pending") -> uuid.UUID:
    key = uuid.uuid4()
    rows.conn.execute("INSERT INTO orders (order_id, status) VALUES (%s, %s)", [key, status])
    return key


def state(rows: Rows, order: uuid.UUID) -> tuple[str, list[str]]:
    """The order's status, and the destinations that were told of it."""
    ((status,),) = rows.conn.execute("SELECT status FROM orders WHERE order_id = %s", [order]).fetchall()
    told = rows.conn.execute(
        "SELECT destination FROM outbox_messages WHERE payload ->> 'orderId' = %s ORDER BY 1", [str(order)]
    )
    return status, [name for (name,) in told]


DONE = ("Completed", ["crm", "erp"])
UNTOUCHED: tuple[str, list[str]] = ("Pending", [])


def unavailable_within(seconds: float, order: uuid.UUID) -> None:
    started = monotonic()
    with pytest.raises(outbox.DatabaseUnavailable):
        orders.complete_order(order)
    assert monotonic() - started < seconds


def completed_once_up_again(order: uuid.UUID) -> None:
    """For a second the database is taken to be down: outbox.database.DOWN_SECONDS."""

    def done() -> bool:
        with contextlib.suppress(outbox.DatabaseUnavailable):
            orders.complete_order(order)
            return True
        return False

    until(done)


# -- enqueue -----------------------------------------------------------------------------------------------------------


def test_an_event_is_one_row_for_each_subscribed_destination(rows: Rows, box: Outbox) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with rows.conn.transaction():
        both = outbox.enqueue(rows.conn, orders.OrderCompleted(orderId=uuid.UUID(int=7)), traceparent=parent)
        one = outbox.enqueue(rows.conn, Ping(n=1), traceparent="no traceparent")
    assert [each.destination for each in both] == ["crm", "erp"]
    assert [each.destination for each in one] == ["crm"]  # erp asked for OrderCompleted alone
    first, second = (rows.get(each.outbox_message_id) for each in both)
    assert first["event_id"] == second["event_id"] != rows.get(one[0].outbox_message_id)["event_id"]
    assert first["payload"] == {"orderId": str(uuid.UUID(int=7))}
    assert (first["event_type"], first["status"], first["traceparent"]) == ("OrderCompleted", "Pending", parent)
    assert first["due_in"] <= 0
    assert rows.get(one[0].outbox_message_id)["traceparent"] is None


def test_a_rolled_back_transaction_leaves_no_event(rows: Rows, box: Outbox) -> None:
    with rows.conn.transaction(force_rollback=True):
        outbox.enqueue(rows.conn, Ping(n=1))
        assert rows.count() == 1
    assert rows.count() == 0


def test_message_ids_are_uuid_version_7_in_the_order_of_their_milliseconds(rows: Rows, box: Outbox) -> None:
    before = time.time()
    made = []
    for n in range(50):
        made.append(outbox.enqueue(rows.conn, Ping(n=n))[0].outbox_message_id)
        time.sleep(0.001)
    assert made == sorted(made)
    assert len(set(made)) == 50
    for key in made:
        assert (key.version, key.variant) == (7, uuid.RFC_4122)
        assert before - 1 < (key.int >> 80) / 1000 < time.time() + 1


def test_an_event_that_nobody_wants_is_no_row_and_one_warning(
    rows: Rows, configure: Callable[..., Outbox], caplog: pytest.LogCaptureFixture
) -> None:
    configure(destinations="{}")
    assert outbox.enqueue(rows.conn, Ping(n=1)) == []
    assert rows.count() == 0
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "test.Ping" in warning.getMessage()


class Note(outbox.Event, type="test.Note"):
    text: str


@pytest.mark.parametrize("text", ["x" * 1000, "nul \0", "lone \ud800"])
def test_a_refused_event_leaves_the_transaction_usable(rows: Rows, configure: Callable[..., Outbox], text: str) -> None:
    configure(max_payload_bytes="200")
    with rows.conn.transaction():
        with pytest.raises(outbox.EventRefused):
            outbox.enqueue(rows.conn, Note(text=text))
        outbox.enqueue(rows.conn, Note(text="fine"))
    assert rows.count() == 1


def test_a_payload_may_be_as_large_as_the_setting_says(rows: Rows, configure: Callable[..., Outbox]) -> None:
    configure(max_payload_bytes="200")
    room = 200 - len('{"text":""}')
    outbox.enqueue(rows.conn, Note(text="x" * room))
    with pytest.raises(outbox.EventRefused, match="201 bytes"):
        outbox.enqueue(rows.conn, Note(text="x" * (room + 1)))


# -- complete_order ----------------------------------------------------------------------------------------------------


def test_completing_an_order_stores_its_event_and_rings(rows: Rows, box: Outbox, order: uuid.UUID) -> None:
    answer = orders.complete_order(order)
    ((completed_at,),) = rows.conn.execute(
        "SELECT to_char(completed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') FROM orders"
    ).fetchall()
    assert answer == orders.CompletedOrder(order, completed_at)
    assert state(rows, order) == DONE
    assert orders.complete_order(order) == answer
    assert state(rows, order) == DONE
    assert len(box.doorbell.rings) == 2  # type: ignore[attr-defined]


def test_fifty_completions_at_once_are_one_answer_and_one_event(rows: Rows, box: Outbox, order: uuid.UUID) -> None:
    with ThreadPoolExecutor(50) as threads:
        answers = list(threads.map(lambda _: orders.complete_order(order), range(50)))
    assert len(set(answers)) == 1
    assert state(rows, order) == DONE


def test_an_unknown_order_is_not_found(rows: Rows, box: Outbox) -> None:
    with pytest.raises(orders.OrderNotFound):
        orders.complete_order(uuid.uuid4())
    assert rows.count() == 0


def test_a_cancelled_order_stays_cancelled(rows: Rows, box: Outbox) -> None:
    order = add_order(rows, "Cancelled")
    with pytest.raises(orders.OrderCancelled):
        orders.complete_order(order)
    assert state(rows, order) == ("Cancelled", [])


def test_an_exception_before_the_commit_changes_neither_order_nor_events(
    rows: Rows, box: Outbox, order: uuid.UUID
) -> None:
    def work(conn: Any) -> None:
        conn.execute(orders.COMPLETE, [order])
        outbox.enqueue(conn, orders.OrderCompleted(orderId=order))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        outbox.transact(work)
    assert state(rows, order) == UNTOUCHED
    orders.complete_order(order)
    assert state(rows, order) == DONE


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_commit_whose_acknowledgement_was_lost_is_one_answer_and_one_event(
    rows: Rows, configure: Callable[..., Outbox], proxy: Proxy, order: uuid.UUID, cut: str
) -> None:
    box = configure(database_url=proxy.conninfo)
    proxy.cut = cut
    answer = orders.complete_order(order)
    assert proxy.cuts == 1
    assert state(rows, order) == DONE
    assert orders.complete_order(order) == answer
    assert len(box.doorbell.rings) == 2  # type: ignore[attr-defined]


def fail_first(rows: Rows, code: str, times: int) -> None:
    """Let the first `times` transactions that insert an event fail with `code`; a sequence outlives a rollback."""
    rows.conn.execute("CREATE SEQUENCE tries")
    rows.conn.execute(
        "CREATE FUNCTION fail_first() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF nextval('tries') <= {times} THEN RAISE EXCEPTION 'by a test' USING ERRCODE = '{code}'; END IF;"
        " RETURN NULL; END $$"
    )
    rows.conn.execute(
        "CREATE TRIGGER fail_first AFTER INSERT ON outbox_messages FOR EACH STATEMENT EXECUTE FUNCTION fail_first()"
    )


@pytest.mark.parametrize("code", ["40001", "40P01"])
def test_a_serialization_failure_or_deadlock_is_tried_once_more(
    rows: Rows, box: Outbox, order: uuid.UUID, code: str
) -> None:
    fail_first(rows, code, 1)
    orders.complete_order(order)
    assert state(rows, order) == DONE


@pytest.mark.parametrize("code", ["40001", "40P01"])
def test_a_second_failure_of_that_kind_is_unavailable(rows: Rows, box: Outbox, order: uuid.UUID, code: str) -> None:
    fail_first(rows, code, 2)
    with pytest.raises(outbox.DatabaseUnavailable):
        orders.complete_order(order)
    assert rows.conn.execute("SELECT last_value FROM tries").fetchone() == (2,)
    assert state(rows, order) == UNTOUCHED
    orders.complete_order(order)
    assert state(rows, order) == DONE


def test_two_transactions_in_a_real_deadlock_both_succeed(rows: Rows, box: Outbox) -> None:
    one, two = add_order(rows), add_order(rows)
    meet = threading.Barrier(2)
    runs: list[int] = []

    def both(first: uuid.UUID, second: uuid.UUID) -> None:
        def work(conn: Any) -> None:
            runs.append(1)
            conn.execute(orders.COMPLETE, [first])
            if len(runs) <= 2:
                meet.wait(5)
            conn.execute(orders.COMPLETE, [second])

        outbox.transact(work)

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(both, one, two), threads.submit(both, two, one)]:
            done.result(20)
    assert len(runs) == 3


@pytest.fixture
def locked(conninfo: str, order: uuid.UUID) -> Iterator[None]:
    with connect(conninfo) as conn, conn.transaction():
        conn.execute("SELECT FROM orders WHERE order_id = %s FOR UPDATE", [order])
        yield


def test_a_lock_that_is_not_had_in_time_is_unavailable(rows: Rows, box: Outbox, order: uuid.UUID, locked: None) -> None:
    unavailable_within(10, order)
    assert state(rows, order) == UNTOUCHED


def test_a_pool_that_is_exhausted_is_unavailable(
    rows: Rows, configure: Callable[..., Outbox], order: uuid.UUID
) -> None:
    configure(pool_size="1")
    entered, leave = threading.Event(), threading.Event()

    def work(conn: Any) -> None:
        entered.set()
        leave.wait(20)

    with ThreadPoolExecutor(1) as threads:
        holder = threads.submit(outbox.transact, work)
        assert entered.wait(5)
        unavailable_within(10, order)
        leave.set()
        holder.result(5)
    completed_once_up_again(order)
    assert state(rows, order) == DONE


def test_a_server_out_of_connections_is_unavailable(rows: Rows, box: Outbox, order: uuid.UUID, conninfo: str) -> None:
    name = psycopg.sql.Identifier(str(conninfo_to_dict(conninfo)["dbname"]))
    if rows.conn.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user").fetchone() == (True,):
        pytest.skip("a superuser is under no connection limit")
    rows.conn.execute(psycopg.sql.SQL("ALTER DATABASE {} CONNECTION LIMIT 1").format(name))
    with pytest.raises(psycopg.OperationalError, match="too many connections"):
        connect(conninfo)
    unavailable_within(10, order)
    rows.conn.execute(psycopg.sql.SQL("ALTER DATABASE {} CONNECTION LIMIT -1").format(name))
    completed_once_up_again(order)
    assert state(rows, order) == DONE


def test_a_database_that_is_down_is_unavailable_and_then_at_once(
    configure: Callable[..., Outbox], order: uuid.UUID, conninfo: str
) -> None:
    configure(database_url=make_conninfo(conninfo, host="127.0.0.1", port=9))
    unavailable_within(10, order)
    unavailable_within(0.5, order)
    started = monotonic()
    with ThreadPoolExecutor(50) as threads:
        list(threads.map(lambda _: unavailable_within(10, order), range(50)))
    assert monotonic() - started < 10


def sessions(rows: Rows) -> int:
    (count,) = rows.conn.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'outbox'"
    ).fetchone() or (0,)
    return int(count)


def test_after_a_failover_no_call_fails(rows: Rows, box: Outbox) -> None:
    made = [add_order(rows) for _ in range(60)]
    with ThreadPoolExecutor(20) as threads:
        list(threads.map(orders.complete_order, made[:20]))
        assert sessions(rows) > 1
        rows.conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'outbox'"
        )
        until(lambda: sessions(rows) == 0)
        for key in made[20:25]:
            orders.complete_order(key)
        list(threads.map(orders.complete_order, made[25:]))
    assert all(state(rows, key) == DONE for key in made)


def test_backends_killed_under_load_cost_no_event(rows: Rows, box: Outbox) -> None:
    """Every answer is a result or DatabaseUnavailable, and each order is told of once or not completed."""
    made = [add_order(rows) for _ in range(200)]
    ended = threading.Event()

    def kill() -> None:
        with connect(str(rows.conn.info.dsn) + f" password={rows.conn.info.password}") as conn:
            while not ended.wait(0.05):
                conn.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND application_name = 'outbox' ORDER BY random() LIMIT 1"
                )

    def complete(key: uuid.UUID) -> bool:
        try:
            orders.complete_order(key)
        except outbox.DatabaseUnavailable:
            return False
        return True

    killer = threading.Thread(target=kill)
    killer.start()
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(complete, made))
    ended.set()
    killer.join()
    for key, answered in zip(made, answers, strict=True):
        assert state(rows, key) in ([DONE] if answered else [DONE, UNTOUCHED])
    assert sum(answers) > 150


def test_a_frozen_server_is_unavailable_in_time_and_then_recovers(
    rows: Rows, configure: Callable[..., Outbox], proxy: Proxy, order: uuid.UUID
) -> None:
    configure(database_url=proxy.conninfo)
    orders.complete_order(add_order(rows))  # so that a pooled connection is there, and looks fine
    proxy.freeze()
    unavailable_within(10, order)
    proxy.thaw()
    until(lambda: answers(order), 5)
    assert state(rows, order) == DONE


def answers(order: uuid.UUID) -> bool:
    try:
        orders.complete_order(order)
    except outbox.DatabaseUnavailable:
        return False
    return True


def test_a_read_only_server_is_unavailable_and_recovers_without_a_restart(
    rows: Rows, box: Outbox, order: uuid.UUID, conninfo: str
) -> None:
    name = psycopg.sql.Identifier(str(conninfo_to_dict(conninfo)["dbname"]))
    orders.complete_order(add_order(rows))
    rows.conn.execute(psycopg.sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(name))
    rows.conn.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = 'outbox'"
    )
    unavailable_within(10, order)
    unavailable_within(10, order)
    rows.conn.execute(psycopg.sql.SQL("ALTER DATABASE {} RESET default_transaction_read_only").format(name))
    until(lambda: answers(order), 5)  # the pooled connections are those of the read-only server
    assert state(rows, order) == DONE


def test_a_database_without_the_tables_is_unavailable_and_names_the_remedy(
    configure: Callable[..., Outbox], create_database: Callable[..., str]
) -> None:
    configure(database_url=create_database())
    with pytest.raises(outbox.DatabaseUnavailable, match="python -m outbox migrate"):
        orders.complete_order(uuid.uuid4())
