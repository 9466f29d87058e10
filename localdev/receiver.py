"""A webhook receiver as a careful consumer writes it: check the signature, process each id once, answer.

    POST   /webhook and /webhook/...   deliveries
    GET    /deliveries[?id=...]        every delivery, with its raw bytes
    DELETE /deliveries                 forget them, and the scripted answers
    GET    /summary                    counts
    POST   /control                    {"next": [answer, ...]}: answers for the next deliveries, one each

An answer: {"status": 200, "headers": {}, "body": "", "delay": 0, "hang": false, "for_id": "...", "containing": "..."};
with `for_id` or `containing` it waits for a delivery of that id, or with that text in its body.
An id is processed, once, by the first delivery that is answered 2xx: at arrival, before a scripted delay.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from aiohttp import web

from localdev.signatures import verify, verify_with_reference

SECRETS_VARIABLE = "LOCALDEV_RECEIVER_SECRETS"
LARGEST_BODY = 64 * 1024 * 1024


@dataclass(frozen=True)
class Answer:
    """What the receiver answers to one delivery."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: str = ""
    delay: float = 0
    hang: bool = False
    for_id: str | None = None
    containing: str | None = None

    def meant_for(self, message_id: str, body: bytes) -> bool:
        if self.for_id is not None and self.for_id != message_id:
            return False
        return self.containing is None or self.containing.encode() in body


@dataclass(frozen=True)
class Delivery:
    """One request that arrived, as it is kept in the log."""

    arrived_at: float
    path: str
    id: str
    timestamp: str
    signature: str
    headers: dict[str, str]
    body_base64: str
    #: processed, duplicate, refused (signature), failed (scripted status) or hung
    verdict: str
    status: int
    problem: str | None
    #: Own check and reference library came to different judgements.
    disagreement: bool


class Receiver:
    """The ids processed so far, every delivery, and the answers scripted for the next ones."""

    def __init__(self, secrets: Sequence[str], log: Path) -> None:
        self._secrets = list(secrets)
        self._log_path = log
        self._script: list[Answer] = []
        self.deliveries = read_log(log)
        self._processed = {delivery.id for delivery in self.deliveries if delivery.verdict == "processed"}
        self._log: TextIO = log.open("a", encoding="utf-8")
        if log.stat().st_size and not log.read_bytes().endswith(b"\n"):
            self._log.write("\n")

    def application(self) -> web.Application:
        application = web.Application(client_max_size=LARGEST_BODY)
        application.add_routes(
            [
                web.post("/webhook", self.receive),
                web.post("/webhook/{rest:.*}", self.receive),
                web.get("/deliveries", self.list_deliveries),
                web.delete("/deliveries", self.reset),
                web.get("/summary", self.summarise),
                web.post("/control", self.control),
            ]
        )
        return application

    async def receive(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        problem = verify(self._secrets, headers, body, time.time())
        reference = verify_with_reference(self._secrets, headers, body)
        message_id = headers.get("webhook-id", "")
        answer = Answer(status=401, body=problem) if problem else self._next_answer(message_id, body)
        self._keep(
            Delivery(
                arrived_at=time.time(),
                path=request.path,
                id=message_id,
                timestamp=headers.get("webhook-timestamp", ""),
                signature=headers.get("webhook-signature", ""),
                headers=headers,
                body_base64=base64.b64encode(body).decode(),
                verdict=self._judge(message_id, answer, problem),
                status=answer.status,
                problem=problem,
                disagreement=(problem is None) != (reference is None),
            )
        )
        if answer.hang:
            await asyncio.get_running_loop().create_future()
        if answer.delay:
            await asyncio.sleep(answer.delay)
        return web.Response(status=answer.status, headers=answer.headers, body=answer.body.encode())

    def _next_answer(self, message_id: str, body: bytes) -> Answer:
        for index, answer in enumerate(self._script):
            if answer.meant_for(message_id, body):
                return self._script.pop(index)
        return Answer()

    def _judge(self, message_id: str, answer: Answer, problem: str | None) -> str:
        if problem is not None:
            return "refused"
        if answer.hang:
            return "hung"
        if not 200 <= answer.status < 300:
            return "failed"
        if message_id in self._processed:
            return "duplicate"
        self._processed.add(message_id)
        return "processed"

    def _keep(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)
        self._log.write(json.dumps(asdict(delivery)) + "\n")
        self._log.flush()

    async def list_deliveries(self, request: web.Request) -> web.Response:
        wanted = request.query.get("id")
        return web.json_response([asdict(d) for d in self.deliveries if wanted is None or d.id == wanted])

    async def summarise(self, request: web.Request) -> web.Response:
        verdicts = Counter(delivery.verdict for delivery in self.deliveries)
        return web.json_response(
            {
                "deliveries": len(self.deliveries),
                **{verdict: verdicts[verdict] for verdict in ("processed", "duplicate", "refused", "failed", "hung")},
                "ids": len({delivery.id for delivery in self.deliveries}),
                "disagreements": sum(delivery.disagreement for delivery in self.deliveries),
                "scripted_answers_left": len(self._script),
            }
        )

    async def control(self, request: web.Request) -> web.Response:
        try:
            script = [Answer(**answer) for answer in (await request.json())["next"]]
        except (ValueError, TypeError, KeyError) as error:
            return web.json_response({"problem": f"not a script of answers: {error}"}, status=400)
        self._script += script
        return web.json_response({"scripted_answers": len(self._script)})

    async def reset(self, request: web.Request) -> web.Response:
        self.deliveries.clear()
        self._processed.clear()
        self._script.clear()
        self._log.close()
        self._log = self._log_path.open("w", encoding="utf-8")
        return web.Response(status=204)


def read_log(path: Path) -> list[Delivery]:
    """The deliveries of an earlier run; a last line that was cut short is left out."""
    deliveries = []
    if path.exists():
        for line in path.read_text("utf-8").splitlines():
            with contextlib.suppress(ValueError, TypeError):
                deliveries.append(Delivery(**json.loads(line)))
    return deliveries


async def serve(receiver: Receiver, port: int) -> None:
    runner = web.AppRunner(receiver.application(), access_log=None, handle_signals=False, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
    print(f"receiver: http://127.0.0.1:{port}/webhook", flush=True)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask(*_: Any) -> None:
        loop.call_soon_threadsafe(stop.set)

    for name in ("SIGINT", "SIGTERM", "SIGBREAK"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), ask)
    await stop.wait()
    await runner.cleanup()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m localdev.receiver", description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True, help="where deliveries are kept, a JSON object a line")
    options = parser.parse_args()
    secrets = os.environ.get(SECRETS_VARIABLE, "").split()
    if not secrets:
        print(f"receiver: {SECRETS_VARIABLE} should hold one or more whsec_ secrets, parted by spaces", file=sys.stderr)
        return 2
    asyncio.run(serve(Receiver(secrets, options.log), options.port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
