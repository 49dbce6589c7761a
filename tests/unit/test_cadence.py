"""The cut of a stream into chunks: where it falls, and that a listener never waits."""

from __future__ import annotations

from fractions import Fraction

import pytest

from triptych.stages.cadence import Cadence

CADENCES = [
    Cadence(initial, full) for full in (1, 2, 7, 25, 300) for initial in (1, 2, 3, 4, 10, 25) if initial <= full
]
TRIM = Fraction(555, 1920)  # of a frame, at the start of a stream


def chunks(cadence: Cadence, frames: int) -> list[int]:
    sizes: list[int] = []
    while (start := sum(sizes)) < frames:
        sizes.append(min(cadence.size(start), frames - start))
    return sizes


def waits(cadence: Cadence, real_time_factor: Fraction, frames: int) -> Fraction:
    """Frames of silence a listener hears who plays what has come; a frame takes `real_time_factor` frames to make."""
    silence, played_until, made = Fraction(0), Fraction(0), 0
    for index, size in enumerate(chunks(cadence, frames)):
        made += size
        arrival = made * real_time_factor
        if index and arrival > played_until:
            silence += arrival - played_until
        played_until = max(played_until, arrival) + size - (TRIM if index == 0 else 0)
    return silence


def test_default_cadence_starts_small_and_grows_to_full_chunks() -> None:
    assert chunks(Cadence(4, 25), 160) == [4, 4, 5, 7, 9, 12, 16, 21, 25, 25, 25, 7]


@pytest.mark.parametrize("cadence", CADENCES)
def test_chunks_cover_every_frame_once_and_keep_their_bounds(cadence: Cadence) -> None:
    for frames in (0, 1, 3, cadence.initial, cadence.full, 1000):
        sizes = chunks(cadence, frames)
        assert sum(sizes) == frames
        assert all(1 <= size <= cadence.full for size in sizes)
        assert not sizes or sizes[0] == min(cadence.initial, frames)


@pytest.mark.parametrize("cadence", CADENCES)
def test_chunks_become_full_and_never_shrink_after_the_second(cadence: Cadence) -> None:
    sizes = chunks(cadence, 10 * cadence.full + 200)[1:-1]
    assert sizes == sorted(sizes)
    assert sizes[-1] == cadence.full


@pytest.mark.parametrize("cadence", CADENCES)
def test_no_wait_while_speech_is_made_at_half_of_real_time(cadence: Cadence) -> None:
    assert waits(cadence, Fraction(1, 2), 2000) == 0


@pytest.mark.parametrize("cadence", [cadence for cadence in CADENCES if cadence.initial >= 2])
def test_no_wait_up_to_three_quarters_of_real_time(cadence: Cadence) -> None:
    assert waits(cadence, Fraction(3, 4), 2000) == 0


def test_the_check_for_waits_sees_a_ramp_that_is_too_steep() -> None:
    class Jump(Cadence):
        def size(self, start: int) -> int:
            return self.full if start else self.initial

    assert waits(Jump(4, 25), Fraction(1, 2), 2000) > 0


@pytest.mark.parametrize(("initial", "full"), [(0, 25), (-1, 1), (26, 25)])
def test_impossible_cadences_are_refused(initial: int, full: int) -> None:
    with pytest.raises(ValueError, match=f"initial {initial} and full {full}"):
        Cadence(initial, full)
