"""Memory: the peak of a process that drains a large backlog against one that drains a small one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.database import Server, empty, fill_due, vacuum
from bench.drain import DESTINATIONS
from bench.report import Section, compare
from bench.sizes import Sizes

SMALL = 1_000
PAYLOAD_BYTES = 1_024
#: Room for the garbage collector's moods, not for rows: 100,000 rows of 1 KB are 100 MB.
AT_MOST_MB = 30


def run(server: Server, sizes: Sizes) -> Section:
    url = server.database("memory")
    peaks, speeds = [], []
    for _ in range(sizes.runs):
        small, large = _drain(url, SMALL), _drain(url, sizes.drained)
        peaks.append((large["peak_mb"], small["peak_mb"]))
        speeds.append(sizes.drained / large["seconds"])
    server.drop("memory")
    line = compare(
        f"draining {sizes.drained:,} rows", "MB", peaks, f"draining {SMALL:,} rows", at_most=AT_MOST_MB, difference=True
    )
    return Section(
        "Memory of a drain",
        f"Peak resident memory of a process that drains rows of {PAYLOAD_BYTES:,} bytes for {DESTINATIONS} destinations"
        f" with a sender that does nothing; {sizes.runs} interleaved runs. The large drains moved"
        f" {min(speeds):,.0f} to {max(speeds):,.0f} rows/s.",
        [line],
    )


def _drain(url: str, rows: int) -> dict[str, Any]:
    empty(url)
    fill_due(url, rows, destinations=DESTINATIONS, payload_bytes=PAYLOAD_BYTES)
    vacuum(url)
    done = subprocess.run(
        [sys.executable, "-m", "bench.drain", str(rows)],
        cwd=Path(__file__).parents[1],
        input=url,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result
