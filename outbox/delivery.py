"""The webhook: one POST per attempt, signed by Standard Webhooks, and what its answer means.

| answer | outcome |
| --- | --- |
| 2xx | Delivered |
| 410 Gone | Dead: the receiver wants no more of it |
| any other status, 3xx (never followed) included | Retry, after its Retry-After if it has one |
| no connection, no answer in time, no HTTP | Retry |
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import httpx
from aiohttp.abc import AbstractResolver, ResolveResult
from httpx_aiohttp import AiohttpTransport

from outbox import addresses
from outbox.message import TRACEPARENT, Dead, Delivered, Message, Outcome, Retry
from outbox.retry import retry_after_seconds
from outbox.signing import sign

log = logging.getLogger(__name__)
# It writes every request's whole URL at INFO, credentials and query included.
logging.getLogger("httpx").setLevel(logging.WARNING)

#: How much of an answer is read: enough for an error's text, and for a small answer to leave its connection reusable.
ANSWER_BYTES = 4096
#: How long an answer's body is waited for; its status has said all that matters.
TAIL_SECONDS = 0.5
ERROR_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where and how one destination's messages go."""

    url: str
    #: Newest first.
    keys: tuple[bytes, ...]
    timeout_seconds: float
    #: Texts that must not reach a log or an error.
    secrets: frozenset[str]


class WebhookSender:
    """Delivers messages to their destinations' endpoints. Used from one event loop, on which its client opens.

    Tests give a `transport`; nobody else does.
    """

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        allowed_networks: Sequence[addresses.Network] = (),
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._endpoints = endpoints
        self._allowed = allowed_networks
        self._transport = transport
        self._client: httpx.AsyncClient | None = None

    async def send(self, message: Message) -> Outcome:
        """One attempt. Returns what came of it; a fault of the receiver or the network is never an exception."""
        endpoint = self._endpoints[message.destination]
        try:
            # One deadline over all: a receiver that drips a byte a second does not outlive it.
            async with asyncio.timeout(endpoint.timeout_seconds):
                return await self._post(endpoint, message)
        except (TimeoutError, httpx.TimeoutException):
            return Retry("timeout", f"no answer within {endpoint.timeout_seconds:g} s")
        except (httpx.TransportError, aiohttp.ClientError, OSError) as error:
            return Retry("connection_error", plain(f"{type(error).__name__}: {error}", endpoint.secrets))
        except Exception as error:
            log.exception("delivery failed message=%s", message.outbox_message_id)
            return Retry("delivery_error", type(error).__name__)

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _post(self, endpoint: Endpoint, message: Message) -> Outcome:
        if self._client is None:
            self._client = self._open()
        body = body_of(message)
        request = self._client.build_request(
            "POST", endpoint.url, content=body, headers=headers_of(message, body, endpoint.keys)
        )
        response = await self._client.send(request, stream=True, follow_redirects=False)
        try:
            if response.is_success:
                await _read_some(response)
                return Delivered()
            text = await _read_some(response)
        finally:
            await response.aclose()
        error = plain(
            f"HTTP {response.status_code}: {text}" if text else f"HTTP {response.status_code}", endpoint.secrets
        )
        if response.status_code == httpx.codes.GONE:
            return Dead("gone", error)
        wait = retry_after_seconds(
            response.headers.get("retry-after"),
            answer_date=response.headers.get("date"),
            now=message.database_now,
        )
        return Retry(f"http_{response.status_code}", error, retry_after=wait)

    def _open(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=self._transport or AiohttpTransport(client=self._session, trust_env=False),
            timeout=None,  # the deadline in `send` is the one that counts
            trust_env=False,  # no proxies, no .netrc
            cookies=_NoCookies(),
        )

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # the drain bounds concurrency
                resolver=_GuardedResolver(self._allowed),
                ttl_dns_cache=30,
                ssl=httpx.create_ssl_context(trust_env=False),
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "User-Agent"),
            trust_env=False,
        )


def body_of(message: Message) -> bytes:
    """The bytes to sign and send: a fixed function of event_type, created_at and the stored payload."""
    event_type = json.dumps(message.event_type, ensure_ascii=False)
    return f'{{"type":{event_type},"timestamp":"{message.created_at}","data":{message.payload}}}'.encode()


def headers_of(message: Message, body: bytes, keys: Sequence[bytes]) -> dict[str, str]:
    """The headers of one attempt: the same `webhook-id` for all of a message's attempts, a timestamp for each."""
    timestamp = int(message.database_now)
    message_id = str(message.outbox_message_id)
    headers = {
        "content-type": "application/json",
        "accept-encoding": "identity",
        "user-agent": "outbox",
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": sign(keys, message_id, timestamp, body),
    }
    if message.traceparent and TRACEPARENT.fullmatch(message.traceparent):
        headers["traceparent"] = message.traceparent
    return headers


def plain(text: str, secrets: frozenset[str] = frozenset()) -> str:
    """Text fit for last_error, whatever bytes it came from: one short line, printable, without the secrets."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= ERROR_CHARS else line[: ERROR_CHARS - 1] + "…"


async def _read_some(response: httpx.Response) -> str:
    """The start of an answer's body; what a receiver sends after that, or never sends, does not matter."""
    data = b""
    try:
        async with asyncio.timeout(TAIL_SECONDS):
            async for chunk in response.aiter_raw():
                data += chunk
                if len(data) >= ANSWER_BYTES:
                    break
    except (TimeoutError, httpx.TransportError, aiohttp.ClientError):
        pass
    return data[:ANSWER_BYTES].decode("utf-8", "replace")


class _NoCookies(httpx.Cookies):
    """A receiver's cookies stay with that answer: kept, they would grow for ever and leak between destinations."""

    def extract_cookies(self, response: httpx.Response) -> None:
        pass


class _GuardedResolver(AbstractResolver):
    """Resolves names to the addresses that a webhook may go to; the connection is made to no other."""

    def __init__(self, allowed: Sequence[addresses.Network]) -> None:
        self._allowed = allowed
        self._inner = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        good = [each for each in found if not addresses.blocked(each["host"], self._allowed)]
        if not good:
            raise OSError(f"{host} leads to a private address; OUTBOX_ALLOWED_PRIVATE_NETWORKS does not name it")
        return good

    async def close(self) -> None:
        await self._inner.close()


def sensitive(url: str, secrets: Sequence[str]) -> frozenset[str]:
    """The parts of a destination that a receiver or a library may echo and that must not be written down."""
    parsed = httpx.URL(url)
    parts: list[Any] = [*secrets, parsed.query.decode(), parsed.userinfo.decode(), parsed.password, parsed.username]
    return frozenset(part for part in parts if part and len(part) >= 3)
