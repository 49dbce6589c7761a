"""Where the bytes of a part come from, and that every refusal names the part."""

from __future__ import annotations

import asyncio
import base64
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from triptych.config.schema import MediaConfig
from triptych.errors import CapacityError, RequestError
from triptych.media.contract import MediaPart
from triptych.media.fetch import Fetcher
from triptych.media.local import LocalFiles
from triptych.media.source import _PIECE, MediaSource, decode_base64, decode_data_url

PARAM = "messages.0.content.1"


def part(url: str = "", data: bytes = b"") -> MediaPart:
    return MediaPart(kind="image", param=PARAM, url=url, data=data)


async def read(one: MediaPart, **config: Any) -> bytes:
    source = MediaSource(MediaConfig(**config))
    try:
        return await source.read(one)
    finally:
        await source.close()


async def refused(one: MediaPart, **config: Any) -> tuple[str, str | None]:
    with pytest.raises(RequestError) as caught:
        await read(one, **config)
    assert caught.value.param == PARAM
    return str(caught.value), caught.value.code


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("data:image/png;base64,QUJD", b"ABC"),
        ("data:;base64,QUI=", b"AB"),
        ("data:image/png;name=x;base64,QQ==", b"A"),
        ("DATA:text/html;BASE64,+/+/", b"\xfb\xff\xbf"),
        ("data:image/png;base64,%2B%2f+/QQ%3d%3D", b"\xfb\xff\xbfA"),
        ("data:,abc", b"abc"),
        ("data:image/svg+xml,%3Csvg%3E,%00%FF", b"<svg>,\x00\xff"),
        ("data:base64,abc", b"abc"),
    ],
)
async def test_data_urls_hold_their_file(url: str, expected: bytes) -> None:
    assert await read(part(url), fetch=False) == expected


@pytest.mark.parametrize(
    "text",
    [
        "QUJ",
        "QUJDR",
        "QQ=",
        "QQ===",
        "QUJD\n",
        "QU JD",
        "QU\r\nJD",
        "QUJ_",
        "QU-D",
        "QQ==QUJD",
        "=QUJ",
        "QÜJD",
        "QUJD%0A",
    ],
)
async def test_base64_is_strict(text: str) -> None:
    message, code = await refused(part(f"data:image/png;base64,{text}"))
    assert code == "invalid_base64" and "line breaks" in message


@pytest.mark.parametrize("extra", [-1, 0, 1, 2, 3, 4])
def test_long_base64_is_that_of_the_whole(extra: int) -> None:
    data = (bytes(range(256)) * (_PIECE // 256 * 2))[: _PIECE * 3 // 2 + extra]
    assert decode_base64(base64.b64encode(data).decode(), len(data)) == data


def test_padding_between_pieces_is_refused() -> None:
    text = "A" * (_PIECE - 2) + "==" + "QUJD"
    with pytest.raises(RequestError, match="not valid base64"):
        decode_base64(text, 2 * _PIECE)


@pytest.mark.parametrize("size", range(90, 111))
def test_base64_is_limited_to_the_byte(size: int) -> None:
    text = base64.b64encode(bytes(size)).decode()
    if size <= 100:
        assert len(decode_base64(text, 100)) == size
    else:
        with pytest.raises(RequestError, match="larger than 100 B") as caught:
            decode_base64(text, 100)
        assert caught.value.code == "media_too_large"


def test_too_much_base64_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(RequestError, match=r"media\.max_bytes"):
        decode_base64("?" * 1000, 100)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64", "comma"),
        ("data:", "comma"),
        ("data:,ä", "ASCII"),
        ("data:,%C3" + "x" * (1 << 20), "must be base64"),
    ],
)
async def test_malformed_data_urls_are_refused(url: str, message: str) -> None:
    text, code = await refused(part(url))
    assert message in text and code == "invalid_media_url"


async def test_percent_encoding_is_limited_by_what_it_decodes_to() -> None:
    assert decode_data_url("data:," + "%41" * 100, 100) == b"A" * 100
    assert (await refused(part("data:," + "%41" * 101), max_bytes=100))[1] == "media_too_large"


async def test_bytes_come_as_they_are_within_the_limit() -> None:
    assert await read(part(data=b"x" * 100), max_bytes=100) == b"x" * 100
    assert (await refused(part(data=b"x" * 101), max_bytes=100))[1] == "media_too_large"


@pytest.mark.parametrize("one", [part(), part("data:,"), part("data:image/png;base64,")])
async def test_an_empty_file_is_refused(one: MediaPart) -> None:
    assert "the image is empty" in (await refused(one))[0]


async def test_files_are_read_where_a_folder_is_set(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"abc")
    url = (tmp_path / "a.png").as_uri()
    assert await read(part(url), local_path=str(tmp_path)) == b"abc"
    assert await read(part(url.replace("file:", "FILE:")), local_path=str(tmp_path)) == b"abc"
    message, _ = await refused(part(url))
    assert "media.local_path is empty" in message and "allowed: data:, https:" in message


async def test_files_are_read_off_the_event_loop_within_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, threads = threading.Event(), []

    def slow(self: LocalFiles, url: str) -> bytes:
        threads.append(threading.current_thread())
        done.wait(10)
        return b"abc"

    monkeypatch.setattr(LocalFiles, "read", slow)
    try:
        message, _ = await refused(part("file:///x"), local_path=str(tmp_path), fetch_timeout_s=0.1)
    finally:
        done.set()
    assert "longer than 0.1 s (media.fetch_timeout_s)" in message
    assert threads != [threading.main_thread()]


async def test_files_that_are_slow_to_read_hold_up_nothing_but_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop has few threads, and every request needs one: to be parsed, to be tokenised."""
    done = threading.Event()
    monkeypatch.setattr(LocalFiles, "read", lambda self, url: done.wait(20) and b"abc")
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(2))
    source = MediaSource(MediaConfig(local_path=str(tmp_path)))
    reads = [asyncio.create_task(source.read(part("file:///x"))) for _ in range(4)]
    try:
        await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.to_thread(int), 10)
    finally:
        done.set()
    assert await asyncio.gather(*reads) == 4 * [b"abc"]
    await source.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://files.example/x", "scheme 'ftp' of 'ftp://files.example/x' is not supported; allowed: data:, https:"),
        ("javascript:alert(1)", "scheme 'javascript'"),
        ("gs://bucket/x", "scheme 'gs'"),
        ("/etc/passwd", "'/etc/passwd' is a path, not a URL; allowed: data:, https:"),
        ("../x", "is a path"),
        ("~/x", "is a path"),
        ("C:\\x.png", "is a path"),
        ("\\\\server\\share", "is a path"),
        ("files.example/x.png", "is not a URL"),
        (" https://files.example/", "is not a URL"),
        ("iVBORw0KGgo", "write base64 as data:image/png;base64,..."),
        ("A" * 5_000_000, f"'{'A' * 60}...' is not a URL"),
        ("x" * 32 + ":", "is not a URL"),
        ("http://files.example/", "media.allow_http"),
        ("https://user@files.example/", "user name"),
        ("https://127.0.0.1/", "not public"),
    ],
)
async def test_other_urls_are_refused_with_what_is_allowed(url: str, message: str) -> None:
    text, code = await refused(part(url))
    assert message in text and code == "invalid_media_url"
    assert len(text) < 300


async def test_a_path_is_told_its_url_where_files_are_read(tmp_path: Path) -> None:
    assert "write file:///folder/name" in (await refused(part("/a.png"), local_path=str(tmp_path)))[0]
    assert "allowed: data:, https:, file:" in (await refused(part("ftp://x"), local_path=str(tmp_path)))[0]


async def test_nothing_is_fetched_where_fetching_is_off() -> None:
    for url in ("https://files.example/", "http://files.example/"):
        assert "media.fetch is off" in (await refused(part(url), fetch=False))[0]
    assert "allowed: data:;" in (await refused(part("x"), fetch=False))[0]


async def test_urls_are_fetched_and_errors_carry_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[Any] = [b"abc", RequestError("no", code="media_too_large"), CapacityError("full"), b""]

    async def fetch(self: Fetcher, url: str) -> bytes:
        assert url == "https://files.example/x"
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return bytes(outcome)

    monkeypatch.setattr(Fetcher, "fetch", fetch)
    one = part("https://files.example/x")
    assert await read(one) == b"abc"
    assert await refused(one) == ("no", "media_too_large")
    with pytest.raises(CapacityError):
        await read(one)
    assert "empty" in (await refused(one))[0]


async def test_the_resolver_is_the_one_that_is_given() -> None:
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(f"{host}:{port}")
        return ["10.0.0.1"]

    source = MediaSource(MediaConfig(), resolve=resolve)
    with pytest.raises(RequestError, match="not public"):
        await source.read(part("https://files.example/"))
    await source.close()
    await source.close()
    assert asked == ["files.example:443"]


async def test_reading_many_parts_at_once_mixes_nothing_up() -> None:
    source = MediaSource(MediaConfig(fetch=False))
    urls = [f"data:;base64,{base64.b64encode(str(index).encode()).decode()}" for index in range(100)]
    found = await asyncio.gather(*(source.read(part(url)) for url in urls))
    await source.close()
    assert found == [str(index).encode() for index in range(100)]
