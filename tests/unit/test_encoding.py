"""The Thinker's encoder work: turns, budget, sharing, cache, failures; the same bits whatever else is there."""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from triptych.errors import CheckpointError, TriptychError
from triptych.models.qwen3_omni.encoders import PREFIXES, Encoders
from triptych.models.qwen3_omni.patches import patchify
from triptych.models.qwen3_omni.preprocessor_config import PreprocessorConfig, load_preprocessor
from triptych.models.weights import load_weights
from triptych.stages import encoding
from triptych.stages.encoding import EncoderLine, Fault
from triptych.stages.media_slices import EncoderItem, slices

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def encoders(nano: Path) -> Encoders:
    raw = json.loads((nano / "config.json").read_text())
    with torch.device("meta"):
        built = Encoders(raw)
    load_weights(built, built.placements, nano, prefixes=PREFIXES, dtype=torch.float32)
    return built


@pytest.fixture(scope="module")
def preprocessor(nano: Path) -> PreprocessorConfig:
    return load_preprocessor(nano)


@pytest.fixture
def make_line(encoders: Encoders, preprocessor: PreprocessorConfig) -> Callable[..., EncoderLine]:
    def make(**changes: Any) -> EncoderLine:
        settings: dict[str, Any] = {
            "encoders": encoders,
            "preprocessor": preprocessor,
            "budget": 100,
            "cache_bytes": 0,
            "dtype": torch.float32,
            "device": CPU,
            "batch_invariant": True,
        }
        return EncoderLine(**(settings | changes))

    return make


def video(frames: int = 9, h: int = 4, w: int = 6, name: bytes = b"video") -> EncoderItem:
    """t temporal patches of 24 patches and 6 rows each, unless asked otherwise. The content follows from the name."""
    pixels = np.random.default_rng(list(name)).integers(0, 256, (frames, 16 * h, 16 * w, 3), dtype=np.uint8)
    t = -(-frames // 2)
    return EncoderItem(kind="video", digest=name, num_rows=t * h * w // 4, features=pixels, grid=(t, h, w))


def image(h: int = 4, w: int = 4, name: bytes = b"image") -> EncoderItem:
    pixels = np.random.default_rng(list(name)).integers(0, 256, (1, 16 * h, 16 * w, 3), dtype=np.uint8)
    return EncoderItem(kind="image", digest=name, num_rows=h * w // 4, features=pixels, grid=(1, h, w))


def clip(frames: int = 1010, name: bytes = b"clip") -> EncoderItem:
    mel = np.random.default_rng(list(name)).standard_normal((128, frames)).astype(np.float32)
    rows = frames // 100 * 13 + -(-(frames % 100) // 8)
    return EncoderItem(kind="audio", digest=name, num_rows=rows, features=mel)


def replaced(item: EncoderItem, **changes: Any) -> EncoderItem:
    fields = {name: getattr(item, name) for name in ("kind", "digest", "num_rows", "features", "grid")}
    return EncoderItem(**(fields | changes))


def drain(line: EncoderLine) -> list[Fault]:
    faults: list[Fault] = []
    for _ in range(1000):
        if not line.has_work():
            return faults
        faults += line.step()
    raise AssertionError("the line never ends")


def rows_of(line: EncoderLine, request_id: str, *items: EncoderItem) -> list[list[Tensor]]:
    """Copies of every row of a request's items."""
    found = []
    for index, item in enumerate(items):
        rows = line.rows(request_id, index, 0, item.num_rows)
        found.append([tensor.clone() for tensor in (rows.embeds, *rows.deepstack)])
    return found


def whole(item: EncoderItem, encoders: Encoders, preprocessor: PreprocessorConfig) -> list[Tensor]:
    """An item in one call."""
    features = torch.from_numpy(item.features)
    if item.kind == "audio":
        return [encoders.encode_audio([features], chunk=min(100, features.shape[1]))]
    rows, deepstack = encoders.encode_vision(patchify(features, preprocessor, torch.float32), [item.grid])
    return [rows, *deepstack]


@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize("budget", [1, 25, 100, 900, 10_000])
def test_an_item_in_slices_is_the_whole_item(
    make_line: Callable[..., EncoderLine],
    encoders: Encoders,
    preprocessor: PreprocessorConfig,
    budget: int,
    batch_invariant: bool,
) -> None:
    items = (video(), clip(), image(6, 10), clip(30, b"short"), clip(100, b"exact"), clip(830, b"short end"))
    line = make_line(budget=budget, batch_invariant=batch_invariant)
    line.submit("one", items)
    assert not drain(line)
    for item, found in zip(items, rows_of(line, "one", *items), strict=True):
        expected = whole(item, encoders, preprocessor)
        assert len(found) == (1 if item.kind == "audio" else 4)
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=0)


def test_batch_invariant_rows_have_the_same_bits_whatever_else_is_there(make_line: Callable[..., EncoderLine]) -> None:
    rng = random.Random(0)
    pool = [video(), video(4, 2, 2, b"small"), clip(), clip(30, b"short"), image(), image(6, 10, b"wide")]
    alone = {}
    for item in pool:
        line = make_line()
        line.submit("alone", [item])
        drain(line)
        [alone[item.digest]] = rows_of(line, "alone", item)
    for _ in range(5):
        line, asked = make_line(cache_bytes=rng.choice((0, 10_000, 10**9))), {}
        for number in range(6):
            name = str(number)
            asked[name] = rng.sample(pool, rng.randint(1, 3))
            line.submit(name, asked[name])
            for _ in range(rng.randint(0, 4)):
                line.step()
        drain(line)
        for name, items in asked.items():
            for item, found in zip(items, rows_of(line, name, *items), strict=True):
                assert all(torch.equal(mine, other) for mine, other in zip(found, alone[item.digest], strict=True))


def test_slices_cover_an_item_once_and_keep_the_budget(encoders: Encoders) -> None:
    for item in (video(), video(1), video(40, 2, 2), image(8, 8), clip(), clip(5), clip(800), clip(801), clip(5000)):
        for budget in (1, 24, 50, 100, 799, 800, 2000, 10**6):
            cut = list(slices(item, encoders, budget))
            assert [piece.start for piece in cut[1:]] == [piece.stop for piece in cut[:-1]]
            assert [piece.row for piece in cut[1:]] == [piece.row + piece.num_rows for piece in cut[:-1]]
            assert cut[0].start == cut[0].row == 0
            assert sum(piece.num_rows for piece in cut) == item.num_rows
            indivisible = {"audio": 800, "image": 64, "video": item.grid[1] * item.grid[2]}[item.kind]
            assert all(piece.cost <= max(budget, indivisible) for piece in cut)


def test_a_turn_spends_no_more_than_the_budget_and_no_less_than_one_slice(
    make_line: Callable[..., EncoderLine],
) -> None:
    line = make_line(budget=50)  # two temporal patches
    line.submit("one", [video(9), image(8, 8)])  # 64 patches
    ready = []
    while line.has_work():
        line.step()
        ready.append((line.rows_ready("one", 0), line.rows_ready("one", 1)))
    assert ready == [(12, 0), (24, 0), (30, 0), (30, 16)]


def test_a_long_video_does_not_hold_up_a_small_picture(make_line: Callable[..., EncoderLine]) -> None:
    line = make_line(budget=24)
    line.submit("long", [video(200)])
    line.step()
    line.submit("small", [image()])
    line.step()
    line.step()
    assert line.rows_ready("small", 0) == 4 and line.rows_ready("long", 0) < 600


def test_rows_can_be_had_as_soon_as_they_are_there_and_no_sooner(make_line: Callable[..., EncoderLine]) -> None:
    line = make_line(budget=24)
    item = video()
    line.submit("one", [item])
    assert line.rows_ready("one", 0) == 0
    with pytest.raises(ValueError, match="0 are ready"):
        line.rows("one", 0, 0, 1)
    line.step()
    assert line.rows_ready("one", 0) == 6
    early = line.rows("one", 0, 2, 5).embeds.clone()
    with pytest.raises(ValueError, match="6 are ready"):
        line.rows("one", 0, 0, 7)
    drain(line)
    [[embeds, *_]] = rows_of(line, "one", item)
    assert torch.equal(early, embeds[2:5])


def test_what_two_requests_bring_is_encoded_once(
    make_line: Callable[..., EncoderLine], encoders: Encoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted(encoders, monkeypatch)
    line = make_line(budget=48, cache_bytes=10**6)
    line.submit("one", [video(), video()])
    line.step()
    line.submit("two", [video()])
    drain(line)
    assert sum(t for [(t, _, _)] in calls) == 5
    assert rows_of(line, "two", video())[0][0].equal(rows_of(line, "one", video())[0][0])
    line.release("one")
    line.release("two")
    line.submit("three", [video()])  # from the cache
    assert not line.has_work() and line.rows_ready("three", 0) == 30
    assert sum(t for [(t, _, _)] in calls) == 5
    assert (line.num_queries, line.num_hits) == (4, 3)


def test_one_kind_is_not_taken_for_another_of_the_same_digest(make_line: Callable[..., EncoderLine]) -> None:
    line = make_line()
    items = (image(name=b"same"), clip(name=b"same"))
    line.submit("one", items)
    drain(line)
    assert [line.rows_ready("one", index) for index in range(2)] == [4, items[1].num_rows]


def test_without_a_cache_nothing_stays_after_the_last_request(make_line: Callable[..., EncoderLine]) -> None:
    line = make_line()
    line.submit("one", [video(), clip()])
    drain(line)
    assert line.cache.nbytes == line.cache.pinned_bytes == 4 * (30 * 4 + 132) * 64
    line.release("one")
    line.release("one")
    assert len(line.cache) == line.cache.nbytes == 0


def test_a_released_request_costs_no_more_work(
    make_line: Callable[..., EncoderLine], encoders: Encoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted(encoders, monkeypatch)
    line = make_line(budget=24, cache_bytes=10**6)
    line.submit("one", [video(200)])
    line.step()
    line.release("one")
    assert not line.has_work() and not line.step()
    assert len(calls) == 1
    assert len(line.cache) == 0  # a part of an item is of no use


def test_a_shared_item_goes_on_when_one_of_its_requests_is_released(make_line: Callable[..., EncoderLine]) -> None:
    line = make_line(budget=24)
    line.submit("one", [video()])
    line.submit("two", [image(), video()])
    line.step()
    line.release("one")
    drain(line)
    assert line.rows_ready("two", 1) == 30


def test_features_are_let_go_when_encoded_cached_or_released(make_line: Callable[..., EncoderLine]) -> None:
    line = make_line(budget=24, cache_bytes=10**6)

    def submitted(request_id: str, frames: int) -> weakref.ref[np.ndarray]:
        item = video(frames, name=b"%d" % frames)
        line.submit(request_id, [item])
        return weakref.ref(item.features)

    done = submitted("done", 3)
    assert done() is not None
    drain(line)
    cached, left = submitted("cached", 3), submitted("left", 20)
    line.step()
    assert left() is not None
    line.release("left")
    gc.collect()
    assert done() is None and cached() is None and left() is None


def test_features_of_a_read_only_map_are_taken(make_line: Callable[..., EncoderLine]) -> None:
    item = image()
    item.features.flags.writeable = False
    line = make_line()
    line.submit("one", [item])
    assert not drain(line)


def test_rows_are_in_the_dtype_of_the_thinker(make_line: Callable[..., EncoderLine]) -> None:
    line, item = make_line(dtype=torch.bfloat16), image()
    line.submit("one", [item])
    drain(line)
    assert {tensor.dtype for tensor in rows_of(line, "one", item)[0]} == {torch.bfloat16}


def test_only_the_oldest_waiting_request_begins_when_rows_fill_the_memory(
    make_line: Callable[..., EncoderLine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "AHEAD_BYTES", 4 * 4 * 30 * 64)  # one video's rows
    line = make_line(budget=24)
    for number in range(3):
        line.submit(str(number), [video(name=b"%d" % number), image(name=b"i%d" % number)])
    while line.rows_ready("0", 1) == 0:
        line.step()
    assert line.rows_ready("2", 0) == 0
    assert not drain(line)  # each in turn, though nobody lets go: all must get on
    assert [line.rows_ready(str(number), index) for number in range(3) for index in (0, 1)] == [30, 4] * 3


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (replaced(image(), num_rows=5), "give 4 rows, the prompt has 5"),
        (replaced(image(), grid=(1, 4, 6)), r"not uint8 \[1 to 2, 64, 96, 3\]"),
        (replaced(image(), grid=(2, 4, 4), num_rows=8), r"not uint8 \[3 to 4, 64, 64, 3\]"),
        (replaced(image(), grid=(1, 3, 4)), "not of 2 x 2 blocks"),
        (replaced(image(), grid=(0, 4, 4)), "not of 2 x 2 blocks"),
        (replaced(image(), features=image().features.astype(np.float32)), "features are float32"),
        (replaced(image(), features=image().features[0]), r"features are uint8 \[64, 64, 3\]"),
        (replaced(clip(), features=clip().features[:80]), r"float32 \[80, 1010\], not float32 \[128, frames\]"),
        (replaced(clip(), features=clip().features[:, :0]), r"\[128, 0\]"),
        (replaced(clip(), features=clip().features.astype(np.float64)), "features are float64"),
        (replaced(clip(), num_rows=131), "give 132 rows, the prompt has 131"),
    ],
)
def test_an_item_that_is_not_what_it_says_is_refused_and_nothing_is_held(
    make_line: Callable[..., EncoderLine], item: EncoderItem, message: str
) -> None:
    line = make_line()
    with pytest.raises(TriptychError, match=message):
        line.submit("one", [image(name=b"good"), item])
    assert not line.has_work() and len(line.cache) == 0
    line.release("one")
    line.submit("one", [image(name=b"good")])


def test_a_request_cannot_come_twice(make_line: Callable[..., EncoderLine]) -> None:
    line = make_line()
    line.submit("one", [image()])
    with pytest.raises(TriptychError, match="already"):
        line.submit("one", [image()])


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_values_that_are_not_finite_fail_their_requests_alone(
    make_line: Callable[..., EncoderLine], batch_invariant: bool
) -> None:
    bad = clip(900, b"bad")
    bad.features[3, 850] = np.nan
    line = make_line(budget=5000, batch_invariant=batch_invariant)
    line.submit("good", [clip(900, b"good"), image()])
    line.submit("bad", [image(name=b"other"), bad])
    line.submit("same", [bad])
    faults = drain(line)
    assert {fault.request_id for fault in faults} == {"bad", "same"}
    assert all("finite" in fault.message for fault in faults) and len(faults) == 2
    assert line.rows_ready("good", 0) == 117 and line.rows_ready("good", 1) == 4
    line.release("good")
    assert len(line.cache) == 0


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_an_encoder_that_fails_on_one_item_fails_its_request_alone(
    make_line: Callable[..., EncoderLine], encoders: Encoders, monkeypatch: pytest.MonkeyPatch, batch_invariant: bool
) -> None:
    encode = encoders.encode_vision

    def failing(patches: Tensor, grids: list[tuple[int, int, int]]) -> Any:
        if (1, 8, 8) in grids:
            raise RuntimeError("out of memory")
        return encode(patches, grids)

    monkeypatch.setattr(encoders, "encode_vision", failing)
    line = make_line(budget=5000, batch_invariant=batch_invariant)
    line.submit("good", [image(), clip()])
    line.submit("bad", [image(8, 8, b"large"), video()])
    line.submit("fine", [video(7, name=b"another")])
    assert drain(line) == [Fault("bad", "image cannot be encoded: out of memory")]
    assert line.rows_ready("good", 0) == 4 and line.rows_ready("fine", 0) == 24


def test_random_comings_and_goings_leave_nothing_behind(make_line: Callable[..., EncoderLine]) -> None:
    rng = random.Random(1)
    pool = [video(), video(5, name=b"v2"), clip(30, b"short"), clip(300, b"c2"), image(), image(2, 2, b"dot")]
    for cache_bytes in (0, 20_000):
        line = make_line(budget=30, cache_bytes=cache_bytes, batch_invariant=False)
        here: set[str] = set()
        for number in range(120):
            if rng.random() < 0.4:
                line.submit(str(number), rng.sample(pool, rng.randint(0, 3)))
                here.add(str(number))
            elif here and rng.random() < 0.5:
                gone = rng.choice(sorted(here))
                line.release(gone)
                here.discard(gone)
            assert not line.step()
        for name in here:
            line.release(name)
        assert not line.has_work() and line.cache.pinned_bytes == 0 and line.cache.nbytes <= cache_bytes


# --- what a checkpoint has -------------------------------------------------------------------------------------------


def test_an_encoder_that_the_checkpoint_lacks_is_not_built_and_its_media_refused(
    nano: Path, make_line: Callable[..., EncoderLine]
) -> None:
    raw = json.loads((nano / "config.json").read_text())
    deaf = make_line(encoders=Encoders(raw, PREFIXES[1:]))
    assert deaf.encoders.audio_tower is None
    with pytest.raises(TriptychError, match="no encoder for audio"):
        deaf.submit("one", [clip()])
    deaf.submit("one", [image()])
    blind = make_line(encoders=Encoders(raw, PREFIXES[:1]))
    with pytest.raises(TriptychError, match="no encoder for image"):
        blind.submit("one", [image()])


def test_building_encoders_imports_neither_transformers_nor_a_compiler(nano: Path) -> None:
    """Each takes as long as all the rest of a stage's start."""
    script = (
        "import json, sys, torch\nfrom triptych.models.qwen3_omni.encoders import Encoders\n"
        f"with torch.device('meta'): Encoders(json.load(open({str(nano / 'config.json')!r})))\n"
        "sys.exit(', '.join({'transformers', 'sympy', 'torch._dynamo'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("part", "key", "value", "message"),
    [
        ("audio_config", "output_dim", 32, "output_dim 32 is not the text decoder's hidden_size 64"),
        ("vision_config", "out_hidden_size", 32, "out_hidden_size 32 is not the text decoder's"),
        ("audio_config", "activation_function", "relu", "'relu' is not supported"),
        ("vision_config", "hidden_act", "silu", "'silu' is not supported"),
        ("audio_config", "n_window", 25, "n_window 25 is not supported"),
        ("audio_config", "n_window_infer", 50, "less than 2 x n_window"),
        ("audio_config", "encoder_attention_heads", 5, "no multiple of encoder_attention_heads 5"),
        ("vision_config", "num_heads", 3, "no multiple of 4 x num_heads 3"),
        ("vision_config", "deepstack_visual_indexes", [0, 7], "exceed depth 3"),
        ("vision_config", "depth", "three", r"Expected `int`, got `str` - at `\$.depth`"),
    ],
)
def test_sizes_that_do_not_fit_are_named(nano: Path, part: str, key: str, value: object, message: str) -> None:
    raw = json.loads((nano / "config.json").read_text())
    raw["thinker_config"][part][key] = value
    with pytest.raises(CheckpointError, match=f"thinker_config.{part}: .*{message}"), torch.device("meta"):
        Encoders(raw)


def counted(encoders: Encoders, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int, int]]]:
    """The grids of every call of the vision encoder from here on."""
    calls: list[list[tuple[int, int, int]]] = []
    encode = encoders.encode_vision

    def counting(patches: Tensor, grids: list[tuple[int, int, int]]) -> Any:
        calls.append(grids)
        return encode(patches, grids)

    monkeypatch.setattr(encoders, "encode_vision", counting)
    return calls
