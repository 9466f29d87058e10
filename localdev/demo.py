"""`python3 -m localdev demo`: twenty orders and their events, on real parts, through four things that go wrong.

The summary at the end is counted in the database and in the receiver's own log; a mismatch is exit code 1.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg

from localdev.console import colour
from localdev.processes import wait_until
from localdev.stack import Reply, Stack, StackError
from localdev.up import stop_on_signals

ORDERS = 20
LEASE_SECONDS = 6
SETTINGS = {
    "OUTBOX_BACKOFF_BASE_SECONDS": "1",
    "OUTBOX_LEASE_SECONDS": str(LEASE_SECONDS),
    "OUTBOX_DELIVERY_TIMEOUT_SECONDS": "3",
    # The demo calls the timer itself, to show what it is for.
    "AzureWebJobs.outbox_timer.Disabled": "true",
}
CREATE_ORDER = "INSERT INTO orders (order_id) VALUES (%s)"
MESSAGES = """
SELECT outbox_message_id::text, event_id::text, payload->>'orderId', status, attempt_count FROM outbox_messages
ORDER BY created_at, outbox_message_id
"""
PATIENCE_SECONDS = 30

INTRODUCTION = """\
An app completes an order in its database, and then has to tell somebody else: it calls a webhook. If it dies between
the two, the webhook is never called. If it calls first, it may tell of an order that was never completed.

An outbox closes the gap. The app writes "tell them" into a table of the same database, in the same transaction as the
order: both or neither. Afterwards a worker reads the table and calls the webhook, as often as it takes. So a call may
come twice, but always with the same id, and the receiver drops what it has already processed.
"""


class Mismatch(Exception):
    """Something was not as an outbox promises."""


@dataclass(frozen=True)
class Message:
    """A row of the outbox."""

    id: str
    event_id: str
    order_id: str
    status: str
    attempts: int


@dataclass(frozen=True)
class Arrival:
    """A delivery, as the receiver logged it."""

    id: str
    order_id: str
    at: float
    verdict: str
    status: int
    disagreement: bool


def main() -> int:
    started = time.monotonic()
    stop_on_signals()
    print(INTRODUCTION)
    for name in [name for name in os.environ if name.startswith(("OUTBOX_", "AzureWebJobs"))]:
        del os.environ[name]  # the demo is about its own database and queue
    try:
        with Stack.temporary(env=SETTINGS, say=lambda line: print(f"  {line}", flush=True)) as stack:
            matches = Demo(stack).run()
    except KeyboardInterrupt:
        print("stopped")
        return 130
    except (Mismatch, StackError, RuntimeError, TimeoutError, OSError) as error:
        print(colour("red", f"\nThe demo failed. {error}"))
        return 1
    print(f"\n{time.monotonic() - started:.0f} seconds.")
    return 0 if matches else 1


class Demo:
    """The acts, and what they look at: the database, and the receiver's log."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._orders: list[str] = []

    def run(self) -> bool:
        """All acts; whether the summary fits."""
        try:
            self.everything_works()
            self.receiver_fails()
            self.worker_dies()
            self.doorbell_is_lost()
        except Exception:
            print(f"\nThe last lines of the host's log:\n{self._stack.hosts[0].child.last_lines(30)}")
            raise
        return self.sum_up()

    def everything_works(self) -> None:
        chapter("1. Everything works")
        tell("Each order: one POST, one transaction for order and event, one ring at the queue, one signed webhook.")
        answers = [self._post(self._new_order()) for _ in range(ORDERS - 3)]
        self._wait_for_settled()
        arrived = {arrival.order_id: arrival for arrival in self._arrivals()}
        for number, order in enumerate(self._orders, 1):
            arrival = arrived[order]
            fact(f"{number:>2}. order {order} -> event {arrival.id[-12:]} -> webhook {arrival.verdict}")
        first = self._orders[0]
        tell("The first order is completed once more, as a client does that saw no answer:")
        events = len(self._messages())
        again = self._post(first)
        expect(again.body == answers[0].body, "completing an order again should be answered as before")
        expect(len(self._messages()) == events, "completing an order again should store no second event")
        fact("the answer is the same, and there is no second event")

    def receiver_fails(self) -> None:
        chapter("2. The receiver fails")
        tell("The receiver will answer the next delivery with 500.")
        order = self._new_order()
        self._stack.script_receiver({"status": 500, "containing": order})
        self._post(order)
        self._wait_for_settled()
        self._show_attempts(order)
        expect([a.verdict for a in self._arrivals(order)] == ["failed", "processed"], "one retry should have arrived")
        tell("The event waited in the table for its second attempt, which the worker had rung for itself.")

    def worker_dies(self) -> None:
        chapter("3. A worker is killed in the middle of a delivery")
        tell(
            "The receiver will process the next delivery at once but be slow to answer; meanwhile the worker is killed."
        )
        order = self._new_order()
        self._stack.script_receiver({"status": 200, "delay": 60, "containing": order})
        self._post(order)
        wait_until(lambda: bool(self._arrivals(order)), PATIENCE_SECONDS, "the arrival of the delivery")
        killed = self._stack.kill_host()
        held = self._message(order)
        fact(f"process {killed} killed; the row is still {held.status}, under a lease of {LEASE_SECONDS} s")
        expect(held.status == "Processing", "the killed worker should not have been able to say that it is done")
        self._stack.wait_host_restarted(killed)
        self._wait_for_settled()
        self._show_attempts(order)
        arrivals = self._arrivals(order)
        expect([a.verdict for a in arrivals] == ["processed", "duplicate"], "a second attempt should have been dropped")
        expect(len({a.id for a in arrivals}) == 1, "both attempts should carry the same id")
        tell("Nobody knew whether the first attempt had arrived, so it was repeated; the receiver knew the id.")

    def doorbell_is_lost(self) -> None:
        chapter("4. The doorbell is lost")
        tell("The queue is emptied and its service stopped while an order is completed.")
        azurite = self._stack.azurite
        assert azurite is not None
        self._stack.queue.clear_messages()
        azurite.stop()
        order = self._new_order()
        self._post(order)
        azurite.start()
        waiting = self._message(order)
        fact(f"the order is completed all the same; its event is {waiting.status}, and nothing says so to a worker")
        expect(waiting.status == "Pending" and not self._arrivals(order), "nobody should have heard of this event")
        tell("Every five minutes a timer looks into the table by itself. The demo calls it now.")
        self._stack.run_function("outbox_timer")
        self._wait_for_settled()
        self._show_attempts(order)

    def sum_up(self) -> bool:
        """Print the table; whether everything in it fits together."""
        chapter("Summary, counted in the database and in the receiver's log")
        with self._database() as database:
            row = database.execute("SELECT count(*) FROM orders WHERE status = 'Completed'").fetchone()
        completed = row[0] if row is not None else 0
        messages = self._messages()
        arrivals = self._arrivals()
        verdicts = Counter(arrival.verdict for arrival in arrivals)
        processed = {arrival.id for arrival in arrivals if arrival.verdict == "processed"}
        lost = [message for message in messages if message.id not in processed]
        told = {message.order_id for message in messages if message.id in processed}
        retries = len(arrivals) - len({arrival.id for arrival in arrivals})
        attempts = sum(message.attempts for message in messages)
        refused = verdicts["refused"] + sum(arrival.disagreement for arrival in arrivals)
        table = [
            line("orders completed", completed, completed == len(self._orders) == ORDERS),
            line("events", len({m.event_id for m in messages}), len(messages) == completed),
            line("deliveries", len(arrivals), len(arrivals) == attempts),
            line("retries", retries, retries == attempts - len(messages) == verdicts["failed"] + verdicts["duplicate"]),
            line("duplicates dropped", verdicts["duplicate"], verdicts["duplicate"] >= 1),
            line("wrong signatures", refused, refused == 0),
            line("lost", len(lost), not lost and told == set(self._orders)),
        ]
        return all(table)

    def _new_order(self) -> str:
        order = str(uuid.uuid4())
        with self._database() as database:
            database.execute(CREATE_ORDER, [order])
        self._orders.append(order)
        return order

    def _post(self, order: str) -> Reply:
        reply = self._stack.complete_order(order)
        expect(reply.status == 200, f"completing order {order} was answered {reply.status}")
        return reply

    def _database(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self._stack.database_url, autocommit=True)

    def _messages(self) -> list[Message]:
        with self._database() as database:
            return [Message(*row) for row in database.execute(MESSAGES)]

    def _message(self, order: str) -> Message:
        return next(message for message in self._messages() if message.order_id == order)

    def _arrivals(self, order: str | None = None) -> list[Arrival]:
        return [a for a in parse_arrivals(self._stack.deliveries()) if order in (None, a.order_id)]

    def _wait_for_settled(self) -> None:
        def settled() -> bool:
            messages = self._messages()
            return len(messages) == len(self._orders) and all(m.status == "Processed" for m in messages)

        wait_until(settled, PATIENCE_SECONDS, "the delivery of all events")

    def _show_attempts(self, order: str) -> None:
        arrivals = self._arrivals(order)
        for number, arrival in enumerate(arrivals, 1):
            after = f"{arrival.at - arrivals[0].at:.1f} s later" if number > 1 else "first"
            fact(f"attempt {number}, {after}: id {arrival.id[-12:]} -> answer {arrival.status}, {arrival.verdict}")


def parse_arrivals(deliveries: list[dict[str, Any]]) -> Iterator[Arrival]:
    for delivery in deliveries:
        body = json.loads(base64.b64decode(delivery["body_base64"]))
        yield Arrival(
            id=delivery["id"],
            order_id=body["data"]["orderId"],
            at=delivery["arrived_at"],
            verdict=delivery["verdict"],
            status=delivery["status"],
            disagreement=delivery["disagreement"],
        )


def chapter(title: str) -> None:
    print(colour("bold", f"\n{title}"), flush=True)


def tell(sentence: str) -> None:
    print(f"  {sentence}", flush=True)


def fact(text: str) -> None:
    print(colour("cyan", f"    {text}"), flush=True)


def line(name: str, count: int, fits: bool) -> bool:
    """A line of the summary; whether it fits."""
    verdict = colour("green", "ok") if fits else colour("red", "MISMATCH")
    print(f"  {name:<20}{count:>5}   {verdict}", flush=True)
    return fits


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Mismatch(otherwise[0].upper() + otherwise[1:] + ".")


if __name__ == "__main__":
    sys.exit(main())
