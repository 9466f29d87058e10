"""Completing an order, black box: keys, routes, answers, and what an outage of a neighbour changes."""

from __future__ import annotations

import re
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from localdev.stack import request
from tests.acceptance.running import App, wait_for

COMPLETED_AT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


def test_a_completed_order_answers_the_contract_and_its_event_arrives_signed(app: App) -> None:
    (order,) = app.new_orders(1)
    reply = app.stack.complete_order(order.upper())
    body = reply.json()
    assert (reply.status, set(body)) == (200, {"orderId", "status", "completedAt"})
    assert (body["orderId"], body["status"]) == (order, "Completed")
    assert COMPLETED_AT.fullmatch(body["completedAt"])
    wait_for(lambda: app.messages([order])[0][1] == "Processed", 10, "the event settled")
    (message_id, *_), (arrival, *more) = app.messages([order])[0], app.stack.deliveries()
    assert not more
    assert (arrival["id"], arrival["verdict"]) == (message_id, "processed")
    assert arrival["disagreement"] is False  # the receiver's own check, and the reference library's


@pytest.mark.parametrize("key", [None, "wrong", ""])
def test_without_the_key_nobody_completes_an_order(app: App, key: str | None) -> None:
    (order,) = app.new_orders(1)
    url = f"{app.stack.base_url}/api/orders/{order}/complete"
    headers = {} if key is None else {"x-functions-key": key}
    assert request("POST", url, b"", headers).status == 401
    assert app.messages([order]) == []


def test_the_key_may_come_in_the_query(app: App) -> None:
    (order,) = app.new_orders(1)
    url = f"{app.stack.base_url}/api/orders/{order}/complete?code={app.stack.function_key}"
    assert request("POST", url, b"").status == 200


@pytest.mark.parametrize(
    ("order_id", "status"),
    [
        (str(uuid.uuid4()), 404),
        ("42", 400),
        (uuid.uuid4().hex, 400),
        ("{" + str(uuid.uuid4()) + "}", 400),
        ("urn:uuid:" + str(uuid.uuid4()), 400),
        (str(uuid.uuid4()) + "%0A", 400),
        ("%00", 400),
        ("' OR 1=1 --".replace(" ", "%20"), 400),
    ],
)
def test_an_id_that_names_no_order_is_told_so(app: App, order_id: str, status: int) -> None:
    reply = app.stack.complete_order(order_id)
    assert reply.status == status
    assert reply.headers["content-type"].startswith("application/problem+json")
    assert reply.json()["status"] == status


def test_a_cancelled_order_is_a_conflict_and_tells_nobody(app: App) -> None:
    (order,) = app.new_orders(1, "Cancelled")
    assert app.stack.complete_order(order).status == 409
    assert app.messages([order]) == []


@pytest.mark.parametrize("body", [b"", b"{not json", b"\xff\x00" * 1000, b"x" * 5_000_000], ids=len)
def test_the_body_does_not_matter(app: App, body: bytes) -> None:
    (order,) = app.new_orders(1)
    assert app.stack.post(f"/api/orders/{order}/complete", body).status == 200


def test_fifty_callers_at_once_get_one_answer_and_one_event(app: App) -> None:
    (order,) = app.new_orders(1)
    with ThreadPoolExecutor(50) as pool:
        replies = list(pool.map(lambda _: app.stack.complete_order(order), range(50)))
    assert {reply.status for reply in replies} == {200}
    assert len({reply.body for reply in replies}) == 1
    assert len(app.messages([order])) == 1


def test_a_repeat_rings_too(app: App) -> None:
    (order,) = app.new_orders(1)
    app.stack.complete_order(order)
    wait_for(lambda: app.messages([order])[0][1] == "Processed", 10, "the event settled")
    app.sql(
        "UPDATE outbox_messages SET status = 'Pending', processed_at = NULL, next_attempt_at = now()"
    )  # as if its doorbell had been lost
    app.stack.complete_order(order)
    wait_for(lambda: app.messages([order])[0][1] == "Processed", 10, "the event delivered by the repeat's doorbell")


def test_with_the_queue_down_orders_are_completed_and_hardly_slower(own_app: App) -> None:
    def complete_200() -> float:
        orders = own_app.new_orders(200)
        begun = time.monotonic()
        with ThreadPoolExecutor(50) as pool:
            assert {reply.status for reply in pool.map(own_app.stack.complete_order, orders)} == {200}
        return time.monotonic() - begun

    complete_200()  # connections and imports
    healthy = complete_200()
    assert own_app.stack.azurite is not None
    own_app.stack.azurite.stop()
    down = complete_200()
    assert down <= 2 * healthy + 2
    log = (own_app.stack.state_dir / "host.log").read_text()
    assert log.count("doorbell failed") == 1
    own_app.stack.run_function("outbox_timer")
    wait_for(
        lambda: own_app.sql("SELECT count(*) FROM outbox_messages WHERE status <> 'Processed'")[0][0] == 0,
        30,
        "the timer delivered what the queue could not announce",
    )


def test_with_the_database_down_the_answer_is_503_in_time_and_nothing_is_lost(own_app: App) -> None:
    orders = own_app.new_orders(40)
    postgres = own_app.stack.postgres
    assert postgres is not None
    assert own_app.stack.complete_order(orders[0]).status == 200
    postgres.stop(immediate=True)

    def complete(order: str) -> float:
        begun = time.monotonic()
        reply = own_app.stack.complete_order(order)
        assert reply.status == 503
        assert int(reply.headers["retry-after"]) > 0
        assert reply.headers["content-type"].startswith("application/problem+json")
        return time.monotonic() - begun

    with ThreadPoolExecutor(40) as pool:
        assert max(pool.map(complete, orders)) < 10
    postgres.start()
    wait_for(lambda: own_app.stack.complete_order(orders[1]).status == 200, 5, "the database's return noticed")
    # Every pooled connection died with the server; no request may pay for it.
    with ThreadPoolExecutor(20) as pool:
        assert {reply.status for reply in pool.map(own_app.stack.complete_order, orders)} == {200}
    postgres.restart(immediate=True)
    with ThreadPoolExecutor(20) as pool:
        assert {reply.status for reply in pool.map(own_app.stack.complete_order, orders)} == {200}
    wait_for(
        lambda: {row[1] for row in own_app.messages(orders)} == {"Processed"},
        60,
        "all events delivered after the outage",
    )
    assert own_app.queue_length("-poison") == 0
