"""Downloads of media: over HTTPS, from hosts that may be asked, within a size and a time.

Each request has a connection of its own, to an address that was judged; TLS and the Host header carry the name. There
are no proxies, cookies, credentials or kept connections: nothing of one request reaches another.
"""

from __future__ import annotations

import asyncio
import io
import logging
import socket
import ssl
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import responses

import h11
import httpx

from triptych import __version__
from triptych.config.schema import MediaConfig
from triptych.config.units import format_bytes
from triptych.errors import CapacityError, ConfigError, RequestError
from triptych.media.address import Resolver, addresses_of, host_of

MAX_FETCHES = 16  # at once; each may hold max_bytes
MAX_HEADER_BYTES = 65536
READ_BYTES = 262144
LONGEST_URL = 65536  # that httpx reads
REDIRECTS = (301, 302, 303, 307, 308)
PORTS = {"http": 80, "https": 443}

log = logging.getLogger(__name__)


class Fetcher:
    """Fetches files for all requests of a server. `resolve` and `tls` stand in for those of the system, in tests."""

    def __init__(self, config: MediaConfig, resolve: Resolver | None = None, tls: ssl.SSLContext | None = None) -> None:
        """Raises ConfigError where an entry of `allowed_domains` is not the name of a host."""
        self._config = config
        self._schemes = ("https", "http") if config.allow_http else ("https",)
        self._domains = tuple(_domain(text, index) for index, text in enumerate(config.allowed_domains))
        self._tls = tls or httpx.create_ssl_context()
        self._slots = asyncio.Semaphore(MAX_FETCHES)
        # Threads of their own: slow name servers delay nothing but fetches.
        self._threads = ThreadPoolExecutor(MAX_FETCHES, thread_name_prefix="resolve")
        self._resolve = resolve or self._ask_system

    async def fetch(self, text: str) -> bytes:
        """The file behind a URL.

        Raises RequestError when the URL, its host, a redirect or the answer is refused, or time runs out;
        CapacityError when no download could begin within the time. Cancelled, it drops its connection.
        """
        if len(text) > LONGEST_URL:
            raise RequestError(
                f"the URL has {len(text)} characters, and at most {LONGEST_URL} can be fetched; send the file as a "
                "data: URL"
            )
        try:
            url = httpx.URL(text)
        except (httpx.InvalidURL, ValueError):
            raise RequestError("the URL is malformed; write https://host/path") from None
        named = repr(self._check(url, "the URL"))
        try:
            async with asyncio.timeout(self._config.fetch_timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            raise CapacityError("too many files are being fetched; try again", status=503) from None
        try:
            async with asyncio.timeout(self._config.fetch_timeout_s):
                return await self._follow(url, named)
        except TimeoutError:
            limit = f"{self._config.fetch_timeout_s:g} s (media.fetch_timeout_s)"
            raise RequestError(f"fetching from {named} took longer than {limit}") from None
        finally:
            self._slots.release()

    def close(self) -> None:
        """Let go of the threads. Fetches under way are their callers' to cancel. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check(self, url: httpx.URL, named: str) -> str:
        """The host of a URL that may be fetched as far as its text tells; RequestError otherwise."""
        if url.scheme not in self._schemes:
            allowed = " and ".join(f"{scheme}:" for scheme in self._schemes)
            how = "" if "http" in self._schemes or url.scheme != "http" else "; media.allow_http allows http:"
            raise RequestError(f"{named} has the scheme {url.scheme[:20]!r}; only {allowed} can be fetched{how}")
        if url.userinfo:
            raise RequestError(f"{named} has a user name or password in it; send the file as a data: URL instead")
        host = host_of(url, named)
        if url.port is not None and not 0 < url.port < 65536:
            raise RequestError(f"{named} has a port that is not one of 1 to 65535")
        if self._domains and not any(host == domain or host.endswith(f".{domain}") for domain in self._domains):
            raise RequestError(f"{named} has a host that is not one of media.allowed_domains")
        return host

    async def _follow(self, url: httpx.URL, first: str) -> bytes:
        named = first
        for _ in range(self._config.max_redirects + 1):
            answer = await self._get(url, named)
            if isinstance(answer, bytes):
                return answer
            # Where a host redirects to is between it and us: errors do not say.
            named = f"a host that {first} redirects to"
            try:
                url = url.join(answer)
            except (httpx.InvalidURL, ValueError):
                raise RequestError(f"{first} redirects to something that is not a URL") from None
            try:
                self._check(url, f"a URL that {first} redirects to")
            except RequestError as error:
                log.info("redirect from %s is refused: %s", first, error)
                raise
        limit = f"{self._config.max_redirects} times (media.max_redirects)"
        raise RequestError(f"{first} redirects more than {limit}; write the URL it leads to")

    async def _get(self, url: httpx.URL, named: str) -> bytes | str:
        """The body, or where a redirect leads."""
        host, port = host_of(url, named), url.port or PORTS[url.scheme]
        reader, writer = await self._connect(host, port, url.scheme == "https", named)
        try:
            return await self._exchange(reader, writer, _request(url, host), named)
        except (OSError, h11.RemoteProtocolError) as error:
            log.info("fetching from %s failed: %s", host, error)
            raise RequestError(f"{named} closed the connection, or broke HTTP, before the file was complete") from None
        finally:
            writer.transport.abort()

    async def _connect(
        self, host: str, port: int, secure: bool, named: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the first address that answers; TLS, if `secure`, is with the name."""
        addresses = await addresses_of(host, port, self._resolve, self._config.allow_private_addresses, named)
        tls, name = (self._tls, host) if secure else (None, None)
        reason = ""
        for address in addresses:
            try:
                async with asyncio.timeout(self._config.fetch_timeout_s / len(addresses)):
                    return await asyncio.open_connection(
                        str(address), port, ssl=tls, server_hostname=name, limit=READ_BYTES
                    )
            except ssl.SSLCertVerificationError as error:
                log.info("certificate of %s at %s: %s", host, address, error)
                reason = "has no certificate that is trusted and made out to that name"
            except OSError as error:  # TimeoutError is one as well
                log.info("connecting to %s at %s: %s", host, address, error or "timed out")
                reason = reason or f"cannot be connected to{' with TLS' if secure else ''}"
        raise RequestError(f"{named} {reason}")

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: h11.Request, named: str
    ) -> bytes | str:
        peer = h11.Connection(our_role=h11.CLIENT, max_incomplete_event_size=MAX_HEADER_BYTES)
        writer.write((peer.send(request) or b"") + (peer.send(h11.EndOfMessage()) or b""))
        await writer.drain()
        body = io.BytesIO()
        while True:
            event = peer.next_event()
            if event is h11.NEED_DATA:
                peer.receive_data(await reader.read(READ_BYTES))
            elif isinstance(event, h11.Response):
                location = self._judge(event, named)
                if location is not None:
                    return location
            elif isinstance(event, h11.Data):
                if body.tell() + len(event.data) > self._config.max_bytes:
                    raise self._too_large(named)
                body.write(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return body.getvalue()
            elif not isinstance(event, h11.InformationalResponse):
                raise h11.RemoteProtocolError(f"unexpected {event!r}")

    def _judge(self, response: h11.Response, named: str) -> str | None:
        """None when the body may be read, or where the response redirects to."""
        headers = {name: value.decode("latin-1") for name, value in response.headers}
        status = response.status_code
        if status in REDIRECTS and b"location" in headers:
            return headers[b"location"]
        if status != 200:
            phrase = responses.get(status, "unknown")  # not the one that was sent
            raise RequestError(f"{named} answered {status} ({phrase}) instead of 200")
        if headers.get(b"content-encoding", "identity").strip().lower() not in ("", "identity"):
            raise RequestError(f"{named} sends the file compressed although asked not to; send it as a data: URL")
        length = headers.get(b"content-length", "0")
        if length.isdecimal() and int(length) > self._config.max_bytes:
            raise self._too_large(named)
        return None

    def _too_large(self, named: str) -> RequestError:
        limit = f"{format_bytes(self._config.max_bytes)} (media.max_bytes)"
        return RequestError(f"the file from {named} is larger than {limit}", code="media_too_large")

    async def _ask_system(self, host: str, port: int) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return [str(address[0]) for *_, address in found]


def _request(url: httpx.URL, host: str) -> h11.Request:
    authority = f"[{host}]" if ":" in host else host
    if url.port is not None:
        authority += f":{url.port}"
    headers = [
        ("Host", authority),
        ("User-Agent", f"triptych/{__version__}"),
        ("Accept", "*/*"),
        ("Accept-Encoding", "identity"),
        ("Connection", "close"),
    ]
    return h11.Request(method="GET", target=url.raw_path, headers=headers)


def _domain(text: str, index: int) -> str:
    try:
        return host_of(httpx.URL(scheme="https", host=text, path="/"), text)
    except (RequestError, httpx.InvalidURL, ValueError):
        message = f"{text!r} is not the name of a host; write example.com, which stands for its subdomains as well"
        raise ConfigError(message, f"media.allowed_domains[{index}]") from None
