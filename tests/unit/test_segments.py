"""Shared memory: written once, read once, and nothing left behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from triptych.connectors import segments
from triptych.connectors.segments import SegmentWriter

TOKEN = f"{os.getpid()}xtest_segments"


def existing(token: str = TOKEN) -> set[str]:
    return {name for name in os.listdir(segments.DIRECTORY) if name.startswith(f"triptych-{token}-")}


def touch(name: str) -> str:
    (Path(segments.DIRECTORY) / name).write_bytes(b"x")
    return name


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    left = existing()
    segments.sweep(TOKEN)
    assert left == set()


def test_what_is_written_is_read_at_its_offsets_and_the_file_is_gone() -> None:
    name = SegmentWriter(TOKEN, "talker").write([(0, b"abc"), (64, memoryview(b"defg"))])
    assert existing() == {name} and segments.is_segment(name, TOKEN, "talker")
    mapped = segments.take(name)
    assert existing() == set()
    assert (len(mapped), mapped[:3], mapped[64:]) == (68, b"abc", b"defg")


def test_a_reader_may_write_into_its_own_pages_after_the_file_is_gone() -> None:
    mapped = segments.take(SegmentWriter(TOKEN, "talker").write([(0, bytes(10000))]))
    mapped[9000] = 7
    assert mapped[9000] == 7 and mapped[8999] == 0


def test_a_segment_can_be_taken_once() -> None:
    name = SegmentWriter(TOKEN, "talker").write([(0, b"abc")])
    segments.take(name).close()
    with pytest.raises(FileNotFoundError):
        segments.take(name)
    segments.unlink(name)  # that it is gone is no error


def test_an_empty_segment_is_refused_and_removed() -> None:
    name = SegmentWriter(TOKEN, "talker").write([])
    with pytest.raises(ValueError):
        segments.take(name)


def test_a_segment_is_private_to_its_user() -> None:
    name = SegmentWriter(TOKEN, "talker").write([(0, b"abc")])
    assert os.stat(Path(segments.DIRECTORY) / name).st_mode & 0o777 == 0o600
    segments.unlink(name)


def test_no_room_is_an_error_that_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    def pwrite(fd: int, piece: memoryview, offset: int) -> int:
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(offset)
        return 2  # a short write, as a filesystem gives that has room for no more

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space left"):
        SegmentWriter(TOKEN, "talker").write([(0, b"abc")])
    assert written == [0] and existing() == set()


def test_short_writes_are_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, piece, offset: real(fd, piece[:2], offset))
    assert segments.take(SegmentWriter(TOKEN, "talker").write([(3, b"abcdefg")]))[3:] == b"abcdefg"


def test_two_writers_of_one_process_never_share_a_name() -> None:
    """A process that was started again has another pid, and so other names; one that runs never repeats itself."""
    writer = SegmentWriter(TOKEN, "talker")
    names = {writer.write([(0, b"a")]) for _ in range(3)}
    assert len(names) == 3
    script = (
        "import sys; from triptych.connectors.segments import SegmentWriter\n"
        "print(SegmentWriter(*sys.argv[1:]).write([(0, b'a')]))"
    )
    other = subprocess.run([sys.executable, "-c", script, TOKEN, "talker"], capture_output=True, text=True, timeout=30)
    assert other.stdout.strip() in existing() - names
    segments.sweep(TOKEN, "talker")


def test_a_segment_never_overwrites_another() -> None:
    name = SegmentWriter(TOKEN, "talker").write([(0, b"first")])
    with pytest.raises(FileExistsError):
        SegmentWriter(TOKEN, "talker").write([(0, b"second")])
    assert segments.take(name)[:] == b"first"


def test_sweep_of_a_process_spares_every_other_process_even_of_a_like_name() -> None:
    names = {process: SegmentWriter(TOKEN, process).write([(0, b"a")]) for process in ("a", "a-b", "a-1.1", "b", "a/c")}
    segments.sweep(TOKEN, "a")
    assert existing() == set(names.values()) - {names["a"]}
    segments.sweep(TOKEN, "a/c")
    assert existing() == {names["a-b"], names["a-1.1"], names["b"]}
    segments.sweep(TOKEN)


def test_sweep_of_a_server_spares_other_servers_and_other_files() -> None:
    other = TOKEN + "2"
    mine = SegmentWriter(TOKEN, "a").write([(0, b"a")])
    spared = {SegmentWriter(other, "a").write([(0, b"a")]), touch(f"triptych-{other}-notes")}
    stranger = touch(f"triptych-{TOKEN}-notes")
    try:
        segments.sweep(TOKEN)
        assert mine not in existing() and existing(other) == spared
        assert existing() == {stranger}
    finally:
        for name in (*spared, stranger):
            segments.unlink(name)


def test_sweep_of_a_dead_servers_process_takes_all_its_tokens_and_spares_other_pids() -> None:
    pid = os.getpid()
    own = {SegmentWriter(token, "media").write([(0, b"a")]) for token in (TOKEN, f"{pid}xother")}
    spared = SegmentWriter(f"{pid}1xab_cd", "media").write([(0, b"a")])
    start, number = min(own).rsplit("-", 1)
    namespace, rest = number.split(".", 1)
    elsewhere = touch(f"{start}-{int(namespace) + 1}.{rest}")  # another container, where that pid may well be alive
    try:
        segments.sweep_server(TOKEN)
        assert not own & set(os.listdir(segments.DIRECTORY))
        assert {spared, elsewhere} <= set(os.listdir(segments.DIRECTORY))
    finally:
        for name in (*own, spared, elsewhere):
            segments.unlink(name)


def test_sweep_stale_removes_what_dead_servers_left_and_nothing_else() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    dead = SegmentWriter(f"{child.pid}xab_cd", "talk-er").write([(0, b"a")])
    alive = SegmentWriter(TOKEN, "talker").write([(0, b"a")])
    start, number = dead.rsplit("-", 1)
    namespace, rest = number.split(".", 1)
    elsewhere = touch(f"{start}-{int(namespace) + 1}.{rest}")  # another container, where that pid may well be alive
    foreign = touch(f"triptych-{child.pid}xab_cd-notes")
    try:
        segments.sweep_stale()
        names = set(os.listdir(segments.DIRECTORY))
        assert dead not in names and {alive, elsewhere, foreign} <= names
    finally:
        for name in (alive, elsewhere, foreign):
            segments.unlink(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "../../etc/passwd",
        "triptych-{TOKEN}-talker-1",
        "triptych-{TOKEN}-other-1.2.3",
        "triptych-{TOKEN}-talker-1.2.3/x",
    ],
)
def test_no_other_file_passes_for_a_segment(name: str) -> None:
    assert not segments.is_segment(name.format(TOKEN=TOKEN), TOKEN, "talker")


def test_the_token_is_the_run_directory_without_the_program() -> None:
    assert segments.token_of("/tmp/triptych-12xab") == segments.token_of("/tmp/triptych-12xab/") == "12xab"
    assert segments.token_of("/run/other") == "other"


def test_a_held_segment_is_read_by_many_and_stays_until_its_holder_unlinks_it() -> None:
    name = SegmentWriter(TOKEN, "media").write([(0, b"abc")])
    first, second = segments.map_readonly(name, "media"), segments.map_readonly(name, "media")
    first[0] = ord("x")  # a page of its own
    assert (first[:], second[:]) == (b"xbc", b"abc")
    segments.unlink(name)
    assert second[:] == b"abc"
    with pytest.raises(FileNotFoundError):
        segments.map_readonly(name, "media")


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "/etc/passwd", "triptych-{TOKEN}-talker-1.2.3", "a/b"])
def test_what_is_no_segment_of_the_process_is_never_mapped(name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a shared memory segment of 'media'"):
        segments.map_readonly(name.format(TOKEN=TOKEN), "media")


def test_a_segment_can_be_written_under_a_name_reserved_by_another() -> None:
    names = SegmentWriter(TOKEN, "media")
    first, second = names.reserve(), names.reserve()
    segments.write(second, [(0, b"two")])
    assert first != second and existing() == {second} and segments.is_segment(second, TOKEN, "media")
    with pytest.raises(FileExistsError):
        segments.write(second, [(0, b"again")])
    segments.unlink(second)
