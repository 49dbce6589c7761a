"""How a stream of codec frames is cut into chunks of audio.

The cut depends on the frame index alone, never on load or arrival times: the vocoder's rounding depends on the cut, so
this is what makes the same frames the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.config.schema import ConnectorExtra, DeployConfig


@dataclass(frozen=True, slots=True)
class Cadence:
    """A small first chunk for an early start, then chunks that grow to `full` frames.

    A listener who starts at the first chunk never waits as long as a frame takes at most 3/4 of its duration to make
    (RTF 0.75). With `start` frames out of which `initial` came first, the listener holds at least `start - 1` frames of
    audio (a stream's start is a little short of its frames) and has heard what was made since the first chunk; so the
    next chunk may have n frames as long as 3/4 * (start + n - initial) <= start - 1.

    Raises ValueError unless 1 <= initial <= full.
    """

    initial: int
    full: int

    def __post_init__(self) -> None:
        if not 1 <= self.initial <= self.full:
            raise ValueError(f"a cadence needs 1 <= initial <= full, not initial {self.initial} and full {self.full}")

    def size(self, start: int) -> int:
        """Frames in the chunk that begins at frame `start`, unless the stream ends earlier."""
        if start == 0:
            return self.initial
        affordable = 4 * (start - 1) // 3 - start + self.initial
        return max(1, min(self.full, affordable))

    def later_sizes(self) -> list[int]:
        """Every size of a chunk behind the first that does not end its stream, ascending."""
        start, sizes = self.initial, [self.size(self.initial)]
        while sizes[-1] < self.full:
            start += sizes[-1]
            sizes.append(self.size(start))
        return sorted(set(sizes))


def deployed_cadence(deploy: DeployConfig) -> Cadence:
    """The cadence that the connector between Talker and Code2Wav sets."""
    code2wav = deploy.stage("code2wav")
    name = code2wav.input_connectors.get("talker") if code2wav is not None else None
    extra = deploy.connectors[name].extra if name is not None else ConnectorExtra()
    return Cadence(extra.initial_codec_chunk_frames, extra.codec_chunk_frames)
