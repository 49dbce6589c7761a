"""Which hosts may be asked for a file: judged by all their addresses, however they are spelled."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import httpx
import pytest

from triptych.errors import RequestError
from triptych.media.address import MAX_ADDRESSES, addresses_of, host_of, is_public

NOT_PUBLIC = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "10.255.255.255",
    "100.64.0.1",
    "100.100.100.200",
    "100.127.255.255",
    "127.0.0.1",
    "127.255.255.254",
    "168.63.129.16",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.19.255.255",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::7f00:1",  # IPv4-compatible
    "::808:808",
    "::ffff:127.0.0.1",  # IPv4-mapped
    "::ffff:10.0.0.1",
    "::ffff:8.8.8.8",
    "::ffff:0:7f00:1",  # IPv4-translated
    "64:ff9b::7f00:1",  # NAT64
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::808:808",  # NAT64 of a local network
    "100::1",
    "2001::1",  # Teredo
    "2001:0:a00:1::",
    "2001:2::1",
    "2001:20::1",
    "2001:db8::1",
    "2002:7f00:1::",  # 6to4
    "2002:808:808::",
    "3fff::1",
    "5f00::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fec0::1",
    "ff02::1",
]
PUBLIC = [
    "1.1.1.1",
    "8.8.8.8",
    "9.255.255.255",
    "11.0.0.0",
    "93.184.216.34",
    "100.63.255.255",
    "100.128.0.0",
    "172.15.255.255",
    "172.32.0.0",
    "192.167.255.255",
    "223.255.255.255",
    "2001:4860:4860::8888",
    "2606:2800:220:1:248:1893:25c8:1946",
    "2a00:1450:4001::1",
    "64:ff9b::808:808",
]


class Names:
    """A resolver with one answer, that counts how often it is asked."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        if not self.addresses:
            raise OSError("no such name")
        return self.addresses


async def asked(host: str, names: Names, allow_private: bool = False) -> list[str]:
    found = await addresses_of(host, 443, names, allow_private, repr(host))
    return [str(address) for address in found]


def host(url: str) -> str:
    return host_of(httpx.URL(url), "the URL")


@pytest.mark.parametrize("text", NOT_PUBLIC)
def test_special_addresses_are_not_public(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", PUBLIC)
def test_global_unicast_addresses_are_public(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", NOT_PUBLIC + PUBLIC)
def test_nothing_is_public_that_python_calls_special(text: str) -> None:
    address = ipaddress.ip_address(text)
    special = address.is_private or address.is_loopback or address.is_link_local or address.is_multicast
    assert not (is_public(address) and special)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://Example.COM/x", "example.com"),
        ("https://example.com./x", "example.com"),
        ("https://bücher.example/", "xn--bcher-kva.example"),
        ("https://my_bucket.example/", "my_bucket.example"),
        ("https://127.0.0.1/", "127.0.0.1"),
        ("https://127.0.0.1./", "127.0.0.1"),
        ("https://127。0。0。1/", "127.0.0.1"),
        ("https://[0:0::1]/", "::1"),
        ("https://[::ffff:127.0.0.1]/", "::ffff:7f00:1"),
        ("https://1.2.3.4.nip.io/", "1.2.3.4.nip.io"),
    ],
)
def test_a_host_has_one_spelling(url: str, expected: str) -> None:
    assert host(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "https:///x",
        "https://./",
        "https://127.1/",
        "https://127.0.1/",
        "https://2130706433/",
        "https://0x7f000001/",
        "https://0x7f.0.0.1/",
        "https://017700000001/",
        "https://0177.0.0.0x1/",
        "https://127.0.0.0x/",
        "https://1.2.3.4.5/",
        "https://example.com../",
        "https://.example.com/",
        "https://exa mple.com/",
        "https://exa%6dple.com/",
        "https://example.com%2f.evil.example/",
        "https://example.com\\.evil.example/",
        "https://[fe80::1%25eth0]/",
        "https://[fe80::1%eth0]/",
        "https://-example.com/",
        "https://" + "a" * 64 + ".com/",
        "https://" + "a." * 127 + "com/",
    ],
)
def test_spellings_that_programs_read_differently_are_refused(url: str) -> None:
    with pytest.raises(RequestError, match="the URL has"):
        host(url)


@pytest.mark.parametrize("text", NOT_PUBLIC)
async def test_a_name_is_judged_by_what_it_resolves_to(text: str) -> None:
    names = Names(text)
    with pytest.raises(RequestError, match=r"media\.allow_private_addresses") as caught:
        await asked("files.example", names)
    assert text not in str(caught.value)
    assert await asked("files.example", names, allow_private=True) == [str(ipaddress.ip_address(text))]


@pytest.mark.parametrize("position", [0, 1, 9])
async def test_one_address_that_is_not_public_condemns_the_host(position: int) -> None:
    addresses = [f"8.8.8.{index}" for index in range(10)]
    addresses[position] = "10.0.0.1"
    with pytest.raises(RequestError, match="not public"):
        await asked("files.example", Names(*addresses))


async def test_an_address_is_judged_without_asking_anyone() -> None:
    names = Names()
    with pytest.raises(RequestError, match=r"'127\.0\.0\.1' is an address that is not public"):
        await asked("127.0.0.1", names)
    assert await asked("8.8.8.8", names) == ["8.8.8.8"]
    assert names.asked == []


async def test_a_name_that_does_not_resolve_reads_like_one_that_is_private() -> None:
    messages = set()
    for names in (Names(), Names("10.0.0.1"), Names("not an address"), Names("fe80::1%eth0")):
        with pytest.raises(RequestError) as caught:
            await asked("files.example", names)
        messages.add(str(caught.value))
    assert len(messages) == 1


async def test_a_name_that_does_not_resolve_is_refused_where_all_addresses_are_allowed() -> None:
    with pytest.raises(RequestError, match=r"'files\.example' does not resolve"):
        await asked("files.example", Names(), allow_private=True)


async def test_addresses_keep_their_order_without_doubles_up_to_a_limit() -> None:
    many = [f"8.8.8.{index // 2}" for index in range(40)]
    names = Names(*many)
    assert await asked("files.example", names) == [f"8.8.8.{index}" for index in range(MAX_ADDRESSES)]
    assert names.asked == [("files.example", 443)]
