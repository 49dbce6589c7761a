"""Local files: regular ones below one folder, and nothing else, whatever a URL or a link says."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from triptych.errors import ConfigError, RequestError
from triptych.media.local import LocalFiles

OUTSIDE = "not below the folder"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two files, beside a file that is none of its business."""
    inner = tmp_path / "media"
    (inner / "sub").mkdir(parents=True)
    (inner / "a.wav").write_bytes(b"sound")
    (inner / "sub" / "b ü#?.png").write_bytes(b"picture")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "media-2").mkdir()
    (tmp_path / "media-2" / "c").write_bytes(b"other")
    return inner


@pytest.fixture
def files(folder: Path) -> LocalFiles:
    return LocalFiles(str(folder), max_bytes=1000)


def refusal(files: LocalFiles, url: str) -> str:
    with pytest.raises(RequestError) as caught:
        files.read(url)
    return str(caught.value)


def test_a_file_is_read_by_any_spelling_of_its_url(files: LocalFiles, folder: Path) -> None:
    for prefix in ("file://", "file:", "FILE://localhost", "file:///"):
        assert files.read(f"{prefix}{folder}/a.wav") == b"sound"
    assert files.read(f"file://{folder}//./sub/b%20%C3%BC%23%3f.png") == b"picture"
    assert files.read(f"file://{folder}/sub/b ü%23%3F.png") == b"picture"
    assert files.read((folder / "a.wav").as_uri()) == b"sound"


def test_a_path_with_a_link_above_the_folder_is_the_same_path(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    through = LocalFiles(str(tmp_path / "link"), max_bytes=1000)
    assert through.read(f"file://{tmp_path}/link/a.wav") == b"sound"
    assert through.read(f"file://{folder}/a.wav") == b"sound"


def test_links_are_followed_inside_the_folder(files: LocalFiles, folder: Path) -> None:
    (folder / "sub" / "near").symlink_to("../a.wav")
    (folder / "loop").symlink_to("sub")
    assert files.read(f"file://{folder}/loop/near") == b"sound"


def test_what_is_outside_gets_one_answer_whether_it_exists(files: LocalFiles, folder: Path, tmp_path: Path) -> None:
    (folder / "out").symlink_to(tmp_path)
    (folder / "there").symlink_to(tmp_path / "secret")
    (folder / "not-there").symlink_to(tmp_path / "nothing")
    urls = [
        "file:///etc/passwd",
        "file:///",
        "file:///proc/self/environ",
        f"file://{tmp_path}/secret",
        f"file://{tmp_path}/nothing",
        f"file://{tmp_path}/media-2/c",
        f"file://{folder}/out/secret",
        f"file://{folder}/out/nothing",
        f"file://{folder}/there",
        f"file://{folder}/not-there",
    ]
    assert len({refusal(files, url) for url in urls}) == 1
    assert OUTSIDE in refusal(files, urls[0])


@pytest.mark.parametrize(
    "tail",
    ["/../secret", "/sub/../../secret", "/%2e%2e/secret", "/..%2Fsecret", "/%2E./secret", "/a.wav%00.png", "/.."],
)
def test_parent_folders_and_nul_are_refused(files: LocalFiles, folder: Path, tail: str) -> None:
    assert "neither '..' nor NUL" in refusal(files, f"file://{folder}{tail}")


def test_an_escape_is_undone_once(files: LocalFiles, folder: Path) -> None:
    assert "no such file" in refusal(files, f"file://{folder}/%252e%252e/secret")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file://server/share/a.wav", "names no host"),
        ("file://server", "names no host"),
        ("file://127.0.0.1/etc/passwd", "names no host"),
        ("file:a.wav", "absolute path"),
        ("file:", "absolute path"),
        ("file://", "absolute path"),
        ("file:///a?b", "%3F"),
        ("file:///a#b", "%23"),
        ("file:///\ud800", "not text"),
        ("file:///" + "a/" * 5000, "4096"),
    ],
)
def test_malformed_urls_are_refused_saying_how_to_write_them(files: LocalFiles, url: str, message: str) -> None:
    assert message in refusal(files, url)


def test_only_regular_files_are_read_and_nothing_hangs(files: LocalFiles, folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "pipe-link").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        for name in ("", "/", "/sub", "/sub/", "/pipe", "/pipe-link", "/socket"):
            assert "not a regular file" in refusal(files, f"file://{folder}{name}")


def test_a_device_is_not_opened() -> None:
    assert "not a regular file" in refusal(LocalFiles("/dev", max_bytes=1000), "file:///dev/zero")


def test_a_file_of_unknown_length_is_refused() -> None:
    assert "changed" in refusal(LocalFiles("/proc/self", max_bytes=1000), f"file:///proc/{os.getpid()}/status")


def test_the_size_is_limited_to_the_byte(files: LocalFiles, folder: Path) -> None:
    (folder / "full").write_bytes(bytes(1000))
    (folder / "over").write_bytes(bytes(1001))
    assert len(files.read(f"file://{folder}/full")) == 1000
    with pytest.raises(RequestError, match=r"media\.max_bytes") as caught:
        files.read(f"file://{folder}/over")
    assert caught.value.code == "media_too_large"


def test_a_missing_file_inside_is_said_to_be_missing(files: LocalFiles, folder: Path) -> None:
    (folder / "dangling").symlink_to("nothing")
    (folder / "self").symlink_to("self")
    assert "no such file" in refusal(files, f"file://{folder}/nothing")
    assert "no such file" in refusal(files, f"file://{folder}/dangling")
    assert "broken link" in refusal(files, f"file://{folder}/self")
    assert "cannot be read" in refusal(files, f"file://{folder}/a.wav/x")


@pytest.mark.parametrize("name", ["a.wav", "sub/b"])
def test_a_link_that_appears_after_the_check_is_not_followed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The file, or the folder it is in, becomes a link to the outside between check and open."""
    (folder / "sub" / "b").write_bytes(b"inside")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b").write_bytes(b"secret")
    files = LocalFiles(str(folder), max_bytes=1000)
    realpath = os.path.realpath

    def checked_then_swapped(path: bytes) -> bytes:
        checked = realpath(path)
        first = name.split("/")[0]
        (folder / first).rename(tmp_path / "moved")
        (folder / first).symlink_to(tmp_path / ("sub" if "/" in name else "secret"))
        return checked

    monkeypatch.setattr(os.path, "realpath", checked_then_swapped)
    assert refusal(files, f"file://{folder}/{name}").startswith(
        ("the file is not a regular", "the file cannot be read")
    )


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_replaces_the_file_after_it_was_looked_at_is_not_read(
    files: LocalFiles, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    look = os.stat

    def looked_then_swapped(*args: Any, **options: Any) -> os.stat_result:
        found = look(*args, **options)
        (folder / "a.wav").unlink()
        if kind == "link":
            (folder / "a.wav").symlink_to(tmp_path / "secret")
        else:
            os.mkfifo(folder / "a.wav")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", looked_then_swapped)
        message = refusal(files, f"file://{folder}/a.wav")
    assert message.startswith(("the file is not a regular", "the file cannot be read"))


def test_no_descriptor_is_left_open(files: LocalFiles, folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for name in ("a.wav", "sub", "sub/nothing", "nothing/at/all", "a.wav/x"):
        try:
            files.read(f"file://{folder}/{name}")
        except RequestError:
            continue
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["nothing", "a.wav"])
def test_the_folder_must_be_one(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"media\.local_path"):
        LocalFiles(str(folder / name), max_bytes=1000)
