"""The claim: what it takes, in which order, by which plan, and what it leaves to others."""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from outbox.database import _LIMITS
from outbox.database import sql as statement
from outbox.message import Message
from outbox.store import PostgresStore

from .support import Rows, connect, free_of_sessions, ids

LIMITS = [1, 7, 100]
CLAIM = {
    "lease_token": uuid.uuid4(), "lease_seconds": 30.0, "max_attempts": 50, "give_up_seconds": 259200.0,
    "max_payload_bytes": 262144,
}  # fmt: skip
STATEMENTS: dict[str, dict[str, Any]] = {
    "claim": {**CLAIM, "destinations": ["crm", "erp"], "rooms": [100, 100], "batch_size": 100},
    "claim_suspect": {**CLAIM, "destinations": ["crm", "erp"]},
    "suspects": {"destinations": ["crm", "erp"], "max_attempts": 50},
    "expire": {"destinations": ["crm", "erp"], "max_attempts": 50, "give_up_seconds": 259200.0},
    "due": {"destinations": ["crm", "erp"], "soon_seconds": 2.0, "horizon_seconds": 300.0},
    "backlog": {"destinations": ["crm", "erp"], "at_most": 2001},
    "destinations": {},
}
TYPES = {int: "int", float: "float8", uuid.UUID: "uuid", "rooms": "int[]", "destinations": "text[]"}


@pytest.fixture(scope="module")
def full_template(create_database: Callable[..., str], template: str) -> str:
    """A database with a backlog, and statistics that say that the table is empty."""
    conninfo = create_database(template)
    with connect(conninfo) as conn:
        rows = Rows(conn)
        rows.freeze_statistics()
        rows.add(20_000, "crm")
        rows.add(2_000, "erp")
        rows.add(20_000, "crm", status="Processed", processed_at="now")
    return free_of_sessions(conninfo)


@pytest.fixture
def conninfo(request: pytest.FixtureRequest, create_database: Callable[..., str]) -> str:
    full = "backlog" in request.fixturenames
    return create_database(request.getfixturevalue("full_template" if full else "template"))


@pytest.fixture
def backlog(rows: Rows) -> Rows:
    """The table with 22,000 due rows and stale statistics."""
    return rows


@pytest.fixture(params=["auto", "force_generic_plan"])
def eager_store(
    request: pytest.FixtureRequest, conninfo: str, open_store: Callable[..., PostgresStore]
) -> PostgresStore:
    """A store whose connections prepare each statement on first use, under both plan modes."""
    url = psycopg.conninfo.make_conninfo(conninfo, options=f"-c plan_cache_mode={request.param}")
    return open_store(url, prepare_threshold=0)


@pytest.fixture
def open_snapshot(conninfo: str, rows: Rows) -> Iterator[None]:
    """A transaction that keeps vacuum and index clean-up from removing any row that was live when it began."""
    with connect(conninfo) as conn, conn.transaction():
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        conn.execute("SELECT count(*) FROM outbox_messages")
        yield


def plan(conn: psycopg.Connection[Any], name: str, mode: str) -> list[tuple[str, str, str | None]]:
    """The nodes of a statement's plan under the drain's settings: (type, relation, index)."""
    values = STATEMENTS[name]
    text = statement(name).decode()
    for number, key in enumerate(values, 1):
        text = re.sub(rf"%\({key}\)s", f"${number}", text)
    types = ", ".join(TYPES.get(key) or TYPES[type(value)] for key, value in values.items())
    with conn.transaction(force_rollback=True), psycopg.ClientCursor(conn) as cursor:
        cursor.execute(statement("drain_limits"), _LIMITS)
        cursor.execute("SELECT set_config('plan_cache_mode', %s, true)", [mode])
        cursor.execute("DEALLOCATE ALL")
        cursor.execute(f"PREPARE {name}_{mode} {f'({types})' if types else ''} AS {text}")
        arguments = "(" + ", ".join(["%s"] * len(values)) + ")" if values else ""
        cursor.execute(f"EXPLAIN (FORMAT JSON) EXECUTE {name}_{mode} {arguments}", list(values.values()))
        found = cursor.fetchone()
    assert found is not None
    nodes: list[tuple[str, str, str | None]] = []

    def walk(node: dict[str, Any]) -> None:
        nodes.append((node["Node Type"], node.get("Relation Name", ""), node.get("Index Name")))
        for child in node.get("Plans", []):
            walk(child)

    walk(json.loads(found[0])[0]["Plan"] if isinstance(found[0], str) else found[0][0]["Plan"])
    return nodes


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("name", STATEMENTS)
def test_the_plan_reads_the_table_by_index_and_sorts_no_rows_of_it(backlog: Rows, name: str, mode: str) -> None:
    for _ in ("stale", "fresh"):
        nodes = plan(backlog.conn, name, mode)
        reads = [node for node in nodes if node[1] == "outbox_messages" and "Scan" in node[0]]
        assert reads
        for kind, _, index in reads:
            assert kind in ("Index Scan", "Index Only Scan")
            assert index in ("outbox_messages_claimable", "outbox_messages_pkey")
        # `claim` sorts the destinations by who waited longest: a handful of names, no rows
        assert sum("Sort" in kind for kind, _, _ in nodes) <= (name == "claim")
        backlog.conn.execute("ANALYZE outbox_messages")


@pytest.mark.parametrize("limit", LIMITS)
def test_a_claim_takes_its_limit_exactly(backlog: Rows, eager_store: PostgresStore, limit: int) -> None:
    for _ in range(7):  # psycopg and PostgreSQL change plans after five uses
        assert len(eager_store.claim({"crm": 1000, "erp": 1000}, 2 * limit)) == 2 * limit
        assert len(eager_store.claim({"crm": limit, "erp": 0}, 100)) == limit


@pytest.mark.parametrize("off", ["enable_hashjoin", "enable_mergejoin", "enable_nestloop", "enable_indexscan"])
def test_no_plan_makes_a_claim_take_more(
    backlog: Rows, conninfo: str, open_store: Callable[..., PostgresStore], off: str
) -> None:
    store = open_store(psycopg.conninfo.make_conninfo(conninfo, options=f"-c {off}=off"), prepare_threshold=0)
    for _ in range(6):
        assert len(store.claim({"crm": 100, "erp": 0}, 100)) == 100


def test_behind_an_open_snapshot_a_claim_repeats_no_row_and_misses_none(
    backlog: Rows, open_snapshot: None, eager_store: PostgresStore
) -> None:
    seen: set[uuid.UUID] = set()
    for _ in range(20):  # past the dead entries that the claims before leave at the index's head
        messages = eager_store.claim({"crm": 100}, 100)
        assert len(messages) == 100
        assert not seen & set(ids(messages))
        seen |= set(ids(messages))
    assert len(seen) == 2000


def test_a_claim_leases_what_it_returns(rows: Rows, store: PostgresStore) -> None:
    (key,) = rows.add(age=100)
    (message,) = store.claim({"crm": 10}, 10)
    row = rows.get(key)
    assert row["status"] == "Processing"
    assert row["lease_token"] == message.lease_token
    assert row["next_attempt_at"] == row["lease_expires_at"]
    assert 28 < row["due_in"] <= 30
    assert row["attempt_count"] == message.attempt_count == 1
    assert 100 <= message.age_seconds < 110
    assert abs(message.claimed_at - row["processing_started_at"].timestamp()) < 0.001
    assert message.lease_left <= 30


def test_the_oldest_of_a_destination_go_first(rows: Rows, store: PostgresStore) -> None:
    last = rows.add(3, age=50, due_in=-1)
    middle = rows.add(3, age=1, due_in=-30)
    first = rows.add(3, age=10, due_in=-60)
    claimed = [set(ids(store.claim({"crm": 10}, 3))) for _ in range(3)]
    assert claimed == [set(first), set(middle), set(last)]


def test_a_claim_returns_its_rows_in_the_order_of_their_making(rows: Rows, store: PostgresStore) -> None:
    made = rows.add(50)
    assert ids(store.claim({"crm": 50}, 50)) == made


def test_what_is_not_due_is_not_claimed(rows: Rows, store: PostgresStore) -> None:
    rows.add(due_in=5)
    rows.add(status="Processed", processed_at="now")
    rows.add(status="Failed", last_error="x")
    rows.add(destination="unasked")
    assert store.claim({"crm": 10}, 10) == []


def test_a_backlog_of_one_destination_does_not_hold_up_another(backlog: Rows, store: PostgresStore) -> None:
    names = [f"d{n}" for n in range(5)]
    new = [backlog.add(1, name)[0] for name in names]
    claimed = store.claim(dict.fromkeys(["crm", *names], 32), 100)
    assert set(new) <= set(ids(claimed))
    assert Counter(m.destination for m in claimed)["crm"] == 16  # 100 shared by 6


def test_with_more_destinations_than_rows_to_claim_who_waited_longest_goes_first(
    rows: Rows, store: PostgresStore
) -> None:
    names = [f"d{n}" for n in range(20)]
    made = [rows.add(3, name, due_in=-100 + n)[0] for n, name in enumerate(names)]
    assert set(ids(store.claim(dict.fromkeys(names, 32), 5))) == set(made[:5])


def test_no_room_means_no_row(rows: Rows, store: PostgresStore) -> None:
    rows.add(10, "crm")
    rows.add(10, "erp")
    assert Counter(m.destination for m in store.claim({"crm": 0, "erp": 4}, 100)) == {"erp": 4}


def test_concurrent_claimers_never_share_a_row(rows: Rows, open_store: Callable[..., PostgresStore]) -> None:
    made = rows.add(3000, "crm") + rows.add(1000, "erp")
    claimed: list[list[Message]] = []

    def work() -> None:
        store = open_store()
        while messages := store.claim({"crm": 50, "erp": 50}, 50):
            claimed.append(messages)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [key for messages in claimed for key in ids(messages)]
    assert len(found) == len(set(found))
    left = ids(open_store().claim({"crm": 4000, "erp": 4000}, 4000))  # a claimer that met only locked rows went home
    assert set(found) | set(left) == set(made)
    assert max(len(messages) for messages in claimed) <= 50


def test_a_row_whose_lease_ran_out_is_claimed_like_a_pending_one(rows: Rows, store: PostgresStore) -> None:
    rows.add(2)
    first, _second = store.claim({"crm": 10}, 10)
    assert store.claim({"crm": 10}, 10) == []
    rows.run_out(first)
    (again,) = store.claim({"crm": 10}, 10)
    assert again.outbox_message_id == first.outbox_message_id
    assert again.lease_token != first.lease_token
    assert again.attempt_count == 2
    assert rows.get(first.outbox_message_id)["lost_leases"] == 1


@pytest.mark.parametrize(
    ("columns", "code"),
    [
        ({"attempt_count": 3}, "attempts_exhausted"),
        ({"attempt_count": 2_000_000_000}, "attempts_exhausted"),
        ({"age": 101}, "gave_up"),
        ({"age": 500, "redriven_at": "yesterday"}, "gave_up"),
    ],
)
def test_a_due_row_out_of_attempts_or_time_is_never_claimed_and_becomes_failed(
    rows: Rows, open_store: Callable[..., PostgresStore], columns: dict[str, Any], code: str
) -> None:
    store = open_store(max_attempts=3, give_up_seconds=100)
    (due,) = rows.add(last_error="HTTP 500", **columns)
    (later,) = rows.add(due_in=60, **columns)
    assert store.claim({"crm": 10}, 10) == []
    assert store.claim_suspect(["crm"]) == []
    (expired,) = store.expire(["crm"])
    assert (expired["outbox_message_id"], expired["failure_code"]) == (due, code)
    row = rows.get(due)
    assert (row["status"], row["failure_code"], row["lease_token"]) == ("Failed", code, None)
    assert "HTTP 500" in row["last_error"]
    assert row["failed_at"] is not None
    assert rows.get(later)["status"] == "Pending"


def test_a_redrive_starts_the_give_up_time_anew(rows: Rows, open_store: Callable[..., PostgresStore]) -> None:
    store = open_store(give_up_seconds=100)
    (key,) = rows.add(age=500, redriven_at="now")
    assert store.expire(["crm"]) == []
    (message,) = store.claim({"crm": 10}, 10)
    assert message.outbox_message_id == key
    assert message.tried_seconds < 10 < message.age_seconds


def test_a_row_that_lost_two_leases_in_a_row_is_claimed_alone(rows: Rows, store: PostgresStore) -> None:
    rows.add(3)
    for _ in range(2):
        assert not store.suspects(["crm"])
        messages = store.claim({"crm": 10}, 10)
        assert len(messages) == 3
        rows.run_out(*messages)
    mates = rows.add(2)
    assert set(ids(store.claim({"crm": 10}, 10))) == set(mates)
    assert store.suspects(["crm"])
    alone = [store.claim_suspect(["crm"]) for _ in range(4)]
    assert [len(messages) for messages in alone] == [1, 1, 1, 0]
    assert not store.suspects(["crm"])
    assert {m.attempt_count for messages in alone for m in messages} == {3}


def test_a_result_between_two_lost_leases_clears_the_suspicion(rows: Rows, store: PostgresStore) -> None:
    from .test_settle import settlement

    rows.add()
    rows.run_out(*store.claim({"crm": 1}, 1))
    (message,) = store.claim({"crm": 1}, 1)
    store.settle([settlement(message, "Pending", delay_seconds=0.0, error="x")])
    rows.run_out(*store.claim({"crm": 1}, 1))
    assert not store.suspects(["crm"])
    assert len(store.claim({"crm": 1}, 1)) == 1


def test_a_destination_is_found_by_its_rows_at_work(rows: Rows, store: PostgresStore) -> None:
    for name in ("b", "a", "", "Ü", "c"):
        rows.add(3, name)
    rows.add(1, "done", status="Processed", processed_at="now")
    assert set(store.destinations()) == {"", "a", "b", "c", "Ü"}


def test_due_tells_what_is_due_soon_and_what_comes_next_within_the_horizon(rows: Rows, store: PostgresStore) -> None:
    def due(soon_seconds: float = 0) -> tuple[bool, int | None]:
        found = store.due(["crm", "erp"], soon_seconds=soon_seconds, horizon_seconds=300)
        return found.soon, None if found.next_in is None else round(found.next_in + 0.4)

    assert due() == (False, None)
    rows.add(due_in=1000)
    assert due() == (False, None)
    rows.add(destination="erp", due_in=50)
    assert due() == (False, 50)
    assert due(soon_seconds=60) == (True, None)
    rows.add()
    assert due() == (True, 50)
    store.claim({"crm": 1}, 1)
    assert due() == (False, 30)  # the lease's end


@pytest.mark.parametrize("zone", ["Asia/Bangkok", "America/New_York", "UTC"])
def test_no_time_zone_changes_what_a_message_says(
    rows: Rows, conninfo: str, open_store: Callable[..., PostgresStore], zone: str
) -> None:
    payload = '{"n": 12345678901234567890123456789, "x": 1.10, "b": {"z": 1, "a": "é\\"\\\\"}, "e": 1e30}'
    (key,) = rows.add(payload=payload)
    rows.update(key, created_at="2026-03-29 02:30:00.000001+00")
    store = open_store(
        psycopg.conninfo.make_conninfo(conninfo, options=f"-c TimeZone={zone} -c DateStyle=German"), give_up_seconds=1e9
    )
    (message,) = store.claim({"crm": 1}, 1)
    assert message.created_at == "2026-03-29T02:30:00.000001Z"
    assert message.payload == (
        '{"b": {"a": "é\\"\\\\", "z": 1}, "e": 1000000000000000000000000000000, '
        '"n": 12345678901234567890123456789, "x": 1.10}'
    )


def test_a_payload_beyond_the_limit_is_not_read(rows: Rows, open_store: Callable[..., PostgresStore]) -> None:
    rows.add(payload={"s": "x" * 100})
    (message,) = open_store(max_payload_bytes=100).claim({"crm": 1}, 1)
    assert message.payload is None
