"""The way to PostgreSQL: limits on every transaction, and calls that end in time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from outbox.database import CALL_SECONDS, Database
from outbox.errors import DatabaseUnavailable, SettingsError

from .support import Proxy, Rows

LIMITS = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")


def settings(conn: Any) -> list[str]:
    return [conn.execute(f"SHOW {name}").fetchone()[0] for name in LIMITS]


@pytest.mark.parametrize("limits", ["limits", "drain_limits"])
def test_every_transaction_has_limits_and_no_session_keeps_them(
    open_database: Callable[..., Database], limits: str
) -> None:
    database = open_database(size=1)
    assert database.run(settings, limits=limits) == ["5s", "3s", "8s"]
    with database._pool.connection() as conn:  # as PgBouncer would hand it to another client
        assert settings(conn) == ["0", "0", "0"]
        assert conn.execute("SHOW enable_seqscan").fetchone() == ("on",)


def test_no_statement_of_a_drain_is_compiled_whatever_the_server_s_setting(
    conninfo: str, open_database: Callable[..., Database]
) -> None:
    """It takes 0.3 s for each claim, where the plans that are switched off make it look dear."""
    database = open_database(make_conninfo(conninfo, options="-c jit=on"), size=1)
    assert database.run(lambda conn: conn.execute("SHOW jit").fetchone(), limits="drain_limits") == ("off",)
    with database._pool.connection() as conn:
        assert conn.execute("SHOW jit").fetchone() == ("on",)


def test_a_statement_that_takes_too_long_is_unavailable(open_database: Callable[..., Database]) -> None:
    started = monotonic()
    with pytest.raises(DatabaseUnavailable, match="57014"):
        open_database().run(lambda conn: conn.execute("SELECT pg_sleep(60)"))
    assert 4.5 < monotonic() - started < 10


def test_a_transaction_left_idle_is_ended_by_the_server(rows: Rows, open_database: Callable[..., Database]) -> None:
    def work(conn: Any) -> None:
        conn.execute("SET LOCAL idle_in_transaction_session_timeout = 100")
        assert not threading.Event().wait(0.5)
        conn.execute("SELECT 1")

    with pytest.raises(DatabaseUnavailable):
        open_database().run(work)


def test_an_error_of_the_statement_itself_is_not_called_unavailable(open_database: Callable[..., Database]) -> None:
    database = open_database(size=1)
    with pytest.raises(psycopg.errors.DivisionByZero):
        database.run(lambda conn: conn.execute("SELECT 1 / 0"))
    assert database.run(lambda conn: conn.execute("SELECT 1").fetchone()) == (1,)


@pytest.mark.parametrize("given", ["postgresql://[", "no equals sign"])
def test_a_connection_string_that_cannot_be_read_is_a_wrong_setting_and_not_shown(given: str) -> None:
    with pytest.raises(SettingsError, match="OUTBOX_DATABASE_URL") as error:
        Database(given, size=1, prepare_threshold=None)
    assert given not in str(error.value)


def trusts(conninfo: str) -> bool:
    """Whether the server lets in whoever asks."""
    try:
        psycopg.connect(conninfo, password="wr0ng").close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.mark.parametrize(
    "wrong", [{"password": "wr0ng"}, {"dbname": "no_such_database"}, {"user": "nobody_known"}, {"sslmode": "require"}]
)
def test_what_the_server_refuses_is_unavailable_and_no_secret_is_told(
    conninfo: str, open_database: Callable[..., Database], wrong: dict[str, str]
) -> None:
    if "password" in wrong and trusts(conninfo):
        pytest.skip("the server that OUTBOX_TEST_DATABASE_URL names asks for no password")
    started = monotonic()
    with pytest.raises(DatabaseUnavailable) as error:
        open_database(make_conninfo(conninfo, **wrong)).run(lambda conn: conn.execute("SELECT 1"))
    assert monotonic() - started < 10
    assert "wr0ng" not in str(error.value)


def test_a_network_that_drops_everything_is_unavailable_in_time_for_all_callers(
    proxy: Proxy, open_database: Callable[..., Database]
) -> None:
    database = open_database(proxy.conninfo, size=4)
    run = lambda _: database.run(lambda conn: conn.execute("SELECT 1").fetchone())  # noqa: E731
    with ThreadPoolExecutor(12) as threads:
        list(threads.map(run, range(12)))
        proxy.freeze()
        started = monotonic()
        for done in [threads.submit(run, n) for n in range(12)]:
            with pytest.raises(DatabaseUnavailable):
                done.result(20)
        assert monotonic() - started < 10
    proxy.thaw()


def test_a_call_ends_at_its_deadline_also_where_the_network_fails_in_its_middle(
    proxy: Proxy, open_database: Callable[..., Database]
) -> None:
    database = open_database(proxy.conninfo)

    def work(conn: Any) -> None:
        conn.execute("SELECT 1")
        proxy.freeze()
        conn.execute("SELECT 1")

    started = monotonic()
    with pytest.raises(DatabaseUnavailable):
        database.run(work)
    assert monotonic() - started < CALL_SECONDS + 1
    proxy.thaw()


def test_a_pool_is_whole_again_after_every_kind_of_failure(rows: Rows, open_database: Callable[..., Database]) -> None:
    database = open_database(size=2)
    end = "SELECT pg_terminate_backend(pg_backend_pid())"
    for statement in ("SELECT 1 / 0", end, "SELECT no_such_column", end) * 3:
        with pytest.raises((psycopg.Error, DatabaseUnavailable)):
            database.run(partial(psycopg.Connection.execute, query=statement))
    with ThreadPoolExecutor(2) as threads:
        meet = threading.Barrier(2)
        list(threads.map(lambda _: database.run(lambda conn: meet.wait(5) and conn.execute("SELECT 1")), range(2)))
