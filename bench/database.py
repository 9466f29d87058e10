"""A PostgreSQL server for the benches, tables filled by the server itself, and an outbox on top of them."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from pydantic import SecretStr

from localdev.postgres import Postgres
from outbox.events import Event
from outbox.schema import migrate
from outbox.settings import Destination, Settings, Storage
from outbox.wiring import Outbox

#: Everything else is PostgreSQL's default. These keep checkpoints of the filling out of the measuring.
OPTIONS = {"max_wal_size": "8GB", "checkpoint_timeout": "30min"}
SHOWN = ("synchronous_commit", "fsync", "shared_buffers", "work_mem", *OPTIONS)
#: A URL and a secret that are valid and never used: the benches send nothing.
NOWHERE = Destination(url="https://receiver.example/", secrets=(SecretStr("whsec_" + "YmVuY2gt" * 4),))
STORAGE = "AccountName=bench;AccountKey=YmVuY2g=;QueueEndpoint=http://127.0.0.1:9/bench"


class Measured(Event, type="Measured"):
    """The benches' event."""

    data: str


class Server:
    """An embedded PostgreSQL that lives as long as the `with` block."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="outbox-bench-"))
        self._postgres = Postgres(self._folder, options=OPTIONS)

    def __enter__(self) -> Server:
        try:
            self._postgres.start()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._postgres.stop(immediate=True)
        self._remove()

    def _remove(self) -> None:
        self._postgres.discard()
        shutil.rmtree(self._folder, ignore_errors=True)

    def database(self, name: str) -> str:
        """A new database with the outbox's tables; returns its connection string."""
        self._postgres.create_database(name)
        url = self._postgres.url(name)
        migrate(url)
        with connect(url) as conn:
            # The benches vacuum and analyze when they mean to, so that the same state is measured each time.
            conn.execute("ALTER TABLE outbox_messages SET (autovacuum_enabled = off)")
        return url

    def drop(self, name: str) -> None:
        with connect(self._postgres.url("postgres")) as conn:
            conn.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

    def conditions(self) -> dict[str, str]:
        """What the figures depend on."""
        with connect(self._postgres.url("postgres")) as conn:
            shown = {name: str(scalar(conn, "SELECT current_setting(%s)", name)) for name in SHOWN}
            server = str(scalar(conn, "SHOW server_version"))
        return {
            "PostgreSQL": server,
            **shown,
            "Python": platform.python_version(),
            "psycopg": psycopg.__version__,
            "cores": str(os.cpu_count()),
            "system": f"{platform.system()} {platform.machine()}",
        }


def connect(url: str) -> psycopg.Connection[Any]:
    return psycopg.connect(url, autocommit=True)


def scalar(conn: psycopg.Connection[Any], query: str, *parameters: object) -> object:
    row = conn.execute(query.encode(), parameters or None).fetchone()
    assert row is not None
    return row[0]


@contextmanager
def outbox_on(
    url: str, destinations: list[str], *, prepare_threshold: int | None = None, **session: str
) -> Iterator[Outbox]:
    """The outbox as an app has it, all settings at their defaults. `session` are PostgreSQL settings."""
    if session:
        url = make_conninfo(url, options=" ".join(f"-c {name}={value}" for name, value in session.items()))
    settings = Settings(
        database_url=SecretStr(url),
        queue_name="bench",
        destinations=dict.fromkeys(destinations, NOWHERE),
        prepare_threshold=prepare_threshold,
    )
    outbox = Outbox(settings, Storage.model_validate({"AzureWebJobsStorage": STORAGE}))
    try:
        yield outbox
    finally:
        asyncio.run(outbox.close())


def names(count: int) -> list[str]:
    """Names of `count` destinations."""
    return [f"receiver-{number}" for number in range(count)]


def fill_due(url: str, rows: int, *, destinations: int = 1, payload_bytes: int = 60) -> None:
    """Pending rows that became due over the last hour, spread over the destinations."""
    with connect(url) as conn:
        conn.execute(
            """
            INSERT INTO outbox_messages
                (outbox_message_id, event_type, destination, payload, created_at, next_attempt_at)
            SELECT uuidv7(), 'Measured', 'receiver-' || n %% %(destinations)s,
                jsonb_build_object('data', repeat('x', %(payload_bytes)s)), at.due, at.due
            FROM generate_series(1, %(rows)s) AS n
            CROSS JOIN LATERAL (SELECT now() - make_interval(secs => 3600.0 * (1 - n::float8 / %(rows)s)) AS due) AS at
            """,
            {"rows": rows, "destinations": destinations, "payload_bytes": max(1, payload_bytes - len('{"data": ""}'))},
        )


def fill_processed(url: str, rows: int) -> None:
    """Rows delivered within the last day."""
    with connect(url) as conn:
        conn.execute(
            """
            INSERT INTO outbox_messages
                (outbox_message_id, event_type, destination, payload, status, attempt_count,
                 created_at, next_attempt_at, processed_at)
            SELECT uuidv7(), 'Measured', 'receiver-0', jsonb_build_object('data', repeat('x', 48)), 'Processed', 1,
                at.done, at.done, at.done
            FROM generate_series(1, %(rows)s) AS n
            CROSS JOIN LATERAL (SELECT now() - interval '1 day' * (1 - n::float8 / %(rows)s) AS done) AS at
            """,
            {"rows": rows},
        )


def empty(url: str) -> None:
    with connect(url) as conn:
        conn.execute("TRUNCATE outbox_messages")


def vacuum(url: str) -> None:
    """What autovacuum would have done by now; then the disk is let come to rest."""
    with connect(url) as conn:
        conn.execute("VACUUM (ANALYZE) outbox_messages")
        conn.execute("CHECKPOINT")
