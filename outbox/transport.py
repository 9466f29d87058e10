"""httpx's transport over aiohttp, for webhooks: fast at high concurrency, and only to addresses that are allowed.

httpx's own connection pool slows down as concurrency grows (docs/performance.md). The library that joins the two,
httpx-aiohttp, encodes URLs anew, calls any lost connection a connect timeout, and loses a status whose reason phrase
is not UTF-8; it also knows no guard. This is that join, without what a webhook does not need.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Sequence
from functools import partial
from io import BytesIO
from typing import cast

import aiohttp
import httpx
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from outbox import addresses

#: The longest status line, and the longest header, of an answer.
HEADER_BYTES = 65_536
#: Above this, aiohttp wants a file.
INLINE_BYTES = 1 << 20


class AiohttpTransport(httpx.AsyncBaseTransport):
    """Sends requests without redirects, cookies, proxies or decompression. Used from one event loop.

    Raises httpx.TransportError where there is no answer. Has no deadline: that is the caller's.
    """

    def __init__(self, allowed: Sequence[addresses.Network]) -> None:
        self._allowed = allowed
        self._session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._session is None:
            self._session = self._open()
        # aiohttp resolves names only, so the guard of names never sees an address.
        if addresses.is_literal(request.url.host) and addresses.blocked(request.url.host, self._allowed):
            raise httpx.ConnectError(_refusal(request.url.host))
        try:
            response = await self._session.request(
                request.method,
                URL(str(request.url), encoded=True),
                headers=request.headers,
                data=request.content if len(request.content) <= INLINE_BYTES else BytesIO(request.content),
                allow_redirects=False,
            )
        except aiohttp.ClientResponseError as error:
            raise httpx.RemoteProtocolError(error.message) from error
        except aiohttp.ClientConnectorError as error:
            raise httpx.ConnectError(str(error)) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise httpx.NetworkError(str(error) or type(error).__name__) from error
        return httpx.Response(response.status, headers=response.raw_headers, stream=_Body(response), request=request)

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            limit=0,  # the drain bounds concurrency
            resolver=_GuardedResolver(self._allowed),
            ttl_dns_cache=30,
            ssl=httpx.create_ssl_context(trust_env=False),
        )
        connector._factory = cast("partial[ResponseHandler]", partial(_StatusEndsIt, loop=connector._loop))
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "User-Agent"),
            timeout=aiohttp.ClientTimeout(total=None),
            max_line_size=HEADER_BYTES,
            max_field_size=HEADER_BYTES,
            auto_decompress=False,
            trust_env=False,
        )


class _Body(httpx.AsyncByteStream):
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except aiohttp.ClientError as error:
            raise httpx.ReadError(str(error)) from error

    async def aclose(self) -> None:
        self._response.release()  # keeps the connection only if the body has been read to its end


class _StatusEndsIt(ResponseHandler):
    """A 204 ends with its headers (RFC 9110, 15.3.5): a body that a receiver sends all the same is not an answer.

    Left in, it is read as the next answer's start, and the 204 that came with it is lost.
    """

    def data_received(self, data: bytes) -> None:
        end = data.find(b"\r\n\r\n") + 4
        if data[9:12] == b"204" and data.startswith(b"HTTP/1.") and 4 <= end < len(data):
            self.force_close()
            data = data[:end]
        super().data_received(data)


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
            raise OSError(None, _refusal(host))
        return good

    async def close(self) -> None:
        await self._inner.close()


def _refusal(host: str) -> str:
    return f"{host} is, or leads to, a private address; OUTBOX_ALLOWED_PRIVATE_NETWORKS does not name it"
