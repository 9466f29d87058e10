"""The way to PostgreSQL: a bounded pool, limits on every transaction, and driver errors told apart by SQLSTATE."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from time import monotonic
from typing import Any, TypeAlias, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg_pool import ConnectionPool, PoolTimeout, TooManyRequests

from outbox.errors import DatabaseUnavailable, SettingsError

log = logging.getLogger(__name__)
# It writes a line at INFO each time a connection is borrowed.
logging.getLogger("psycopg.pool").setLevel(logging.WARNING)
T = TypeVar("T")
Connection: TypeAlias = psycopg.Connection[Any]

CONNECT_SECONDS = 3
POOL_WAIT_SECONDS = 3.0
#: How long a database that gave nobody a connection is taken to be down.
DOWN_SECONDS = 1.0
LOCK_SECONDS = 3.0
STATEMENT_SECONDS = 5.0
#: The longest that one call of `Database.run` takes, whatever the server and the network do.
CALL_SECONDS = 8.0

_LIMITS = {
    "statement_ms": int(STATEMENT_SECONDS * 1000),
    "lock_ms": int(LOCK_SECONDS * 1000),
    "idle_ms": int(CALL_SECONDS * 1000),
}

# Worth the same transaction once more, on another connection: serialization failure, deadlock, a server that shut
# down or restarts, and read-only after a failover, where the connection still leads to the old primary.
_AGAIN = {"40001", "40P01", "57P01", "57P02", "57P05", "25006"}
# Worth it later: cannot connect now, too many connections, other lack of resources, lock or statement timed out,
# idle in transaction cut off.
_LATER = {"57P03", "53300", "53000", "53100", "53200", "53400", "55P03", "57014", "25P03", "25P04"}


@cache
def sql(name: str) -> bytes:
    """The statement in sql/<name>.sql."""
    return files("outbox").joinpath("sql", f"{name}.sql").read_bytes()


def connect(conninfo: str) -> Connection:
    """A connection outside of any pool, for a command. Raises DatabaseUnavailable that says what is wrong."""
    _parsed(conninfo)
    try:
        return psycopg.connect(conninfo, autocommit=True, connect_timeout=CONNECT_SECONDS)
    except psycopg.Error as error:
        raise DatabaseUnavailable(f"PostgreSQL cannot be reached: {first_line(error)}") from error


def _parsed(conninfo: str) -> dict[str, Any]:
    try:
        return conninfo_to_dict(conninfo)
    except psycopg.Error:  # whose text may quote the password
        raise SettingsError("OUTBOX_DATABASE_URL: it should be a PostgreSQL connection string") from None


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


class _ClientConnection(psycopg.Connection[Any]):
    """A connection whose every wait ends, also where the server is frozen and its own timeouts cannot fire."""

    deadline: float | None = None
    opened: float

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        if timeout is None:
            left = STATEMENT_SECONDS + 2 if self.deadline is None else self.deadline - monotonic()
            timeout = max(0.05, min(STATEMENT_SECONDS + 2, left))
        try:
            return super().wait(gen, interval, timeout)
        except psycopg.errors._WaitTimeout:
            self.pgconn.finish()
            raise psycopg.OperationalError("the server did not answer in time") from None


class Database:
    """A pool of at most `size` connections, opened on first use.

    Raises SettingsError where `conninfo` cannot be read. Everything else that is wrong with the database is a
    DatabaseUnavailable of the call that met it.
    """

    def __init__(self, conninfo: str, *, size: int, prepare_threshold: int | None) -> None:
        given = _parsed(conninfo)
        defaults = {"connect_timeout": CONNECT_SECONDS, "application_name": "outbox", "keepalives_idle": 30}
        # Linux alone knows tcp_user_timeout; libpq ignores it elsewhere.
        defaults["tcp_user_timeout"] = int(CALL_SECONDS * 1000)
        self._pool: ConnectionPool[_ClientConnection] = ConnectionPool(
            conninfo,
            connection_class=_ClientConnection,
            kwargs={
                "autocommit": True,  # a transaction is an explicit block
                "prepare_threshold": prepare_threshold,
                **{name: value for name, value in defaults.items() if name not in given},
            },
            configure=_note_opened,
            min_size=0,
            max_size=size,
            open=False,
            timeout=POOL_WAIT_SECONDS,
            max_idle=120,
            max_lifetime=1800,
            # Short, so that a pool that failed to connect tries at once when the next caller comes.
            reconnect_timeout=1,
        )
        self._lock = threading.Lock()
        self._drained = 0.0
        self._last_borrowed = 0.0
        self._down_until = 0.0

    def run(self, work: Callable[[Connection], T], *, seconds: float = CALL_SECONDS, limits: str = "limits") -> T:
        """Run `work` in a transaction; once more on another connection where the first was lost or the server asks.

        `work` must be idempotent: the first try may have committed without our hearing of it. `limits` names the
        statement in sql/ that sets the transaction's limits. Raises DatabaseUnavailable after `seconds` at the latest.
        """
        deadline = monotonic() + seconds
        try:
            return self._once(work, deadline, limits)
        except psycopg.Error as error:
            if not _again(error) or deadline - monotonic() < seconds / 2:
                raise _translated(error) from error
            log.warning("database try again code=%s", error.sqlstate or type(error).__name__)
        try:
            return self._once(work, deadline, limits)
        except psycopg.Error as error:
            raise _translated(error) from error

    def _once(self, work: Callable[[Connection], T], deadline: float, limits: str) -> T:
        with self._connection(deadline) as conn, conn.transaction():
            conn.execute(sql(limits), _LIMITS)
            return work(conn)

    @contextmanager
    def _connection(self, deadline: float) -> Iterator[_ClientConnection]:
        conn = self._borrow(deadline)
        conn.deadline = deadline
        try:
            yield conn
        except psycopg.Error as error:
            if _lost(error):
                conn.close()
                self._drop_older_than(conn)
            raise
        finally:
            conn.deadline = None
            self._pool.putconn(conn)

    def _borrow(self, deadline: float) -> _ClientConnection:
        with self._lock:
            if self._pool.closed:
                self._pool.open()
        if monotonic() < self._down_until:
            raise PoolTimeout
        try:
            conn = self._pool.getconn(timeout=min(POOL_WAIT_SECONDS, max(0.0, deadline - monotonic())))
        except PoolTimeout:
            # Nobody got a connection for that long: spare those who come next the wait, lest they queue for minutes.
            if monotonic() - self._last_borrowed > POOL_WAIT_SECONDS:
                self._down_until = monotonic() + DOWN_SECONDS
            raise
        self._last_borrowed = monotonic()
        return conn

    def _drop_older_than(self, lost: _ClientConnection) -> None:
        """After a failover all pooled connections are dead: replace them at the first sign, once."""
        with self._lock:
            if lost.opened < self._drained:
                return
            self._drained = monotonic()
        self._pool.drain()

    def close(self) -> None:
        self._pool.close(timeout=2)


def _note_opened(conn: _ClientConnection) -> None:
    conn.opened = monotonic()


def _lost(error: psycopg.Error) -> bool:
    """Whether the connection itself is gone or useless."""
    if isinstance(error, PoolTimeout | TooManyRequests):
        return False
    state = error.sqlstate
    if state is None:
        return isinstance(error, psycopg.OperationalError)
    return state.startswith("08") or state in ("57P01", "57P02", "57P05", "25006", "25P03", "25P04")


def _again(error: psycopg.Error) -> bool:
    return _lost(error) or error.sqlstate in _AGAIN


def _translated(error: psycopg.Error) -> Exception:
    if error.sqlstate in ("42P01", "42703"):
        return DatabaseUnavailable("a table or column is missing: run `python -m outbox migrate`")
    if isinstance(error, PoolTimeout | TooManyRequests):
        return DatabaseUnavailable("no connection to PostgreSQL could be had in time")
    if _again(error) or error.sqlstate in _LATER:
        return DatabaseUnavailable(f"PostgreSQL cannot answer now ({error.sqlstate or type(error).__name__})")
    return error
