"""`python -m bench`: measure, print a table; exit 1 where a bar is missed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from bench import claim, memory, report, settle
from bench.database import Server
from bench.report import Section
from bench.sizes import DEFAULT, FULL, Sizes

BENCHES: Mapping[str, Callable[[Server, Sizes], Section]] = {
    "claim": claim.run,
    "settle": settle.run,
    "memory": memory.run,
}
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="bench", help=f"{', '.join(BENCHES)}; all without one")
    parser.add_argument("--full", action="store_true", help="the large sizes, about 20 minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--write", action="store_true", help=f"put the figures into {PAGE.parent.name}/{PAGE.name}")
    options = parser.parse_args()
    if unknown := set(options.names) - set(BENCHES):
        parser.error(f"there is no bench {', '.join(sorted(unknown))}: choose from {', '.join(BENCHES)}")
    if options.write and options.names:
        parser.error("--write needs all benches: the page holds the figures of one run")
    # The outbox's defaults are measured, not what the caller's shell sets.
    for name in [name for name in os.environ if name.upper().startswith(("OUTBOX_", "AZUREWEBJOBS"))]:
        del os.environ[name]

    sizes = FULL if options.full else DEFAULT
    sections: list[Section] = []
    with Server() as server:
        conditions = {**server.conditions(), "sizes": "full" if options.full else "default"}
        print(report.heading(conditions), flush=True)
        for name in options.names or BENCHES:
            section = BENCHES[name](server, sizes)
            sections.append(section)
            print("\n" + report.text(section), flush=True)
    if options.json:
        options.json.write_text(report.as_json(conditions, sections), "utf-8")
    if options.write:
        report.write_page(PAGE, conditions, sections)
    missed = [line.what for section in sections for line in section.lines if line.holds is False]
    if missed:
        print(f"\nMissed: {'; '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
