"""From the parts of a request to features that the stages can map: fetched, decoded by a worker, kept by content.

Files that are the same and are asked for in the same way are decoded once, also while the first decoding is still
under way, and whoever sent them.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from triptych.config.schema import MediaConfig
from triptych.connectors import segments
from triptych.connectors.segments import SegmentWriter
from triptych.connectors.wire import FeatureRef
from triptych.errors import CapacityError, ContextLengthError, RequestError
from triptych.media.contract import MediaFeatures, MediaKind, MediaOptions, MediaPart, MediaStats
from triptych.media.feature_cache import CachedFeatures, FeatureCache
from triptych.media.jobs import Decoded, Job, NoRoom, Refused, Setup, Silent
from triptych.media.pool import WORKER_COMMAND, WorkerPool
from triptych.media.source import MediaSource
from triptych.models.qwen3_omni.config import load_config
from triptych.models.qwen3_omni.media_layout import part_rows
from triptych.models.qwen3_omni.media_options import check_options
from triptych.models.qwen3_omni.preprocessor_config import load_preprocessor

logger = logging.getLogger(__name__)

FILES_HELD = 4  # times `max_bytes` of files that may wait to be decoded, all requests together
AT_ONCE = 4  # parts of one request on their way; of all together, or one for each worker, where they are patient
_HASHED_AT_ONCE = 1 << 20
_FORMAT = b"1"  # of the features; another one must not be taken for this


class Lease:
    """`MediaLease`."""

    def __init__(self, cache: FeatureCache) -> None:
        self._cache = cache
        self._held: list[CachedFeatures] = []
        self.items: Sequence[MediaFeatures] = ()

    def hold(self, entry: CachedFeatures) -> MediaFeatures:
        self._held.append(entry)
        return entry.features

    def close(self) -> None:
        held, self._held = self._held, []
        for entry in held:
            self._cache.release(entry)


@dataclass(slots=True, eq=False)
class _Flight:
    """A decoding under way, and how many parts wait for it. It holds its result until the last of them has it."""

    task: asyncio.Task[CachedFeatures | None]
    waiting: int = 0


class Loader:
    """`MediaLoader`. Belongs to the event loop that it was made in."""

    def __init__(
        self,
        config: MediaConfig,
        model_dir: str,
        *,
        source: MediaSource | None = None,
        command: Sequence[str] = WORKER_COMMAND,
        patient: bool = False,
    ) -> None:
        """With `patient` the parts of all requests wait for their turn, where else a request is sent away.

        Raises CheckpointError when the checkpoint does not say how media is prepared, ConfigError for limits that
        cannot be followed."""
        self._config = config
        # Never more parts than the pool takes; their number bounds the files that they hold.
        turns = min(max(AT_ONCE, config.workers), config.workers + config.max_waiting)
        self._turn = asyncio.Semaphore(turns) if patient else None
        self._encoders = load_config(model_dir).media
        self._preprocessor = load_preprocessor(model_dir)
        self._fingerprint = msgspec.msgpack.encode(self._preprocessor)
        self._source = source if source is not None else MediaSource(config)
        self._token = f"{os.getpid()}x{secrets.token_hex(6)}"
        self._names = SegmentWriter(self._token, segments.MEDIA)
        self._pool = WorkerPool(Setup(model_dir=model_dir, config=config), command)
        self._cache = FeatureCache(config.cache_bytes)
        self._flights: dict[tuple[bytes, int | None], _Flight] = {}
        self._bytes_held = 0
        self._hasher = ThreadPoolExecutor(1, "media hash")
        self._closed = False
        self.stats = MediaStats()

    def warm(self) -> None:
        """Start the first worker in the background, before it is needed."""
        self._pool.warm()

    async def load(self, parts: Sequence[MediaPart], options: MediaOptions, *, max_rows: int | None = None) -> Lease:
        """Also raises ContextLengthError for a part that alone takes more than `max_rows` rows of a prompt, if it can
        be told before decoding it then without decoding."""
        check_options(self._preprocessor, options)
        if len(parts) > self._config.max_parts:
            raise RequestError(
                f"the request has {len(parts)} images, clips and videos: at most {self._config.max_parts}, the limit "
                "'media.max_parts'",
                parts[self._config.max_parts].param,
            )
        lease = Lease(self._cache)
        turn = asyncio.Semaphore(AT_ONCE) if self._turn is None else self._turn
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._load_part(part, options, max_rows, lease, turn)) for part in parts]
        except BaseExceptionGroup as failed:
            lease.close()
            # The first that went wrong; the others were cancelled.
            raise failed.exceptions[0] from None
        except BaseException:
            lease.close()
            raise
        lease.items = tuple(task.result() for task in tasks)
        return lease

    async def close(self) -> None:
        """Stop the workers, end every load and free all shared memory. Idempotent."""
        self._closed = True
        flights = [flight.task for flight in self._flights.values()]
        for task in flights:
            task.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        await self._pool.close()
        await self._source.close()
        self._hasher.shutdown(wait=False, cancel_futures=True)
        self._cache.clear()
        segments.sweep(self._token)

    async def _load_part(
        self, part: MediaPart, options: MediaOptions, max_rows: int | None, lease: Lease, turn: asyncio.Semaphore
    ) -> MediaFeatures:
        async with turn:
            try:
                start = time.monotonic()
                data = await self._source.read(part)
                self.stats.fetch_seconds += time.monotonic() - start
                with self._holding(len(data)):
                    return await self._decode_part(part, data, self._of_kind(part, options), max_rows, lease)
            except RequestError as error:
                self.stats.refused += 1
                _raise_for(part, error)

    @contextmanager
    def _holding(self, num_bytes: int) -> Iterator[None]:
        """While a part has its file in memory: also one whose decoding another part's is, for it has read its own."""
        if self._turn is None and self._bytes_held + num_bytes > FILES_HELD * self._config.max_bytes:
            raise CapacityError("too many files wait to be decoded; try again", retry_after=5, status=503)
        self._bytes_held += num_bytes
        try:
            yield
        finally:
            self._bytes_held -= num_bytes

    async def _decode_part(
        self, part: MediaPart, data: bytes, options: MediaOptions, max_rows: int | None, lease: Lease
    ) -> MediaFeatures:
        content = await self._hash(data)
        entry = await self._find(part.kind, content, options, data, max_rows)
        if entry is None:
            raise RequestError("the file has no sound: send one with an audio stream")
        features = lease.hold(entry)
        if part.kind == "video" and options.use_audio_in_video and entry.has_sound:
            try:
                sound = await self._find("audio", content, MediaOptions(), data, max_rows)
            except RequestError as error:
                raise _of_sound(error) from error
            features = msgspec.structs.replace(features, sound=sound and lease.hold(sound))
        rows = part_rows(features, self._encoders)
        if max_rows is not None and rows > max_rows:
            raise ContextLengthError(f"the {part.kind} takes {rows} tokens, more than the context of {max_rows}")
        return features

    async def _find(
        self, kind: MediaKind, content: bytes, options: MediaOptions, data: bytes, max_rows: int | None
    ) -> CachedFeatures | None:
        """The decoded file with a user more, from the cache, from a decoding under way or from a new one; None for a
        file without sound where that was asked for."""
        digest = self._digest(kind, content, options)
        if (entry := self._cache.acquire(digest)) is not None:
            self.stats.cache_hits += 1
            return entry
        flight = self._flights.get((digest, max_rows))
        if flight is None:
            job = Job(
                kind=kind,
                options=options,
                size=len(data),
                segment=self._names.reserve(),
                max_rows=max_rows,
                max_bytes=0,
            )
            flight = _Flight(asyncio.create_task(self._decode(job, digest, data), name=f"decode {kind}"))
            self._flights[digest, max_rows] = flight
        else:
            self.stats.cache_hits += 1
        flight.waiting += 1
        try:
            entry = await asyncio.shield(flight.task)
            return entry and self._cache.acquire(digest)
        except asyncio.CancelledError:
            if self._closed and flight.task.cancelled():  # it was not this part that was cancelled
                raise CapacityError("the server is stopping", status=503) from None
            raise
        finally:
            flight.waiting -= 1
            if not flight.waiting:
                self._land(digest, max_rows, flight)

    def _land(self, digest: bytes, max_rows: int | None, flight: _Flight) -> None:
        """Nobody waits for a decoding any more: let go of its result, or stop it."""

        def let_go(task: asyncio.Task[CachedFeatures | None]) -> None:
            if task.cancelled() or task.exception() is not None:
                return
            if (entry := task.result()) is not None:
                self._cache.release(entry)

        if self._flights.get((digest, max_rows)) is flight:
            del self._flights[digest, max_rows]
        flight.task.cancel()
        flight.task.add_done_callback(let_go)

    async def _decode(self, job: Job, digest: bytes, data: bytes) -> CachedFeatures | None:
        """One user of the entry is the flight's own."""
        start = time.monotonic()
        try:
            room = self._room()
            answer = await self._pool.run(msgspec.structs.replace(job, max_bytes=room), data)
            if isinstance(answer, NoRoom):
                self._cache.shrink()
                room = self._room()
                if answer.num_bytes <= room:
                    answer = await self._pool.run(msgspec.structs.replace(job, max_bytes=room), data)
        finally:
            self.stats.decode_seconds += time.monotonic() - start
        match answer:
            case Decoded():
                self.stats.decoded += 1
                return self._cache.add(_entry(job, digest, answer))
            case Silent():
                return None
            case Refused(code="context_length_exceeded"):
                raise ContextLengthError(answer.message, None)
            case Refused():
                raise RequestError(answer.message, answer.param, answer.code)
            case NoRoom():
                logger.warning(
                    "a decoded %s of %d bytes is refused: one job may take %d, half of what is free in %s, shared "
                    "among media.workers. Make that larger (docker: --shm-size)",
                    job.kind,
                    answer.num_bytes,
                    room,
                    segments.DIRECTORY,
                )
                raise CapacityError(
                    f"the decoded {job.kind} takes {answer.num_bytes} bytes of shared memory, and {room} are free for "
                    "it; try again, or send a smaller one",
                    retry_after=5,
                    status=503,
                )

    async def _hash(self, data: bytes) -> bytes:
        """In a thread of its own when it takes long: those of the event loop may all wait for a slow name server."""
        if len(data) < _HASHED_AT_ONCE:
            return hashlib.sha256(data).digest()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._hasher, lambda: hashlib.sha256(data).digest())

    def _room(self) -> int:
        """What one job may write: its share of half the shared memory that is free, for the stages need some too."""
        stat = os.statvfs(segments.DIRECTORY)
        return stat.f_bavail * stat.f_frsize // (2 * self._config.workers)

    def _of_kind(self, part: MediaPart, options: MediaOptions) -> MediaOptions:
        """The options that matter to a part, so that others do not make another part of it."""
        match part.kind:
            case "audio":
                return MediaOptions()
            case "video":
                return options
            case "image":
                most = self._preprocessor.image_max_pixels  # which no limit raises
                asked = [limit for limit in (options.max_pixels, part.max_pixels) if limit is not None and limit < most]
                return MediaOptions(min_pixels=options.min_pixels, max_pixels=min(asked, default=None))

    def _digest(self, kind: MediaKind, content: bytes, options: MediaOptions) -> bytes:
        asked = msgspec.msgpack.encode(msgspec.structs.replace(options, use_audio_in_video=False))
        pieces = (_FORMAT, kind.encode(), self._fingerprint, asked, content)
        return hashlib.sha256(b"".join(len(piece).to_bytes(4, "little") + piece for piece in pieces)).digest()


def _of_sound(error: RequestError) -> RequestError:
    """The same error about the sound of a video: the file is decoded as audio for it."""
    message = f"the sound of the video cannot be heard (use_audio_in_video): {error}"
    if isinstance(error, ContextLengthError):
        return ContextLengthError(message, None)
    return RequestError(message, error.param, error.code)


def _entry(job: Job, digest: bytes, decoded: Decoded) -> CachedFeatures:
    features = MediaFeatures(
        kind=job.kind,
        digest=digest,
        features=FeatureRef(segment=job.segment, dtype=decoded.dtype, shape=decoded.shape),
        grid=decoded.grid,
        second_per_grid=decoded.second_per_grid,
        num_mel_frames=decoded.num_mel_frames,
    )
    return CachedFeatures(features, os.stat(f"{segments.DIRECTORY}/{job.segment}").st_size, decoded.has_sound)


def _raise_for(part: MediaPart, error: RequestError) -> NoReturn:
    """The same error about that part, unless it is about an option."""
    if isinstance(error, ContextLengthError):
        raise ContextLengthError(str(error), part.param) from error
    raise RequestError(str(error), error.param or part.param, error.code or "invalid_media") from error
