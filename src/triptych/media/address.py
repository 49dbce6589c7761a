"""Whether a host may be asked for a file: by every address it resolves to, never by how it is spelled.

Whoever connects does so to an address from here, not to the name, which could resolve to another one a moment later.
"""

from __future__ import annotations

import ipaddress
import logging
import re
from collections.abc import Awaitable, Callable, Sequence

import httpx

from triptych.errors import RequestError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]  # host and port -> addresses; raises OSError

MAX_ADDRESSES = 8  # of one host that are tried; all are judged

log = logging.getLogger(__name__)

# Registries: IANA special-purpose addresses (RFC 6890 and later), multicast, and one cloud's host agent.
_SPECIAL_IPV4 = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
_GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")
_SPECIAL_IPV6 = tuple(
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments, Teredo among them
        "2001:db8::/32",
        "2002::/16",  # 6to4: wraps any IPv4 address
        "3fff::/20",
    )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"\d+|0x[0-9a-f]*")


def is_public(address: Address) -> bool:
    """Whether an address is one of the public internet. An IPv6 address that wraps an IPv4 one is not, but for NAT64,
    through which hosts without IPv4 reach it: there the wrapped address counts."""
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _SPECIAL_IPV4)
    if address in _NAT64:
        return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return address in _GLOBAL_IPV6 and not any(address in network for network in _SPECIAL_IPV6)


def host_of(url: httpx.URL, named: str) -> str:
    """The host of a URL in ASCII and lower case, without a trailing dot; IPv6 without brackets.

    Raises RequestError where there is none, and for spellings that programs read differently: numbers in place of an
    IPv4 address (`127.1`, `0x7f000001`), zone ids, characters that no name has. Errors call the URL `named`.
    """
    host = url.raw_host.decode("ascii").removesuffix(".")
    try:
        return str(_parsed(host))
    except ValueError:
        labels = host.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        raise RequestError(f"{named} has a number for a host; write IPv4 addresses as four decimal numbers")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise RequestError(f"{named} has {'a host that is no name' if host else 'no host'}; write https://host/path")
    return host


async def addresses_of(host: str, port: int, resolve: Resolver, allow_private: bool, named: str) -> list[Address]:
    """The addresses of a host in the order to try them, at most MAX_ADDRESSES and at least one.

    `host` comes from `host_of`, and is called `named` in errors. Raises RequestError when the name does not resolve
    or when any of its addresses is not public, unless `allow_private`: in one wording, so that answers tell nothing
    about names that only this machine's network knows.
    """
    try:
        addresses, what = [_parsed(host)], "is"
    except ValueError:
        addresses, what = await _resolved(host, port, resolve), "does not resolve, or resolves to"
    private = [] if allow_private else [address for address in addresses if not is_public(address)]
    if private:
        log.info("host %s is refused: %s is not a public address", host, private[0])
    if private or (not addresses and not allow_private):
        reason = f"{what} an address that is not public (media.allow_private_addresses is off)"
        raise RequestError(f"{named} {reason}; check the URL, or send the file as a data: URL")
    if not addresses:
        raise RequestError(f"{named} does not resolve; check the URL, or send the file as a data: URL")
    return addresses[:MAX_ADDRESSES]


async def _resolved(host: str, port: int, resolve: Resolver) -> list[Address]:
    try:
        return [_parsed(text) for text in dict.fromkeys(await resolve(host, port))]
    except (OSError, ValueError) as error:
        log.info("host %s does not resolve: %s", host, error)
        return []


def _parsed(text: str) -> Address:
    """Raises ValueError also for a zone id: it names a link of this machine."""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id is not None:
        raise ValueError(f"{text!r} has a zone id")
    return address
