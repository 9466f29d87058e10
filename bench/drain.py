"""A process that drains a backlog once and says how long it took and what memory it had: `bench.memory` starts it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from time import perf_counter

from bench.database import names, outbox_on
from outbox.message import Delivered, Message, Outcome

#: Enough that OUTBOX_MAX_IN_FLIGHT is reached (8 times OUTBOX_DELIVERY_CONCURRENCY).
DESTINATIONS = 8


class NoSender:
    """Delivers to nobody, at once."""

    async def send(self, message: Message) -> Outcome:
        return Delivered()


class NoDoorbell:
    def ring(self, delay_seconds: float = 0) -> None:
        pass


def drain(url: str, rows: int) -> float:
    """Drain all rows with the outbox's own processor and store; returns the seconds it took."""
    with outbox_on(url, names(DESTINATIONS)) as outbox:
        outbox.processor.sender = NoSender()
        outbox.processor.doorbell = NoDoorbell()
        started = perf_counter()
        report = asyncio.run(outbox.processor.drain(3_600))
        elapsed = perf_counter() - started
        assert report is not None and report.delivered == rows, report
    return elapsed


def peak_mb() -> float:
    """The largest resident memory that this process had."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count the parent's memory before exec
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        return int(lines["VmHWM"].split()[0]) / 1024
    if sys.platform == "win32":
        raise SystemExit("this bench cannot read a process's peak memory on Windows")
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 1024


if __name__ == "__main__":
    seconds = drain(sys.stdin.read(), int(sys.argv[1]))
    print(json.dumps({"seconds": seconds, "peak_mb": peak_mb()}))
