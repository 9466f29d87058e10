"""The webhook: what is sent, what each answer means, and what no receiver can do to a drain."""

from __future__ import annotations

import asyncio
import base64
import gzip
import logging
import re
import socket
import ssl
import struct
import tracemalloc
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given, settings
from hypothesis import strategies as st
from standardwebhooks import Webhook

from outbox import delivery
from outbox.delivery import WebhookSender, plain
from outbox.message import Dead, Delivered, Message, Outcome, Retry
from outbox.transport import AiohttpTransport

from .support import LOOPBACK, OK, SECRET, Handler, Reader, Receiver, Writer, answering, endpoint, message, send
from .support import request as read_request

URL = "https://receiver.example/hook"


def reply(status: int, text: str = "", headers: Any = None) -> httpx.Response:
    async def body() -> AsyncIterator[bytes]:
        yield text.encode()

    return httpx.Response(status, headers=headers, content=body())


def post(
    handler: Callable[[httpx.Request], httpx.Response], *messages: Message, url: str = URL, secrets: Any = (SECRET,)
) -> list[Outcome]:
    """Send messages, one unless they are given, to a transport that answers by `handler`."""

    async def run() -> list[Outcome]:
        sender = WebhookSender({"crm": endpoint(url, 5, *secrets)}, httpx.MockTransport(handler))
        outcomes = [await sender.send(each) for each in messages or [message()]]
        await sender.aclose()
        return outcomes

    return asyncio.run(run())


def requests_of(*messages: Message, answer: httpx.Response | None = None, **options: Any) -> list[httpx.Request]:
    """The requests that the messages became."""
    requests: list[httpx.Request] = []

    def note(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return answer or reply(204)

    post(note, *messages, **options)
    return requests


# -- what is sent ------------------------------------------------------------------------------------------------------

TIME = "2025-01-02T03:04:05.000006Z"


@pytest.mark.parametrize(
    ("event_type", "payload", "body"),
    [
        ("OrderCompleted", '{"orderId": "0190a0b1-c2d3-7e4f-8a9b-0c1d2e3f4a5b"}',
         '{"type":"OrderCompleted","timestamp":"2025-01-02T03:04:05.000006Z",'
         '"data":{"orderId": "0190a0b1-c2d3-7e4f-8a9b-0c1d2e3f4a5b"}}'),
        ("a.b_1", '{"n": 123456789012345678901234567890.10, "s": "grün 😀\\u2028"}',
         '{"type":"a.b_1","timestamp":"2025-01-02T03:04:05.000006Z",'
         '"data":{"n": 123456789012345678901234567890.10, "s": "grün 😀\\u2028"}}'),
        ('"\\é', "{}", '{"type":"\\"\\\\é","timestamp":"2025-01-02T03:04:05.000006Z","data":{}}'),
    ],
    ids=["the order's", "numbers and text as stored", "a type written by hand"],
)  # fmt: skip
def test_the_body_is_these_bytes(event_type: str, payload: str, body: str) -> None:
    (request,) = requests_of(message(event_type=event_type, payload=payload, created_at=TIME))
    assert request.content == body.encode()


def test_an_attempt_is_one_post_with_these_headers() -> None:
    (request,) = requests_of(message(claimed_at=1_700_000_000.5, claimed_monotonic=monotonic() - 60))
    assert (request.method, str(request.url)) == ("POST", URL)
    assert dict(request.headers) == {
        "host": "receiver.example",
        "content-type": "application/json",
        "content-length": str(len(request.content)),
        "accept-encoding": "identity",
        "user-agent": "outbox",
        "webhook-id": "00000000-0000-0000-0000-000000000007",
        "webhook-timestamp": "1700000060",  # the database's time at the claim, and what has passed since
        "webhook-signature": request.headers["webhook-signature"],
    }


def test_every_attempt_has_the_same_id_and_body_and_a_timestamp_of_its_own() -> None:
    first, second = requests_of(message(), message(claimed_at=1_700_009_999.0, attempt_count=2))
    assert first.content == second.content
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    for name in ("webhook-timestamp", "webhook-signature"):
        assert first.headers[name] != second.headers[name]


def test_a_receiver_verifies_what_it_got_by_any_of_the_secrets() -> None:
    secrets = (SECRET, "whsec_" + "QkJC" * 8)
    (request,) = requests_of(message(claimed_at=datetime.now(UTC).timestamp()), secrets=secrets)
    for secret in secrets:
        Webhook(secret).verify(request.content, dict(request.headers))


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("given", [TRACE, None, "", TRACE.upper(), TRACE + "\r\nx: y", TRACE + "\n"])
def test_a_traceparent_is_passed_on_if_it_is_one(given: str | None) -> None:
    (request,) = requests_of(message(traceparent=given))
    assert request.headers.get("traceparent") == (TRACE if given == TRACE else None)


# -- what an answer means ----------------------------------------------------------------------------------------------


def test_the_status_table() -> None:
    statuses = [*range(200, 600), 600, 999]
    rest = iter(statuses)
    outcomes = post(lambda _: reply(next(rest)), *[message()] * len(statuses))
    for status, outcome in zip(statuses, outcomes, strict=True):
        if 200 <= status <= 299:
            assert outcome == Delivered()
        elif status == 410:
            assert outcome == Dead("gone", "HTTP 410")
        else:
            assert outcome == Retry(f"http_{status}", f"HTTP {status}")


def test_a_redirect_is_not_followed() -> None:
    requests = requests_of(message(), answer=reply(307, headers={"location": URL + "/elsewhere"}))
    assert [str(request.url) for request in requests] == [URL]


@pytest.mark.parametrize("status", [302, 429, 503])
@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 0),
        ({"retry-after": "120"}, 120),
        ({"retry-after": "-5"}, 0),
        ({"retry-after": "999999999"}, 86_400),
        ({"retry-after": formatdate(1e9 + 60, usegmt=True), "date": formatdate(1e9, usegmt=True)}, 60),
        ({"retry-after": formatdate(1_700_000_060, usegmt=True)}, pytest.approx(60, abs=1)),  # database time
        ([(b"retry-after", b"\xd9\xa3")], 0),
        ([(b"retry-after", b"120"), (b"retry-after", b"5")], 0),
    ],
)
def test_any_retried_answer_may_ask_for_a_wait(status: int, headers: Any, seconds: float) -> None:
    (outcome,) = post(lambda _: reply(status, headers=headers))
    assert isinstance(outcome, Retry)
    assert outcome.retry_after == seconds


@pytest.mark.parametrize(
    ("raised", "outcome"),
    [
        (httpx.ConnectError("no route\nto host"), Retry("connection_error", "ConnectError: no route to host")),
        (httpx.RemoteProtocolError(f"{URL}?sig=s3cret"), Retry("connection_error", f"RemoteProtocolError: {URL}?***")),
        (RuntimeError("s3cret"), Retry("delivery_error", "RuntimeError")),
    ],
)
def test_a_fault_on_the_way_is_a_retry_and_no_exception(raised: Exception, outcome: Outcome) -> None:
    def fail(_: httpx.Request) -> httpx.Response:
        raise raised

    assert post(fail, url=URL + "?sig=s3cret") == [outcome]


# -- what is written down ----------------------------------------------------------------------------------------------


def test_the_reason_is_the_status_and_the_start_of_the_answer_on_one_line() -> None:
    (outcome,) = post(lambda _: reply(500, "  Traceback:\r\n\tboom \x1b[31m\x00\u2028" + "x" * 5000))
    assert outcome == Retry("http_500", ("HTTP 500: Traceback: boom [31m " + "x" * 300)[:299] + "…")


def test_a_receiver_that_echoes_what_it_got_puts_no_secret_into_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    url = "https://user:p%40ssw0rd@receiver.example/hook?token=s3cret&x=a%2Fb+c"
    basic = base64.b64encode(b"user:p@ssw0rd").decode()
    echo = f"{url} user:p%40ssw0rd p@ssw0rd token=s3cret&x=a%2Fb+c s3cret a%2Fb+c a/b+c|a/b c {basic} {SECRET}"
    (outcome,) = post(lambda _: reply(400, echo), url=url)
    assert outcome == Retry(
        "http_400", "HTTP 400: https://***@receiver.example/hook?*** *** *** *** *** *** ***|*** *** ***"
    )
    for secret in ("p%40ssw0rd", "p@ssw0rd", "s3cret", "a%2Fb", "a/b", basic, SECRET):
        assert secret not in caplog.text


def test_credentials_in_the_url_become_a_header_and_the_query_is_sent_as_it_is() -> None:
    heads: list[bytes] = []

    async def note(reader: Reader, writer: Writer) -> None:
        heads.append(await read_request(reader))
        writer.write(OK)

    sent = send(note, url="http://user:p%40ss@127.0.0.1:{port}/a%2Fb?x=%2B%20%41+~'&y")
    assert sent.outcome == Delivered()
    assert heads[0].startswith(b"POST /a%2Fb?x=%2B%20%41+~'&y HTTP/1.1\r\n")
    basic = base64.b64encode(b"user:p@ss")
    assert b"\r\nauthorization: Basic " + basic + b"\r\n" in heads[0]
    assert re.search(rb"\r\nhost: 127.0.0.1:\d+\r\n", heads[0])


def test_a_cookie_does_not_come_back() -> None:
    heads: list[bytes] = []

    async def note(reader: Reader, writer: Writer) -> None:
        for _ in range(2):
            heads.append(await read_request(reader))
            writer.write(b"HTTP/1.1 200 OK\r\nSet-Cookie: a=b\r\nContent-Length: 2\r\n\r\nok")

    send(note, times=2)
    assert len(heads) == 2
    assert b"cookie" not in heads[1].lower()


def test_a_payload_of_several_megabytes_is_sent_whole() -> None:
    bodies: list[bytes] = []

    async def note(reader: Reader, writer: Writer) -> None:
        bodies.append((await read_request(reader)).partition(b"\r\n\r\n")[2])
        writer.write(OK)

    payload = '"' + "x" * 3_000_000 + '"'
    assert send(note, payload=payload).outcome == Delivered()
    assert bodies[0] == delivery.body_of(message(payload=payload))


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(st.text(st.characters(codec=None)) | st.binary().map(lambda data: data.decode("utf-8", "replace")))
def test_any_text_becomes_one_short_line_that_a_database_can_store(text: str) -> None:
    line = plain(text)
    assert len(line) <= 300
    assert line == " ".join(line.split())
    assert line.isprintable()
    line.encode()  # no lone surrogate


# -- faults at the wire ------------------------------------------------------------------------------------------------


async def reset(reader: Reader, writer: Writer) -> None:
    await read_request(reader)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


NO_HTTP = {
    "reset": reset,
    "no answer": answering(b""),
    "half a status": answering(b"HTTP/1.1 200 O"),
    "half a header": answering(b"HTTP/1.1 200 OK\r\nContent-Le"),
    "garbage": answering(b"\x00\xff\xfe\n\n"),
    "TLS": answering(b"\x15\x03\x01\x00\x02\x02\x16"),
    "status": answering(b"HTTP/1.1 2000 OK\r\n\r\n"),
    "NUL": answering(b"HTTP/1.1 200 OK\r\nX: a\0b\r\n\r\n"),
    "endless headers": answering(b"HTTP/1.1 200 OK\r\n" + (b"X: " + b"a" * 1000 + b"\r\n") * 5000),
}


@pytest.mark.parametrize("handler", NO_HTTP.values(), ids=NO_HTTP)
def test_what_is_no_http_is_a_retry_and_the_next_post_goes_out(handler: Handler) -> None:
    sent = send(handler, answering(OK), times=2)
    first, second = sent.outcomes
    assert isinstance(first, Retry)
    assert first.code == "connection_error"
    assert first.error == plain(first.error)
    assert (second, sent.connections) == (Delivered(), 2)
    assert sent.seconds < 2


def test_a_port_where_nobody_listens_is_a_retry_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    sent = send(answering(OK), url=f"http://127.0.0.1:{port}/")
    assert isinstance(sent.outcome, Retry)
    assert sent.outcome.code == "connection_error"
    assert "Connect call failed" in (sent.outcome.error or "")
    assert sent.seconds < 2


def test_a_name_that_leads_nowhere_is_a_retry() -> None:
    sent = send(answering(OK), url="http://receiver.invalid/?s3cret")
    assert isinstance(sent.outcome, Retry)
    assert sent.outcome.code == "connection_error"
    assert "receiver.invalid" in (sent.outcome.error or "")
    assert "s3cret" not in (sent.outcome.error or "")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]"])
def test_no_connection_is_made_to_a_private_address_however_it_is_named(host: str) -> None:
    sent = send(answering(OK), url=f"http://{host}:{{port}}/hook", allowed=())
    assert isinstance(sent.outcome, Retry)
    assert sent.outcome.code == "connection_error"
    assert "private address; OUTBOX_ALLOWED_PRIVATE_NETWORKS does not name it" in (sent.outcome.error or "")
    assert sent.connections == 0


BODIES: dict[str, tuple[bytes, Outcome]] = {
    "half": (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc", Delivered()),
    "half a chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", Delivered()),
    "no gzip": (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc", Delivered()),
    "HTTP/1.0": (b"HTTP/1.0 201\r\n\r\n\xff", Delivered()),
    "after hints": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n" + OK, Delivered()),
    "gone, half": (b"HTTP/1.1 410 Gone\r\nContent-Length: 100\r\n\r\nno", Dead("gone", "HTTP 410: no")),
    "error, half": (b"HTTP/1.1 500 Oops\r\nContent-Length: 100\r\n\r\nabc", Retry("http_500", "HTTP 500: abc")),
    "no UTF-8": (b"HTTP/1.1 500 Oops\r\n\r\n\xff\xfe\x00\xed\xa0\x80|", Retry("http_500", "HTTP 500: �� ���|")),
    "upgrade": (b"HTTP/1.1 101 X\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", Retry("http_101", "HTTP 101")),
    "odd reason": (b"HTTP/1.1 200 \xff\xfe\r\nContent-Length: 0\r\n\r\n", Delivered()),
    "204 with a body": (b"HTTP/1.1 204 No\r\nContent-Length: 5\r\n\r\nhello", Delivered()),
    "204 with chunks": (b"HTTP/1.1 204 No\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n", Delivered()),
    "205 with a body": (b"HTTP/1.1 205 Reset\r\nContent-Length: 5\r\n\r\nhello", Delivered()),
    "long header": (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 60_000 + b"\r\nContent-Length: 0\r\n\r\n", Delivered()),
    "odd location": (b"HTTP/1.1 302 X\r\nLocation: http://[\r\n\r\n", Retry("http_302", "HTTP 302")),
}


@pytest.mark.parametrize(("answer", "outcome"), BODIES.values(), ids=BODIES)
def test_the_status_counts_whatever_becomes_of_the_body(answer: bytes, outcome: Outcome) -> None:
    sent = send(answering(answer))
    assert sent.outcome == outcome
    assert sent.seconds < 2


BOMB = gzip.compress(b"\0" * 10_000_000)


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize(("encoding", "chunk"), [("identity", b"x" * 50_000), ("gzip", BOMB)])
def test_of_a_huge_answer_only_the_start_is_read(status: int, encoding: str, chunk: bytes) -> None:
    pushed = 0

    async def flood(reader: Reader, writer: Writer) -> None:
        nonlocal pushed
        await read_request(reader)
        head = f"HTTP/1.1 {status} X\r\nContent-Length: 100000000\r\nContent-Encoding: {encoding}\r\n\r\n"
        writer.write(head.encode())
        while pushed < 100_000_000:
            writer.write(chunk)
            await writer.drain()
            pushed += len(chunk)

    send(answering(OK))  # what is loaded once is not this answer's
    tracemalloc.start()
    try:
        sent = send(flood)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(sent.outcome, Delivered if status == 200 else Retry)
    assert pushed < 30_000_000  # what the system buffers, and no more
    assert peak < 2_500_000
    assert sent.seconds < 2


async def hang(reader: Reader, writer: Writer) -> None:
    await read_request(reader)
    await reader.read()


async def drip(reader: Reader, writer: Writer) -> None:
    await read_request(reader)
    for byte in b"HTTP/1.1 200 OK\r\nX: " + b"y" * 10_000:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("handler", [hang, drip])
def test_one_deadline_is_over_all_that_a_receiver_does(handler: Handler) -> None:
    sent = send(handler, seconds=0.3)
    assert sent.outcome == Retry("timeout", "no answer within 0.3 s")
    assert sent.seconds < 1


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(200, Delivered()), (410, Dead("gone", "HTTP 410: yyy")), (500, Retry("http_500", "HTTP 500: yyy"))],
)
def test_a_body_that_never_ends_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, status: int, outcome: Outcome
) -> None:
    monkeypatch.setattr(delivery, "TAIL_SECONDS", 0.1)

    async def stall(reader: Reader, writer: Writer) -> None:
        await read_request(reader)
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: 1000\r\n\r\nyyy".encode())
        await reader.read()

    sent = send(stall)
    assert sent.outcome == outcome
    assert sent.seconds < 1
    assert send(stall, seconds=0.09).outcome == outcome  # the deadline passes while the body is open


def test_a_connection_serves_one_post_after_another() -> None:
    sent = send(answering(*[OK] * 5), times=5)
    assert (sent.outcomes, sent.connections) == ([Delivered()] * 5, 1)


def test_a_connection_that_its_receiver_closed_since_is_not_used_again() -> None:
    async def close(reader: Reader, writer: Writer) -> None:
        await answering(OK)(reader, writer)
        writer.write_eof()
        assert await reader.read() == b""  # the sender has seen it, and closed its own end

    async def run() -> tuple[list[Outcome], int]:
        outcomes = []
        async with Receiver(close) as receiver:
            sender = WebhookSender({"crm": endpoint(f"http://127.0.0.1:{receiver.port}/")}, AiohttpTransport(LOOPBACK))
            for _ in range(3):
                outcomes.append(await sender.send(message()))
                await receiver.served()
            await sender.aclose()
        return outcomes, receiver.connections

    assert asyncio.run(run()) == ([Delivered()] * 3, 3)


def test_a_post_that_may_have_arrived_is_not_sent_twice_by_one_attempt() -> None:
    got = 0

    async def swallow_the_second(reader: Reader, writer: Writer) -> None:
        nonlocal got
        await answering(OK)(reader, writer)
        await read_request(reader)
        got += 1

    sent = send(swallow_the_second, times=2)
    assert sent.outcomes[0] == Delivered()
    assert isinstance(sent.outcomes[1], Retry)
    assert (got, sent.connections) == (1, 1)


def test_no_proxy_and_no_netrc_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    heads: list[bytes] = []

    async def note(reader: Reader, writer: Writer) -> None:
        heads.append(await read_request(reader))
        writer.write(OK)

    (tmp_path / "netrc").write_text("machine 127.0.0.1 login somebody password s3cret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        assert send(note).outcome == Delivered()
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()
    assert heads[0].startswith(b"POST /hook HTTP/1.1\r\n")
    assert b"authorization" not in heads[0].lower()


def test_a_certificate_that_nobody_vouches_for_is_not_trusted(tmp_path: Path) -> None:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(1), now + timedelta(1))
    encoding, private = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    pem = builder.sign(key, hashes.SHA256()).public_bytes(encoding)
    (tmp_path / "pem").write_bytes(pem + key.private_bytes(encoding, private, serialization.NoEncryption()))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "pem")
    sent = send(answering(OK), url="https://127.0.0.1:{port}/hook", tls=tls)
    assert isinstance(sent.outcome, Retry)
    assert sent.connections == 0
