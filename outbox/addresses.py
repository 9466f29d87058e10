"""Which addresses a webhook may go to: public ones, and the private networks that the operator names.

Destinations come from the operator, yet a name may lead to an address inside (DNS rebinding), where a request can do
harm: 169.254.169.254 hands out credentials on Azure.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import TypeAlias

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

# Azure's platform endpoint (DNS, health probes, agent): a public address by the registry, an inside one by use.
_AZURE_PLATFORM = ipaddress.IPv4Address("168.63.129.16")
# An IPv4 address in the last 32 bits: NAT64 (RFC 6052), SIIT (RFC 2765), IPv4-compatible (RFC 4291).
_EMBEDDING = [ipaddress.IPv6Network(each) for each in ("64:ff9b::/96", "::ffff:0:0:0/96", "::/96")]
# NAT64 of a network's own (RFC 8215) and site-local (RFC 3879): inside by definition, whatever this Python says.
_INSIDE = [ipaddress.IPv6Network(each) for each in ("64:ff9b:1::/48", "fec0::/10")]


def is_literal(host: str) -> bool:
    """Whether a URL's host is an IP address rather than a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether a URL's host is this machine, by its name or its address."""
    return host == "localhost" or (is_literal(host) and ipaddress.ip_address(host.partition("%")[0]).is_loopback)


def blocked(address: str, allowed: Sequence[Network]) -> bool:
    """Whether a webhook must not go to this IP address (text; raises ValueError for anything else)."""
    ip: Address = ipaddress.ip_address(address.partition("%")[0])
    forms: list[Address] = [ip]
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped:
            forms = [ip.ipv4_mapped]
        elif ip.sixtofour:
            forms.append(ip.sixtofour)
        elif int(ip) > 1 and any(ip in network for network in _EMBEDDING):
            forms.append(ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF))
    return any(_inside(form) and not any(form in network for network in allowed) for form in forms)


def _inside(ip: Address) -> bool:
    return not ip.is_global or ip.is_multicast or ip == _AZURE_PLATFORM or any(ip in network for network in _INSIDE)
