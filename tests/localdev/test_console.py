"""The console never makes the stack wait."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

from localdev.console import Console
from localdev.processes import wait_until


def test_lines_and_followed_logs_are_printed(tmp_path: Path) -> None:
    stream = io.StringIO()
    log = tmp_path / "host.log"
    log.write_text("first\n")
    console = Console(stream)
    console.follow(log, "host | ")
    wait_until(lambda: "host | first\n" in stream.getvalue(), 5, "the line that was there")
    console.say("hello")
    with log.open("a") as file:
        file.write("second\nunfinished")
    console.close()
    assert sorted(stream.getvalue().splitlines()) == ["hello", "host | first", "host | second"]


def test_a_pipe_that_nobody_reads_blocks_nobody() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        console = Console(stream)
        started = time.monotonic()
        for _ in range(20_000):
            console.say("x" * 100)
        console.close(0.2)
        assert time.monotonic() - started < 5
        os.close(reading)  # lets the printer go on, into a broken pipe
        console._printer.join(5)
        assert not console._printer.is_alive()
