"""How much is measured: the default run, and `--full`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    #: Interleaved runs of each comparison; a figure is the median over them.
    runs: int
    #: Due rows, and as many Processed ones beside them.
    backlog: int
    #: Dead index entries at the head of the backlog.
    dead: int
    #: Results settled in batches, for each run.
    results: int
    #: Rows of the large drain.
    drained: int


DEFAULT = Sizes(runs=3, backlog=1_000_000, dead=100_000, results=2_000, drained=20_000)
FULL = Sizes(runs=5, backlog=1_000_000, dead=100_000, results=10_000, drained=1_000_000)
