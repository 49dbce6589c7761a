"""The teacher's speech at the codec's pace: every word and pause lasts whole codec frames.

A word then meets the frames at the same place wherever it is said, so its codes are nearly the same each time: the
Talker has to learn how words sound, and not also how each sounds at every offset within a frame.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from training.alignment import owners_of
from training.teacher import FRAME, SAMPLE_RATE, Speech, Waveform, read_waveform, speak, write_waveform

LEAD, TAIL = 1, 2  # frames of quiet around a sentence
_SECONDS = FRAME / SAMPLE_RATE  # of one frame
_SLOWER = 0.1  # frames: rather a little longer than shorter


def speak_in_frames(sentence: str, voice: str) -> Speech:
    """One sentence whose words and pauses begin and end with codec frames."""
    return in_frames(speak(sentence, voice), sentence, voice)


def in_frames(speech: Speech, sentence: str, voice: str) -> Speech:
    """Speech of a sentence, stretched so that its words and pauses last whole frames.

    Raises RuntimeError where Rubber Band is not installed.
    """
    source, target = time_map([end for _, end in speech.phones], owners_of(sentence, voice, speech.phones))
    stretched = _stretch(_part(speech.samples, source[0], source[-1]), [at - source[0] for at in source], target)
    seconds = [frame * _SECONDS for frame in target]
    return Speech(
        stretched, [(phone, round(float(np.interp(end, source, seconds)), 3)) for phone, end in speech.phones]
    )


def time_map(ends: Sequence[float], owners: Sequence[int | None]) -> tuple[list[float], list[int]]:
    """Where words and pauses begin and end: seconds of the speech, and the codec frames to bring them to.

    `ends` are the seconds at which phones end, `owners` the words they belong to, None for a pause.
    """
    last = [place for place, owner in enumerate(owners) if place + 1 == len(owners) or owners[place + 1] != owner]
    edges = [ends[place] for place in last if (place, owners[place]) != (len(owners) - 1, None)]
    source = [edges.pop(0) if owners[0] is None else 0.0]
    target = [LEAD]
    for edge in edges:
        frames = (edge - source[-1]) / _SECONDS
        source.append(edge)
        target.append(target[-1] + max(1, round(frames + _SLOWER)))
    return [source[0] - LEAD * _SECONDS, *source, source[-1] + TAIL * _SECONDS], [0, *target, target[-1] + TAIL]


def _part(samples: Waveform, start: float, end: float) -> Waveform:
    """Samples from second `start` to second `end`, silence where there are none."""
    first, last = round(start * SAMPLE_RATE), round(end * SAMPLE_RATE)
    inside = samples[max(0, first) : max(0, last)]
    return np.pad(inside, (max(0, -first), max(0, last - max(0, first) - len(inside))))


def _stretch(samples: Waveform, source: list[float], target: list[int]) -> Waveform:
    """Bring every second of `source` to the codec frame of `target`; the first is the beginning, the last the end."""
    if shutil.which("rubberband") is None:
        raise RuntimeError("rubberband is not installed; on Debian: apt-get install rubberband-cli")
    whole = target[-1] * FRAME
    with tempfile.TemporaryDirectory() as folder:
        spoken, paced, points = (Path(folder) / name for name in ("spoken.wav", "paced.wav", "points"))
        write_waveform(str(spoken), samples)
        inner = zip(source[1:-1], target[1:-1], strict=True)
        points.write_text("".join(f"{round(second * SAMPLE_RATE)} {frame * FRAME}\n" for second, frame in inner))
        subprocess.run(
            ["rubberband", "-q", "-D", str(whole / SAMPLE_RATE), "-M", points, spoken, paced],
            check=True, capture_output=True,
        )  # fmt: skip
        stretched = read_waveform(paced, SAMPLE_RATE)[:whole]
    return np.pad(stretched, (0, whole - len(stretched)))
