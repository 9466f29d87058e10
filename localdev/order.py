"""`python3 -m localdev order`: creates an order in the running stack and completes it over HTTP."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from typing import Any

import psycopg

from localdev.stack import request

# The app has no endpoint that creates orders: in the sample, another system does.
CREATE = "INSERT INTO orders (order_id) VALUES (%s)"


def main(state_dir: Path, count: int) -> int:
    """Create and complete `count` orders; 1 when one of them failed."""
    path = state_dir / "stack.json"
    try:
        stack: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        print(f"There is no {path}: start the stack first, with python3 -m localdev up")
        return 1
    failed = 0
    with psycopg.connect(stack["database_url"], autocommit=True) as database:
        for _ in range(count):
            order_id = str(uuid.uuid4())
            database.execute(CREATE, [order_id])
            print(f"order {order_id}: created in the database")
            url = f"{stack['base_url']}/api/orders/{order_id}/complete"
            started = time.monotonic()
            reply = request("POST", url, b"", {"x-functions-key": stack["function_key"]})
            milliseconds = (time.monotonic() - started) * 1000
            answer = reply.body.decode("utf-8", "replace")
            print(f"  POST {url}\n  -> {reply.status} in {milliseconds:.0f} ms: {answer}")
            failed += reply.status != 200
    return 1 if failed else 0
