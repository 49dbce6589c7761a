"""The cache of encoded media: what is used stays, the rest leaves in order of use, and the sums are right."""

from __future__ import annotations

import random

import pytest

from triptych.engine.encoder_cache import EncoderCache


def filled(capacity: int, *sizes: int) -> EncoderCache[int]:
    """Values 0, 1, ... of these sizes, each used by "u" and then let go, in that order."""
    cache: EncoderCache[int] = EncoderCache(capacity)
    for key, size in enumerate(sizes):
        cache.add(key, key, size, {"u"})
    for key in range(len(sizes)):
        cache.unpin(key, "u")
    return cache


def test_what_was_let_go_is_kept_within_the_capacity_the_oldest_leaving_first() -> None:
    cache = filled(10, 4, 4, 4)
    assert 0 not in cache and 1 in cache and 2 in cache
    assert (cache.nbytes, cache.pinned_bytes) == (8, 0)


def test_use_makes_a_value_the_last_to_leave() -> None:
    cache = filled(8, 4, 4)
    assert cache.pin(0, "v") == 0
    cache.unpin(0, "v")
    cache.add(2, 2, 4, {"w"})
    assert 0 in cache and 1 not in cache


def test_what_is_used_stays_whatever_it_weighs() -> None:
    cache: EncoderCache[int] = EncoderCache(10)
    for key in range(3):
        cache.add(key, key, 100, {"u"})
    assert len(cache) == 3 and cache.pinned_bytes == cache.nbytes == 300
    cache.unpin(0, "u")
    assert 0 not in cache and cache.nbytes == 200


def test_a_value_is_used_until_its_last_user_lets_go() -> None:
    cache: EncoderCache[str] = EncoderCache(0)
    cache.add("key", "value", 4, {"a", "b"})
    assert cache.pin("key", "a") == "value"  # again: still one use of a's
    cache.unpin("key", "a")
    cache.unpin("key", "a")
    assert "key" in cache
    cache.unpin("key", "b")
    assert "key" not in cache and cache.nbytes == cache.pinned_bytes == 0


def test_without_capacity_a_value_goes_with_its_last_user() -> None:
    assert len(filled(0, 1, 1)) == 0


def test_what_is_not_kept_is_not_pinned() -> None:
    cache: EncoderCache[int] = EncoderCache(10)
    assert cache.pin("absent", "u") is None
    cache.unpin("absent", "u")
    assert cache.nbytes == 0


def test_a_discarded_value_is_gone_used_or_not() -> None:
    cache: EncoderCache[int] = EncoderCache(10)
    cache.add("used", 1, 4, {"u"})
    cache.add("idle", 2, 4, {"u"})
    cache.unpin("idle", "u")
    for key in ("used", "idle", "absent"):
        cache.discard(key)
    assert len(cache) == cache.nbytes == cache.pinned_bytes == 0
    cache.unpin("used", "u")  # its user need not know


def test_a_key_cannot_be_added_twice_nor_without_a_user() -> None:
    cache: EncoderCache[int] = EncoderCache(10)
    cache.add("key", 1, 4, {"u"})
    with pytest.raises(ValueError, match="kept already"):
        cache.add("key", 1, 4, {"u"})
    with pytest.raises(ValueError, match="no user"):
        cache.add("other", 1, 4, ())
    assert cache.nbytes == 4 and "other" not in cache


def test_any_course_of_events_keeps_sums_bounds_and_pins() -> None:
    rng = random.Random(0)
    for capacity in (0, 20, 50):
        cache: EncoderCache[int] = EncoderCache(capacity)
        uses: dict[int, set[str]] = {}
        sizes = {key: rng.randint(1, 20) for key in range(8)}
        for _ in range(600):
            key, user = rng.randrange(8), rng.choice("abc")
            if rng.random() < 0.5:
                if cache.pin(key, user) is None:
                    cache.add(key, key, sizes[key], {user})
                uses.setdefault(key, set()).add(user)
            elif rng.random() < 0.9:
                cache.unpin(key, user)
                uses.get(key, set()).discard(user)
            else:
                cache.discard(key)
                uses.pop(key, None)
            used = {key for key, users in uses.items() if users}
            assert all(key in cache for key in used)
            assert cache.pinned_bytes == sum(sizes[key] for key in used)
            assert cache.nbytes == sum(sizes[key] for key in range(8) if key in cache)
            assert cache.nbytes <= max(capacity, cache.pinned_bytes)
