"""The HTTP side of the host: functions behind their routes and keys, and the admin endpoints."""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import hdrs, web
from azure.functions import HttpResponse
from azure.functions.http import HttpRequestConverter, HttpResponseConverter
from azure.functions.meta import Datum

from localdev.host.functions import AppFunction
from localdev.host.routes import Route, split_path
from localdev.host.worker import InvocationFailed, TraceContext, Worker

log = logging.getLogger("host")

LARGEST_BODY = 104_857_600
EVERY_METHOD = frozenset({"GET", "POST", "DELETE", "HEAD", "PATCH", "PUT", "OPTIONS"})
#: The server sets these itself.
CONNECTION_HEADERS = frozenset({"connection", "content-length", "keep-alive", "transfer-encoding", "upgrade"})


@dataclass(frozen=True)
class HttpFunction:
    function: AppFunction
    route: Route
    methods: frozenset[str]
    anonymous: bool


@dataclass(frozen=True)
class Answer:
    """A function's answer; as text it is the status, for the log."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def __str__(self) -> str:
        return str(self.status)


class HttpTriggers:
    """Answers requests: which function, with which key, and what it says."""

    def __init__(
        self,
        functions: Sequence[AppFunction],
        *,
        prefix: str,
        key: str,
        worker: Worker,
        start_once: Callable[[str, str], Awaitable[bool]],
    ) -> None:
        self._functions = [http_function(function, prefix) for function in functions]
        self._functions.sort(key=lambda f: f.route.rank)
        self._key = key
        self._worker = worker
        self._start_once = start_once
        self.stopping = False

    def application(self) -> web.Application:
        application = web.Application(client_max_size=LARGEST_BODY)
        application.router.add_route("*", r"/{path:[\s\S]*}", self.answer)
        return application

    def describe(self) -> list[str]:
        return [
            f"{f.function.name}: [{','.join(sorted(f.methods))}] /{f.route.template}"
            + ("" if f.anonymous else " (function key)")
            for f in self._functions
        ]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.stopping:
            return web.Response(status=503)
        parts = split_path(request.raw_path)
        if parts and parts[0].lower() == "admin":
            return await self._administer(request, [part.lower() for part in parts[1:2]] + parts[2:])
        fitting = [(f, found) for f in self._functions if (found := f.route.match(parts)) is not None]
        if not fitting:
            return web.Response(status=404)
        allowed = [(f, found) for f, found in fitting if request.method in f.methods]
        if not allowed:
            # Azure's own host says 404 here (azure-functions-host issue 10098); the contract is 405.
            methods = frozenset[str]().union(*(f.methods for f, _ in fitting))
            return web.Response(status=405, headers={hdrs.ALLOW: ", ".join(sorted(methods))})
        chosen, parameters = allowed[0]
        if not chosen.anonymous and not self._has_key(request):
            return web.Response(status=401)
        if (request.content_length or 0) > LARGEST_BODY:
            return web.Response(status=413)
        return await self._invoke(chosen.function, request, parameters)

    async def _invoke(self, function: AppFunction, request: web.Request, parameters: dict[str, str]) -> web.Response:
        argument = to_http_request(request, parameters, await request.read())
        trace = TraceContext.of_request(request.headers.get("traceparent", ""), request.headers.get("tracestate", ""))
        try:
            answer = await self._worker.invoke(function, argument, f"{request.method} {request.path}", encode, trace)
        except InvocationFailed:
            return web.Response(status=500)
        response = web.Response(status=answer.status, body=answer.body)
        response.headers.popall(hdrs.CONTENT_TYPE, None)
        for name, value in answer.headers:
            response.headers.add(name, value)
        return response

    def _has_key(self, request: web.Request) -> bool:
        given = request.headers.get("x-functions-key") or request.query.get("code") or ""
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._key.encode())

    async def _administer(self, request: web.Request, parts: list[str]) -> web.StreamResponse:
        if parts == ["host", "status"] and request.method == "GET":
            return web.json_response({"state": "Running", "version": "stand-in"})
        if len(parts) == 2 and parts[0] == "functions" and request.method == "POST":
            if not self._has_key(request):
                return web.Response(status=401)
            try:
                text = (json.loads(await request.read()) or {}).get("input") or ""
            except (ValueError, AttributeError):
                return web.Response(status=400)
            started = await self._start_once(parts[1], text if isinstance(text, str) else json.dumps(text))
            return web.Response(status=202 if started else 404)
        return web.Response(status=404)


def http_function(function: AppFunction, prefix: str) -> HttpFunction:
    trigger = function.trigger
    return HttpFunction(
        function=function,
        route=Route("/".join(part for part in (prefix, str(trigger["route"]).strip("/")) if part)),
        methods=frozenset(str(method).upper() for method in trigger.get("methods") or EVERY_METHOD),
        anonymous=str(trigger.get("authLevel", "FUNCTION")).upper() == "ANONYMOUS",
    )


def to_http_request(request: web.Request, parameters: dict[str, str], body: bytes) -> Any:
    """The `HttpRequest` that azure.functions' own converter makes of a request."""

    def texts(values: dict[str, str]) -> dict[str, Datum]:
        return {name: Datum(value, "string") for name, value in values.items()}

    headers: dict[str, str] = {}
    for name, value in request.headers.items():
        name = name.lower()
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    query: dict[str, str] = {}
    for name, value in request.query.items():
        if value:  # the host drops empty ones
            query[name] = f"{query[name]},{value}" if name in query else value
    data = {
        "method": Datum(request.method, "string"),
        "url": Datum(str(request.url), "string"),
        "headers": texts(headers),
        "query": texts(query),
        "params": texts(parameters),
        "body": Datum(body, "bytes"),
    }
    return HttpRequestConverter.decode(Datum(data, "http"), trigger_metadata=None)


def encode(result: Any) -> Answer:
    """The answer in what a function returned; raises when that is none."""
    if not isinstance(result, HttpResponse | str):
        raise TypeError(f"an HTTP function should return an HttpResponse or a text, not {type(result).__name__}")
    datum = HttpResponseConverter.encode(result, expected_type=None)
    if datum.type == "string":
        return Answer(200, [("content-type", "text/plain; charset=utf-8")], datum.value.encode())
    http = datum.value
    headers = [(name, value.value) for name, value in http["headers"].items() if name.lower() not in CONNECTION_HEADERS]
    for cookie in http["cookies"] or []:
        headers += [("set-cookie", morsel.OutputString()) for morsel in cookie.values()]
    if any(character in name + value for name, value in headers for character in "\r\n\0"):
        raise ValueError("a header of the answer contains a line break or NUL")
    status = int(http["status_code"].value)
    if not 200 <= status <= 999:
        raise ValueError(f"{status} is no status of an answer")
    return Answer(status, headers, http["body"].value)
