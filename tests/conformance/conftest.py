"""The real parts around the official worker: a database, Azurite and an HTTP receiver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from azure.storage.queue import QueueClient

from localdev.azurite import Azurite
from localdev.guard import Guard
from localdev.postgres import Postgres

from .harness import ROOT, SECRET, OfficialWorker, Receiver, receiving

TEMPLATE = "conformance"


@pytest.fixture(scope="session")
def guard() -> Iterator[Guard]:
    guard = Guard()
    yield guard
    guard.close()


@pytest.fixture(scope="session")
def storage(tmp_path_factory: pytest.TempPathFactory, guard: Guard) -> Iterator[str]:
    """Azurite's connection string."""
    azurite = Azurite(tmp_path_factory.mktemp("azurite") / "data", guard=guard)
    try:
        azurite.start()
        yield azurite.connection_string
    finally:
        azurite.stop()


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory, guard: Guard) -> Iterator[Postgres]:
    """A server with a migrated database to make others from."""
    postgres = Postgres(tmp_path_factory.mktemp("postgres"), options={"fsync": "off"}, guard=guard)
    try:
        with postgres:
            postgres.create_database(TEMPLATE)
            subprocess.run(
                [sys.executable, "-m", "outbox", "migrate"],
                cwd=ROOT,
                env={**os.environ, "OUTBOX_DATABASE_URL": postgres.url(TEMPLATE)},
                check=True,
                stdout=subprocess.DEVNULL,
            )
            yield postgres
    finally:
        postgres.discard()


@pytest.fixture
def database_url(postgres: Postgres) -> str:
    """A migrated database that is this test's alone."""
    name = f"conformance_{uuid.uuid4().hex}"
    with psycopg.connect(postgres.url("postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
    return postgres.url(name)


@pytest.fixture
def db(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def queue(storage: str) -> Iterator[QueueClient]:
    """The doorbell's queue, not created yet, by a client that shows messages as they are on the wire."""
    with QueueClient.from_connection_string(storage, f"conformance-{uuid.uuid4().hex}") as client:
        yield client


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def worker(database_url: str, storage: str, queue: QueueClient, receiver: Receiver) -> OfficialWorker:
    return OfficialWorker(
        {
            "AzureWebJobsStorage": storage,
            "OUTBOX_DATABASE_URL": database_url,
            "OUTBOX_QUEUE_NAME": queue.queue_name,
            "OUTBOX_DESTINATIONS": json.dumps({"receiver": {"url": receiver.url, "secret": SECRET}}),
            "OUTBOX_ALLOWED_PRIVATE_NETWORKS": "127.0.0.0/8",
        }
    )
