"""A lock between processes that the operating system lets go of when its holder dies."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl


class FileLock:
    """An exclusive lock on a file of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def acquire(self, *, wait: bool = False) -> bool:
        """Take the lock; False when another process has it and `wait` is not set."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._lock(fd, wait)
        except OSError:
            os.close(fd)
            return False
        self._fd = fd
        return True

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> FileLock:
        while not self.acquire(wait=True):
            pass  # Windows gives up after ten seconds
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()

    if sys.platform == "win32":

        @staticmethod
        def _lock(fd: int, wait: bool) -> None:
            msvcrt.locking(fd, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)

    else:

        @staticmethod
        def _lock(fd: int, wait: bool) -> None:
            fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
