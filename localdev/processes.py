"""Child processes of a stack, and the ports they listen on."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class Watcher(Protocol):
    def add(self, pid: int) -> None: ...
    def remove(self, pid: int) -> None: ...


class Child:
    """One process: its log, its entry with the guard, and what to do when it dies unasked."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        guard: Watcher | None = None,
        on_death: Callable[[int], None] | None = None,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.command = list(command)
        self.log = log
        self.env = env
        self.cwd = cwd
        self.on_death = on_death
        self._guard = guard
        self._identity = dict(identity or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._waiter: threading.Thread | None = None
        self._asked = False

    def start(self) -> None:
        self._asked = False
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self.env) if self.env is not None else None,
                cwd=self.cwd,
                **own_group(),
                **self._identity,
            )
        if self._guard is not None:
            self._guard.add(process.pid)
        self._process = process
        self._waiter = threading.Thread(target=self._wait, args=(process,), name=f"wait-{self.name}", daemon=True)
        self._waiter.start()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._guard is not None:
            self._guard.remove(process.pid)
        if not self._asked and self.on_death is not None:
            self.on_death(code)

    @property
    def pid(self) -> int | None:
        """The pid of the newest process, dead or alive; None before the first start."""
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self, grace: float = 15, ask: Callable[[], None] | None = None) -> None:
        """Ask it to end, wait, and kill it after `grace` seconds."""
        self._asked = True
        process = self._process
        if process is None or process.poll() is not None:
            return
        with contextlib.suppress(OSError):
            (ask or (lambda: ask_to_stop(process)))()
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self, *, expected: bool = False) -> None:
        """Kill it as a fault would, with no chance to clean up; `expected` keeps on_death from being called."""
        self._asked = self._asked or expected
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def last_lines(self, count: int = 15) -> str:
        """The end of its log, for an error message."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-count:])
        return ""


def own_group() -> dict[str, Any]:
    """Popen arguments that keep the terminal's Ctrl-C from a child: the stack stops its children, in order."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}


def ask_to_stop(process: subprocess.Popen[bytes]) -> None:
    if sys.platform == "win32":
        process.send_signal(signal.CTRL_BREAK_EVENT)
    else:
        process.terminate()


def free_port() -> int:
    """A port nobody listens on, from outside the ranges that outgoing connections take theirs from.

    A process that restarts on its old port would otherwise find it used by somebody's outgoing connection.
    """
    for port in random.sample(range(20000, 30000), 200):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("there is no free port between 20000 and 30000")


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Return as soon as the condition holds; TimeoutError naming `what` when it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} seconds")
        time.sleep(0.05)


def answers(port: int) -> bool:
    """Whether something accepts connections on a local port."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False
