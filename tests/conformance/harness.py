"""What the conformance tests hold on to: the worker's process, and the receiver it delivers to."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import standardwebhooks

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("driver.py")
SECRET = "whsec_Y29uZm9ybWFuY2UtdGVzdHMtb25seS1zZWNyZXQ="


@dataclass(frozen=True)
class Answer:
    """How an invocation ended; status, headers (names in lower case) and body are an HTTP trigger's."""

    ok: bool
    error: str | None
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Life:
    """What one worker told its host, from start to end."""

    init: Answer
    functions: Mapping[str, list[dict[str, Any]]]
    load: Mapping[str, Answer]
    answers: list[Answer]

    def trigger(self, function: str) -> dict[str, Any]:
        """The trigger as the host understands it: without a name, and with the host's defaults."""
        trigger = next(binding for binding in self.functions[function] if binding["type"].endswith("Trigger"))
        defaults = {"runOnStartup": False, "useMonitor": True} if trigger["type"] == "timerTrigger" else {}
        return {**defaults, **{key: value for key, value in trigger.items() if key not in ("name", "direction")}}


@dataclass(frozen=True)
class OfficialWorker:
    """Starts a worker with these settings; its own environment has none of the app's."""

    settings: Mapping[str, str]

    def live(self, *invocations: Mapping[str, Any], **settings: str | None) -> Life:
        """Start a worker, make the invocations, let it end. `settings` replace or (None) remove those it has."""
        foreign = ("OUTBOX_", "AzureWebJobsStorage", "PG", "PYTHONPATH")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        environment |= {name: value for name, value in {**self.settings, **settings}.items() if value is not None}
        done = subprocess.run(
            [sys.executable, str(DRIVER), str(ROOT)],
            input=json.dumps(invocations),
            capture_output=True,
            encoding="utf-8",
            cwd=ROOT,
            env=environment,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout.splitlines()[-1])
        return Life(
            init=Answer(**told["init"]),
            functions=told["functions"],
            load={name: Answer(**answer) for name, answer in told["load"].items()},
            answers=[Answer(**answer) for answer in told["answers"]],
        )


def complete(order_id: object, **invocation: Any) -> dict[str, Any]:
    """The invocation that the host makes of `POST /api/orders/{order_id}/complete`."""
    http = {"path": f"orders/{order_id}/complete", "params": {"order_id": str(order_id)}}
    return {"function": "complete_order", "http": http, **invocation}


def doorbell(text: str) -> dict[str, Any]:
    """The invocation that the host makes of a queue message, its base64 taken off."""
    return {"function": "outbox_wakeup", "queue": text}


def tick(*, past_due: bool = False) -> dict[str, Any]:
    return {"function": "outbox_timer", "timer": {"past_due": past_due}}


@dataclass(frozen=True)
class Receiver:
    """A webhook receiver that answers 204 and keeps what it got."""

    url: str
    #: Headers (names in lower case) and raw body of each request.
    requests: list[tuple[dict[str, str], bytes]]

    def verified(self) -> list[dict[str, Any]]:
        """The events received, their signatures checked by the reference library."""
        reference = standardwebhooks.Webhook(SECRET)
        return [reference.verify(body, headers) for headers, body in self.requests]


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    requests: list[tuple[dict[str, str], bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Receiver(f"http://127.0.0.1:{server.server_port}/webhook", requests)
        finally:
            server.shutdown()
            thread.join()
