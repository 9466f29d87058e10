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
import base64
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote, unquote_plus

import httpx

from outbox.message import TRACEPARENT, Dead, Delivered, Message, Outcome, Retry
from outbox.retry import retry_after_seconds
from outbox.signing import decode_secret, sign

log = logging.getLogger(__name__)

#: How much of an answer is read: enough for an error's text, and for a small answer to leave its connection reusable.
ANSWER_BYTES = 4096
#: How long an answer's body is waited for; its status has said all that matters.
TAIL_SECONDS = 0.5
ERROR_CHARS = 300


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where and how one destination's messages go."""

    url: httpx.URL
    headers: Mapping[str, str]
    #: Newest first.
    keys: tuple[bytes, ...]
    timeout_seconds: float
    #: Texts that a receiver or a library may echo and that must not reach a log or an error.
    secrets: frozenset[str]

    @classmethod
    def of(cls, url: str, secrets: Sequence[str], timeout_seconds: float) -> Endpoint:
        """From a URL, which may hold credentials (they become Basic authentication), and `whsec_` secrets."""
        whole = httpx.URL(url)
        headers = {
            "host": whole.netloc.decode(),
            "content-type": "application/json",
            "accept-encoding": "identity",
            "user-agent": "outbox",
        }
        user, password = unquote(whole.username), unquote(whole.password)
        basic = base64.b64encode(f"{user}:{password}".encode()).decode() if whole.userinfo else ""
        if basic:
            headers["authorization"] = f"Basic {basic}"
        query = whole.query.decode()
        values = [part.partition("=")[2] for part in query.split("&")]
        private = [*secrets, basic, user, password, whole.userinfo.decode(), query, *values]
        return cls(
            url=whole.copy_with(userinfo=b""),
            headers=headers,
            keys=tuple(decode_secret(secret) for secret in secrets),
            timeout_seconds=timeout_seconds,
            secrets=frozenset(
                form for each in private for form in (each, unquote(each), unquote_plus(each)) if len(form) >= 3
            ),
        )


class WebhookSender:
    """Delivers messages to their destinations' endpoints, by any of httpx's transports."""

    def __init__(self, endpoints: Mapping[str, Endpoint], transport: httpx.AsyncBaseTransport) -> None:
        self._endpoints = endpoints
        self._transport = transport

    async def send(self, message: Message) -> Outcome:
        """One attempt. Returns what came of it; a fault of the receiver or the network is never an exception."""
        endpoint = self._endpoints[message.destination]
        response: httpx.Response | None = None
        text = bytearray()
        try:
            # One deadline over all: a receiver that drips a byte a second does not outlive it.
            async with asyncio.timeout(endpoint.timeout_seconds):
                body = body_of(message)
                # Straight to the transport: a client adds cookies, redirects and half of the time.
                response = await self._transport.handle_async_request(
                    httpx.Request("POST", endpoint.url, headers=headers_of(message, body, endpoint), content=body)
                )
                async with asyncio.timeout(TAIL_SECONDS):
                    await _read_start(response, text)
        except (TimeoutError, httpx.TransportError) as error:
            if response is None:  # else the status has said it
                if isinstance(error, (TimeoutError, httpx.TimeoutException)):
                    return Retry("timeout", f"no answer within {endpoint.timeout_seconds:g} s")
                return Retry("connection_error", plain(f"{type(error).__name__}: {error}", endpoint.secrets))
        except Exception as error:
            log.exception("delivery failed message=%s", message.outbox_message_id)
            return Retry("delivery_error", type(error).__name__)
        finally:
            if response is not None:
                await response.aclose()
        return _outcome(response, text, endpoint, message)

    async def aclose(self) -> None:
        await self._transport.aclose()


def _outcome(response: httpx.Response, body: bytearray, endpoint: Endpoint, message: Message) -> Outcome:
    if response.is_success:
        return Delivered()
    text = f"HTTP {response.status_code}" + (": " + body.decode("utf-8", "replace") if body else "")
    error = plain(text, endpoint.secrets)
    if response.status_code == httpx.codes.GONE:
        return Dead("gone", error)
    wait = retry_after_seconds(
        response.headers.get("retry-after"), answer_date=response.headers.get("date"), now=message.database_now
    )
    return Retry(f"http_{response.status_code}", error, retry_after=wait)


def body_of(message: Message) -> bytes:
    """The bytes to sign and send: a fixed function of event_type, created_at and the stored payload."""
    event_type = json.dumps(message.event_type, ensure_ascii=False)
    return f'{{"type":{event_type},"timestamp":"{message.created_at}","data":{message.payload}}}'.encode()


def headers_of(message: Message, body: bytes, endpoint: Endpoint) -> dict[str, str]:
    """The headers of one attempt: the same `webhook-id` for all of a message's attempts, a timestamp for each."""
    timestamp = int(message.database_now)
    message_id = str(message.outbox_message_id)
    headers = {
        **endpoint.headers,
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": sign(endpoint.keys, message_id, timestamp, body),
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


async def _read_start(response: httpx.Response, into: bytearray) -> None:
    """The start of an answer's body; what a receiver sends after that, or never sends, does not matter."""
    async for chunk in response.aiter_raw():
        into += chunk[: ANSWER_BYTES - len(into)]
        if len(into) == ANSWER_BYTES:
            break
