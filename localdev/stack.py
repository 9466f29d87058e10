"""The whole app on this machine: PostgreSQL, Azurite, the webhook receiver and one or more functions hosts.

    with Stack(Path(".localdev"), hosts=2) as stack:
        ...  # stack.base_url, stack.database_url, stack.complete_order(...), stack.kill_host()

`up`, the demo and the acceptance tests use it. Everything runs in processes of its own; however this one ends, a guard
kills what it leaves behind.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.message import Message as EmailMessage
from pathlib import Path
from typing import Any

from azure.core.exceptions import AzureError, ResourceExistsError
from azure.storage.queue import QueueClient

from localdev.azurite import Azurite
from localdev.filelock import FileLock
from localdev.guard import Guard
from localdev.postgres import Postgres
from localdev.processes import Child, answers, free_port, wait_until
from localdev.settings import ROOT, environment, given

HOST_READY_SECONDS = 60
#: A host that lived shorter than this is restarted after a pause, which grows up to the limit.
SHORT_LIFE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 5.0


class StackError(Exception):
    """Why the stack is not up, in words for a person."""


@dataclass(frozen=True)
class Ports:
    """Where the parts listen; a free port for each that is None. Further hosts take the ports after `host`."""

    host: int | None = None
    postgres: int | None = None
    queue: int | None = None
    blob: int | None = None
    receiver: int | None = None


@dataclass(frozen=True)
class Reply:
    """What an HTTP endpoint of the stack answered."""

    status: int
    #: By lower-case name.
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class HostProcess:
    """One functions host, and how often it died young."""

    def __init__(self, child: Child, port: int) -> None:
        self.child = child
        self.port = port
        self.started_at = 0.0
        self.short_lives = 0
        self.ready_pid: int | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.started_at = time.monotonic()
        self.child.start()

    def pause_before_restart(self) -> float:
        """Seconds to wait; none for a host that had lived."""
        young = time.monotonic() - self.started_at < SHORT_LIFE_SECONDS
        self.short_lives = self.short_lives + 1 if young else 0
        return min(0.25 * 2.0**self.short_lives, LONGEST_PAUSE_SECONDS) if young else 0

    def wait_until_ready(self, seconds: float) -> bool:
        """Wait for the host to answer; False when it died instead."""
        pid = self.child.pid
        wait_until(lambda: not self.child.running or self._answers(), seconds, f"the start of {self.child.name}")
        if not self.child.running:
            return False
        self.ready_pid = pid
        return True

    def _answers(self) -> bool:
        try:
            return request("GET", f"{self.url}/admin/host/status", timeout=5).status == 200
        except OSError:
            return False


class Stack:
    """The parts, started by `with`.

    `env` holds settings for the app's processes and wins over os.environ; OUTBOX_DATABASE_URL or AzureWebJobsStorage
    from either is used as it is, and no PostgreSQL or Azurite is started then.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        hosts: int = 1,
        env: Mapping[str, str] | None = None,
        receiver: bool = True,
        ports: Ports | None = None,
        postgres_options: Mapping[str, str] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.state_dir = state_dir.resolve()
        self._overrides = dict(env or {})
        self._ports = ports or Ports()
        self._host_count = hosts
        self._with_receiver = receiver
        self._postgres_options = dict(postgres_options or {})
        self._say = say
        self._stopping = threading.Event()
        self._lock = threading.RLock()
        self._guard: Guard | None = None
        self._running_lock: FileLock | None = None
        self.postgres: Postgres | None = None
        self.azurite: Azurite | None = None
        self.receiver: Child | None = None
        self.hosts: list[HostProcess] = []
        self.database_url = ""
        self.storage_connection_string = ""
        self.receiver_url = ""
        self.function_key = ""
        #: The settings of the app's processes.
        self.env: dict[str, str] = {}

    @classmethod
    @contextlib.contextmanager
    def temporary(cls, **arguments: Any) -> Iterator[Stack]:
        """A stack whose state is deleted at the end."""
        folder = Path(tempfile.mkdtemp(prefix="localdev-"))
        folder.chmod(0o711)  # as root, the database's account has to pass
        stack = cls(folder, **arguments)
        try:
            with stack:
                yield stack
        finally:
            if stack.postgres is not None:
                stack.postgres.discard()
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def base_url(self) -> str:
        """The address of the first host."""
        return self.hosts[0].url

    @property
    def queue(self) -> QueueClient:
        """The doorbell's queue, by a client that fails soon."""
        name = self.env["OUTBOX_QUEUE_NAME"]
        soon: dict[str, Any] = {"retry_total": 0, "connection_timeout": 2, "read_timeout": 10}
        return QueueClient.from_connection_string(self.storage_connection_string, name, **soon)

    def __enter__(self) -> Stack:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop all parts in order; the data stay in the state folder."""
        self._stopping.set()
        with self._lock:
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda host: host.child.stop(), self.hosts))
            for part in (self.receiver, self.azurite, self.postgres):
                if part is not None:
                    part.stop()
            if self._guard is not None:
                self._guard.close()
                self._guard = None
            if self._running_lock is not None:
                self._file.unlink(missing_ok=True)
                self._running_lock.release()
                self._running_lock = None

    def complete_order(self, order_id: str, *, timeout: float = 30) -> Reply:
        """POST the order's completion, with the key."""
        return self.post(f"/api/orders/{order_id}/complete", timeout=timeout)

    def run_function(self, name: str, text: str = "") -> None:
        """Start a timer or queue function once, as the portal's "Run" does."""
        reply = self.post(f"/admin/functions/{name}", json.dumps({"input": text}).encode())
        if reply.status != 202:
            raise StackError(f"the host answered {reply.status} when asked to run {name}")

    def post(self, path: str, body: bytes = b"", *, timeout: float = 30) -> Reply:
        headers = {"x-functions-key": self.function_key, "content-type": "application/json"}
        return request("POST", self.base_url + path, body, headers, timeout=timeout)

    def script_receiver(self, *answers: Mapping[str, Any]) -> None:
        """Give the receiver its next answers (see localdev.receiver)."""
        reply = request("POST", f"{self.receiver_url}/control", json.dumps({"next": answers}).encode())
        if reply.status != 200:
            raise StackError(f"the receiver does not take this script: {reply.body.decode()}")

    def deliveries(self) -> list[dict[str, Any]]:
        """Every delivery that arrived at the receiver."""
        deliveries: list[dict[str, Any]] = request("GET", f"{self.receiver_url}/deliveries").json()
        return deliveries

    def kill_host(self, index: int = 0) -> int:
        """Kill a host as a crash would; its pid. It is restarted."""
        host = self.hosts[index]
        pid = host.child.pid
        assert pid is not None
        host.child.kill()
        return pid

    def wait_host_restarted(self, killed: int, index: int = 0, seconds: float = HOST_READY_SECONDS) -> None:
        """Wait until another process than `killed` answers in the host's place."""
        host = self.hosts[index]
        wait_until(lambda: host.ready_pid not in (None, killed), seconds, f"the restart of {host.child.name}")

    def _start(self) -> None:
        self.state_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.state_dir / "up.lock")
        if not lock.acquire():
            raise StackError(f"another stack runs in {self.state_dir}: stop it, or use another --state-dir")
        self._running_lock = lock
        self._file.unlink(missing_ok=True)
        self._guard = Guard()
        kept = self._secrets()
        self.function_key = kept["function_key"]
        with ThreadPoolExecutor() as pool:
            for started in [pool.submit(self._start_postgres), pool.submit(self._start_azurite)]:
                started.result()
        defaults = {
            "OUTBOX_DATABASE_URL": self.database_url,
            "AzureWebJobsStorage": self.storage_connection_string,
            "OUTBOX_ALLOWED_PRIVATE_NETWORKS": "127.0.0.0/8,::1/128",
        }
        if self._with_receiver:
            port = self._ports.receiver or free_port()
            self.receiver_url = f"http://127.0.0.1:{port}"
            receiver = {"url": f"{self.receiver_url}/webhook", "secret": kept["webhook_secret"]}
            defaults["OUTBOX_DESTINATIONS"] = json.dumps({"receiver": receiver})
        self.env = environment(defaults, self._overrides)
        self.env |= {
            "LOCALDEV_STATE_DIR": str(self.state_dir),
            "LOCALDEV_FUNCTION_KEY": self.function_key,
            "PYTHONUNBUFFERED": "1",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), self.env.get("PATH", "")]),
        }
        if self._with_receiver:
            self._start_receiver(kept["webhook_secret"])
        self._migrate()
        self._create_queue()
        self._start_hosts()
        self._write()

    def _secrets(self) -> dict[str, str]:
        """Keys of this stack, made once, so that a command typed yesterday still works."""
        path = self.state_dir / "secrets.json"
        if path.exists():
            kept: dict[str, str] = json.loads(path.read_text("utf-8"))
            return kept
        made = {
            "function_key": secrets.token_urlsafe(32),
            "webhook_secret": "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode(),
        }
        write_atomically(path, json.dumps(made))
        return made

    def _start_postgres(self) -> None:
        own = given("OUTBOX_DATABASE_URL", self._overrides)
        if own is not None:
            self.database_url = own
            return
        self._say("starting PostgreSQL ...")
        self.postgres = Postgres(
            self.state_dir,
            port=self._ports.postgres,
            options=self._postgres_options,
            guard=self._guard,
            on_death=lambda code: self._died("PostgreSQL", code),
        )
        self.postgres.start()
        self.postgres.create_database("outbox")
        self.database_url = self.postgres.url()

    def _start_azurite(self) -> None:
        own = given("AzureWebJobsStorage", self._overrides)
        if own is not None:
            self.storage_connection_string = own
            return
        self._say("starting Azurite ...")
        self.azurite = Azurite(
            self.state_dir / "azurite",
            queue_port=self._ports.queue,
            blob_port=self._ports.blob,
            log=self.state_dir / "azurite.log",
            guard=self._guard,
            on_death=lambda code: self._died("Azurite", code),
        )
        self.azurite.start()
        self.storage_connection_string = self.azurite.connection_string

    def _start_receiver(self, secret: str) -> None:
        port = self.receiver_url.rpartition(":")[2]
        log = self.state_dir / "deliveries.jsonl"
        self.receiver = Child(
            "receiver",
            [sys.executable, "-m", "localdev.receiver", "--port", port, "--log", str(log)],
            log=self.state_dir / "receiver.log",
            env={**self.env, "LOCALDEV_RECEIVER_SECRETS": secret},
            cwd=ROOT,
            guard=self._guard,
            on_death=lambda code: self._died("the receiver", code),
        )
        self.receiver.start()
        receiver = self.receiver
        wait_until(lambda: not receiver.running or answers(int(port)), 30, "the receiver's start")
        if not receiver.running:
            raise StackError(f"the receiver did not start:\n{receiver.last_lines()}")

    def _migrate(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "outbox", "migrate"],
            cwd=ROOT,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode != 0:
            raise StackError(f"python -m outbox migrate failed:\n{done.stdout.strip()}")

    def _create_queue(self) -> None:
        try:
            with contextlib.suppress(ResourceExistsError):
                self.queue.create_queue()
        except (AzureError, ValueError) as error:
            raise StackError(f"the queue {self.env.get('OUTBOX_QUEUE_NAME')} cannot be made: {error}") from None

    def _start_hosts(self) -> None:
        first = self._ports.host or free_port()
        for index in range(self._host_count):
            port = first if index == 0 else first + index if self._ports.host else free_port()
            name = "host" if self._host_count == 1 else f"host{index + 1}"
            log = self.state_dir / f"{name}.log"
            log.write_bytes(b"")
            child = Child(name, host_command(port), log=log, env=self.env, cwd=ROOT, guard=self._guard)
            host = HostProcess(child, port)
            child.on_death = lambda code, host=host: self._restart(host, code)
            self.hosts.append(host)
        self._say("starting the functions host ..." if self._host_count == 1 else "starting the functions hosts ...")
        for host in self.hosts:
            host.start()
        for host in self.hosts:
            if not host.wait_until_ready(HOST_READY_SECONDS):
                raise StackError(f"the functions host did not start:\n{host.child.last_lines()}")

    def _restart(self, host: HostProcess, code: int) -> None:
        host.ready_pid = None
        if self._stopping.is_set() or not self._file.exists():
            return  # before everything was up, _start_hosts says that it died
        pause = host.pause_before_restart()
        self._say(
            f"{host.child.name} (pid {host.child.pid}) died: {described(code)}; "
            + (f"restarting in {pause:g} s, it had lived shortly" if pause else "restarting it, as Azure would")
        )
        if self._stopping.wait(pause):
            return
        with self._lock:
            if self._stopping.is_set():
                return
            host.start()
        with contextlib.suppress(TimeoutError):
            if host.wait_until_ready(HOST_READY_SECONDS):
                self._write()
                self._say(f"{host.child.name} is back (pid {host.child.pid})")

    def _died(self, what: str, code: int) -> None:
        if not self._stopping.is_set():
            self._say(f"{what} died: {described(code)}. The rest goes on without it.")

    @property
    def _file(self) -> Path:
        return self.state_dir / "stack.json"

    def _write(self) -> None:
        with self._lock:
            if self._stopping.is_set():
                return
            pids: dict[str, Any] = {
                "postgres": self.postgres.pid if self.postgres is not None else None,
                "azurite": self.azurite.pid if self.azurite is not None else None,
                "receiver": self.receiver.pid if self.receiver is not None else None,
                "host": self.hosts[0].child.pid,
            }
            if self._host_count > 1:
                pids["hosts"] = [host.child.pid for host in self.hosts]
            content = {
                "base_url": self.base_url,
                "database_url": self.database_url,
                "storage_connection_string": self.storage_connection_string,
                "receiver_url": self.receiver_url,
                "function_key": self.function_key,
                "pids": pids,
            }
            write_atomically(self._file, json.dumps(content, indent=2) + "\n")


def host_command(port: int) -> list[str]:
    """Core Tools where they are installed, else the stand-in; LOCALDEV_HOST=stand-in asks for the second."""
    func = shutil.which("func")
    if func is not None and os.environ.get("LOCALDEV_HOST") != "stand-in":
        return [func, "start", "--port", str(port)]
    return [sys.executable, "-m", "localdev.host", "--port", str(port)]


def described(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def write_atomically(path: Path, text: str) -> None:
    """Write a file that only its owner can read, so that a reader sees the old one or the new one."""
    fd, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with open(fd, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(unfinished, path)


def request(
    method: str, url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None, *, timeout: float = 30
) -> Reply:
    """One HTTP request without proxies; any status is a reply. OSError when there is none."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    message = urllib.request.Request(url, data=body, headers=dict(headers or {}), method=method)
    try:
        with opener.open(message, timeout=timeout) as answer:
            return Reply(answer.status, _lower(answer.headers), answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, _lower(error.headers), error.read())


def _lower(headers: EmailMessage) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
