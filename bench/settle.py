"""Settling: a statement for a batch of results against a statement for each."""

from __future__ import annotations

from time import monotonic, perf_counter

from bench.database import Server, fill_due, names, outbox_on
from bench.report import Line, Section, compare
from bench.sizes import Sizes
from outbox.message import Settlement
from outbox.store import PostgresStore

BATCH = 100
NAMES = names(1)


def run(server: Server, sizes: Sizes) -> Section:
    lines = [_line(server, sizes, mode) for mode in ("on", "off")]
    return Section(
        "Settling",
        f"PostgresStore.settle with {BATCH} results a call against 1 a call, the same statement, on one connection;"
        f" {sizes.results:,} and {sizes.results // 5:,} results in each of {sizes.runs} interleaved runs.",
        lines,
    )


def _line(server: Server, sizes: Sizes, synchronous_commit: str) -> Line:
    name = f"settle_{synchronous_commit}"
    url = server.database(name)
    fill_due(url, sizes.runs * (sizes.results + sizes.results // 5 + 2 * BATCH))
    with outbox_on(url, NAMES, synchronous_commit=synchronous_commit) as outbox:
        pairs = [
            (
                _rows_per_second(outbox.store, sizes.results, BATCH),
                _rows_per_second(outbox.store, sizes.results // 5, 1),
            )
            for _ in range(sizes.runs)
        ]
    server.drop(name)
    bar = 5 if synchronous_commit == "on" else None
    what = f"batches of {BATCH}, synchronous_commit {synchronous_commit}"
    return compare(what, "rows/s", pairs, "row by row", at_least=bar)


def _rows_per_second(store: PostgresStore, rows: int, batch: int) -> float:
    results: list[Settlement] = []
    while len(results) < rows:
        for message in store.claim({NAMES[0]: BATCH}, BATCH):
            results.append(Settlement(message=message, status="Processed", ended=monotonic()))
    started = perf_counter()
    for start in range(0, len(results), batch):
        part = results[start : start + batch]
        assert len(store.settle(part)) == len(part)
    return len(results) / (perf_counter() - started)
