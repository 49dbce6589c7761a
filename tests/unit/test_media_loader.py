"""Parts of requests become features: decoded once, held while they are used, kept within a budget, and gone after."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from PIL import Image

from tests.media_files import audio_file, film, image_file, noise, tone, video_file
from triptych.config.schema import MediaConfig
from triptych.connectors import segments
from triptych.errors import CapacityError, CheckpointError, ContextLengthError, RequestError
from triptych.media.contract import MediaFeatures, MediaOptions, MediaPart
from triptych.media.loader import Loader
from triptych.media.pool import LEAVE_S, WORKER_COMMAND

FAKE = (sys.executable, str(Path(__file__).parents[1] / "fake_media_worker.py"))
OPTIONS = MediaOptions()


def existing() -> set[str]:
    """Segments of this process's loaders; other tests have some of their own."""
    loaders = re.compile(rf"triptych-{os.getpid()}x[0-9a-f]{{12}}-")
    return {name for name in os.listdir(segments.DIRECTORY) if loaders.match(name)}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = existing()
    yield
    assert existing() <= before
    assert not [child for child in psutil.Process().children() if "media" in " ".join(child.cmdline())]


@contextlib.asynccontextmanager
async def made(model: Path, *, command: Sequence[str] = FAKE, **limits: Any) -> AsyncIterator[Loader]:
    loader = Loader(MediaConfig(**limits), str(model), command=command)
    try:
        yield loader
    finally:
        await loader.close()


def part(text: str | bytes, kind: Any = "image", param: str = "messages.0.content.0", **more: Any) -> MediaPart:
    return MediaPart(kind=kind, param=param, data=text if isinstance(text, bytes) else text.encode(), **more)


def segments_of(items: Sequence[MediaFeatures]) -> list[str]:
    return [item.features.segment for item in items]


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


# --- what comes out ---


async def test_every_kind_of_part_comes_out_of_real_workers_in_its_order(nano: Path) -> None:
    video = video_file(film(20), sound=tone(2.0, 48000))
    options = MediaOptions(use_audio_in_video=True, min_pixels=3136, max_pixels=50000)
    async with made(nano, command=WORKER_COMMAND, workers=2) as loader:
        parts = [
            part(audio_file(tone(1.0, 16000), 16000), "audio"),
            part(image_file(Image.fromarray(noise(64, 96)))),
            part(video, "video"),
            part(video_file(film(20)), "video"),  # without sound
            part(video, "audio"),
        ]
        lease = await loader.load(parts, options)
        assert [item.kind for item in lease.items] == [one.kind for one in parts]
        for item, one in zip(lease.items, parts, strict=True):
            mapped = segments.map_readonly(item.features.segment, segments.MEDIA)
            array = np.frombuffer(mapped, item.features.dtype).reshape(item.features.shape)
            assert array.any() and array.dtype == ("float32" if one.kind == "audio" else "uint8")
        loud, silent, sound = lease.items[2:]
        assert loud.sound is not None and silent.sound is None
        assert loud.sound == sound  # the same features, whether asked for alone or with its pictures
        assert loader.stats.decoded == 5
        lease.close()
        without = await loader.load([parts[2]], msgspec.structs.replace(options, use_audio_in_video=False))
        assert without.items[0] == msgspec.structs.replace(loud, sound=None)
        without.close()


async def test_an_error_names_its_part_or_the_option_at_fault(nano: Path) -> None:
    async with made(nano, command=WORKER_COMMAND) as loader:
        good = part(image_file(Image.fromarray(noise(64, 64))))
        with pytest.raises(RequestError, match=r"plain|unknown type") as refused:
            await loader.load([good, part("plain words", param="messages.3.content.1")], OPTIONS)
        assert (refused.value.param, refused.value.code) == ("messages.3.content.1", "invalid_media")
        with pytest.raises(RequestError) as refused:
            await loader.load([part(video_file(film(4)), "video")], MediaOptions(num_frames=8))
        assert (refused.value.param, refused.value.code) == ("mm_processor_kwargs.num_frames", "invalid_value")
        with pytest.raises(RequestError, match="no sound") as refused:
            await loader.load([part(video_file(film(4)), "audio")], OPTIONS)
        assert refused.value.code == "invalid_media"
        with pytest.raises(ContextLengthError, match="more than the context of 3") as refused:
            await loader.load([good], OPTIONS, max_rows=3)
        assert refused.value.param == good.param and refused.value.code == "context_length_exceeded"
        assert loader.stats.refused == 4


@pytest.mark.parametrize(
    ("max_rows", "code", "reason"),
    [(None, "invalid_media", "seconds: at least 9, the limit 'media.min_audio_s'"), (9, "context_length_exceeded", "")],
)
async def test_an_error_of_the_sound_of_a_video_says_so(
    nano: Path, max_rows: int | None, code: str, reason: str
) -> None:
    video = part(video_file(film(8), sound=tone(2.0, 48000)), "video")
    options = MediaOptions(use_audio_in_video=True, num_frames=2, min_pixels=3136, max_pixels=3136)
    async with made(nano, command=WORKER_COMMAND, min_audio_s=9.0) as loader:
        with pytest.raises(RequestError, match=r"^the sound of the video cannot be heard.*: the audio ") as refused:
            await loader.load([video], options, max_rows=max_rows)
        assert reason in str(refused.value)
        assert (refused.value.param, refused.value.code) == (video.param, code)


async def test_the_code_of_an_error_is_kept(nano: Path) -> None:
    async with made(nano) as loader:
        with pytest.raises(RequestError, match="no good") as refused:
            await loader.load([part("refuse no good")], OPTIONS)
        assert (refused.value.param, refused.value.code) == ("messages.0.content.0", "some_code")


async def test_wrong_options_and_too_many_parts_cost_nothing(nano: Path) -> None:
    async with made(nano, max_parts=2) as loader:
        with pytest.raises(RequestError, match="fps"):
            await loader.load([part("ok")], MediaOptions(fps=1e9))
        with pytest.raises(RequestError, match=r"3 images.*at most 2.*media\.max_parts") as refused:
            await loader.load([part("ok", param=f"p{n}") for n in range(3)], OPTIONS)
        assert refused.value.param == "p2"
        assert not psutil.Process().children()
        assert (await loader.load([], OPTIONS)).items == ()


def test_a_checkpoint_without_a_preprocessor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        Loader(MediaConfig(), str(tmp_path))


# --- decoded once ---


async def test_what_was_decoded_is_not_decoded_again(nano: Path) -> None:
    async with made(nano) as loader:
        first = await loader.load([part("ok one")], OPTIONS)
        first.close()
        second = await loader.load([part("ok one", param="elsewhere"), part("ok two")], OPTIONS)
        assert first.items[0] == second.items[0]
        assert len(set(segments_of(second.items))) == 2
        assert (loader.stats.decoded, loader.stats.cache_hits) == (2, 1)
        second.close()


async def test_what_was_decoded_and_then_removed_by_somebody_else_is_decoded_again(nano: Path) -> None:
    async with made(nano) as loader:
        first = await loader.load([part("ok")], OPTIONS)
        segments.unlink(segments_of(first.items)[0])
        second = await loader.load([part("ok")], OPTIONS)
        first.close()
        assert loader.stats.decoded == 2 and existing() == set(segments_of(second.items))
        second.close()


async def test_the_same_parts_at_the_same_time_are_decoded_once(nano: Path, tmp_path: Path) -> None:
    async with made(nano, workers=2) as loader:
        text = f"wait {tmp_path}/go"
        loads = [asyncio.create_task(loader.load([part(text), part(text)], OPTIONS)) for _ in range(3)]
        await until(lambda: psutil.Process().children())
        loads[0].cancel()  # the others get it all the same
        (tmp_path / "go").touch()
        leases = [await load for load in loads[1:]]
        assert len({name for lease in leases for name in segments_of(lease.items)}) == 1
        assert loader.stats.decoded == 1 and len(existing()) == 1
        for lease in leases:
            lease.close()
        with pytest.raises(asyncio.CancelledError):
            await loads[0]


async def test_what_is_asked_of_the_processor_makes_another_part_and_what_does_not_matter_none(nano: Path) -> None:
    async with made(nano) as loader:

        async def digests(*parts: MediaPart, **options: Any) -> list[bytes]:
            lease = await loader.load(parts, MediaOptions(**options))
            lease.close()
            return [item.digest for item in lease.items]

        parts = [part("same", kind) for kind in ("image", "audio", "video")]
        plain = await digests(*parts)
        assert len(set(plain)) == 3
        fewer = await digests(*parts, fps=1.0)
        assert fewer[:2] == plain[:2] and fewer[2] != plain[2]
        smaller = await digests(*parts, max_pixels=90_000)
        assert smaller[1] == plain[1] and smaller[0] != plain[0] and smaller[2] != plain[2]
        assert await digests(*parts, use_audio_in_video=True) == plain
        assert await digests(part("same", max_pixels=90_000)) == smaller[:1]
        assert await digests(part("same", max_pixels=10**7), max_pixels=90_000) == smaller[:1]
        assert await digests(part("same", max_pixels=10**8)) == plain[:1]  # a limit never raises the checkpoint's own


async def test_a_failure_is_not_kept(nano: Path) -> None:
    async with made(nano) as loader:
        for _ in range(2):
            with pytest.raises(RequestError, match="crashed"):
                await loader.load([part("crash")], OPTIONS)
        lease = await loader.load([part("ok")], OPTIONS)
        lease.close()


# --- held and let go ---


async def test_what_is_in_use_is_never_freed_and_what_is_not_is_within_the_budget(nano: Path) -> None:
    async with made(nano, cache_bytes=2 * 4096) as loader:  # two of the fake worker's images
        leases = [await loader.load([part(f"ok {n}")], OPTIONS) for n in range(4)]
        assert len(existing()) == 4
        leases[0].close()
        leases[0].close()
        assert len(existing()) == 3
        again = await loader.load([part("ok 3")], OPTIONS)  # used twice now
        leases[3].close()
        leases[1].close()
        assert existing() == set(segments_of(leases[2].items) + segments_of(again.items))
        again.close()
        leases[2].close()
        assert len(existing()) == 2  # kept for the next
        kept = await loader.load([part("ok 2"), part("ok 3")], OPTIONS)
        assert loader.stats.decoded == 4
        newer = await loader.load([part("ok 4")], OPTIONS)
        kept.close()
        newer.close()
        assert set(segments_of(newer.items)) < existing() and len(existing()) == 2


async def test_without_a_cache_everything_is_freed_with_its_last_lease(nano: Path) -> None:
    async with made(nano, cache_bytes=0) as loader:
        first, second = await loader.load([part("ok")], OPTIONS), await loader.load([part("ok")], OPTIONS)
        first.close()
        assert existing() == set(segments_of(second.items))
        second.close()
        assert not existing()


async def test_one_bad_part_lets_go_of_all_the_others(nano: Path, tmp_path: Path) -> None:
    async with made(nano, workers=2, cache_bytes=0) as loader:
        parts = [part("ok"), part("ok", "audio"), part(f"write-and-hang {tmp_path}/x"), part("refuse it", param="bad")]
        with pytest.raises(RequestError) as refused:
            await loader.load(parts, OPTIONS)
        assert refused.value.param == "bad"
        await until(lambda: not existing())


async def test_a_cancelled_load_lets_go_of_everything(nano: Path, tmp_path: Path) -> None:
    async with made(nano, cache_bytes=0) as loader:
        load = asyncio.create_task(loader.load([part("ok"), part(f"write-and-hang {tmp_path}/x")], OPTIONS))
        await until((tmp_path / "x").exists)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        async with asyncio.timeout(LEAVE_S + 20):
            lease = await loader.load([part("ok")], OPTIONS)  # the worker is free again
        lease.close()
        await until(lambda: not existing())


async def test_a_video_and_its_sound_are_held_together(nano: Path) -> None:
    async with made(nano, cache_bytes=0) as loader:
        lease = await loader.load([part("ok sound", "video")], MediaOptions(use_audio_in_video=True))
        assert lease.items[0].sound is not None and len(existing()) == 2
        lease.close()
        assert not existing()


async def test_closing_frees_what_is_in_use_and_ends_loads(nano: Path, tmp_path: Path) -> None:
    async with made(nano) as loader:
        lease = await loader.load([part("ok")], OPTIONS)
        load = asyncio.create_task(loader.load([part(f"write-and-hang {tmp_path}/x")], OPTIONS))
        await until((tmp_path / "x").exists)
        await loader.close()
        assert not existing() and not psutil.Process().children()
        with pytest.raises(CapacityError, match="stopping"):
            await load
        lease.close()
        await loader.close()


async def test_full_shared_memory_first_costs_the_cache_and_then_the_request(
    nano: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with made(nano) as loader:
        (await loader.load([part("ok")], OPTIONS)).close()
        assert len(existing()) == 1
        monkeypatch.setattr(loader, "_room", lambda: 100 if existing() else 1000)
        (await loader.load([part("room 900")], OPTIONS)).close()
        assert loader.stats.decoded == 2 and len(existing()) == 1 and "shm-size" not in caplog.text
        with pytest.raises(CapacityError, match="2000 bytes of shared memory, and 1000") as refused:
            await loader.load([part("room 2000")], OPTIONS)
        assert refused.value.status == 503 and "shm-size" in caplog.text  # who runs the server can help that


@pytest.mark.parametrize("names", ["abcde", "aaaaa"], ids=["different", "the same, each read anew"])
async def test_files_that_wait_are_bounded_all_together(nano: Path, tmp_path: Path, names: str) -> None:
    async with made(nano, max_bytes=1000) as loader:
        waits = [f"wait {tmp_path}/{name}".ljust(900) for name in names]
        tasks = [asyncio.create_task(loader.load([part(text)], OPTIONS)) for text in waits]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        [refused] = done
        with pytest.raises(CapacityError, match="too many files"):
            await refused
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
