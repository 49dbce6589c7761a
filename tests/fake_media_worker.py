"""Stands in for a media worker: does what the file that it is sent says. Answers carry its pid."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
from io import BufferedRWPair
from pathlib import Path

from triptych.connectors import segments
from triptych.media.jobs import Decoded, FromWorker, Job, Last, NoRoom, Ready, Refused, Silent, encode, receive

ROWS = 160  # of the features that it makes up


def answer(job: Job, data: bytes) -> FromWorker:
    word, _, rest = data.decode().partition(" ")
    if word == "wait":  # until the file of that name is there
        while not Path(rest).exists():
            threading.Event().wait(0.01)
    if word in ("hang", "write-and-hang"):
        if word == "write-and-hang":
            segments.write(job.segment, [(0, b"half")])
            Path(rest).touch()
        threading.Event().wait()
    if word == "crash":
        os.abort()
    if word == "write-and-crash":
        segments.write(job.segment, [(0, b"half")])
        os.abort()
    if word == "refuse":
        return Refused(message=rest, code="some_code")
    if word == "silent":
        return Silent()
    if word == "room" and job.max_bytes < int(rest):
        return NoRoom(num_bytes=int(rest))
    if word == "noise":
        sys.stdout.flush()
        raise SystemExit(3)
    if job.kind == "audio":
        segments.write(job.segment, [(0, bytes(4 * 8 * ROWS))])
        return Decoded(dtype="float32", shape=(8, ROWS), num_mel_frames=ROWS)
    segments.write(job.segment, [(0, bytes(4096))])
    grid = (1, 4, 4)
    return Decoded(dtype="uint8", shape=(1, 32, 128, 3), grid=grid, has_sound=job.kind == "video" and rest == "sound")


def serve(stream: BufferedRWPair) -> None:
    stream.write(encode(Ready()))
    stream.flush()
    while (job := receive(stream)) is not None:
        assert isinstance(job, Job)
        data = stream.read(job.size)
        if data.startswith(b"pid"):
            made: FromWorker = Refused(message=str(os.getpid()))
        elif data.startswith(b"last"):
            made = Last(answer=Refused(message=str(os.getpid())))
        else:
            made = answer(job, data)
        stream.write(encode(made))
        stream.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    with socket.socket(fileno=parser.parse_args().fd) as connection, connection.makefile("rwb") as stream:
        receive(stream)  # Setup
        serve(stream)


if __name__ == "__main__":
    main()
