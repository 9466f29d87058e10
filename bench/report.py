"""The figures: on the terminal, as JSON, and in docs/performance.md between two markers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

BEGIN = "<!-- figures: written by `python -m bench --write`, not by hand -->"
END = "<!-- end of figures -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One comparison: a figure, what it is held against in the same run, and the bar."""

    what: str
    unit: str
    value: float
    #: The other side of the comparison, and its figure.
    against: str
    base: float
    #: value / base, or base / value where that reads better; the median of the runs' own ratios, and their extremes.
    ratio: float
    lowest: float
    highest: float
    #: "x" for a ratio, else the unit of a difference.
    ratio_unit: str = "x"
    bar: str = ""
    #: None: nothing is asked here.
    holds: bool | None = None


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    note: str
    lines: Sequence[Line]


def compare(
    what: str,
    unit: str,
    pairs: Sequence[tuple[float, float]],
    against: str,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    difference: bool = False,
) -> Line:
    """A line from (value, base) of each run, held to a bar on the ratio, or on the difference."""
    results = [value - base if difference else value / base for value, base in pairs]
    result = median(results)
    holds: bool | None = None
    sign, suffix = ("+", f" {unit}") if difference else ("", "x")
    bar = ""
    if at_most is not None:
        bar, holds = f"at most {sign}{at_most:g}{suffix}", result <= at_most
    elif at_least is not None:
        bar, holds = f"at least {sign}{at_least:g}{suffix}", result >= at_least
    return Line(
        what=what,
        unit=unit,
        value=median(value for value, _ in pairs),
        against=against,
        base=median(base for _, base in pairs),
        ratio=result,
        lowest=min(results),
        highest=max(results),
        ratio_unit=unit if difference else "x",
        bar=bar,
        holds=holds,
    )


def heading(conditions: Mapping[str, str]) -> str:
    return "; ".join(f"{name} {value}" for name, value in conditions.items())


def text(section: Section) -> str:
    rows = [_HEAD, *(_cells(line) for line in section.lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    table.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([section.title, section.note, "", *table])


def as_json(conditions: Mapping[str, str], sections: Sequence[Section]) -> str:
    return (
        json.dumps({"conditions": conditions, "sections": [asdict(section) for section in sections]}, indent=2) + "\n"
    )


def write_page(page: Path, conditions: Mapping[str, str], sections: Sequence[Section]) -> None:
    """Replace what stands between the markers."""
    before = page.read_text("utf-8")
    if before.count(BEGIN) != 1 or before.count(END) != 1:
        raise SystemExit(f"{page}: it should hold the two markers once each:\n{BEGIN}\n{END}")
    figures = "\n\n".join([f"Measured with {heading(conditions)}.", *(_markdown(section) for section in sections)])
    pattern = re.escape(BEGIN) + ".*" + re.escape(END)
    page.write_text(re.sub(pattern, lambda _: f"{BEGIN}\n{figures}\n{END}", before, flags=re.DOTALL), "utf-8")


_HEAD = ("what", "median", "against", "median", "comparison (runs)", "bar")


def _markdown(section: Section) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (_HEAD, ("---",) * len(_HEAD), *map(_cells, section.lines))]
    return "\n".join([f"### {section.title}", "", section.note, "", *lines])


def _cells(line: Line) -> tuple[str, ...]:
    verdict = "" if line.holds is None else ": holds" if line.holds else ": MISSED"
    compared, lowest, highest = (
        f"{_number(figure)}x" if line.ratio_unit == "x" else f"{figure:+.1f} {line.ratio_unit}"
        for figure in (line.ratio, line.lowest, line.highest)
    )
    return (
        line.what,
        f"{_number(line.value)} {line.unit}",
        line.against,
        f"{_number(line.base)} {line.unit}",
        f"{compared} ({lowest} to {highest})",
        line.bar + verdict,
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
