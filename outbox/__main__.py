"""The operator's commands: `python -m outbox --help`."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outbox import settings, wiring
from outbox.database import connect
from outbox.errors import OutboxError


def main(argv: list[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0, 1 for an error that the last line explains, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m outbox", description="Operate the outbox.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser("migrate", help="bring the database's schema up to date")
    command.add_argument(
        "directories", nargs="*", type=Path, metavar="DIRECTORY",
        help="more migrations to apply (default: ./migrations, where there is one)",
    )  # fmt: skip

    command = commands.add_parser("stats", help="rows at work and failed, by destination")
    command.add_argument("--json", action="store_true", help="as one JSON object")

    command = commands.add_parser("drain", help="deliver what is due, in this process")
    command.add_argument(
        "--app", default="function_app", metavar="MODULE",
        help="the module that registers the event types (default: function_app)",
    )  # fmt: skip
    command.add_argument("--seconds", type=_positive, help="time budget (default: OUTBOX_DRAIN_BUDGET_SECONDS)")

    arguments = parser.parse_args(argv)
    try:
        match arguments.command:
            case "migrate":
                _migrate(arguments.directories)
            case "stats":
                _stats(as_json=arguments.json)
            case "drain":
                _drain(arguments.app, arguments.seconds)
    except OutboxError as error:
        print(f"python -m outbox {arguments.command}: {error}", file=sys.stderr)
        return 1
    return 0


def _migrate(directories: list[Path]) -> None:
    from outbox import schema  # its library is needed by no function

    if not directories and Path("migrations").is_dir():
        directories = [Path("migrations")]
    for directory in directories:
        if not any(directory.glob("*.sql")):
            raise OutboxError(f"{directory} holds no .sql files")
    applied = schema.migrate(settings.load_database_url(), *directories)
    print("applied " + ", ".join(applied) if applied else "nothing to apply: the schema is up to date")


def _stats(*, as_json: bool) -> None:
    with _outbox() as box:
        rows = box.store.stats()
    if as_json:
        print(json.dumps({row.pop("destination"): row for row in rows}))
        return
    columns = ["destination", "pending", "processing", "failed", "oldest_due_seconds"]
    table = [
        columns,
        *[[str(row[c]) if c != "oldest_due_seconds" else f"{row[c]:.1f}" for c in columns] for row in rows],
    ]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _drain(app: str, seconds: float | None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    sys.path.insert(0, os.getcwd())
    try:
        importlib.import_module(app)
    except ModuleNotFoundError as error:
        if error.name != app:
            raise
        raise OutboxError(
            f"there is no module {app} here; run it in the app's folder, or name one with --app"
        ) from None
    with _outbox() as box:
        for name in ("SIGINT", "SIGTERM", "SIGBREAK"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), lambda *_: box.stop_draining())
        report = asyncio.run(box.drain(seconds))
    assert report is not None  # nothing else drains in this process
    print(" ".join(f"{name}={getattr(report, name)}" for name in report.__slots__))


@contextmanager
def _outbox() -> Iterator[wiring.Outbox]:
    """The outbox over a database that answers; closed whatever happens, since open pools hold up the process's end."""
    box = wiring.configure()
    # Says what is wrong in one line, where a pool would try again and again.
    connect(settings.load_database_url()).close()
    try:
        yield box
    finally:
        asyncio.run(box.close())


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError("it should be a number of seconds above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
