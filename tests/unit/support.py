"""The hands of the unit tests: a message, and a receiver on a loopback port that does to it what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias
from uuid import UUID

from outbox.addresses import Network
from outbox.delivery import Endpoint, WebhookSender
from outbox.message import Message, Outcome
from outbox.transport import AiohttpTransport

ROOT = Path(__file__).resolve().parent.parent.parent
SECRET = "whsec_" + "QUFB" * 8
LOOPBACK: tuple[Network, ...] = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter
Handler: TypeAlias = Callable[[Reader, Writer], Awaitable[None]]


def message(**values: Any) -> Message:
    defaults: dict[str, Any] = {
        "outbox_message_id": UUID(int=7),
        "lease_token": UUID(int=8),
        "event_type": "test.Ping",
        "destination": "crm",
        "payload": '{"n": 1}',
        "created_at": "2025-01-02T03:04:05.000006Z",
        "age_seconds": 0.0,
        "tried_seconds": 0.0,
        "attempt_count": 1,
        "traceparent": None,
        "ordering_key": None,
        "claimed_at": 1_700_000_000.0,
        "claimed_monotonic": monotonic(),
        "lease_seconds": 30.0,
    }
    return Message(**{**defaults, **values})


def endpoint(url: str, seconds: float = 5.0, *secrets: str) -> Endpoint:
    return Endpoint.of(url, secrets or (SECRET,), seconds)


async def request(reader: Reader) -> bytes:
    """One whole request."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
    assert length is not None
    return head + await reader.readexactly(int(length[1]))


def answering(*answers: bytes) -> Handler:
    """Answers the requests of one connection, one after the other, and closes it."""

    async def handle(reader: Reader, writer: Writer) -> None:
        for answer in answers:
            await request(reader)
            writer.write(answer)
            await writer.drain()

    return handle


class Receiver:
    """Serves the n-th connection by the n-th of `handlers`, all further ones by the last."""

    def __init__(self, *handlers: Handler, tls: ssl.SSLContext | None = None) -> None:
        self._handlers = handlers
        self._tls = tls
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def connections(self) -> int:
        return len(self._tasks)

    async def served(self) -> None:
        """Wait until every connection has been closed from this side."""
        await asyncio.gather(*self._tasks)

    async def __aenter__(self) -> Receiver:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._tls)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: Reader, writer: Writer) -> None:
        handler = self._handlers[min(self.connections, len(self._handlers) - 1)]
        self._tasks.append(asyncio.create_task(self._serve(handler, reader, writer)))

    async def _serve(self, handler: Handler, reader: Reader, writer: Writer) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            try:
                await handler(reader, writer)
            finally:
                writer.close()
                await writer.wait_closed()


class Sent:
    """What came of the posts of one sender, and how many connections and seconds they took."""

    def __init__(self, outcomes: list[Outcome], connections: int, seconds: float) -> None:
        self.outcomes = outcomes
        self.outcome = outcomes[-1]
        self.connections = connections
        self.seconds = seconds


def send(
    *handlers: Handler, times: int = 1, seconds: float = 5.0, url: str = "http://127.0.0.1:{port}/hook",
    allowed: Sequence[Network] = LOOPBACK, tls: ssl.SSLContext | None = None, **values: Any,
) -> Sent:  # fmt: skip
    """Post one message `times` times, one after the other, to a receiver made of `handlers`."""

    async def run() -> Sent:
        async with asyncio.timeout(20), Receiver(*handlers, tls=tls) as receiver:
            sender = WebhookSender(
                {"crm": endpoint(url.format(port=receiver.port), seconds)}, AiohttpTransport(allowed)
            )
            started = monotonic()
            outcomes = [await sender.send(message(**values)) for _ in range(times)]
            took = monotonic() - started
            await sender.aclose()
            return Sent(outcomes, receiver.connections, took)

    return asyncio.run(run())
