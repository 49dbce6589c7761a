"""Downloads: whom they ask, how far they follow, what they take, and that they leave no connection behind."""

from __future__ import annotations

import asyncio
import gzip
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import h11
import httpx
import pytest

from triptych import __version__
from triptych.config.schema import MediaConfig
from triptych.errors import CapacityError, ConfigError, RequestError
from triptych.media import fetch
from triptych.media.fetch import Fetcher

PUBLIC = "93.184.216.34"
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Server:
    """A loopback server that answers each path with given bytes, and knows who is connected."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes | Answer] = {}
        self.requests: list[bytes] = []
        self.connected = 0
        self.total = 0
        self.arrived = asyncio.Event()
        self.idle = asyncio.Event()
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connected += 1
        self.total += 1
        self.idle.clear()
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head)
            self.arrived.set()
            answer = self.answers[head.split()[1].decode()]
            if isinstance(answer, bytes):
                writer.write(answer)
            else:
                talking = asyncio.ensure_future(answer(writer))
                leaving = asyncio.ensure_future(reader.read())
                await asyncio.wait((talking, leaving), return_when=asyncio.FIRST_COMPLETED)
                for task in (talking, leaving):
                    task.cancel()
                await asyncio.gather(talking, leaving, return_exceptions=True)
        except (OSError, asyncio.IncompleteReadError):
            self.arrived.set()
        finally:
            writer.close()
            self.connected -= 1
            if not self.connected:
                self.idle.set()

    async def left_alone(self) -> None:
        async with asyncio.timeout(5):
            await self.idle.wait()


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server()
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    server.port = listener.sockets[0].getsockname()[1]
    async with listener:
        yield server
        listener.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as one:
        yield one
        if one.total:
            await one.left_alone()


def open_config(**changes: Any) -> MediaConfig:
    defaults: dict[str, Any] = {"allow_http": True, "allow_private_addresses": True, "fetch_timeout_s": 5.0}
    return MediaConfig(**(defaults | changes))


@asynccontextmanager
async def fetching(config: MediaConfig, *args: Any) -> AsyncIterator[Fetcher]:
    fetcher = Fetcher(config, *args)
    yield fetcher
    fetcher.close()


async def fetched(server: Server, path: str = "/x", **changes: Any) -> bytes:
    async with fetching(open_config(**changes)) as fetcher:
        return await fetcher.fetch(f"http://127.0.0.1:{server.port}{path}")


async def refused(server: Server, path: str = "/x", **changes: Any) -> str:
    with pytest.raises(RequestError) as caught:
        await fetched(server, path, **changes)
    return str(caught.value)


def response(body: bytes = b"", status: str = "200 OK", length: int | None = None, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def redirect(location: str, status: str = "302 Found") -> bytes:
    return response(b"moved", status, Location=location)


class Diverted:
    """Connections by address, led to loopback servers: what the public internet is to these tests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **servers: Server) -> None:
        self.connections: list[tuple[str, int, str | None]] = []
        self.names: dict[str, Sequence[str]] = {}
        self.servers = {address.replace("_", "."): server for address, server in servers.items()}
        self._connect = asyncio.open_connection
        monkeypatch.setattr(asyncio, "open_connection", self.connect)

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        if host not in self.names:
            raise socket.gaierror("no such name")
        return self.names[host]

    async def connect(self, host: str, port: int, **options: Any) -> Any:
        self.connections.append((host, port, options["server_hostname"]))
        if host not in self.servers:
            raise ConnectionRefusedError
        return await self._connect("127.0.0.1", self.servers[host].port, **options)


async def test_a_file_is_downloaded_byte_by_byte(server: Server) -> None:
    body = bytes(range(256)) * 4000
    server.answers["/a%20b?c=d"] = response(body)
    assert await fetched(server, "/a b?c=d#fragment") == body
    head = server.requests[0].decode()
    assert head == (
        f"GET /a%20b?c=d HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nUser-Agent: triptych/{__version__}\r\n"
        "Accept: */*\r\nAccept-Encoding: identity\r\nConnection: close\r\n\r\n"
    )


async def test_bodies_may_be_chunked_or_end_with_the_connection(server: Server) -> None:
    server.answers["/chunked"] = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )
    server.answers["/old"] = b"HTTP/1.0 200 OK\r\n\r\nabcde"
    server.answers["/hint"] = b"HTTP/1.1 103 Early Hints\r\n\r\n" + response(b"abcde")
    for path in server.answers:
        assert await fetched(server, path) == b"abcde"


async def test_the_system_resolver_is_asked_where_no_other_is_given(server: Server) -> None:
    server.answers["/x"] = response(b"abc")
    async with fetching(open_config()) as fetcher:
        assert await fetcher.fetch(f"http://localhost:{server.port}/x") == b"abc"


async def test_connections_go_to_the_address_that_was_judged(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that changes its address between check and connection, as in DNS rebinding, has no second chance."""
    answers = [["127.0.0.1"], ["10.0.0.1"]]

    async def rebinding(host: str, port: int) -> Sequence[str]:
        return answers.pop(0)

    def unasked(*args: Any, **options: Any) -> Any:
        raise AssertionError(f"resolved again: {args}")

    monkeypatch.setattr(socket, "getaddrinfo", unasked)
    server.answers["/x"] = response(b"abc")
    async with fetching(open_config(), rebinding) as fetcher:
        assert await fetcher.fetch(f"http://Rebind.Example.:{server.port}/x") == b"abc"
    assert answers == [["10.0.0.1"]]
    assert f"\r\nHost: rebind.example:{server.port}\r\n".encode() in server.requests[0]


@pytest.mark.parametrize("addresses", [["10.0.0.1"], [PUBLIC, "127.0.0.1"], ["::ffff:127.0.0.1"], ["169.254.169.254"]])
async def test_no_connection_is_made_where_an_address_is_not_public(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Diverted(monkeypatch)
    net.names["files.example"] = addresses
    async with fetching(MediaConfig(), net.resolve) as fetcher:
        with pytest.raises(RequestError, match=r"'files\.example' does not resolve, or resolves to"):
            await fetcher.fetch("https://files.example/x")
    assert net.connections == []


async def test_https_carries_the_name_and_the_address_is_the_judged_one(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Diverted(monkeypatch)
    net.names["files.example"] = ["2606:2800:220:1::1", PUBLIC]
    async with fetching(MediaConfig(), net.resolve) as fetcher:
        with pytest.raises(RequestError, match=r"'files\.example' cannot be connected to with TLS"):
            await fetcher.fetch("https://files.example:8443/x")
    assert net.connections == [("2606:2800:220:1::1", 8443, "files.example"), (PUBLIC, 8443, "files.example")]


async def test_the_next_address_is_tried_when_one_does_not_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Diverted(monkeypatch, **{PUBLIC.replace(".", "_"): server})
    net.names["files.example"] = ["2606:2800:220:1::1", PUBLIC]
    server.answers["/x"] = response(b"abc")
    async with fetching(MediaConfig(allow_http=True), net.resolve) as fetcher:
        assert await fetcher.fetch("http://files.example/x") == b"abc"
    assert b"\r\nHost: files.example\r\n" in server.requests[0]


async def test_redirects_are_followed_up_to_the_limit(server: Server) -> None:
    server.answers |= {
        "/1": redirect("/2", "301 Moved Permanently"),
        "/2": redirect(f"http://127.0.0.1:{server.port}/3", "307 Temporary Redirect"),
        "/3": redirect("4?q#f", "308 Permanent Redirect"),
        "/4?q": response(b"abc"),
    }
    assert await fetched(server, "/1") == b"abc"
    assert "'127.0.0.1' redirects more than 2 times (media.max_redirects)" in await refused(
        server, "/1", max_redirects=2
    )
    server.requests.clear()
    await refused(server, "/1", max_redirects=0)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("http://127.0.0.1/", "an address that is not public"),
        ("http://[::1]/", "an address that is not public"),
        ("http://169.254.169.254/latest/meta-data/", "an address that is not public"),
        ("//10.0.0.1/", "an address that is not public"),
        ("http://inside.example/", "resolves to an address that is not public"),
        ("http://127.1/", "a number for a host"),
        ("http://0x7f000001/", "a number for a host"),
        ("http://user:pass@files.example/", "user name or password"),
        ("file:///etc/passwd", "scheme 'file'"),
        ("data:,abc", "scheme 'data'"),
        ("ftp://files.example/", "scheme 'ftp'"),
        ("gopher://127.0.0.1:6379/_x", "scheme 'gopher'"),
        ("http://[::1", "not a URL"),
        ("http://files.example:99999/", "a port that"),
        ("http://other.example/", "not one of media.allowed_domains"),
    ],
)
async def test_each_redirect_is_judged_like_the_first_url(
    server: Server, monkeypatch: pytest.MonkeyPatch, location: str, message: str
) -> None:
    net = Diverted(monkeypatch, **{PUBLIC.replace(".", "_"): server})
    net.names |= {"files.example": [PUBLIC], "inside.example": ["10.0.0.1"], "other.example": [PUBLIC]}
    server.answers["/x"] = redirect(location)
    domains = ("files.example",) if "other" in location else ()
    async with fetching(MediaConfig(allow_http=True, allowed_domains=domains), net.resolve) as fetcher:
        with pytest.raises(RequestError, match=r"'files\.example' redirects") as caught:
            await fetcher.fetch("http://files.example/x")
    assert message in str(caught.value)
    told = [
        part
        for part in ("127.", "::1", "169.254", "10.0.", "0x7f", "inside", "other", "passwd")
        if part in str(caught.value)
    ]
    assert not told
    assert [address for address, *_ in net.connections] == [PUBLIC]


async def test_https_is_not_left_for_http(monkeypatch: pytest.MonkeyPatch, trust: Trust) -> None:
    async with serving(trust.server("files.example")) as server:
        net = Diverted(monkeypatch, **{PUBLIC.replace(".", "_"): server})
        net.names["files.example"] = [PUBLIC]
        server.answers["/x"] = redirect("http://files.example/y")
        async with fetching(MediaConfig(), net.resolve, trust.client) as fetcher:
            with pytest.raises(RequestError, match=r"scheme 'http'; only https: .*media\.allow_http"):
                await fetcher.fetch("https://files.example/x")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://files.example/", "media.allow_http"),
        ("https://user@files.example/", "user name or password"),
        ("https://user:pass@files.example/", "user name or password"),
        ("https://files.example\\@evil.example/", "user name or password"),
        ("https:///x", "no host"),
        ("https:files.example", "no host"),
        ("https://127.1/", "a number for a host"),
        ("https://files.example:0/", "a port that"),
        ("https://files.example:65536/", "a port that"),
        ("https://files.example:http/", "malformed"),
        ("https://files.example/\n", "malformed"),
        ("https://files.example/\ud800", "malformed"),
        ("https://[::1/", "malformed"),
        ("https://" + "a" * 70000, "has 70008 characters, and at most 65536 can be fetched"),
    ],
)
async def test_urls_that_cannot_be_fetched_are_refused_before_anyone_is_asked(url: str, message: str) -> None:
    async def unasked(host: str, port: int) -> Sequence[str]:
        raise AssertionError(host)

    async with fetching(MediaConfig(), unasked) as fetcher:
        with pytest.raises(RequestError) as caught:
            await fetcher.fetch(url)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("example.com", True),
        ("EXAMPLE.com.", True),
        ("a.b.example.com", True),
        ("bücher.example", True),
        ("93.184.216.34", True),
        ("notexample.com", False),
        ("example.com.evil.test", False),
        ("com", False),
        ("84.216.34", False),
        ("1.93.184.216.34", False),
    ],
)
async def test_allowed_domains_stand_for_their_subdomains(
    monkeypatch: pytest.MonkeyPatch, host: str, allowed: bool
) -> None:
    net = Diverted(monkeypatch)
    config = MediaConfig(allowed_domains=("Example.com", "bücher.example", PUBLIC))
    async with fetching(config, net.resolve) as fetcher:
        with pytest.raises(RequestError) as caught:
            await fetcher.fetch(f"https://{host}/")
    assert allowed == any(word in str(caught.value) for word in ("does not resolve", "cannot be connected"))


@pytest.mark.parametrize(
    "entry", ["", "*.example.com", "https://example.com", "example.com/x", "example.com:1", "127.1"]
)
def test_an_entry_of_allowed_domains_is_a_host(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"media\.allowed_domains\[1\]"):
        Fetcher(MediaConfig(allowed_domains=("example.com", entry)))


@pytest.mark.parametrize("status", ["204 No Content", "206 Partial Content", "304 Not Modified", "403 Secret", "500 x"])
async def test_other_statuses_than_200_are_named_without_the_answer(server: Server, status: str) -> None:
    server.answers["/x"] = response(b"" if status[0] in "23" and "206" not in status else b"secret", status)
    message = await refused(server)
    assert f"'127.0.0.1' answered {status[:3]} (" in message and "ecret" not in message


async def test_a_redirect_that_leads_nowhere_is_an_answer_that_is_not_200(server: Server) -> None:
    server.answers["/x"] = response(b"", "302 Found")
    assert "answered 302 (Found)" in await refused(server)


async def test_the_size_is_limited_to_the_byte_however_the_body_is_framed(server: Server) -> None:
    for size in (1000, 1001):
        body = bytes(size)
        server.answers["/known"] = response(body)
        server.answers["/old"] = b"HTTP/1.0 200 OK\r\n\r\n" + body
        server.answers["/chunked"] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (
            size,
            body,
        )
        for path in server.answers:
            if size == 1000:
                assert await fetched(server, path, max_bytes=1000) == body
            else:
                assert "larger than 1000 B (media.max_bytes)" in await refused(server, path, max_bytes=1000)


async def test_a_length_beyond_the_limit_is_refused_before_the_body(server: Server) -> None:
    async def announce(writer: asyncio.StreamWriter) -> None:
        writer.write(response(length=10**15))
        await asyncio.Event().wait()

    server.answers["/x"] = announce
    with pytest.raises(RequestError, match=r"media\.max_bytes") as caught:
        await fetched(server)
    assert caught.value.code == "media_too_large"


async def test_an_endless_body_is_left_at_the_limit(server: Server) -> None:
    sent = 0

    async def endless(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + bytes(65536) + b"\r\n")
            sent += 65536
            await writer.drain()

    server.answers["/x"] = endless
    assert "media.max_bytes" in await refused(server, max_bytes=100_000)
    await server.left_alone()
    assert sent < 50 * 2**20


@pytest.mark.parametrize("encoding", ["gzip", "GZip", "deflate, gzip", "br", "zstd", "identity, gzip"])
async def test_compressed_bodies_are_refused_unread(server: Server, encoding: str) -> None:
    server.answers["/x"] = response(gzip.compress(bytes(10**6)), Content_Encoding=encoding)
    assert "compressed" in await refused(server)


async def test_a_compressed_file_that_is_just_a_file_comes_as_it_is(server: Server) -> None:
    body = gzip.compress(b"abc")
    server.answers["/x"] = response(body, Content_Encoding="identity", Content_Type="application/gzip")
    assert await fetched(server) == body


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"not HTTP at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nshort!",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nshort\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
    ],
)
async def test_broken_answers_are_refused(server: Server, answer: bytes) -> None:
    server.answers["/x"] = answer
    assert "before the file was complete" in await refused(server)


async def test_bytes_beyond_the_announced_length_are_not_taken(server: Server) -> None:
    server.answers["/x"] = response(b"abc") + b"more"
    assert await fetched(server) == b"abc"


async def test_a_dropped_connection_is_refused(server: Server) -> None:
    async def drop(writer: asyncio.StreamWriter) -> None:
        writer.write(response(b"abc", length=100))
        await writer.drain()
        writer.transport.abort()

    server.answers["/x"] = drop
    assert "before the file was complete" in await refused(server)


async def test_a_closed_port_is_refused() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with fetching(open_config()) as fetcher:
            with pytest.raises(RequestError, match=r"'127\.0\.0\.1' cannot be connected to"):
                await fetcher.fetch(f"http://127.0.0.1:{unused.getsockname()[1]}/")


async def trickle_headers(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X: y\r\n")
        await asyncio.sleep(0.02)


async def trickle_hints(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
        await asyncio.sleep(0.02)


async def trickle_body(writer: asyncio.StreamWriter) -> None:
    writer.write(response(length=10_000))
    while True:
        writer.write(b"x")
        await asyncio.sleep(0.02)


async def say_nothing(writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


SLOW = pytest.mark.parametrize("answer", [say_nothing, trickle_headers, trickle_hints, trickle_body])


@SLOW
async def test_the_deadline_holds_over_everything(server: Server, answer: Answer) -> None:
    server.answers["/x"] = answer
    assert "took longer than 0.2 s (media.fetch_timeout_s)" in await refused(server, fetch_timeout_s=0.2)
    await server.left_alone()


async def test_the_deadline_holds_over_redirects(server: Server) -> None:
    async def late(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.15)
        writer.write(redirect("/x"))

    server.answers["/x"] = late
    assert "fetch_timeout_s" in await refused(server, fetch_timeout_s=0.3, max_redirects=100)


async def test_the_deadline_holds_over_a_slow_resolver() -> None:
    async def never(host: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return []

    async with fetching(open_config(fetch_timeout_s=0.1), never) as fetcher:
        with pytest.raises(RequestError, match="fetch_timeout_s"):
            await fetcher.fetch("https://files.example/")


@SLOW
async def test_a_cancelled_fetch_leaves_no_connection(server: Server, answer: Answer) -> None:
    server.answers["/x"] = answer
    task = asyncio.ensure_future(fetched(server))
    await server.arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await server.left_alone()


async def test_no_connection_outlives_its_fetch(server: Server) -> None:
    async def linger(writer: asyncio.StreamWriter) -> None:
        writer.write(response(b"abc", Connection="keep-alive"))
        await asyncio.Event().wait()

    server.answers["/x"] = linger
    async with fetching(open_config()) as fetcher:
        for _ in range(3):
            assert await fetcher.fetch(f"http://127.0.0.1:{server.port}/x") == b"abc"
            await server.left_alone()
    assert server.total == 3


async def test_no_more_than_so_many_fetches_run_at_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MAX_FETCHES", 2)
    gate, two, most = asyncio.Event(), asyncio.Event(), 0

    async def wait(writer: asyncio.StreamWriter) -> None:
        nonlocal most
        most = max(most, server.connected)
        if server.connected == 2:
            two.set()
        await gate.wait()
        writer.write(response(b"abc"))

    server.answers["/x"] = wait
    async with fetching(open_config()) as fetcher:
        tasks = [asyncio.ensure_future(fetcher.fetch(f"http://127.0.0.1:{server.port}/x")) for _ in range(6)]
        await two.wait()
        gate.set()
        assert await asyncio.gather(*tasks) == [b"abc"] * 6
    assert most == 2


async def test_a_fetch_that_never_begins_is_no_fault_of_the_request(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "MAX_FETCHES", 1)
    server.answers["/x"] = say_nothing
    async with fetching(open_config(fetch_timeout_s=0.2)) as fetcher:
        url = f"http://127.0.0.1:{server.port}/x"
        async with asyncio.TaskGroup() as group:
            first = group.create_task(outcome(fetcher, url))
            await server.arrived.wait()
            rest = [group.create_task(outcome(fetcher, url)) for _ in range(3)]
        kinds = [type(task.result()) for task in (first, *rest)]
    assert kinds[0] is RequestError and CapacityError in kinds
    assert next(task.result() for task in rest if isinstance(task.result(), CapacityError)).status == 503


async def outcome(fetcher: Fetcher, url: str) -> Any:
    try:
        return await fetcher.fetch(url)
    except (RequestError, CapacityError) as error:
        return error


async def test_proxies_of_the_environment_are_not_used(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server.answers["/x"] = response(b"abc")
    assert await fetched(server) == b"abc"


async def test_nothing_a_server_sets_comes_back_to_it(server: Server) -> None:
    server.answers["/x"] = response(b"abc", Set_Cookie="id=1; Path=/")
    async with fetching(open_config()) as fetcher:
        for _ in range(2):
            await fetcher.fetch(f"http://127.0.0.1:{server.port}/x")
    assert server.requests[0] == server.requests[1]


class Trust:
    """A certificate authority of its own: contexts of servers that it vouches for, and of a client that trusts it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._openssl("req", "-x509", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")
        self.client = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        self.names: list[str | None] = []

    def _openssl(self, command: str, *args: str) -> None:
        new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
        subprocess.run(["openssl", command, *new, *args], cwd=self._folder, check=True, capture_output=True, timeout=30)

    def server(self, name: str) -> ssl.SSLContext:
        kind = "IP" if name[-1].isdigit() else "DNS"
        self._openssl(
            *("req", "-x509", "-subj", f"/CN={name}", "-addext", f"subjectAltName={kind}:{name}"),
            *("-CA", "ca.pem", "-CAkey", "ca.key", "-keyout", "key.pem", "-out", "cert.pem"),
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._folder / "cert.pem", self._folder / "key.pem")

        def note(_: ssl.SSLObject, name: str | None, __: ssl.SSLContext) -> None:
            self.names.append(name)

        context.sni_callback = note
        return context


@pytest.fixture
def trust(tmp_path: Path) -> Trust:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    return Trust(tmp_path)


async def to_loopback(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


@pytest.mark.parametrize("name", ["files.example", "127.0.0.1"])
async def test_the_certificate_is_checked_against_the_name_not_the_address(trust: Trust, name: str) -> None:
    async with serving(trust.server(name)) as server:
        server.answers["/x"] = response(b"abc")
        async with fetching(open_config(), to_loopback, trust.client) as fetcher:
            assert await fetcher.fetch(f"https://{name}:{server.port}/x") == b"abc"
            with pytest.raises(RequestError, match=r"'other\.example' has no certificate that is trusted"):
                await fetcher.fetch(f"https://other.example:{server.port}/x")
        await server.left_alone()
        assert trust.names == [None if name[0] == "1" else name, "other.example"]
        assert [f"Host: {name}:{server.port}".encode() in head for head in server.requests] == [True]


async def test_an_unknown_authority_is_not_trusted(trust: Trust) -> None:
    async with serving(trust.server("files.example")) as server:
        async with fetching(open_config(), to_loopback) as fetcher:
            with pytest.raises(RequestError, match="no certificate that is trusted"):
                await fetcher.fetch(f"https://files.example:{server.port}/x")


async def test_a_server_without_tls_is_refused() -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(response(b"abc"))
        writer.close()

    listener = await asyncio.start_server(plain, "127.0.0.1", 0)
    async with listener, fetching(open_config(), to_loopback) as fetcher:
        with pytest.raises(RequestError, match="cannot be connected to with TLS"):
            await fetcher.fetch(f"https://files.example:{listener.sockets[0].getsockname()[1]}/x")


@SLOW
async def test_a_cancelled_fetch_over_tls_leaves_no_connection(trust: Trust, answer: Answer) -> None:
    async with serving(trust.server("files.example")) as server:
        server.answers["/x"] = answer
        async with fetching(open_config(), to_loopback, trust.client) as fetcher:
            task = asyncio.ensure_future(fetcher.fetch(f"https://files.example:{server.port}/x"))
            await server.arrived.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await server.left_alone()


@pytest.mark.parametrize("ending", ["deadline", "cancel"])
async def test_a_handshake_that_hangs_leaves_no_connection(ending: str) -> None:
    begun, gone = asyncio.Event(), asyncio.Event()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(1000):
                begun.set()
        except OSError:
            begun.set()
        finally:
            writer.close()
            gone.set()

    listener = await asyncio.start_server(mute, "127.0.0.1", 0)
    async with listener, fetching(open_config(fetch_timeout_s=0.3), to_loopback) as fetcher:
        url = f"https://files.example:{listener.sockets[0].getsockname()[1]}/x"
        task = asyncio.ensure_future(outcome(fetcher, url))
        await begun.wait()
        if ending == "cancel":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            assert isinstance(await task, RequestError)
        async with asyncio.timeout(5):
            await gone.wait()
        listener.close()


def test_the_request_is_one_that_h11_sends_whatever_the_url_holds() -> None:
    peer = h11.Connection(our_role=h11.CLIENT)
    url = httpx.URL("https://files.example/ü \"<>'%zz?q=ä b|{}")
    assert peer.send(fetch._request(url, "files.example"))
