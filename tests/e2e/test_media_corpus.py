"""Every file of the media corpus through the real workers, and through one live server: what is good is answered from
the right features, what is bad is refused by its place in the request, and neither leaves anything behind."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil
import pytest
import yaml

from tests.corpus.file import CorpusFile
from tests.corpus.reference import content, likeness, plain_film, plain_image, plain_sound, seen, spectrogram
from tests.live_server import LiveServer, wait_until
from tests.media_corpus import LIMITS, corpus
from triptych.config.schema import MediaConfig
from triptych.connectors import segments
from triptych.errors import RequestError
from triptych.media.contract import MediaFeatures, MediaOptions, MediaPart
from triptych.media.loader import Loader
from triptych.models.qwen3_omni.config import load_config
from triptych.models.qwen3_omni.media_layout import audio_rows, vision_rows
from triptych.models.qwen3_omni.preprocessor_config import load_preprocessor

SECONDS = 10.0  # for one file, on a machine that does much else
WORKER_BYTES = 1200 * 1024**2  # of address space that a worker may ask for
HELD_BYTES = 700 * 1024**2  # of memory that it then holds, half of which are its libraries
SERVER_BYTES = 100 * 1024**2  # that the server may grow by, for files of a few megabytes
SMALL: dict[str, Any] = {"min_pixels": 3136, "max_pixels": 50_000}  # pictures that a small machine sees quickly


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[CorpusFile]:
    return corpus(tmp_path_factory.mktemp("corpus"))


def of(files: Sequence[CorpusFile], verdict: str) -> list[CorpusFile]:
    return [file for file in files if file.verdict == verdict]


def listed(wrong: Mapping[str, object]) -> str:
    return "\n".join(f"{name}: {what}" for name, what in wrong.items())


class Features:
    """What the encoder must get of each good file, and how many tokens that makes: (of its kind, of its sound)."""

    def __init__(self, model: Path, files: Sequence[CorpusFile]) -> None:
        config, encoders = load_preprocessor(model), load_config(model).media
        self.arrays: dict[str, Any] = {}
        self.sounds: dict[str, Any] = {}
        self.tokens: dict[str, dict[str, int]] = {}
        for file in of(files, "good"):
            samples, rate, frames = content(file)
            heard = None if samples is None else spectrogram(samples, rate, config)
            tokens = {} if heard is None else {"audio_tokens": audio_rows(heard.shape[1], encoders.n_window)}
            if frames is None:
                self.arrays[file.name] = heard
            else:
                shown = seen(frames, file, config, MediaOptions(**SMALL))
                self.arrays[file.name], self.sounds[file.name] = shown, heard
                grid = (-(-len(shown) // 2), shown.shape[1] // config.patch_size, shown.shape[2] // config.patch_size)
                tokens[f"{file.kind}_tokens"] = vision_rows(grid, encoders.spatial_merge_size)
            self.tokens[file.name] = tokens


@pytest.fixture(scope="module")
def expected(nano: Path, files: list[CorpusFile]) -> Features:
    return Features(nano, files)


def test_the_corpus_is_large_and_its_files_hold_what_they_say(files: list[CorpusFile]) -> None:
    assert len({file.name for file in files}) == len(files)
    assert Counter(file.verdict for file in files)["bad"] >= 100 and len(of(files, "good")) >= 200
    assert all(count >= 50 for count in Counter(file.kind for file in of(files, "good")).values())
    wrong: dict[str, Any] = {}
    for file in of(files, "good"):
        if file.samples is not None and file.near is not None and file.kind == "audio":
            samples, rate = plain_sound(file)
            if (found := likeness(samples, file.samples, rate, file.rate)) < file.near:
                wrong[file.name] = found
        if file.frames is not None and file.kind != "audio":
            frames = plain_image(file) if file.kind == "image" else plain_film(file)[0]
            if frames.shape != file.frames.shape or np.abs(frames - file.frames.astype(int)).mean() > (file.near or 1):
                wrong[file.name] = frames.shape
    # What a plain reader gets wrong and Triptych must not: 16 bits clipped to 8, and floats in [0, 1] cut to whole.
    assert set(wrong) <= {"png-grey-16", "tiff-grey-16", "tiff-float"}, listed(wrong)


# --- through the workers ---


async def test_workers_make_the_features_of_a_plain_decode(
    nano: Path, files: list[CorpusFile], expected: Features
) -> None:
    loader = Loader(LIMITS, str(nano))
    wrong: dict[str, str] = {}
    try:
        for file in of(files, "good"):
            options = MediaOptions(**SMALL, use_audio_in_video=file.use_audio_in_video)
            part = MediaPart(kind=file.kind, param=file.name, data=file.path.read_bytes())
            try:
                lease = await loader.load([part], options)
            except RequestError as error:
                wrong[file.name] = f"refused: {error}"
                continue
            [item] = lease.items
            for features, right in ((item, expected.arrays[file.name]), (item.sound, expected.sounds.get(file.name))):
                if difference := differs(features, right):
                    wrong[file.name] = difference
            lease.close()
    finally:
        await loader.close()
    assert not wrong, listed(wrong)
    assert not list(Path("/dev/shm").glob(f"triptych-{os.getpid()}x*-media-*"))


def differs(features: MediaFeatures | None, right: Any) -> str:
    """How features differ from those of a plain decode; "" where they do not."""
    if features is None or right is None:
        return "" if features is right else f"{features} is not {right}"
    if features.features.shape != right.shape:
        return f"{features.features.shape} is not {right.shape}"
    path = f"{segments.DIRECTORY}/{features.features.segment}"
    array = np.fromfile(path, features.features.dtype).reshape(right.shape)
    # Sound changes rate piece by piece, and alpha over white may be rounded the other way.
    most = float(np.abs(array - right.astype(np.float64)).max())
    return "" if most <= (1e-4 if features.kind == "audio" else 1) else f"differs by {most}"


# --- through one server ---


@pytest.fixture(scope="module")
def server(nano: Path, files: list[CorpusFile], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("server")
    plain = msgspec.to_builtins(MediaConfig())
    limits = {key: value for key, value in msgspec.to_builtins(LIMITS).items() if value != plain[key]}
    limits |= {"local_path": str(files[0].path.parents[1]), "worker_memory_bytes": WORKER_BYTES}
    deploy = folder / "deploy.yaml"
    deploy.write_text(yaml.safe_dump({"base_config": "tiny_cpu", "media": limits}), encoding="utf-8")
    with LiveServer(nano, log=folder / "log", deploy=deploy) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def asked(file: CorpusFile, number: int) -> dict[str, Any]:
    """A request that brings the file as its part 1: inside or by name, its options in either place."""
    inside = base64.b64encode(file.path.read_bytes()).decode()
    if number % 3 == 0:
        part: dict[str, Any] = {f"{file.kind}_url": {"url": file.path.as_uri()}}
    elif number % 3 == 1 and file.kind == "audio":
        part = {"input_audio": {"data": inside, "format": "wav"}}  # whatever it is
    else:
        part = {f"{file.kind}_url": {"url": f"data:{file.kind}/x-some;base64,{inside}"}}
    part["type"] = next(iter(part))
    sound: dict[str, Any] = {"use_audio_in_video": True} if file.use_audio_in_video else {}
    return {
        "model": "nano",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}],
        "max_tokens": 2,
        "mm_processor_kwargs": SMALL | (sound if number % 2 else {}),
    } | ({} if number % 2 else sound)


def works(client: httpx.Client, server: LiveServer) -> bool:
    """Whether the server is ready and answers in words."""
    words = [{"role": "user", "content": "Hello."}]
    answer = client.post("/v1/chat/completions", json={"model": "nano", "messages": words, "max_tokens": 2})
    return answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0 and server.ready()


def most_held(server: LiveServer) -> int:
    """Bytes of memory that the largest media worker has held at any time."""
    most = 0
    for child in server.children():
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            if "triptych.media.worker" in " ".join(child.cmdline()):
                status = Path(f"/proc/{child.pid}/status").read_text(encoding="ascii")
                most = max(most, 1024 * int(status.split("VmHWM:")[1].split()[0]))
    return most


def test_every_good_file_is_answered_and_counted(
    server: LiveServer, client: httpx.Client, files: list[CorpusFile], expected: Features
) -> None:
    good = of(files, "good")

    def wrong(number: int) -> Any:
        answer = client.post("/v1/chat/completions", json=asked(good[number], number))
        if answer.status_code != 200:
            return answer.text
        details = answer.json()["usage"]["prompt_tokens_details"]
        counted = {kind: details[kind] for kind in ("audio_tokens", "image_tokens", "video_tokens") if details[kind]}
        return None if counted == expected.tokens[good[number].name] else (counted, expected.tokens[good[number].name])

    with ThreadPoolExecutor(4) as pool:
        answers = dict(zip((file.name for file in good), pool.map(wrong, range(len(good))), strict=True))
    wrong_answers = {name: what for name, what in answers.items() if what is not None}
    assert not wrong_answers, listed(wrong_answers)
    assert works(client, server)


def test_every_bad_file_costs_its_sender_a_400_and_nobody_else_anything(
    server: LiveServer, client: httpx.Client, files: list[CorpusFile]
) -> None:
    assert works(client, server)
    before = psutil.Process(server.process.pid).memory_info().rss
    wrong: dict[str, Any] = {}
    for number, file in enumerate(of(files, "bad") + of(files, "either")):
        body = asked(file, number)
        started = time.monotonic()
        answer = client.post("/v1/chat/completions", json=body)
        seconds = time.monotonic() - started
        error = answer.json().get("error", {})
        if file.verdict == "either" and answer.status_code == 200:
            pass
        elif answer.status_code != 400 or not str(error.get("param")).startswith("messages.0.content.1"):
            wrong[file.name] = (answer.status_code, error)
        elif not re.search(file.error, error["message"], re.IGNORECASE):
            wrong[file.name] = ("another message", file.error, error["message"])
        if seconds > SECONDS:
            wrong[file.name] = f"took {seconds:.1f} s"
        if (held := most_held(server)) > HELD_BYTES:
            wrong[file.name] = f"a worker held {held} bytes"
        if not works(client, server):
            wrong[file.name] = "the server does not answer"
    assert not wrong, listed(wrong)
    assert psutil.Process(server.process.pid).memory_info().rss - before < SERVER_BYTES


def test_the_corpus_leaves_nothing_behind(server: LiveServer, client: httpx.Client) -> None:
    assert works(client, server)
    wait_until(lambda: not server.held(), 10, server.held)
    assert not any(server.metrics()["process_restarts_total"].values())
    kept = sum(Path(trace).stat().st_size for trace in server.traces() if trace.startswith("/dev/shm"))
    assert kept <= LIMITS.cache_bytes
    assert "Traceback" not in server.said(), server.said()[-3000:]
    server.process.terminate()
    server.process.wait(30)
    assert not server.traces()
