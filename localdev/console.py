"""What a stack says: printed by a thread of its own, so that an unread pipe or a paused terminal stops nothing else."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from pathlib import Path
from typing import TextIO

FOLLOW_SECONDS = 0.1


class Console:
    """Lines to print, and log files to follow. When nobody reads them for long, lines are dropped."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._lines: queue.Queue[str | None] = queue.Queue(10_000)
        self._stopped = threading.Event()
        self._followers: list[threading.Thread] = []
        self._printer = threading.Thread(target=self._print, name="console", daemon=True)
        self._printer.start()

    def say(self, line: str = "") -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(line)

    def follow(self, path: Path, prefix: str = "") -> None:
        """Show a log file from its beginning, and what is written to it from now on."""
        thread = threading.Thread(target=self._follow, args=(path, prefix), name="follow", daemon=True)
        self._followers.append(thread)
        thread.start()

    def close(self, seconds: float = 2) -> None:
        """Print what is waiting, if somebody reads it."""
        self._stopped.set()
        for follower in self._followers:
            follower.join(seconds)
        while True:
            try:
                self._lines.put_nowait(None)
                break
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._lines.get_nowait()
        self._printer.join(seconds)

    def _print(self) -> None:
        # After a BrokenPipeError the loop goes on, to keep the queue empty.
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(line + "\n")
                if self._lines.empty():
                    self._stream.flush()
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def _follow(self, path: Path, prefix: str) -> None:
        position = 0
        rest = b""
        while True:
            last = self._stopped.is_set()
            with contextlib.suppress(OSError), path.open("rb") as log:
                log.seek(position)
                read = log.read()
                position += len(read)
                *lines, rest = (rest + read).split(b"\n")
                for line in lines:
                    self.say(prefix + line.decode("utf-8", "replace").rstrip("\r"))
            if last:
                return
            self._stopped.wait(FOLLOW_SECONDS)


COLOURS = {"bold": "1", "red": "31", "green": "32", "cyan": "36"}


def colour(name: str, text: str) -> str:
    """The text in a colour, on a terminal that is not told otherwise (NO_COLOR)."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{COLOURS[name]}m{text}\x1b[0m"
