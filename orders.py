"""The sample business domain, for an adopter to replace: completing an order, and the event that tells of it.

The order's update and the event's rows are one transaction; that is all an outbox asks of the code that uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from psycopg import Connection

import outbox


class OrderCompleted(outbox.Event, type="OrderCompleted"):
    orderId: UUID  # noqa: N815 - the wire's spelling


@dataclass(frozen=True, slots=True)
class CompletedOrder:
    order_id: UUID
    #: UTC, 6 digits and Z, as the row has it.
    completed_at: str


class OrderNotFound(Exception):
    pass


class OrderCancelled(Exception):
    pass


# Completes a pending order; a second caller waits here for the first, then finds nothing to update.
COMPLETE = """
UPDATE orders SET status = 'Completed', completed_at = clock_timestamp()
WHERE order_id = %s AND status = 'Pending'
"""

# The row decides the answer, so that the first call and every repeat say the same.
READ = """
SELECT status, to_char(completed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') FROM orders WHERE order_id = %s
"""


def complete_order(order_id: UUID, traceparent: str | None = None) -> CompletedOrder:
    """Complete the order and store its event, both or neither; a completed order stays as it is.

    Raises OrderNotFound, OrderCancelled, or outbox.DatabaseUnavailable.
    """

    def work(conn: Connection[Any]) -> CompletedOrder:
        if conn.execute(COMPLETE, [order_id]).rowcount:
            outbox.enqueue(conn, OrderCompleted(orderId=order_id), traceparent=traceparent)
        row = conn.execute(READ, [order_id]).fetchone()
        if row is None:
            raise OrderNotFound
        status, completed_at = row
        if status == "Cancelled":
            raise OrderCancelled
        return CompletedOrder(order_id, completed_at)

    order = outbox.transact(work)
    outbox.ring()
    return order
