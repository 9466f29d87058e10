"""The hands of the integration tests: rows in the table, scripted ends of a drain, a network that fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row

import outbox
from outbox.errors import DoorbellUnavailable
from outbox.message import Delivered, Message, Outcome

ROOT = Path(__file__).resolve().parent.parent.parent


class Ping(outbox.Event, type="test.Ping"):
    n: int


def connect(conninfo: str) -> psycopg.Connection[Any]:
    return psycopg.connect(conninfo, autocommit=True)


def until(condition: Callable[[], Any], seconds: float = 10) -> Any:
    """Wait until `condition()` is true and return what it returned."""
    deadline = monotonic() + seconds
    while not (value := condition()):
        assert monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return value


def free_of_sessions(conninfo: str) -> str:
    """The name of a database that can serve as a template: a session that was closed takes a moment to end."""
    name = str(conninfo_to_dict(conninfo)["dbname"])
    with connect(make_conninfo(conninfo, dbname="postgres")) as conn:
        others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
        until(lambda: not conn.execute(others, [name]).fetchall())
    return name


class Rows:
    """The outbox table as a test sees it."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self.conn = conn

    def add(
        self, n: int = 1, destination: str = "crm", *, due_in: float = 0, age: float = 0, payload: Any = None,
        event_type: str = "test.Ping", **columns: Any,
    ) -> list[UUID]:  # fmt: skip
        """Insert `n` rows, the first the oldest; `columns` are further values."""
        text = payload if isinstance(payload, str) else json.dumps({"n": 1} if payload is None else payload)
        statement = sql.SQL(
            "INSERT INTO outbox_messages (outbox_message_id, event_type, destination, payload, created_at,"
            " next_attempt_at{names}) SELECT gen_random_uuid(), %(event_type)s, %(destination)s, %(payload)s::jsonb,"
            " statement_timestamp() - make_interval(secs => %(age)s) - (%(n)s - g) * interval '1 us',"
            " statement_timestamp() + make_interval(secs => %(due_in)s) - (%(n)s - g) * interval '1 us'{values}"
            " FROM generate_series(1, %(n)s) AS g RETURNING outbox_message_id"
        ).format(
            names=sql.SQL("").join(sql.SQL(", {}").format(sql.Identifier(name)) for name in columns),
            values=sql.SQL("").join(sql.SQL(", {}").format(sql.Placeholder(name)) for name in columns),
        )
        given = {"n": n, "due_in": float(due_in), "age": float(age), "payload": text, "destination": destination}
        return [i for (i,) in self.conn.execute(statement, {**given, "event_type": event_type, **columns})]

    def get(self, message_id: UUID) -> dict[str, Any]:
        """The row, with `due_in`: seconds until it is claimable."""
        row = self.conn.cursor(row_factory=dict_row).execute(
            "SELECT *, extract(epoch FROM next_attempt_at - clock_timestamp())::float8 AS due_in"
            " FROM outbox_messages WHERE outbox_message_id = %s", [message_id],
        ).fetchone()  # fmt: skip
        assert row is not None
        return row

    def statuses(self, destination: str | None = None) -> dict[str, int]:
        found = self.conn.execute(
            "SELECT status, count(*) FROM outbox_messages WHERE destination = %(d)s OR %(d)s::text IS NULL GROUP BY 1",
            {"d": destination},
        )
        return dict(found.fetchall())

    def count(self) -> int:
        return sum(self.statuses().values())

    def run_out(self, *messages: Message) -> None:
        """Let the leases of claimed rows end now."""
        self.conn.execute(
            "UPDATE outbox_messages SET lease_expires_at = now(), next_attempt_at = now()"
            " WHERE status = 'Processing' AND outbox_message_id = ANY(%s)", [ids(messages)],
        )  # fmt: skip

    def update(self, message_id: UUID, **columns: Any) -> None:
        changes = sql.SQL(", ").join(
            sql.SQL("{} = {}").format(sql.Identifier(name), sql.Placeholder(name)) for name in columns
        )
        statement = sql.SQL("UPDATE outbox_messages SET {} WHERE outbox_message_id = %(id)s").format(changes)
        assert self.conn.execute(statement, {**columns, "id": message_id}).rowcount == 1

    def freeze_statistics(self) -> None:
        """Let the planner believe, from now on, what is true of the table at this moment."""
        self.conn.execute("ALTER TABLE outbox_messages SET (autovacuum_enabled = false)")
        self.conn.execute("ANALYZE outbox_messages")


def ids(messages: Iterable[Message]) -> list[UUID]:
    return [m.outbox_message_id for m in messages]


class Sender:
    """A receiver by script: `answer(message)` after `seconds`."""

    def __init__(self, answer: Callable[[Message], Outcome | Exception] | None = None, seconds: float = 0) -> None:
        self._answer = answer or (lambda message: Delivered())
        self.seconds = seconds
        self.sent: list[Message] = []
        self.times: list[float] = []
        self.flying: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    async def send(self, message: Message) -> Outcome:
        self.sent.append(message)
        self.times.append(monotonic())
        for name in (message.destination, "all"):
            self.flying[name] += 1
            self.most[name] = max(self.most[name], self.flying[name])
        try:
            await asyncio.sleep(self.seconds)
            outcome = self._answer(message)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome
        finally:
            self.flying[message.destination] -= 1
            self.flying["all"] -= 1


class Bell:
    """A doorbell that notes its rings; `broken` as a queue that is down."""

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken
        self.rings: list[float] = []

    def ring(self, delay_seconds: float = 0) -> None:
        if self.broken:
            raise DoorbellUnavailable("the queue is down")
        self.rings.append(delay_seconds)

    def ring_for_request(self) -> None:
        self.rings.append(0)

    def close(self) -> None:
        pass


class Proxy:
    """The network between the app and PostgreSQL: it can freeze, or cut a connection at a COMMIT."""

    def __init__(self, conninfo: str) -> None:
        given = conninfo_to_dict(conninfo)
        self._upstream = (str(given.get("hostaddr") or given["host"]), int(given.get("port") or 5432))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.conninfo = make_conninfo(
            conninfo, host="127.0.0.1", port=self._listener.getsockname()[1], sslmode="disable", gssencmode="disable"
        )
        self._thaw = threading.Event()
        self._thaw.set()
        #: Cut the next connection that sends a COMMIT: "before" the server gets it, or when its answer comes ("after").
        self.cut: str | None = None
        self.cuts = 0
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def freeze(self) -> None:
        self._thaw.clear()

    def thaw(self) -> None:
        self._thaw.set()

    def __enter__(self) -> Proxy:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._thaw.set()
        self._close(self._listener, *self._sockets)
        for thread in self._threads:
            thread.join(5)

    def _start(self, function: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._thaw.wait()
            try:
                server = socket.create_connection(self._upstream)
            except OSError:
                client.close()
                continue
            self._sockets += [client, server]
            state = {"cut": False}
            self._start(self._forward, client, server, state, True)
            self._start(self._forward, server, client, state, False)

    def _forward(self, source: socket.socket, target: socket.socket, state: dict[str, bool], up: bool) -> None:
        try:
            while data := source.recv(65536):
                self._thaw.wait()
                if up and self.cut and b"COMMIT" in data:
                    cut, self.cut = self.cut, None
                    self.cuts += 1
                    if cut == "before":
                        break
                    state["cut"] = True
                elif not up and state["cut"]:
                    break
                target.sendall(data)
        except OSError:
            pass
        self._close(source, target)

    @staticmethod
    def _close(*sockets: socket.socket) -> None:
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
