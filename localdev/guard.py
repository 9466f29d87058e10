"""The guard: a process that outlives a killed stack just long enough to kill what the stack left behind.

It reads `add PID` and `remove PID` from a pipe. However the other end dies, the pipe closes; then every process still
on the list is killed, with its descendants. `launcher PID` names the process whose death ends the stack as well: on
Windows the command as typed, which the stack is a child of.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable

import psutil

from localdev.bootstrap import LAUNCHER_VARIABLE
from localdev.processes import own_group


class Guard:
    """The stack's end of the pipe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "localdev.guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **own_group(),
        )
        if LAUNCHER_VARIABLE in os.environ:
            self._tell(f"launcher {int(os.environ[LAUNCHER_VARIABLE])}\n")

    def add(self, pid: int) -> None:
        self._tell(f"add {pid}\n")

    def remove(self, pid: int) -> None:
        self._tell(f"remove {pid}\n")

    def close(self) -> None:
        """End the guard; it kills what was not removed."""
        pipe = self._process.stdin
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        pipe = self._process.stdin
        with self._lock, contextlib.suppress(OSError, ValueError):
            if pipe is not None:
                pipe.write(line.encode())
                pipe.flush()


def watch(lines: Iterable[str]) -> None:
    """Follow the pipe to its end, then kill what is left."""
    # A psutil.Process knows when its process began, so that a reused pid is not mistaken for it.
    known: dict[int, psutil.Process] = {}
    for line in lines:
        verb, _, number = line.strip().partition(" ")
        if verb == "add":
            with contextlib.suppress(psutil.Error):
                known[int(number)] = psutil.Process(int(number))
        elif verb == "remove":
            known.pop(int(number), None)
        elif verb == "launcher":
            threading.Thread(target=end_with, args=(int(number), psutil.Process(os.getppid())), daemon=True).start()
    kill(known.values())


def end_with(launcher: int, stack: psutil.Process) -> None:
    """When the launcher is gone, kill the stack; that closes the pipe."""
    with contextlib.suppress(psutil.Error):
        psutil.Process(launcher).wait()
    with contextlib.suppress(psutil.Error):
        stack.kill()


def kill(processes: Iterable[psutil.Process]) -> None:
    doomed: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running():
                doomed += [*process.children(recursive=True), process]
    for process in doomed:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(doomed, timeout=5)


if __name__ == "__main__":
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    watch(sys.stdin)
