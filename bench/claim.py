"""Claiming 100 rows: does the time stay flat while the backlog grows?"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import psycopg

from bench.database import Server, connect, empty, fill_due, fill_processed, names, outbox_on, vacuum
from bench.report import Line, Section, compare
from bench.sizes import Sizes

ROWS = 100
SMALL = 1_000
#: Claims of a run; each takes the next 100 rows, as a drain does.
CLAIMS = 5
NAMES = names(1)

TEXTBOOK = b"""
    SELECT outbox_message_id FROM outbox_messages
    WHERE (status = 'Pending' AND next_attempt_at <= now())
       OR (status = 'Processing' AND lease_expires_at <= now())
    ORDER BY next_attempt_at, created_at, outbox_message_id
    LIMIT 100 FOR UPDATE SKIP LOCKED
"""
TEXTBOOK_LEASE = b"""
    UPDATE outbox_messages SET status = 'Processing', attempt_count = attempt_count + 1, lease_token = %(token)s,
        lease_expires_at = now() + interval '30 s', next_attempt_at = now() + interval '30 s'
    WHERE outbox_message_id = ANY (%(ids)s)
    RETURNING outbox_message_id, event_type, destination, payload::text
"""
# For its WHERE, one for each side of the OR; for its ORDER BY, a single one.
WHERE_INDEXES = (
    b"CREATE INDEX textbook_pending ON outbox_messages (status, next_attempt_at)",
    b"CREATE INDEX textbook_leased ON outbox_messages (status, lease_expires_at)",
)
ORDER_INDEX = (
    b"CREATE INDEX textbook_order ON outbox_messages (next_attempt_at, created_at, outbox_message_id)"
    b" WHERE status IN ('Pending', 'Processing')",
)
DROP_INDEXES = b"DROP INDEX IF EXISTS textbook_pending, textbook_leased, textbook_order"

DIE = b"""
    UPDATE outbox_messages SET status = 'Processed', processed_at = now() WHERE outbox_message_id = ANY (ARRAY(
        SELECT outbox_message_id FROM outbox_messages WHERE destination = %(name)s AND status = 'Pending'
        ORDER BY next_attempt_at, created_at, outbox_message_id LIMIT %(rows)s))
"""

Claim = Callable[[], float]


def run(server: Server, sizes: Sizes) -> Section:
    small, large = server.database("claim_small"), server.database("claim_large")
    fill_processed(large, sizes.backlog)
    vacuum(large)  # the statistics now know of no row that is due
    fill_due(large, sizes.backlog)
    lines = [_held(sizes, small, large, "stale statistics", generic) for generic in (False, True)]
    vacuum(large)
    lines = [*(_held(sizes, small, large, "", generic) for generic in (False, True)), *lines]
    lines += [
        _textbook(sizes, large, "no index of its own", ()),
        _textbook(sizes, large, "(status, next_attempt_at) and (status, lease_expires_at)", WHERE_INDEXES),
        _textbook(sizes, large, "an index in the order it asks for", ORDER_INDEX),
    ]
    lines += _behind_a_snapshot(sizes, small, large)
    server.drop("claim_small")
    server.drop("claim_large")
    return Section(
        f"Claim of {ROWS} rows",
        f"{sizes.backlog:,} due rows beside {sizes.backlog:,} Processed ones. Each of {sizes.runs} runs takes {CLAIMS}"
        " claims of either side in turn, through PostgresStore and with their commits; its figure is their median.",
        lines,
    )


def _held(sizes: Sizes, small: str, large: str, state: str, generic: bool, bar: float | None = 3) -> Line:
    """The claim on the large table against the same on the small one."""
    with _claims(large, generic) as on_large:
        pairs = []
        for _ in range(sizes.runs):
            empty(small)
            fill_due(small, SMALL)
            vacuum(small)
            with _claims(small, generic) as on_small:
                pairs.append(_in_turn(on_large, on_small))
    what = ", ".join(filter(None, ["the outbox's claim", state, "prepared, force_generic_plan" if generic else ""]))
    return compare(what, "ms", pairs, f"the same on {SMALL:,} due rows", at_most=bar)


def _textbook(sizes: Sizes, large: str, state: str, indexes: tuple[bytes, ...]) -> Line:
    """The textbook query against the outbox's claim, on the same table."""
    with closing(connect(large)) as conn, _claims(large) as ours:
        conn.execute(DROP_INDEXES)
        for index in indexes:
            conn.execute(index)
        vacuum(large)
        pairs = [_in_turn(lambda: _textbook_claim(conn), ours, claims=3) for _ in range(sizes.runs)]
        conn.execute(DROP_INDEXES)
    return compare(f"the textbook OR query, {state}", "ms", pairs, "the outbox's claim, same table")


def _behind_a_snapshot(sizes: Sizes, small: str, large: str) -> list[Line]:
    """Rows settled since an old snapshot stay in the index: a claim must step over them."""
    vacuum(large)
    with closing(connect(large)) as reader, closing(connect(large)) as conn:
        reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        reader.execute("SELECT count(*) FROM pg_class")
        conn.execute(DIE, {"name": NAMES[0], "rows": sizes.dead})
        # Another issue's bar; until then the figure says what it costs.
        held = _held(sizes, small, large, f"{sizes.dead:,} dead index entries, open snapshot", generic=False, bar=None)
        reader.execute("COMMIT")
    over = _held(sizes, small, large, "the same entries, snapshot closed", generic=False)
    return [held, over]


@contextmanager
def _claims(url: str, generic: bool = False) -> Iterator[Claim]:
    """A timed claim through the outbox's own store, on a warm connection."""
    threshold, session = (0, {"plan_cache_mode": "force_generic_plan"}) if generic else (None, {})
    with outbox_on(url, NAMES, prepare_threshold=threshold, **session) as outbox:
        outbox.store.destinations()

        def claim() -> float:
            started = perf_counter()
            messages = outbox.store.claim({NAMES[0]: ROWS}, ROWS)
            elapsed = perf_counter() - started
            assert len(messages) == ROWS
            return elapsed

        yield claim


def _textbook_claim(conn: psycopg.Connection[Any]) -> float:
    started = perf_counter()
    with conn.transaction():
        ids = [row[0] for row in conn.execute(TEXTBOOK)]
        rows = conn.execute(TEXTBOOK_LEASE, {"token": uuid.uuid4(), "ids": ids}).fetchall()
    elapsed = perf_counter() - started
    assert len(rows) == ROWS
    return elapsed


def _in_turn(one: Claim, other: Claim, claims: int = CLAIMS) -> tuple[float, float]:
    """Medians in milliseconds of claims taken by turns."""
    taken = [(one(), other()) for _ in range(claims)]
    return median(a for a, _ in taken) * 1000, median(b for _, b in taken) * 1000
