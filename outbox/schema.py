"""Migrations: plain SQL files, applied in the order of their names by yoyo-migrations."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict
from yoyo import read_migrations
from yoyo.backends.core.postgresql import PostgresqlPsycopgBackend
from yoyo.connections import DatabaseURI

from outbox.database import connect, first_line
from outbox.errors import OutboxError

OWN = Path(__file__).parent / "migrations"
# Any number will do that nothing else on the server uses for an advisory lock.
LOCK = 7_236_411_955


def migrate(conninfo: str, *directories: Path) -> list[str]:
    """Apply the migrations that the database has not seen, the package's own and the files in `directories`.

    Safe to run twice, by two at once, and after one that was killed. Returns the names of those applied. Needs a direct
    connection: PgBouncer's transaction mode keeps no session lock. Raises DatabaseUnavailable, and OutboxError where a
    migration fails; those before it stay applied.
    """
    logging.getLogger("yoyo").setLevel(logging.WARNING)
    with connect(conninfo) as conn:
        conn.execute("SELECT pg_advisory_lock(%s)", [LOCK])
        backend = _backend(conninfo)
        with closing(backend.connection):
            backend.init_database()
            # The lock that yoyo keeps in a table outlives a killed process; ours makes it superfluous.
            backend.break_lock()
            migrations = backend.to_apply(read_migrations(str(OWN), *map(str, directories)))
            for migration in migrations:
                try:
                    with backend.transaction() if migration.use_transactions else nullcontext():
                        backend.apply_one(migration)
                except psycopg.Error as error:
                    raise OutboxError(f"migration {migration.id} failed: {first_line(error)}") from error
            return [migration.id for migration in migrations]


class _Backend(PostgresqlPsycopgBackend):  # type: ignore[misc]  # yoyo has no types
    """Applies a migration and notes it in one transaction; yoyo alone takes another connection for each."""

    def copy(self) -> AbstractContextManager[_Backend]:
        return nullcontext(self)


def _backend(conninfo: str) -> _Backend:
    parameters = {"connect_timeout": 5, "options": "-c lock_timeout=10s", **conninfo_to_dict(conninfo)}
    uri = DatabaseURI("postgresql+psycopg", None, None, None, None, parameters.get("dbname"), parameters)
    return _Backend(uri, "_yoyo_migration")
