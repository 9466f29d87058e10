"""The retry policy: the waits between attempts, and what a receiver's Retry-After changes."""

from __future__ import annotations

import math
import time
from email.utils import formatdate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.retry import Backoff, retry_after_seconds

NOW = 1_700_000_000.0  # Tue, 14 Nov 2023 22:13:20 GMT
DAY = 86_400.0


def http_date(offset: float) -> str:
    return formatdate(NOW + offset, usegmt=True)


def test_the_wait_doubles_from_10_seconds_up_to_30_minutes() -> None:
    delays = [Backoff().delay(attempt, jitter=lambda: 0.0) for attempt in range(1, 12)]
    assert delays == [10, 20, 40, 80, 160, 320, 640, 1280, 1800, 1800, 1800]


@pytest.mark.parametrize("attempt", [62, 63, 64, 1024, 1025, 10**9, 10**400])
def test_no_attempt_count_overflows(attempt: int) -> None:
    assert Backoff().delay(attempt, jitter=lambda: 0.0) == 1800
    assert math.isfinite(Backoff(86_400, 86_400).delay(attempt))


@pytest.mark.parametrize("attempt", [0, -1, -(10**9)])
def test_an_attempt_before_the_first_waits_like_the_first(attempt: int) -> None:
    assert Backoff().delay(attempt, jitter=lambda: 0.0) == 10


def test_a_cap_below_the_base_holds() -> None:
    assert Backoff(100, 7).delay(1, jitter=lambda: 0.0) == 7


def test_jitter_adds_up_to_a_tenth_and_parts_rows_that_failed_together() -> None:
    assert Backoff().delay(1, jitter=lambda: 1.0) == pytest.approx(11)
    assert Backoff().delay(50, jitter=lambda: 0.5) == pytest.approx(1890)  # also where the cap holds
    delays = [Backoff().delay(3) for _ in range(200)]
    assert 40 <= min(delays) < 41 < 43 < max(delays) <= 44
    assert len(set(delays)) > 190


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120),
        (" 7\t", 7),
        ("0", 0),
        ("007", 7),
        ("86401", DAY),
        ("9" * 5000, DAY),  # beyond float, and beyond what int() takes
        (http_date(60), 60),
        ("Tuesday, 14-Nov-23 22:14:20 GMT", 60),  # RFC 850
        ("Tue Nov 14 22:14:20 2023", 60),  # asctime, in UTC
        ("Tue, 14 Nov 2023 23:14:20 +0100", 60),
        (http_date(10 * DAY), DAY),
        ("Fri, 31 Dec 9999 23:59:59 -2359", DAY),
    ],
)
def test_a_retry_after_is_seconds_or_a_date_and_at_most_a_day(value: str, seconds: float) -> None:
    assert retry_after_seconds(value, answer_date=None, now=NOW) == seconds


@pytest.mark.parametrize(
    "value",
    [
        None, "", "-1", "+5", "1.5", "1e3", "inf", "nan", "1_000", "0x10", "7, 8", "soon", "٣", "９", "²",
        http_date(-60), "Mon, 01 Jan 0001 00:00:00 +2359", "Tue, 14 Nov 99999999999 22:14:20 GMT",
        "Tue, 14 Nov 2023 99:14:20 GMT", "2023-11-14T22:14:20Z", "GMT", ",", "\0",
    ],
)  # fmt: skip
def test_a_retry_after_that_says_nothing_usable_is_ignored(value: str | None) -> None:
    assert retry_after_seconds(value, answer_date=None, now=NOW) == 0


@pytest.mark.parametrize(
    ("answer_date", "seconds"),
    [(http_date(3540), 60), (http_date(-3600), 7200), (http_date(7200), 0), ("garbage", 3600), ("", 3600)],
)
def test_a_date_is_read_by_the_receivers_own_clock_where_it_told_it(answer_date: str, seconds: float) -> None:
    assert retry_after_seconds(http_date(3600), answer_date=answer_date, now=NOW) == seconds


@pytest.mark.parametrize(
    "value", ["Tue Nov 14 22:14:20 2023", "Tue, 14 Nov 2023 22:14:20", "14 Nov 2023 22:14:20 -0000"]
)
def test_a_date_without_a_zone_is_utc_wherever_the_worker_runs(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    tzset = getattr(time, "tzset", lambda: None)  # Windows has none, and is told nothing
    tzset()
    try:
        assert retry_after_seconds(value, answer_date=None, now=NOW) == 60
    finally:
        monkeypatch.undo()
        tzset()


DATES = r"(Tue, )?\d{1,6} (Jan|Feb|Foo) \d{1,12} \d{1,5}:\d{1,5}(:\d{1,5})?( GMT| [+-]\d{1,9})?"


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(st.text() | st.from_regex(DATES, fullmatch=True), st.from_regex(DATES, fullmatch=True))
def test_no_header_breaks_it(value: str, answer_date: str) -> None:
    assert 0 <= retry_after_seconds(value, answer_date=answer_date, now=NOW) <= DAY
