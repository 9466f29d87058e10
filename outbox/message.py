"""The values that travel through a drain: a claimed message going out, an outcome coming back."""

from __future__ import annotations

import re
from dataclasses import dataclass
from time import monotonic
from typing import TypeAlias
from uuid import UUID

#: W3C Trace Context, version 00 and what may follow it.
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One claimed row: an event for one destination, under a lease."""

    outbox_message_id: UUID
    #: Fencing token of the claim; a result counts only while the row still carries it.
    lease_token: UUID
    event_type: str
    destination: str
    #: The jsonb as PostgreSQL writes it, sent unchanged. None: larger than OUTBOX_MAX_PAYLOAD_BYTES.
    payload: str | None
    #: created_at in UTC, 6 digits and Z, written by the database.
    created_at: str
    #: Seconds between created_at and the claim, by the database's clock.
    age_seconds: float
    #: Seconds between created_at or the last redrive and the claim, by the database's clock.
    tried_seconds: float
    attempt_count: int
    traceparent: str | None
    ordering_key: str | None
    #: The database's time at the claim, Unix seconds.
    claimed_at: float
    #: This process's monotonic() from just before the claim was sent.
    claimed_monotonic: float
    lease_seconds: float

    @property
    def lease_left(self) -> float:
        """Seconds until the lease ends; errs on the early side, since it counts from before the claim was sent."""
        return self.claimed_monotonic + self.lease_seconds - monotonic()

    @property
    def seconds_since_claim(self) -> float:
        return monotonic() - self.claimed_monotonic

    @property
    def database_now(self) -> float:
        """The database's time now, Unix seconds: its time at the claim plus monotonic seconds since."""
        return self.claimed_at + self.seconds_since_claim


@dataclass(frozen=True, slots=True)
class Delivered:
    """The receiver answered 2xx."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Time may heal it."""

    code: str
    error: str
    #: The receiver's Retry-After in seconds: a floor under the backoff.
    retry_after: float = 0.0
    #: A ceiling over the backoff, for a wait that ends at a known time.
    at_most: float | None = None


@dataclass(frozen=True, slots=True)
class Dead:
    """Time cannot heal it: the row becomes Failed and stays."""

    code: str
    error: str


Outcome: TypeAlias = Delivered | Retry | Dead


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """What becomes of a claimed row: the new status, and when it is due again."""

    message: Message
    status: str
    delay_seconds: float = 0.0
    code: str | None = None
    error: str | None = None
    #: monotonic() at the end of the attempt; a delay counts from there.
    ended: float


@dataclass(frozen=True, slots=True)
class Enqueued:
    """One row of an `enqueue`: the event's message to one destination."""

    destination: str
    outbox_message_id: UUID
    #: False: it was there already, under the same dedupe_key.
    created: bool = True


@dataclass(frozen=True, slots=True)
class Due:
    """When the rows at work become claimable next, by the database's clock."""

    #: Whether a row is due, or will be soon.
    soon: bool
    #: Seconds until the next row after those, if that is within the doorbell's horizon.
    next_in: float | None
