"""The operator's commands, each as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from .support import ROOT, Rows


@pytest.fixture
def run(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python -m outbox`, with the settings changed by `changes` (None: missing)."""

    def run_(*arguments: str, cwd: Path = ROOT, **changes: str | None) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, **environment, "PYTHONPATH": str(ROOT), **changes}
        return subprocess.run(
            [sys.executable, "-m", "outbox", *arguments],
            cwd=cwd, env={k: v for k, v in env.items() if v is not None}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    return run_


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[str]]]:
    """A webhook receiver's address, and the ids it got."""
    got: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            got.append(self.headers["webhook-id"])
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/", got
        server.shutdown()
        thread.join()


def one_line(done: subprocess.CompletedProcess[str], command: str) -> str:
    """What a failed command said: one line on stderr, without a traceback."""
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"python -m outbox {command}: ")
    return line


def test_migrate_says_what_it_applied(run: Callable[..., Any], create_database: Callable[..., str]) -> None:
    url = create_database()
    first, second = (run("migrate", OUTBOX_DATABASE_URL=url) for _ in range(2))
    assert (first.returncode, first.stdout) == (0, "applied outbox-0001_messages, outbox-0002_keys, app-0001_orders\n")
    assert (second.returncode, second.stdout) == (0, "nothing to apply: the schema is up to date\n")


def test_migrate_needs_no_setting_but_the_database(run: Callable[..., Any], tmp_path: Path) -> None:
    missing = {"OUTBOX_QUEUE_NAME": None, "OUTBOX_DESTINATIONS": None, "AzureWebJobsStorage": None}
    done = run("migrate", cwd=tmp_path, **missing)
    assert (done.returncode, done.stdout) == (0, "nothing to apply: the schema is up to date\n")


def test_migrate_refuses_a_directory_without_migrations(run: Callable[..., Any], tmp_path: Path) -> None:
    assert "holds no .sql files" in one_line(run("migrate", str(tmp_path)), "migrate")


def test_a_migration_that_fails_is_named_and_leaves_nothing(
    run: Callable[..., Any], create_database: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "app-0001_bad.sql").write_text("CREATE TABLE half (id int); SELECT no_such_function();")
    url = create_database()
    done = run("migrate", str(tmp_path), OUTBOX_DATABASE_URL=url)
    assert done.returncode == 1
    line = one_line(done, "migrate")
    assert "app-0001_bad" in line or "no_such_function" in line
    (tmp_path / "app-0001_bad.sql").write_text("CREATE TABLE half (id int);")
    assert "app-0001_bad" in run("migrate", str(tmp_path), OUTBOX_DATABASE_URL=url).stdout


@pytest.mark.parametrize("command", ["stats", "drain"])
@pytest.mark.parametrize("name", ["OUTBOX_DATABASE_URL", "OUTBOX_QUEUE_NAME", "OUTBOX_DESTINATIONS"])
def test_a_missing_setting_is_named(run: Callable[..., Any], command: str, name: str) -> None:
    assert f"{name} is missing" in one_line(run(command, **{name: None}), command)


@pytest.mark.parametrize("command", ["migrate", "stats", "drain"])
@pytest.mark.parametrize("host", [{"host": "127.0.0.1", "port": 9}, {"password": "wr0ng", "user": "unknown_user"}])
def test_a_database_that_cannot_be_reached_is_one_line(
    run: Callable[..., Any], conninfo: str, command: str, host: dict[str, Any]
) -> None:
    done = run(command, OUTBOX_DATABASE_URL=make_conninfo(conninfo, **host))
    assert (done.returncode, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    assert "Traceback" not in done.stderr
    assert lines[-1].startswith(f"python -m outbox {command}: ")
    assert len(lines) == 1
    assert "wr0ng" not in done.stderr


def test_a_schema_that_is_missing_is_told_with_the_remedy(
    run: Callable[..., Any], create_database: Callable[..., str]
) -> None:
    assert "python -m outbox migrate" in one_line(run("stats", OUTBOX_DATABASE_URL=create_database()), "stats")


def test_stats_are_a_table_or_one_json_object(run: Callable[..., Any], rows: Rows) -> None:
    rows.add(3, "crm")
    rows.add(1, "erp", status="Failed", last_error="x")
    lines = run("stats").stdout.splitlines()
    assert [line.split()[:4] for line in lines] == [
        ["destination", "pending", "processing", "failed"], ["crm", "3", "0", "0"], ["erp", "0", "0", "1"],
    ]  # fmt: skip
    found = json.loads(run("stats", "--json").stdout)
    assert found["erp"]["failed"] == 1
    assert found["crm"]["pending"] == 3
    assert found["crm"]["oldest_due_seconds"] >= 0


def test_drain_delivers_what_is_due_with_the_queue_down(
    run: Callable[..., Any], rows: Rows, environment: dict[str, str], receiver: tuple[str, list[str]]
) -> None:
    url, got = receiver
    order = {"orderId": "c0ffee00-0000-4000-8000-000000000000"}
    made = rows.add(20, event_type="OrderCompleted", payload=order)
    rows.add(due_in=100, event_type="OrderCompleted", payload=order)
    done = run(
        "drain", "--app", "orders", "--seconds", "20",
        OUTBOX_DESTINATIONS=environment["OUTBOX_DESTINATIONS"].replace("http://127.0.0.1:9/", url),
        OUTBOX_ALLOWED_PRIVATE_NETWORKS="127.0.0.0/8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "claimed=20 delivered=20 retried=0 failed=0 given_back=0 lost_leases=0\n"
    assert sorted(got) == sorted(str(key) for key in made)
    assert "Traceback" not in done.stderr


def test_drain_says_which_module_it_did_not_find(run: Callable[..., Any], tmp_path: Path) -> None:
    assert "no module no_such_app" in run("drain", "--app", "no_such_app", cwd=tmp_path).stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments", [[], ["no-such-command"], ["drain", "--seconds", "-1"], ["drain", "--seconds", "x"]]
)
def test_wrong_arguments_exit_with_2(run: Callable[..., Any], arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
