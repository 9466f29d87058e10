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
# RFC 6052: an IPv4 address in the last 32 bits.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def blocked(address: str, allowed: Sequence[Network]) -> bool:
    """Whether a webhook must not go to this IP address (text; raises ValueError for anything else)."""
    ip: Address = ipaddress.ip_address(address.partition("%")[0])
    forms: list[Address] = [ip]
    if isinstance(ip, ipaddress.IPv6Address):
        inner = (
            ip.ipv4_mapped or ip.sixtofour or (ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF) if ip in _NAT64 else None)
        )
        if inner is not None:
            forms = [inner] if ip.ipv4_mapped else [ip, inner]
    return any(_inside(form) and not any(form in network for network in allowed) for form in forms)


def _inside(ip: Address) -> bool:
    return not ip.is_global or ip.is_multicast or ip == _AZURE_PLATFORM
