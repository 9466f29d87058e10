"""Where a webhook may go: to public addresses, and to the private networks that the operator names."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from typing import Any

import pytest

from outbox.addresses import Network, blocked
from outbox.message import Delivered, Retry
from outbox.transport import _GuardedResolver

from .support import LOOPBACK, OK, answering, send


def networks(*texts: str) -> tuple[Network, ...]:
    return tuple(ipaddress.ip_network(text) for text in texts)


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",  # Azure's metadata service hands out credentials
        "168.63.129.16",  # Azure's platform endpoint, public by the registry
        "0.0.0.0", "0.1.2.3",  # Linux takes them for this host
        "127.0.0.1", "127.255.0.1", "::1", "::",
        "10.0.0.1", "172.16.0.1", "172.31.255.254", "192.168.1.1", "fc00::1", "fd12:3456::1",
        "100.64.0.1", "100.127.255.254",  # carrier-grade NAT, and inside of some clouds
        "192.0.0.1", "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "2001:db8::1", "100::1",
        "224.0.0.1", "239.1.1.1", "ff02::1", "ff0e::1",  # multicast
        "240.0.0.1", "255.255.255.255",
        "fe80::1", "fe80::1%eth0", "fe80::1%1",
        "::ffff:169.254.169.254", "::ffff:10.0.0.1", "::ffff:7f00:1", "::ffff:168.63.129.16",  # IPv4 in IPv6 clothes
        "64:ff9b::169.254.169.254", "64:ff9b::168.63.129.16", "2002:a9fe:a9fe::1", "2002:7f00:1::",  # NAT64, 6to4
        "64:ff9b:1::a9fe:a9fe", "::ffff:0:169.254.169.254", "::169.254.169.254", "fec0::1", "fecf::1",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",  # Teredo
    ],
)  # fmt: skip
def test_an_address_inside_is_blocked(address: str) -> None:
    assert blocked(address, ())


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "1.1.1.1", "172.15.0.1", "172.32.0.1", "100.63.0.1", "100.128.0.1", "168.63.129.15", "169.253.0.1",
     "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"],
)  # fmt: skip
def test_a_public_address_is_not(address: str) -> None:
    assert not blocked(address, ())


@pytest.mark.parametrize(
    ("address", "allowed", "is_blocked"),
    [
        ("127.0.0.1", ["127.0.0.0/8"], False),
        ("127.0.0.1", ["127.0.0.1/32"], False),
        ("127.0.0.2", ["127.0.0.1/32"], True),
        ("::ffff:127.0.0.1", ["127.0.0.0/8"], False),
        ("::1", ["127.0.0.0/8"], True),
        ("::1", ["10.0.0.0/8", "::1/128"], False),
        ("10.1.2.3", ["10.1.0.0/16"], False),
        ("10.2.0.1", ["10.1.0.0/16"], True),
        ("169.254.169.254", ["10.0.0.0/8", "192.168.0.0/16"], True),
        ("168.63.129.16", ["168.63.129.16/32"], False),
        ("64:ff9b::10.1.2.3", ["64:ff9b::/96"], True),  # the IPv4 address behind it counts
        ("64:ff9b::10.1.2.3", ["10.1.0.0/16"], False),
    ],
)
def test_an_allowed_network_opens_itself_and_nothing_else(address: str, allowed: list[str], is_blocked: bool) -> None:
    assert blocked(address, networks(*allowed)) is is_blocked


@pytest.mark.parametrize("text", ["", "localhost", "1.2.3", "2130706433", "127.0.0.1:80", "١٢٧.0.0.1"])
def test_what_is_no_address_is_never_let_through(text: str) -> None:
    with pytest.raises(ValueError):
        blocked(text, LOOPBACK)


def name_server(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let every name lead to `addresses`."""

    def getaddrinfo(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_a_name_that_leads_to_a_blocked_address_is_never_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    name_server(monkeypatch, "127.0.0.1")
    sent = send(answering(OK), url="http://receiver.example:{port}/", allowed=networks("10.0.0.0/8"))
    assert isinstance(sent.outcome, Retry)
    assert sent.connections == 0


def test_a_name_that_leads_to_an_allowed_address_is(monkeypatch: pytest.MonkeyPatch) -> None:
    name_server(monkeypatch, "127.0.0.1")
    sent = send(answering(OK), url="http://receiver.example:{port}/")
    assert (sent.outcome, sent.connections) == (Delivered(), 1)


def test_of_a_names_addresses_only_those_not_blocked_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    name_server(monkeypatch, "169.254.169.254", "8.8.8.8", "10.0.0.1", "127.0.0.1")

    async def resolve(allowed: tuple[Network, ...]) -> list[str]:
        return [each["host"] for each in await _GuardedResolver(allowed).resolve("receiver.example", 80)]

    assert asyncio.run(resolve(())) == ["8.8.8.8"]
    assert asyncio.run(resolve(LOOPBACK)) == ["8.8.8.8", "127.0.0.1"]
    name_server(monkeypatch, "169.254.169.254", "10.0.0.1")
    with pytest.raises(OSError, match=r"receiver\.example .*OUTBOX_ALLOWED_PRIVATE_NETWORKS"):
        asyncio.run(resolve(LOOPBACK))


def test_a_name_server_that_does_not_answer_takes_no_longer_than_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    found = threading.Event()

    def getaddrinfo(*_: Any, **__: Any) -> list[Any]:
        found.wait(10)
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    timer = threading.Timer(0.8, found.set)  # asyncio.run waits for the thread that asks
    timer.start()
    sent = send(answering(OK), url="http://receiver.example:{port}/", seconds=0.2)
    assert sent.outcome == Retry("timeout", "no answer within 0.2 s")
    assert sent.seconds < 0.7
    timer.join()
