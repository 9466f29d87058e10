"""The schema and its migrations."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from outbox import schema
from outbox.errors import DatabaseUnavailable, OutboxError

from .support import ROOT, Rows, connect, until

ALL = ["outbox-0001_messages", "outbox-0002_keys", "app-0001_orders"]


def migrate(conninfo: str) -> list[str]:
    return schema.migrate(conninfo, ROOT / "migrations")


def test_a_row_of_four_columns_is_pending_and_due_now(rows: Rows) -> None:
    key = uuid.uuid4()
    rows.conn.execute(
        "INSERT INTO outbox_messages (outbox_message_id, event_type, destination, payload) VALUES (%s, 'T', 'd', '{}')",
        [key],
    )
    row = rows.get(key)
    assert (row["status"], row["attempt_count"], row["lease_token"], row["last_error"]) == ("Pending", 0, None, None)
    assert row["due_in"] <= 0
    assert row["event_id"] is not None


@pytest.mark.parametrize(
    "change",
    [
        "status = 'Done'",
        "status = NULL",
        "status = 'Processing'",
        "status = 'Processing', lease_token = gen_random_uuid()",
        "status = 'Processing', lease_expires_at = next_attempt_at",
        "lease_token = gen_random_uuid(), lease_expires_at = next_attempt_at",
        "status = 'Processing', lease_token = gen_random_uuid(), lease_expires_at = next_attempt_at + interval '1 s'",
        "status = 'Processed'",
        "status = 'Processed', processed_at = now(), last_error = 'x'",
        "status = 'Failed'",
    ],
)
def test_a_check_refuses_a_row_in_no_valid_state(rows: Rows, change: str) -> None:
    rows.add()
    with pytest.raises(psycopg.errors.IntegrityError):
        rows.conn.execute(f"UPDATE outbox_messages SET {change}")  # noqa: S608


@pytest.mark.parametrize(
    "change",
    [
        "status = 'Processing', lease_token = gen_random_uuid(), lease_expires_at = next_attempt_at",
        "status = 'Processed', processed_at = now()",
        "status = 'Failed', last_error = ''",
        "status = 'Failed', last_error = 'x', failed_at = NULL, failure_code = NULL",
        "last_error = 'x', failure_code = 'x', processed_at = now(), failed_at = now(), processing_started_at = now()",
        "attempt_count = 2147483647",
        "payload = 'null'",
        "event_type = '', destination = ''",
    ],
)
def test_the_checks_allow_every_other_row(rows: Rows, change: str) -> None:
    rows.add()
    rows.conn.execute(f"UPDATE outbox_messages SET {change}")  # noqa: S608


def test_only_what_makes_a_message_is_required(rows: Rows) -> None:
    required = rows.conn.execute(
        "SELECT attname FROM pg_attribute WHERE attrelid = 'outbox_messages'::regclass AND attnum > 0 AND attnotnull"
        " AND NOT atthasdef ORDER BY attname"
    )
    assert [name for (name,) in required] == ["destination", "event_type", "outbox_message_id", "payload"]


@pytest.mark.parametrize(
    ("values", "valid"),
    [
        ("'Pending', NULL", True),
        ("'Completed', now()", True),
        ("'Cancelled', NULL", True),
        ("'Completed', NULL", False),
        ("'Pending', now()", False),
        ("'Lost', NULL", False),
    ],
)
def test_an_order_is_completed_when_it_has_a_time(rows: Rows, values: str, valid: bool) -> None:
    statement = f"INSERT INTO orders (order_id, status, completed_at) VALUES (gen_random_uuid(), {values})"  # noqa: S608
    if valid:
        rows.conn.execute(statement)
    else:
        with pytest.raises(psycopg.errors.CheckViolation):
            rows.conn.execute(statement)


def test_migrations_are_applied_once_and_named(create_database: Callable[..., str]) -> None:
    conninfo = create_database()
    assert migrate(conninfo) == ALL
    assert migrate(conninfo) == []


def test_migrating_leaves_no_connection_open(create_database: Callable[..., str]) -> None:
    conninfo = create_database()
    migrate(conninfo)
    sessions = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    with connect(conninfo) as conn:
        until(lambda: not conn.execute(sessions).fetchall(), 3)


def start_migrating(conninfo: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "outbox", "migrate"],
        cwd=ROOT, env={**os.environ, "OUTBOX_DATABASE_URL": conninfo}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_migrations_run_by_several_processes_at_once_are_applied_once(create_database: Callable[..., str]) -> None:
    conninfo = create_database()
    processes = [start_migrating(conninfo) for _ in range(3)]
    said = sorted(process.communicate(timeout=60)[0].split(":")[0].strip() for process in processes)
    assert said == ["applied " + ", ".join(ALL), "nothing to apply", "nothing to apply"]
    assert [process.returncode for process in processes] == [0, 0, 0]


def test_migrations_of_a_killed_process_are_taken_up_again(create_database: Callable[..., str]) -> None:
    """Killed while its first CREATE TABLE waits for a lock, with yoyo's own lock row written and committed."""
    conninfo = create_database()
    waits = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with connect(conninfo) as observer, connect(conninfo) as conn, conn.transaction(force_rollback=True):
        conn.execute("CREATE TABLE outbox_messages (blocks int)")  # the migration waits for this name
        process = start_migrating(conninfo)
        until(lambda: observer.execute(waits).fetchall(), 20)
        process.kill()
        process.communicate(timeout=10)
    assert migrate(conninfo) == ALL
    assert migrate(conninfo) == []


def test_a_migration_and_its_note_are_one_transaction(create_database: Callable[..., str], tmp_path: Path) -> None:
    """A process killed between the two would otherwise leave a migration that can never be applied."""
    (tmp_path / "app-0009_more.sql").write_text("CREATE TABLE more (id int)")
    conninfo = create_database()
    migrate(conninfo)
    with connect(conninfo) as conn:
        conn.execute("ALTER TABLE _yoyo_migration ADD CHECK (migration_id <> 'app-0009_more') NOT VALID")
        with pytest.raises(OutboxError, match="migration app-0009_more failed"):
            schema.migrate(conninfo, tmp_path)
        assert conn.execute("SELECT to_regclass('more')").fetchone() == (None,)
        conn.execute("ALTER TABLE _yoyo_migration DROP CONSTRAINT _yoyo_migration_migration_id_check")
    assert schema.migrate(conninfo, tmp_path) == ["app-0009_more"]


def test_a_server_that_is_down_is_said_to_be(conninfo: str) -> None:
    started = time.monotonic()
    with pytest.raises(DatabaseUnavailable):
        schema.migrate(psycopg.conninfo.make_conninfo(conninfo, host="127.0.0.1", port=9))
    assert time.monotonic() - started < 10
