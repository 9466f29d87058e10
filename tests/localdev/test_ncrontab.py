"""NCRONTAB schedules: what is due when."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from localdev.host.ncrontab import Schedule

START = datetime(2026, 2, 27, 23, 58, 30, 500_000, UTC)  # a Friday


@pytest.mark.parametrize(
    ("expression", "due"),
    [
        ("0 */5 * * * *", datetime(2026, 2, 28, 0, 0, 0, 0, UTC)),  # the app's own
        ("*/5 * * * *", datetime(2026, 2, 28, 0, 0, 0, 0, UTC)),  # five fields: no seconds
        ("* * * * * *", datetime(2026, 2, 27, 23, 58, 31, 0, UTC)),  # the next whole second, never the current one
        ("30 58 23 * * *", datetime(2026, 2, 28, 23, 58, 30, 0, UTC)),  # half a second ago is past
        ("0 30 9 * * mon-fri", datetime(2026, 3, 2, 9, 30, 0, 0, UTC)),  # names and a range
        ("0 0 0 29 Feb *", datetime(2028, 2, 29, 0, 0, 0, 0, UTC)),  # the next leap year
        ("0 0 12 1,15 * *", datetime(2026, 3, 1, 12, 0, 0, 0, UTC)),  # a list
        ("0 0 0 13 * 5", datetime(2026, 3, 13, 0, 0, 0, 0, UTC)),  # day and weekday both: Friday the 13th
        ("0 10/20 * * * *", datetime(2026, 2, 28, 0, 10, 0, 0, UTC)),  # from 10 in steps
        ("15,45 59 * * * *", datetime(2026, 2, 27, 23, 59, 15, 0, UTC)),
    ],
)
def test_next_due_time(expression: str, due: datetime) -> None:
    assert Schedule(expression).next_after(START) == due


@pytest.mark.parametrize(
    "expression",
    ["", "* * * *", "0 60 * * * *", "0 */0 * * * *", "0 0 0 0 * *", "0 5-1 * * * *", "0 0 0 * * mo?", "0,,1 * * * * *"],
)
def test_refuses_what_is_no_schedule(expression: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Schedule(expression)


def test_a_day_that_never_comes_is_an_error_and_no_endless_search() -> None:
    with pytest.raises(ValueError, match="never due"):
        Schedule("0 0 0 31 feb *").next_after(START)
