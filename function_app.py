"""The triggers: decode the request, call, encode the answer. What they do is in orders.py and outbox/."""

from __future__ import annotations

import json
import logging
import re
from http import HTTPStatus
from uuid import UUID

import azure.functions as func

import orders
import outbox

# Names a wrong setting here, while the worker loads the app; opens no connection.
outbox.configure()

app = func.FunctionApp(http_auth_level=func.AuthLevel.FUNCTION)

ORDER_ID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


@app.route(route="orders/{order_id}/complete", methods=["POST"])
def complete_order(req: func.HttpRequest, context: func.Context) -> func.HttpResponse:
    order_id = req.route_params.get("order_id", "")
    if not ORDER_ID.fullmatch(order_id):
        return problem(400, "The order id should be a UUID: 8-4-4-4-12 hexadecimal digits.")
    try:
        order = orders.complete_order(UUID(order_id), traceparent=context.trace_context.trace_parent)
    except orders.OrderNotFound:
        return problem(404, f"There is no order {order_id.lower()}.")
    except orders.OrderCancelled:
        return problem(409, f"Order {order_id.lower()} is cancelled and cannot be completed.")
    except outbox.DatabaseUnavailable as error:
        logging.getLogger(__name__).warning("order not completed order=%s error=%s", order_id.lower(), error)
        return problem(503, "The database cannot answer now. Nothing is lost: repeat the request.", 5)
    body = {"orderId": str(order.order_id), "status": "Completed", "completedAt": order.completed_at}
    return func.HttpResponse(json.dumps(body), mimetype="application/json")


@app.queue_trigger(arg_name="doorbell", queue_name="%OUTBOX_QUEUE_NAME%", connection="AzureWebJobsStorage")
async def outbox_wakeup(doorbell: func.QueueMessage) -> None:
    await outbox.wake_up()  # whatever the message says: it only rings


@app.timer_trigger(arg_name="timer", schedule="0 */5 * * * *")
async def outbox_timer(timer: func.TimerRequest) -> None:
    await outbox.sweep()


def problem(status: int, detail: str, retry_after_seconds: int | None = None) -> func.HttpResponse:
    """An error answer (RFC 9457)."""
    return func.HttpResponse(
        json.dumps({"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}),
        status_code=status,
        mimetype="application/problem+json",
        headers={} if retry_after_seconds is None else {"Retry-After": str(retry_after_seconds)},
    )
