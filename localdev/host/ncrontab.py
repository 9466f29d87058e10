"""Timer schedules: NCRONTAB with six fields (seconds first) or five, in UTC."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
PART = re.compile(r"(?:(?P<all>\*)|(?P<first>\w+)(?:-(?P<last>\w+))?)(?:/(?P<step>\d+))?")
#: A leap day on a given weekday comes back within forty years, a year without one at a century's end included.
SEARCH_DAYS = 366 * 41


@dataclass(frozen=True)
class Field:
    name: str
    lowest: int
    highest: int
    words: Sequence[str] = ()

    def values(self, text: str) -> frozenset[int]:
        values: set[int] = set()
        for part in text.split(","):
            match = PART.fullmatch(part)
            step = int(match["step"] or 1) if match else 0
            if match is None or step == 0:
                raise ValueError(f"{text!r} is no list of {self.name}")
            if match["all"]:
                first, last = self.lowest, self.highest
            else:
                first = self._number(match["first"])
                last = self._number(match["last"]) if match["last"] else self.highest if match["step"] else first
            if last < first:
                raise ValueError(f"{part!r} in the field for {self.name} ends before it begins")
            values.update(range(first, last + 1, step))
        return frozenset(values)

    def _number(self, text: str) -> int:
        word = text[:3].lower()
        number = int(text) if text.isdecimal() else self.words.index(word) + self.lowest if word in self.words else -1
        if not self.lowest <= number <= self.highest:
            raise ValueError(f"{text!r} is not among the {self.name} {self.lowest} to {self.highest}")
        return number


FIELDS = (
    Field("seconds", 0, 59),
    Field("minutes", 0, 59),
    Field("hours", 0, 23),
    Field("days", 1, 31),
    Field("months", 1, 12, MONTHS),
    Field("weekdays", 0, 6, DAYS),
)


class Schedule:
    """When a timer is due. A day has to fit the fields for days and for weekdays, both."""

    def __init__(self, expression: str) -> None:
        parts = expression.split()
        if len(parts) == 5:
            parts = ["0", *parts]
        if len(parts) != len(FIELDS):
            raise ValueError(f"{expression!r} should have six fields (or five, without seconds)")
        self.expression = expression
        values = [field.values(part) for field, part in zip(FIELDS, parts, strict=True)]
        self._seconds, self._minutes, self._hours = (sorted(part) for part in values[:3])
        self._days, self._months, self._weekdays = values[3:]

    def next_after(self, moment: datetime) -> datetime:
        """The first due time later than `moment`."""
        start = moment.astimezone(UTC).replace(microsecond=0) + timedelta(seconds=1)
        day = start.replace(hour=0, minute=0, second=0)
        for _ in range(SEARCH_DAYS):
            if self._fits(day):
                earliest = start if day.date() == start.date() else day
                if (found := self._time_on(earliest)) is not None:
                    return found
            day += timedelta(days=1)
        raise ValueError(f"{self.expression!r} is never due")

    def _fits(self, day: datetime) -> bool:
        weekday = day.isoweekday() % 7
        return day.day in self._days and day.month in self._months and weekday in self._weekdays

    def _time_on(self, earliest: datetime) -> datetime | None:
        for hour in self._hours:
            if hour < earliest.hour:
                continue
            for minute in self._minutes:
                if (hour, minute) < (earliest.hour, earliest.minute):
                    continue
                for second in self._seconds:
                    moment = earliest.replace(hour=hour, minute=minute, second=second)
                    if moment >= earliest:
                        return moment
        return None
