"""`python -m triptych.media.worker --fd N`: decodes what users upload, one file at a time, for the server that owns it.

It is made to be killed: it holds nothing but the file at hand, opens no other, asks for no more memory than its limit,
and ends when its server does. What is wrong with a file is an answer; what is wrong with the decoder is its end, which
costs one request an error.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from io import BufferedRWPair

import numpy as np
import torch

from triptych import log
from triptych.connectors import segments
from triptych.errors import ContextLengthError, RequestError
from triptych.media import jobs
from triptych.media.features import FeatureMaker, Features, NoRoomError
from triptych.media.jobs import Answer, Job, Last, NoRoom, Ready, Refused, Setup, Silent
from triptych.models.qwen3_omni.config import load_config
from triptych.models.qwen3_omni.preprocessor_config import load_preprocessor

logger = logging.getLogger(__name__)

ALARM_S = 10.0  # after its deadline, a job ends the worker even if the server is gone and cannot kill it
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Worker:
    def __init__(self, stream: BufferedRWPair, setup: Setup) -> None:
        self._stream = stream
        self._limits = setup.config
        encoders = load_config(setup.model_dir).media
        self._maker = FeatureMaker(load_preprocessor(setup.model_dir), encoders, setup.config)
        resource.setrlimit(resource.RLIMIT_FSIZE, (setup.config.worker_memory_bytes,) * 2)
        limit_memory(setup.config.worker_memory_bytes)
        self._resident = memory()[1]  # of a fresh worker

    def run(self) -> None:
        """Answer jobs until the server closes the socket, or this process has grown."""
        self._send(Ready())
        while (message := jobs.receive(self._stream)) is not None:
            if not isinstance(message, Job):
                raise ValueError(f"expected a Job, got {type(message).__name__}")
            # Nothing catches the alarm: it ends the process, whatever library it is in.
            signal.setitimer(signal.ITIMER_REAL, self._limits.decode_timeout_s + ALARM_S)
            data = self._stream.read(message.size)
            if len(data) < message.size:
                return
            answer = self._answer(message, data)
            del data
            signal.setitimer(signal.ITIMER_REAL, 0)
            full = memory()[1] - self._resident > self._limits.worker_memory_bytes // 2
            try:
                self._send(Last(answer=answer) if full else answer)
            except BaseException:
                segments.unlink(message.segment)  # nobody else knows that it was written
                raise
            if full:
                return

    def _answer(self, job: Job, data: bytes) -> Answer:
        try:
            features = self._maker.make(job, data)
            if features is None:
                return Silent()
            write(job.segment, features)
            return features.facts
        except ContextLengthError as error:
            return Refused(message=str(error), code=error.code)
        except RequestError as error:
            return Refused(message=str(error), param=error.param, code=error.code)
        except NoRoomError as error:
            return NoRoom(num_bytes=error.num_bytes)
        except MemoryError:
            return self._too_much_memory()
        except Exception as error:
            if isinstance(error, RuntimeError) and "memory" in str(error):  # torch's own word for it
                return self._too_much_memory()
            logger.exception("decoding a file of %d bytes (%s) failed", job.size, job.kind)
            return Refused(message=f"the {job.kind} could not be decoded: {type(error).__name__}")

    def _too_much_memory(self) -> Refused:
        return Refused(
            message=f"decoding takes more memory than {self._limits.worker_memory_bytes} bytes, the limit "
            "'media.worker_memory_bytes': send a smaller file"
        )

    def _send(self, message: jobs.FromWorker) -> None:
        self._stream.write(jobs.encode(message))
        self._stream.flush()


def write(segment: str, features: Features) -> None:
    """Raises NoRoomError when there is no shared memory left."""
    array = np.ascontiguousarray(features.array)
    try:
        segments.write(segment, [(0, array.reshape(-1).view(np.uint8).data)])
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        raise NoRoomError(array.nbytes) from error


def memory() -> tuple[int, int]:
    """Address space and resident memory of this process, in bytes; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            size, resident = file.read().split()[:2]
    except OSError:
        return 0, 0
    return int(size) * _PAGE, int(resident) * _PAGE


def limit_memory(num_bytes: int) -> None:
    """Let this process ask for so many bytes more than it has: its libraries are not a file's doing."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = memory()[0] + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def main(arguments: Sequence[str] | None = None, make: Callable[[BufferedRWPair, Setup], Worker] = Worker) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, whose end is also ours
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    log.configure(process="media worker")
    parser = argparse.ArgumentParser(
        prog="python -m triptych.media.worker", description="A media worker of `triptych serve`."
    )
    parser.add_argument("--fd", type=int, required=True, help="the socket that the server has left open")
    options = parser.parse_args(arguments)
    with socket.socket(fileno=options.fd) as connection, connection.makefile("rwb") as stream:
        setup = jobs.receive(stream)
        if not isinstance(setup, Setup):
            return 0 if setup is None else 2
        try:
            make(stream, setup).run()
        except (BrokenPipeError, ConnectionResetError):
            return 0  # the server is gone
    return 0


if __name__ == "__main__":
    sys.exit(main())
