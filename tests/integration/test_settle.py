"""Recording results: only under the claim's own lease, in one statement, one bad value apart from the others."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest

from outbox.message import Delivered, Message, Retry, Settlement
from outbox.processor import Report
from outbox.retry import Backoff
from outbox.store import PURGE_CHUNK, PostgresStore

from .support import Rows, Sender, connect, ids


def settlement(message: Message, status: str, **values: Any) -> Settlement:
    return Settlement(message=message, status=status, **{"ended": monotonic(), **values})


RESULTS: dict[str, dict[str, Any]] = {
    "Processed": {},
    "Failed": {"code": "gone", "error": "HTTP 410"},
    "Pending": {"delay_seconds": 10.0, "error": "HTTP 500", "code": "http_500"},
}


def test_a_batch_of_results_is_recorded_each_by_its_own(rows: Rows, store: PostgresStore) -> None:
    rows.add(3)
    messages = store.claim({"crm": 3}, 3)
    results = [settlement(m, status, **RESULTS[status]) for m, status in zip(messages, RESULTS, strict=True)]
    assert store.settle(results) == set(ids(messages))
    done, dead, again = (rows.get(m.outbox_message_id) for m in messages)
    assert (done["status"], done["last_error"], done["failure_code"]) == ("Processed", None, None)
    assert done["processed_at"] is not None
    assert (dead["status"], dead["last_error"], dead["failure_code"]) == ("Failed", "HTTP 410", "gone")
    assert dead["failed_at"] is not None
    assert (again["status"], again["last_error"], again["failure_code"]) == ("Pending", "HTTP 500", None)
    assert 9 < again["due_in"] <= 10
    for row in (done, dead, again):
        assert (row["lease_token"], row["lease_expires_at"], row["attempt_count"]) == (None, None, 1)


def took_over(rows: Rows, store: PostgresStore, late: Message) -> Message:
    rows.run_out(late)
    (message,) = store.claim({"crm": 1}, 1)
    return message


def _claimed(rows: Rows, store: PostgresStore, late: Message) -> None:
    took_over(rows, store, late)


def _given_back(rows: Rows, store: PostgresStore, late: Message) -> None:
    store.give_back([took_over(rows, store, late)])


def _settled(status: str) -> Callable[[Rows, PostgresStore, Message], None]:
    def settle(rows: Rows, store: PostgresStore, late: Message) -> None:
        store.settle([settlement(took_over(rows, store, late), status, **RESULTS[status])])

    return settle


def _redriven(rows: Rows, store: PostgresStore, late: Message) -> None:
    store.settle([settlement(took_over(rows, store, late), "Failed", **RESULTS["Failed"])])
    rows.update(
        late.outbox_message_id, status="Pending", attempt_count=0, last_error=None, failure_code=None,
        next_attempt_at="now", redriven_at="now",
    )  # fmt: skip
    (again,) = store.claim({"crm": 1}, 1)
    assert again.attempt_count == late.attempt_count  # so a count could not have told them apart


@pytest.mark.parametrize("result", ["Processed", "Failed", "Pending", "given back"])
@pytest.mark.parametrize(
    "second",
    [
        pytest.param(_claimed, id="claimed"),
        pytest.param(_given_back, id="given_back"),
        pytest.param(_settled("Pending"), id="settled_as_pending"),
        pytest.param(_settled("Processed"), id="settled_as_processed"),
        pytest.param(_settled("Failed"), id="settled_as_failed"),
        pytest.param(_redriven, id="failed_then_redriven_and_claimed"),
    ],
)
def test_a_worker_whose_lease_was_taken_over_changes_nothing_and_is_told(
    rows: Rows, store: PostgresStore, second: Callable[[Rows, PostgresStore, Message], None], result: str
) -> None:
    rows.add()
    (late,) = store.claim({"crm": 1}, 1)
    second(rows, store, late)
    before = rows.conn.execute("SELECT * FROM outbox_messages").fetchall()
    if result == "given back":
        assert store.give_back([late]) == set()
    else:
        assert store.settle([settlement(late, result, **RESULTS[result])]) == set()
    assert rows.conn.execute("SELECT * FROM outbox_messages").fetchall() == before


def test_a_result_that_comes_after_the_lease_but_before_another_claim_counts(rows: Rows, store: PostgresStore) -> None:
    rows.add()
    (late,) = store.claim({"crm": 1}, 1)
    rows.run_out(late)
    assert store.settle([settlement(late, "Processed")]) == {late.outbox_message_id}


def test_of_a_batch_only_the_lost_leases_are_left_out(rows: Rows, store: PostgresStore) -> None:
    rows.add(10)
    messages = store.claim({"crm": 10}, 10)
    rows.run_out(*messages[:4])
    store.claim({"crm": 10}, 10)
    assert store.settle([settlement(m, "Processed") for m in messages]) == set(ids(messages[4:]))
    assert rows.statuses() == {"Processing": 4, "Processed": 6}


def test_a_row_given_back_is_due_now_and_has_its_attempt_again(rows: Rows, store: PostgresStore) -> None:
    (key,) = rows.add(attempt_count=4)
    messages = store.claim({"crm": 1}, 1)
    assert rows.get(key)["attempt_count"] == 5
    assert store.give_back(messages) == {key}
    row = rows.get(key)
    assert (row["status"], row["attempt_count"]) == ("Pending", 4)
    assert row["lease_token"] is row["lease_expires_at"] is None
    assert row["due_in"] <= 0
    assert store.give_back(messages) == set()


def test_a_delay_counts_from_the_end_of_the_attempt(rows: Rows, store: PostgresStore) -> None:
    rows.add(2)
    first, second = store.claim({"crm": 2}, 2)
    store.settle(
        [
            settlement(first, "Pending", delay_seconds=10.0, ended=monotonic() - 7, error="x"),
            settlement(second, "Pending", delay_seconds=10.0, ended=monotonic() - 70, error="x"),
        ]
    )
    assert 2 < rows.get(first.outbox_message_id)["due_in"] <= 3
    assert -1 < rows.get(second.outbox_message_id)["due_in"] <= 0


@pytest.mark.parametrize(
    ("attempts", "retry_after", "least", "most"),
    [(0, 0, 10, 11), (0, 60, 60, 61), (3, 0, 80, 88), (3, 5, 80, 88), (40, 0, 100, 110), (40, 86_400, 86_400, 86_401)],
)
def test_a_retry_waits_for_its_backoff_and_at_least_for_retry_after(
    rows: Rows, drain: Callable[..., Report], attempts: int, retry_after: float, least: float, most: float
) -> None:
    (key,) = rows.add(attempt_count=attempts)
    sender = Sender(lambda m: Retry("http_503", "HTTP 503", retry_after=retry_after))
    report = drain(sender, max_attempts=1000, backoff=Backoff(10, 100))
    assert (report.claimed, report.retried) == (1, 1)
    row = rows.get(key)
    assert (row["status"], row["last_error"]) == ("Pending", "HTTP 503")
    assert least - 2 < row["due_in"] <= most


def test_one_value_that_cannot_be_stored_does_not_fail_its_mates(rows: Rows, drain: Callable[..., Report]) -> None:
    keys = rows.add(20)
    bad = {keys[3]: "nul \0 byte", keys[7]: "lone surrogate \ud800"}
    sender = Sender(lambda m: Retry("c", bad[m.outbox_message_id]) if m.outbox_message_id in bad else Delivered())
    report = drain(sender)
    assert (report.delivered, report.retried, report.lost_leases) == (18, 2, 0)
    for key in bad:
        row = rows.get(key)
        assert row["status"] == "Pending"
        assert row["attempt_count"] == 1
    assert rows.statuses() == {"Processed": 18, "Pending": 2}


def test_a_purge_deletes_in_chunks_what_is_processed_and_past_its_retention(rows: Rows, store: PostgresStore) -> None:
    old = rows.add(PURGE_CHUNK + 10, status="Processed", processed_at="yesterday")
    kept = [
        *rows.add(3, status="Processed", processed_at="now"),
        *rows.add(3, status="Failed", last_error="x", failed_at="yesterday"),
        *rows.add(3, age=500_000),
    ]
    assert store.purge(3600) == len(old)
    assert rows.count() == len(kept)
    assert store.purge(3600) == 0


def test_a_purge_passes_over_a_row_that_another_holds(rows: Rows, conninfo: str, store: PostgresStore) -> None:
    rows.add(10, status="Processed", processed_at="yesterday")
    with connect(conninfo) as conn, conn.transaction():
        conn.execute("SELECT FROM outbox_messages LIMIT 1 FOR UPDATE")
        assert store.purge(3600) == 9


def test_stats_count_rows_at_work_and_failed_by_destination(rows: Rows, store: PostgresStore) -> None:
    rows.add(3, "crm", due_in=-50)
    rows.add(2, "crm", due_in=50)
    rows.add(2, "erp", status="Failed", last_error="x")
    rows.add(9, "erp", status="Processed", processed_at="now")
    store.claim({"crm": 1}, 1)
    crm, erp = store.stats()
    assert 49 < crm.pop("oldest_due_seconds") < 60
    assert crm == {"destination": "crm", "pending": 4, "processing": 1, "failed": 0}
    assert erp == {"destination": "erp", "pending": 0, "processing": 0, "failed": 2, "oldest_due_seconds": 0}
