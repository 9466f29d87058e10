"""A real PostgreSQL for the session, a database of its own for each test, and the drain's parts around it.

OUTBOX_TEST_DATABASE_URL names a server to use instead (15 or newer, a user who may create databases).
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from localdev.postgres import Postgres
from outbox import schema, wiring
from outbox.database import Database
from outbox.processor import Policy, Processor, Report, Route
from outbox.retry import Backoff
from outbox.store import ClaimRules, PostgresStore

from .support import ROOT, Bell, Proxy, Rows, Sender, connect, free_of_sessions

IN_MEMORY = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
SECRET = "whsec_" + "QUFB" * 8


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Connection string of the session's server, as a user with no right but to create databases."""
    if given := os.environ.get("OUTBOX_TEST_DATABASE_URL"):
        yield given
        return
    postgres = Postgres(tmp_path_factory.mktemp("postgres"), options=IN_MEMORY)
    try:
        with postgres:
            with connect(postgres.url("postgres")) as conn:
                conn.execute("CREATE ROLE tester LOGIN CREATEDB PASSWORD 'tester'")
            yield make_conninfo(postgres.url("postgres"), user="tester", password="tester")
    finally:
        postgres.discard()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Postgres]:
    """A server that a test may kill, with a migrated database `outbox`."""
    postgres = Postgres(tmp_path, options=IN_MEMORY)
    try:
        with postgres:
            postgres.create_database("outbox")
            schema.migrate(postgres.url(), ROOT / "migrations")
            yield postgres
    finally:
        postgres.discard()


_numbers = itertools.count()


@pytest.fixture(scope="session")
def create_database(server: str) -> Iterator[Callable[..., str]]:
    """Create a database from a template and return its connection string."""
    made: list[str] = []
    with connect(server) as conn:

        def create(template: str = "template0") -> str:
            name = f"outbox_test_{os.getpid()}_{next(_numbers)}"
            conn.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template))
            )
            made.append(name)
            return make_conninfo(server, dbname=name)

        yield create
        for name in made if "OUTBOX_TEST_DATABASE_URL" in os.environ else ():  # else the server goes with them
            conn.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture(scope="session")
def template(create_database: Callable[..., str]) -> str:
    conninfo = create_database()
    schema.migrate(conninfo, ROOT / "migrations")
    return free_of_sessions(conninfo)


@pytest.fixture
def conninfo(create_database: Callable[..., str], template: str) -> str:
    """Connection string of a migrated database that is this test's alone."""
    return create_database(template)


@pytest.fixture
def rows(conninfo: str) -> Iterator[Rows]:
    with connect(conninfo) as conn:
        yield Rows(conn)


@pytest.fixture
def proxy(conninfo: str) -> Iterator[Proxy]:
    with Proxy(conninfo) as proxy:
        yield proxy


@pytest.fixture
def open_database(conninfo: str) -> Iterator[Callable[..., Database]]:
    opened: list[Database] = []

    def open_(url: str = conninfo, size: int = 2, prepare_threshold: int | None = None) -> Database:
        opened.append(Database(url, size=size, prepare_threshold=prepare_threshold))
        return opened[-1]

    yield open_
    for database in opened:
        database.close()


@pytest.fixture
def open_store(conninfo: str, open_database: Callable[..., Database]) -> Callable[..., PostgresStore]:
    def open_(url: str = conninfo, prepare_threshold: int | None = None, **rules: Any) -> PostgresStore:
        defaults = {"lease_seconds": 30, "max_attempts": 50, "give_up_seconds": 259_200, "max_payload_bytes": 262_144}
        return PostgresStore(
            open_database(url, prepare_threshold=prepare_threshold), ClaimRules(**{**defaults, **rules})
        )

    return open_


@pytest.fixture
def store(open_store: Callable[..., PostgresStore]) -> PostgresStore:
    return open_store()


@pytest.fixture
def processor(open_store: Callable[..., PostgresStore], conninfo: str) -> Callable[..., Processor]:
    """Build a processor on a real store. It knows the destinations crm and erp; `policy` changes its defaults."""

    def build(sender: Sender | None = None, bell: Bell | None = None, url: str = conninfo, **policy: Any) -> Processor:
        routes = policy.pop("routes", {"crm": Route(5, 32), "erp": Route(5, 32)})
        defaults: dict[str, Any] = {
            "backoff": Backoff(10, 1800),
            "batch_size": 100,
            "max_in_flight": 256,
            "lease_seconds": 30.0,
            "max_attempts": 50,
            "give_up_seconds": 259_200.0,
            "unknown_grace_seconds": 0.0,
        }
        max_payload_bytes = policy.pop("max_payload_bytes", 262_144)
        whole = Policy(routes=routes, **{**defaults, **policy})
        shared = {f.name: getattr(whole, f.name) for f in fields(ClaimRules) if f.name != "max_payload_bytes"}
        store = open_store(url, max_payload_bytes=max_payload_bytes, **shared)
        return Processor(store, sender or Sender(), bell or Bell(), whole)

    return build


@pytest.fixture
def drain(processor: Callable[..., Processor]) -> Callable[..., Report]:
    """Run one drain to its end and return its report."""

    def run(sender: Sender | None = None, bell: Bell | None = None, budget: float = 10, **policy: Any) -> Report:
        report = asyncio.run(processor(sender, bell, **policy).drain(budget))
        assert report is not None
        return report

    return run


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, conninfo: str) -> dict[str, str]:
    """The app's settings, without a value that the shell or another test left."""
    for name in os.environ:
        if name.startswith(("OUTBOX_", "AzureWebJobsStorage")):
            monkeypatch.delenv(name)
    settings = {
        "OUTBOX_DATABASE_URL": conninfo,
        "OUTBOX_QUEUE_NAME": "outbox-test",
        "OUTBOX_DESTINATIONS": f'{{"crm": {{"url": "http://127.0.0.1:9/", "secret": "{SECRET}"}}, '
        f'"erp": {{"url": "http://127.0.0.1:9/", "secret": "{SECRET}", "event_types": ["OrderCompleted"]}}}}',
        # nobody listens there
        "OUTBOX_ALLOWED_PRIVATE_NETWORKS": "127.0.0.0/8",
        "AzureWebJobsStorage": "DefaultEndpointsProtocol=http;AccountName=a;AccountKey=a2V5;"
        "QueueEndpoint=http://127.0.0.1:9/a",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return settings


@pytest.fixture
def configure(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., wiring.Outbox]]:
    """Build the process's Outbox from the settings and `changes`, with a bell that only notes its rings."""
    built: list[wiring.Outbox] = []

    def build(**changes: str) -> wiring.Outbox:
        for name, value in changes.items():
            monkeypatch.setenv(f"OUTBOX_{name.upper()}", value)
        wiring.configure.cache_clear()
        box = wiring.configure()
        built.append(box)
        box.doorbell.close()
        box.doorbell = box.processor.doorbell = Bell()  # type: ignore[assignment]
        return box

    yield build
    wiring.configure.cache_clear()
    for box in built:
        asyncio.run(box.close())
