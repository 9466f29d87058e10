"""Migrations: plain SQL files, applied in the order of their names by yoyo-migrations."""

from __future__ import annotations

import logging
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict
from yoyo import read_migrations
from yoyo.backends.core.postgresql import PostgresqlPsycopgBackend
from yoyo.connections import DatabaseURI

from outbox.errors import DatabaseUnavailable

OWN = Path(__file__).parent / "migrations"
# Any number will do that nothing else on the server uses for an advisory lock.
LOCK = 7_236_411_955


def migrate(conninfo: str, *directories: Path) -> list[str]:
    """Apply the migrations that the database has not seen, the package's own and the files in `directories`.

    Safe to run twice, by two at once, and after one that was killed. Returns the names of those applied. Needs a direct
    connection: PgBouncer's transaction mode keeps no session lock. Raises DatabaseUnavailable.
    """
    logging.getLogger("yoyo").setLevel(logging.WARNING)
    try:
        with psycopg.connect(conninfo, autocommit=True, connect_timeout=5) as conn:
            conn.execute("SELECT pg_advisory_lock(%s)", [LOCK])
            # The lock that yoyo keeps in a table outlives a killed process; ours makes it superfluous.
            backend = _backend(conninfo)
            backend.init_database()
            backend.break_lock()
            migrations = backend.to_apply(read_migrations(str(OWN), *map(str, directories)))
            backend.apply_migrations(migrations)
            return [migration.id for migration in migrations]
    except psycopg.OperationalError as error:
        raise DatabaseUnavailable(f"PostgreSQL cannot be reached ({error.sqlstate or type(error).__name__})") from error


def _backend(conninfo: str) -> PostgresqlPsycopgBackend:
    parameters = {"connect_timeout": 5, "options": "-c lock_timeout=10s", **conninfo_to_dict(conninfo)}
    uri = DatabaseURI("postgresql+psycopg", None, None, None, None, parameters.get("dbname"), parameters)
    return PostgresqlPsycopgBackend(uri, "_yoyo_migration")
