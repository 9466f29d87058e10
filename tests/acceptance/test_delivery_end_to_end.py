"""From the commit to the receiver, black box: retries, killed hosts, poison, garbage on the queue."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import psycopg
import pytest

from tests.acceptance.running import App, destinations, started, wait_for

full = pytest.mark.skipif(not os.environ.get("OUTBOX_TEST_FULL"), reason="takes long: python3 -m localdev test --full")


def gaps(app: App, message_id: str) -> list[float]:
    times = [arrival["arrived_at"] for arrival in app.arrivals(message_id)]
    return [later - earlier for earlier, later in pairwise(times)]


def assert_retried_on_time(app: App, base: float) -> None:
    app.stack.script_receiver({"status": 500}, {"status": 503})
    (order,) = app.new_orders(1)
    app.stack.complete_order(order)
    wait_for(lambda: app.messages([order])[0][1] == "Processed", 3 * base + 10, "the third attempt")
    first, second = gaps(app, app.messages([order])[0][0])
    assert base <= first <= 1.1 * base + 1
    assert 2 * base <= second <= 2.2 * base + 1


def test_a_failed_attempt_is_repeated_when_its_backoff_ends_without_the_timer(app: App) -> None:
    assert_retried_on_time(app, base=1)


@full
def test_by_default_attempts_come_after_0_10_and_30_seconds() -> None:
    for app in started({"OUTBOX_BACKOFF_BASE_SECONDS": "10"}):
        assert_retried_on_time(app, base=10)


def test_a_hundred_rows_that_fail_together_all_come_back_without_the_timer(app: App) -> None:
    app.stack.script_receiver(*[{"status": 500}] * 100)
    orders = app.new_orders(100)
    for order in orders:
        assert app.stack.complete_order(order).status == 200
    wait_for(lambda: {m[1] for m in app.messages(orders)} == {"Processed"}, 30, "all hundred delivered")
    assert sum(m[2] for m in app.messages(orders)) == 200


def test_retry_after_is_a_floor_under_the_backoff(app: App) -> None:
    app.stack.script_receiver({"status": 429, "headers": {"Retry-After": "4"}})
    (order,) = app.new_orders(1)
    app.stack.complete_order(order)
    wait_for(lambda: app.messages([order])[0][1] == "Processed", 15, "the second attempt")
    assert 4 <= gaps(app, app.messages([order])[0][0])[0] <= 6


def test_a_killed_hosts_row_goes_out_again_soon_after_its_lease(app: App) -> None:
    app.stack.script_receiver({"delay": 60})
    (order,) = app.new_orders(1)
    app.stack.complete_order(order)
    wait_for(lambda: len(app.stack.deliveries()) == 1, 10, "the first attempt in flight")
    app.stack.wait_host_restarted(app.stack.kill_host())
    wait_for(lambda: app.messages([order])[0][1] == "Processed", 4 + 5, "another attempt within the lease and 5 s")
    message = app.messages([order])[0]
    assert message[2] == 2
    assert len(app.arrivals(message[0])) == 2
    assert [arrival["verdict"] for arrival in app.arrivals(message[0])] == ["processed", "duplicate"]


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        ({"status": 410}, "Failed", "gone"),
        ({"status": 301, "headers": {"Location": "/webhook"}}, "Processed", None),
        ({"status": 500, "body": "x" * 10_000_000}, "Processed", None),
        ({"status": 500, "body": "\0\ud800".encode("utf-8", "surrogatepass").decode("latin-1")}, "Processed", None),
        ({"hang": True}, "Processed", None),
    ],
    ids=["gone", "redirect", "10 MB", "odd bytes", "hangs"],
)
def test_what_a_receiver_answers_once(app: App, answer: dict[str, object], status: str, code: str | None) -> None:
    app.stack.script_receiver(answer)
    (order,) = app.new_orders(1)
    app.stack.complete_order(order)
    wait_for(lambda: app.messages([order])[0][1] == status, 15, f"the row became {status}")
    assert app.messages([order])[0][3] == code
    assert {arrival["path"] for arrival in app.stack.deliveries()} == {"/webhook"}


@pytest.mark.parametrize("text", ["garbage", "{}", "", "\u20ac", '{"requestedAt": "x"}' * 500], ids=repr)
def test_a_doorbell_with_garbage_in_it_drains_all_the_same(app: App, text: str) -> None:
    app.insert_message()
    app.ring(text)
    wait_for(lambda: app.sql("SELECT status FROM outbox_messages")[0][0] == "Processed", 10, "the row delivered")
    assert app.queue_length("-poison") == 0


def test_rows_that_cannot_be_delivered_fail_with_a_reason_and_the_rest_goes_on(app: App) -> None:
    order = str(uuid.uuid4())
    bad = [
        ("NoSuchType", "receiver", "{}", "unknown_event_type"),
        ("OrderCompleted", "nowhere", f'{{"orderId": "{order}"}}', "unknown_destination"),
        ("OrderCompleted", "receiver", '{"orderId": 7}', "payload_mismatch"),
        ("OrderCompleted", "receiver", "null", "payload_mismatch"),
        ("OrderCompleted", "receiver", f'{{"orderId": "{order}", "pad": "{"x" * 300_000}"}}', "payload_too_large"),
    ]
    with psycopg.connect(app.stack.database_url) as conn:
        for event_type, destination, payload, code in bad:
            conn.execute(
                "INSERT INTO outbox_messages (outbox_message_id, event_type, destination, payload, traceparent)"
                " VALUES (gen_random_uuid(), %s, %s, %s, %s)",
                [event_type, destination, payload, code],
            )
    orders = app.new_orders(20)
    for each in orders:
        app.stack.complete_order(each)
    wait_for(lambda: {m[1] for m in app.messages(orders)} == {"Processed"}, 15, "the good rows delivered")
    expected = {(code, "Failed", code) for *_, code in bad}
    found = "SELECT traceparent, status, failure_code FROM outbox_messages WHERE traceparent NOT LIKE '00-%%'"
    wait_for(lambda: set(app.sql(found)) == expected, 15, "the bad rows Failed, each for its reason")
    assert app.sql("SELECT count(*) FROM outbox_messages WHERE status = 'Failed' AND last_error <> ''") == [(len(bad),)]


def test_the_timer_delivers_what_no_doorbell_announced(app: App) -> None:
    app.insert_message()
    app.stack.run_function("outbox_timer")
    wait_for(lambda: app.sql("SELECT status FROM outbox_messages")[0][0] == "Processed", 10, "the row delivered")


def deliver_with_deaths(app: App, orders: list[str], host_pids: list[int]) -> None:
    host = app.stack.hosts[0]

    def finished() -> bool:
        if host.child.running and host.child.pid != host_pids[-1]:
            host_pids.append(host.child.pid or 0)
        return {m[1] for m in app.messages(orders)} == {"Processed", "Failed"}

    wait_for(finished, 90, "99 delivered and one Failed")


def test_a_message_that_kills_its_worker_fails_alone_and_its_mates_are_delivered() -> None:
    poison = str(uuid.uuid4())
    host_pid: list[int] = []

    class Receiver(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if poison in body.decode():
                os.kill(host_pid[-1], getattr(signal, "SIGKILL", signal.SIGTERM))
                return
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # the default of 5 refuses connections of the drain

    with Server(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        for app in started({"OUTBOX_DESTINATIONS": destinations(receiver=url)}, receiver=False):
            host_pid.append(app.stack.hosts[0].child.pid or 0)
            orders = [*app.new_orders(99), poison]
            app.sql("INSERT INTO orders (order_id) VALUES (%s)", poison)
            for order in [*orders[40:], *orders[:40]]:
                app.insert_message(order)
            app.ring()

            deliver_with_deaths(app, orders, host_pid)
            statuses = {status: code for _, status, _, code in app.messages(orders)}
            failed = [m for m in app.messages(orders) if m[1] == "Failed"]
            assert statuses == {"Processed": None, "Failed": "attempts_exhausted"}
            assert failed == app.messages([poison])
            assert len(host_pid) == 4  # three attempts, three deaths
        server.shutdown()


@pytest.mark.parametrize("doorbells", [1000, pytest.param(10_000, marks=full)])
def test_one_undeliverable_row_does_not_keep_a_pile_of_doorbells_alive(app: App, doorbells: int) -> None:
    import asyncio
    import base64

    from azure.storage.queue.aio import QueueClient

    app.insert_message()
    app.stack.script_receiver(*[{"status": 500}] * 50)

    async def ring() -> None:
        body = base64.b64encode(b"{}").decode()
        queue = QueueClient.from_connection_string(
            app.stack.storage_connection_string, app.stack.env["OUTBOX_QUEUE_NAME"]
        )
        async with queue:
            for _ in range(doorbells // 50):
                await asyncio.gather(*(queue.send_message(body) for _ in range(50)))

    asyncio.run(ring())
    wait_for(lambda: app.queue_length() <= 2, 60, "the pile is gone")
    assert app.queue_length("-poison") == 0
