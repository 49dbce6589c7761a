"""The media workers: at most so many processes, each started when it is needed, each job with a deadline.

Jobs are served in the order they came. One that takes too long, or whose caller has left, ends with its worker; the
next job starts another.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from asyncio import StreamReader, StreamWriter
from asyncio.subprocess import Process
from collections.abc import Sequence
from typing import Any

from triptych.connectors import segments
from triptych.errors import CapacityError, RequestError
from triptych.media import jobs
from triptych.media.jobs import Answer, Job, Last, Ready, Setup

logger = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-m", "triptych.media.worker")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # libraries take all cores
START_S = 120.0  # for a worker to load its libraries
LEAVE_S = 1.0  # for a job to end by itself after its caller has left
REAP_S = 5.0  # for a killed process to be gone
_PIECE = 1 << 20


class WorkerDied(Exception):
    """The process is gone, or says what it should not."""


class WorkerProcess:
    """One worker, and the socket to it."""

    def __init__(self, process: Process, reader: StreamReader, writer: StreamWriter) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def spawn(cls, command: Sequence[str]) -> WorkerProcess:
        """Raises OSError when there is no such program, or no room for another process."""
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    *("--fd", str(theirs.fileno())),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=os.environ | ONE_THREAD,
                    start_new_session=True,  # Ctrl-C in a terminal is for the server
                )
            except BaseException:
                writer.transport.abort()
                raise
        return cls(process, reader, writer)

    async def set_up(self, setup: Setup) -> None:
        """Wait until it is ready for jobs. Raises WorkerDied when it does not get there."""
        try:
            async with asyncio.timeout(START_S):
                self._writer.write(jobs.encode(setup))
                answer = await self._receive()
        except TimeoutError:
            raise WorkerDied(f"it was not ready within {START_S:g} seconds") from None
        if not isinstance(answer, Ready):
            raise WorkerDied(f"it began with {type(answer).__name__}")

    @property
    def alive(self) -> bool:
        return self._process.returncode is None and not self._reader.at_eof()

    async def ask(self, job: Job, data: bytes) -> Answer | Last:
        """Raises WorkerDied."""
        try:
            self._writer.write(jobs.encode(job))
            for start in range(0, len(data), _PIECE):
                self._writer.write(memoryview(data)[start : start + _PIECE])
                await self._writer.drain()
        except OSError as error:
            raise WorkerDied(str(error)) from error
        answer = await self._receive()
        if isinstance(answer, Ready):
            raise WorkerDied("it answered a job with Ready")
        return answer

    async def kill(self) -> None:
        """End the process at once, and wait until it is gone."""
        if self._process.returncode is None:
            self._process.kill()
        self._writer.transport.abort()
        try:
            await asyncio.wait_for(self._process.wait(), REAP_S)
        except TimeoutError:
            logger.error("media worker %d does not end", self._process.pid)

    async def _receive(self) -> jobs.FromWorker:
        try:
            length = int.from_bytes(await self._reader.readexactly(jobs.LENGTH), "little")
            if length > jobs.MAX_MESSAGE:
                raise WorkerDied(f"it sent a message of {length} bytes")
            return jobs.decode_from_worker(await self._reader.readexactly(length))
        except (OSError, EOFError, ValueError) as error:
            raise WorkerDied(str(error)) from error


class WorkerPool:
    def __init__(self, setup: Setup, command: Sequence[str] = WORKER_COMMAND) -> None:
        config = setup.config
        self._setup = setup
        self._command = tuple(command)
        self._timeout_s = config.decode_timeout_s
        self._max_waiting = config.max_waiting
        self._free = asyncio.Semaphore(config.workers)  # wakes in the order of waiting
        self._waiting = 0
        self._workers: set[WorkerProcess] = set()
        self._idle: list[WorkerProcess] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starting: set[asyncio.Task[Any] | None] = set()  # those whose worker is not there yet
        self._deadlines: dict[asyncio.Task[Any], asyncio.Timeout] = {}  # of those that a worker is at
        self._closed = False

    def warm(self) -> None:
        """Start the first worker in the background: its libraries take seconds to load, which the first job would."""
        task = asyncio.create_task(self._warm(), name="first media worker")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self, job: Job, data: bytes) -> Answer:
        """What a worker makes of a file. If it wrote the job's segment, that is then the caller's to unlink.

        Raises RequestError (without its `param`) when the worker takes too long or crashes, CapacityError when too
        many wait or no worker can be started. Cancelled, it leaves no segment, and soon no process at work.
        """
        if self._free.locked() and self._waiting >= self._max_waiting:
            raise CapacityError(
                f"{self._waiting} images, clips and videos wait to be decoded; try again", retry_after=5, status=503
            )
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        if self._closed:
            self._free.release()
            raise CapacityError("the server is stopping", status=503)
        task = asyncio.create_task(self._serve(job, data), name=f"media {job.segment}")
        self._tasks.add(task)
        self._starting.add(task)
        task.add_done_callback(self._done)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._abandon(task, job)
            raise

    async def close(self) -> None:
        """End all workers and whatever they do. Idempotent."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._idle.clear()
        await asyncio.gather(*[self._end(worker) for worker in self._workers])

    async def _warm(self) -> None:
        async with self._free:
            try:
                self._idle.append(await self._take())
            except CapacityError:  # it is logged, and the first job tries again
                return

    def _done(self, task: asyncio.Task[Answer]) -> None:
        self._tasks.discard(task)
        self._starting.discard(task)
        self._free.release()

    def _abandon(self, task: asyncio.Task[Answer], job: Job) -> None:
        """Nobody waits for this job any more. A short one may end and keep its worker; a long one is ended."""

        def drop(task: asyncio.Task[Answer]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.debug("a job that nobody waits for has failed: %s", error)
            segments.unlink(job.segment)

        if task in self._starting:
            task.cancel()
        elif (deadline := self._deadlines.get(task)) is not None:
            until = asyncio.get_running_loop().time() + LEAVE_S
            deadline.reschedule(min(until, deadline.when() or until))
        task.add_done_callback(drop)

    async def _serve(self, job: Job, data: bytes) -> Answer:
        worker = await self._take()
        self._starting -= {asyncio.current_task()}
        try:
            answer = await self._ask(worker, job, data)
        except BaseException:
            await self._end(worker)
            segments.unlink(job.segment)  # it may have been writing
            raise
        if isinstance(answer, Last):
            await self._end(worker)
            return answer.answer
        self._idle.append(worker)
        return answer

    async def _ask(self, worker: WorkerProcess, job: Job, data: bytes) -> Answer | Last:
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                self._deadlines[task] = deadline
                try:
                    return await worker.ask(job, data)
                finally:
                    del self._deadlines[task]
        except TimeoutError:
            raise RequestError(
                f"the {job.kind} took longer than {self._timeout_s:g} seconds to decode, the limit "
                "'media.decode_timeout_s': send a smaller one"
            ) from None
        except WorkerDied as error:
            logger.warning("a media worker died over a file of %d bytes (%s): %s", len(data), job.kind, error)
            raise RequestError(f"the {job.kind} could not be decoded: the decoder crashed") from None

    async def _take(self) -> WorkerProcess:
        """The worker that rested last, or a new one."""
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            logger.warning("a media worker died while it rested")
            await self._end(worker)
        try:
            worker = await WorkerProcess.spawn(self._command)
            self._workers.add(worker)
            try:
                await worker.set_up(self._setup)
            except BaseException:
                await self._end(worker)
                raise
        except (OSError, WorkerDied) as error:
            logger.error("a media worker cannot be started: %s", error)
            raise CapacityError("media cannot be decoded now: no worker can be started", status=503) from error
        return worker

    async def _end(self, worker: WorkerProcess) -> None:
        await worker.kill()
        self._workers.discard(worker)
