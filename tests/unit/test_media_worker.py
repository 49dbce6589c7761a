"""The real worker: what it answers, how it is bounded, and that nothing keeps it alive."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from io import BufferedRWPair
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from tests.media_files import audio_file, film, image_file, noise, tone, video_file
from triptych.config.schema import MediaConfig
from triptych.connectors import segments
from triptych.connectors.segments import SegmentWriter
from triptych.media.contract import MediaOptions
from triptych.media.decode_audio import decode_audio
from triptych.media.jobs import LENGTH, Decoded, FromWorker, Job, NoRoom, Ready, Refused, Setup, Silent, encode
from triptych.media.jobs import decode_from_worker as decode
from triptych.media.pool import ONE_THREAD, WORKER_COMMAND
from triptych.media.sniff import as_media
from triptych.media.worker import limit_memory, memory
from triptych.models.qwen3_omni.audio_features import log_mel
from triptych.models.qwen3_omni.image_features import resize_image
from triptych.models.qwen3_omni.preprocessor_config import load_preprocessor

TOKEN = f"{os.getpid()}xtest_media_worker"
NAMES = SegmentWriter(TOKEN, "media")
LIMITS = MediaConfig(worker_memory_bytes=600 * 1024**2, max_audio_s=60.0)


class Worker:
    def __init__(self, process: subprocess.Popen[bytes], stream: BufferedRWPair, connection: socket.socket) -> None:
        self.process = process
        self.stream = stream
        self.connection = connection

    def send(self, message: Any, data: bytes = b"") -> None:
        self.stream.write(encode(message) + data)
        self.stream.flush()

    def receive(self) -> FromWorker:
        length = int.from_bytes(self.stream.read(LENGTH), "little")
        return decode(self.stream.read(length))

    def make(self, kind: Any, data: bytes, **more: Any) -> tuple[FromWorker, Any]:
        """Its answer, and the array that it wrote."""
        settings: dict[str, Any] = {"options": MediaOptions(), "max_bytes": 10**8} | more
        job = Job(kind=kind, size=len(data), segment=NAMES.reserve(), **settings)
        self.send(job, data)
        answer = self.receive()
        if not isinstance(answer, Decoded):
            assert not existing()
            return answer, None
        mapped = segments.take(job.segment)
        return answer, np.frombuffer(mapped, answer.dtype).reshape(answer.shape)

    def close(self) -> None:
        self.stream.close()
        self.connection.close()


def existing() -> set[str]:
    return {name for name in os.listdir(segments.DIRECTORY) if name.startswith(f"triptych-{TOKEN}-")}


@contextlib.contextmanager
def started(model: Path, config: MediaConfig) -> Iterator[Worker]:
    ours, theirs = socket.socketpair()
    with theirs:
        fd = theirs.fileno()
        process = subprocess.Popen(
            [*WORKER_COMMAND, "--fd", str(fd)], pass_fds=(fd,), start_new_session=True, env=os.environ | ONE_THREAD
        )
    ours.settimeout(60)
    worker = Worker(process, ours.makefile("rwb"), ours)
    try:
        worker.send(Setup(model_dir=str(model), config=config))
        assert worker.receive() == Ready()
        yield worker
    finally:
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            worker.close()
        segments.sweep(TOKEN)


@pytest.fixture(scope="module")
def worker(nano: Path) -> Iterator[Worker]:
    with started(nano, LIMITS) as worker:
        yield worker


def test_sound_becomes_its_spectrogram(worker: Worker, nano: Path) -> None:
    data = audio_file(tone(1.3, 44100), 44100)
    answer, array = worker.make("audio", data)
    samples = decode_audio(data, as_media(data, "audio"), max_s=60)
    assert samples is not None
    assert np.array_equal(array, log_mel(samples, load_preprocessor(nano)))
    assert answer == Decoded(dtype="float32", shape=array.shape, num_mel_frames=130)


def test_an_image_is_resized_as_the_processor_does_it(worker: Worker, nano: Path) -> None:
    picture, config = noise(90, 130), load_preprocessor(nano)
    answer, array = worker.make("image", image_file(Image.fromarray(picture)))
    right, grid = resize_image(picture, config, MediaOptions())
    assert np.array_equal(array, right)
    assert answer == Decoded(dtype="uint8", shape=right.shape, grid=grid)


def test_a_video_is_sampled_and_tells_of_its_sound(worker: Worker) -> None:
    small = MediaOptions(min_pixels=3136, max_pixels=50000)
    for sound in (None, tone(2.0, 48000)):
        answer, array = worker.make("video", video_file(film(20), sound=sound), options=small)
        assert isinstance(answer, Decoded) and answer.has_sound == (sound is not None)
        assert array.shape == (4, 64, 64, 3) and answer.grid == (2, 4, 4) and answer.second_per_grid == 1.0
        assert list(np.argsort(array[:, -1, -1, 0])) == [0, 1, 2, 3]
    assert worker.make("audio", video_file(film(4))) == (Silent(), None)


def test_what_does_not_fit_is_refused_with_the_numbers(worker: Worker) -> None:
    picture, clip = image_file(Image.fromarray(noise(320, 320))), audio_file(tone(10, 16000), 16000)
    for kind, data, least in (("image", picture, 100), ("audio", clip, 54)):
        answer, _ = worker.make(kind, data, max_rows=10)
        assert isinstance(answer, Refused) and answer.code == "context_length_exceeded"
        assert f"{least} tokens, more than the context of 10" in answer.message
        answer, _ = worker.make(kind, data, max_bytes=1000)
        assert isinstance(answer, NoRoom) and answer.num_bytes > 1000


def test_limits_are_refused_by_name(worker: Worker) -> None:
    for seconds, limit in ((0.02, "media.min_audio_s"), (61, "media.max_audio_s")):
        answer, _ = worker.make("audio", audio_file(np.zeros((1, round(seconds * 16000)), np.int16), 16000))
        assert isinstance(answer, Refused) and limit in answer.message


def test_an_option_that_a_file_cannot_follow_is_refused_by_its_own_name(worker: Worker) -> None:
    answer, _ = worker.make("video", video_file(film(4)), options=MediaOptions(num_frames=8))
    assert isinstance(answer, Refused) and answer.param == "mm_processor_kwargs.num_frames"


def test_more_memory_than_allowed_is_an_answer_and_the_worker_goes_on(worker: Worker) -> None:
    answer, _ = worker.make("image", image_file(Image.new("RGBA", (9990, 9990))))
    assert isinstance(answer, Refused) and "media.worker_memory_bytes" in answer.message
    answer, array = worker.make("image", image_file(Image.fromarray(noise(64, 64))))
    assert isinstance(answer, Decoded) and array is not None


def test_no_core_is_dumped_and_files_are_bounded(worker: Worker) -> None:
    limits = psutil.Process(worker.process.pid)
    assert limits.rlimit(resource.RLIMIT_CORE) == (0, 0)
    assert limits.rlimit(resource.RLIMIT_FSIZE)[0] == LIMITS.worker_memory_bytes
    assert 0 < limits.rlimit(resource.RLIMIT_AS)[0] < 2**40
    assert limits.num_threads() == 1


def test_ctrl_c_is_for_the_server_whose_end_is_the_workers_end(nano: Path) -> None:
    with started(nano, LIMITS) as worker:
        os.kill(worker.process.pid, signal.SIGINT)
        answer, _ = worker.make("audio", audio_file(tone(0.2, 16000), 16000))
        assert isinstance(answer, Decoded)
        worker.close()
        assert worker.process.wait(20) == 0


def test_a_job_outlives_its_deadline_by_little_even_without_a_server(nano: Path) -> None:
    with started(nano, MediaConfig(decode_timeout_s=-9.5)) as worker:  # the alarm is ten seconds later
        worker.send(Job(kind="audio", options=MediaOptions(), size=100, segment=NAMES.reserve(), max_bytes=1))
        assert worker.process.wait(20) == -signal.SIGALRM  # it waits for a file that never comes


def test_the_server_never_loads_the_decoders() -> None:
    script = (
        "import sys, triptych.media.loader\n"
        "loaded = {'torch', 'transformers', 'av', 'PIL', 'soxr'} & set(sys.modules)\nsys.exit(', '.join(loaded) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_limit_counts_from_what_is_held_already() -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        limit_memory(2**30)
        assert resource.getrlimit(resource.RLIMIT_AS)[0] >= memory()[0]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
