"""The retry policy: how long a failed attempt waits for the next one.

With the defaults the delays are 10, 20, 40, 80, 160, 320, 640, 1280 and then 1800 seconds, plus up to 10 percent.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime

#: The longest wait that a receiver's Retry-After can ask for: a day.
RETRY_AFTER_CAP_SECONDS = 86_400.0
JITTER = 0.1


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff: base, doubled after each attempt, up to cap (seconds)."""

    base_seconds: float = 10.0
    cap_seconds: float = 1800.0

    def delay(self, attempt: int, jitter: Callable[[], float] = random.random) -> float:
        """Seconds to wait after attempt number `attempt` (1 is the first) failed."""
        exponent = min(max(attempt, 1) - 1, 62)  # clamped before the power: no attempt count overflows
        return min(self.cap_seconds, self.base_seconds * 2.0**exponent) * (1 + JITTER * jitter())


def retry_after_seconds(value: str | None, *, answer_date: str | None, now: float) -> float:
    """The wait that a Retry-After header asks for, in seconds; 0 where it asks for nothing usable (RFC 9110, 10.2.3).

    A date is read against the answer's own `Date`, so that a receiver with a wrong clock is understood; without one
    against `now`, the database's time in Unix seconds.
    """
    if value is None:
        return 0.0
    text = value.strip()
    if text.isascii() and text.isdigit():
        return min(float(text), RETRY_AFTER_CAP_SECONDS)
    until = _unix_seconds(text)
    if until is None:
        return 0.0
    since = _unix_seconds(answer_date) if answer_date else None
    return min(max(until - (now if since is None else since), 0.0), RETRY_AFTER_CAP_SECONDS)


def _unix_seconds(http_date: str) -> float | None:
    try:
        moment = parsedate_to_datetime(http_date)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
