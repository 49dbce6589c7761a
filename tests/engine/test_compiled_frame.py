"""The compiled code predictor: what its eager twin computes, and no row by the rows beside it."""

from __future__ import annotations

import ctypes
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.stage_bench import Bench
from triptych.config.sampling import SamplingParams
from triptych.layers import compiled as compiling
from triptych.layers.compiled import compiled
from triptych.models.qwen3_omni.code_predictor import CodePredictor
from triptych.models.qwen3_omni.compiled_frame import SOURCE, CompiledFrame, compiled_code
from triptych.models.qwen3_omni.config import DecoderConfig
from triptych.stages.residual_draw import ResidualDraw

GROUPS = 16
needs_compiler = pytest.mark.skipif(compiled_code() is None, reason="there is no C compiler here")


def decoder(**changes: int) -> DecoderConfig:
    sizes = {
        "vocab_size": 256,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
    }
    return msgspec.convert(sizes | changes, DecoderConfig)


def predictor(config: DecoderConfig, dtype: torch.dtype, *, eager: bool, exact: bool) -> CodePredictor:
    """With random weights, the same each time; `exact`: those of a bfloat16 checkpoint."""
    torch.manual_seed(0)
    model = CodePredictor(config, GROUPS)
    for name, weight in model.named_parameters():
        weight.data.normal_(std=weight.shape[-1] ** -0.5)
        if "norm" in name:
            weight.data.add_(1.0)
        weight.data = (weight.data.bfloat16() if exact else weight.data).to(dtype)
    model.prepare(4, eager=eager)
    return model


class Recorded(ResidualDraw):
    """Draws given codes, and keeps the logits that it was to draw them from."""

    def __init__(self, draw: ResidualDraw, codes: Tensor) -> None:
        super().__init__(draw.uniforms, draw.greedy)
        self.codes = codes
        self.logits: list[Tensor] = []

    def __call__(self, logits: Tensor, index: int) -> Tensor:
        self.logits.append(logits.clone())
        return self.codes[:, index]


def inputs(config: DecoderConfig, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, ResidualDraw]:
    torch.manual_seed(1)
    hidden, first = torch.randn(2, rows, config.hidden_size).to(dtype)
    uniforms = torch.rand(rows, GROUPS - 1, dtype=torch.float64)
    return hidden, first, ResidualDraw.of(uniforms, [row % 3 == 2 for row in range(rows)])


def rows_of(draw: ResidualDraw, rows: slice) -> ResidualDraw:
    return ResidualDraw.of(draw.uniforms[rows], draw.greedy[rows].tolist())


def draw_with_logits(frame: CompiledFrame, hidden: Tensor, first: Tensor, draw: ResidualDraw) -> tuple[Tensor, Tensor]:
    logits = torch.full((hidden.shape[0], GROUPS - 1, frame.vocab), torch.nan)
    return frame(hidden, first, draw, logits), logits


def frame_of(config: DecoderConfig, dtype: torch.dtype = torch.float32, *, exact: bool = True) -> CompiledFrame:
    frame = predictor(config, dtype, eager=False, exact=exact).compiled
    assert frame is not None
    return frame


SHAPES = [
    decoder(),
    decoder(vocab_size=2048, hidden_size=128, num_hidden_layers=5, num_attention_heads=2, num_key_value_heads=1),
    decoder(hidden_size=192, num_attention_heads=6, head_dim=32, intermediate_size=512),
    decoder(vocab_size=37, hidden_size=31, head_dim=10, num_key_value_heads=4, intermediate_size=45),
]


@needs_compiler
@pytest.mark.parametrize("config", SHAPES, ids=lambda config: str(config.hidden_size))
@pytest.mark.parametrize(
    ("dtype", "exact", "tolerance"),
    [(torch.float32, True, 1e-4), (torch.float32, False, 1e-4), (torch.bfloat16, True, 0.15)],
)
def test_it_computes_what_its_eager_twin_does(
    config: DecoderConfig, dtype: torch.dtype, exact: bool, tolerance: float
) -> None:
    frame, twin = frame_of(config, dtype, exact=exact), predictor(config, dtype, eager=True, exact=exact)
    hidden, first, draw = inputs(config, 9, dtype)
    with torch.inference_mode():
        codes, logits = draw_with_logits(frame, hidden, first, draw)
        recorded = Recorded(draw, codes)
        twin(hidden, first, recorded)
        torch.testing.assert_close(logits, torch.stack(recorded.logits, dim=1), atol=tolerance, rtol=0.0)
        # Of its own logits it draws what the eager draw does, row by row.
        drawn = [draw(logits[:, index], index) for index in range(GROUPS - 1)]
        assert torch.equal(codes, torch.stack(drawn, dim=1))


@needs_compiler
@pytest.mark.parametrize("config", SHAPES, ids=lambda config: str(config.hidden_size))
@pytest.mark.parametrize("exact", [True, False])
def test_a_row_is_the_same_alone_and_in_any_batch(config: DecoderConfig, exact: bool) -> None:
    frame = frame_of(config, exact=exact)
    hidden, first, draw = inputs(config, 35, torch.float32)
    codes, logits = draw_with_logits(frame, hidden, first, draw)
    for size in (1, 2, 3, 4, 5, 7, 8, 13, 32):
        for start in range(0, 35, size):
            rows = slice(start, start + size)
            ours = draw_with_logits(frame, hidden[rows], first[rows], rows_of(draw, rows))
            assert torch.equal(ours[0], codes[rows]) and torch.equal(ours[1], logits[rows]), (size, start)


@needs_compiler
def test_a_row_that_is_not_finite_gives_some_code_and_spoils_no_other() -> None:
    frame = frame_of(decoder())
    hidden, first, draw = inputs(decoder(), 6, torch.float32)
    expected = frame(hidden, first, draw)
    hidden[0], hidden[1], hidden[2, 3] = torch.nan, torch.inf, -torch.inf
    codes = frame(hidden, first, draw)
    assert torch.equal(codes[3:], expected[3:])
    assert int(codes.min()) >= 0 and int(codes.max()) < 256
    hidden[:3] = 0.0
    assert torch.equal(frame(hidden, first, draw)[3:], expected[3:])


@needs_compiler
@pytest.mark.parametrize("weights", [[1.0] * 64, [5.0] * 3 + [1.0] * 61, [*range(64)], [*range(64, 0, -1)]])
def test_ties_are_kept_as_in_the_eager_draw(weights: list[float]) -> None:
    """Heads that give the same logits to many codes: cuts of top_k and top_p fall between equal ones."""
    config = decoder(vocab_size=64, num_hidden_layers=0)
    model = CodePredictor(config, GROUPS)
    for weight in model.parameters():
        weight.data.fill_(1.0)
    model.heads.data[:] = (torch.tensor(weights) / 64 / 64)[:, None]
    model.prepare(4, eager=False)
    assert model.compiled is not None
    torch.manual_seed(0)
    hidden = torch.ones(200, 64)
    draw = ResidualDraw.of(torch.rand(200, GROUPS - 1, dtype=torch.float64), [False] * 200)
    codes, logits = draw_with_logits(model.compiled, hidden, hidden, draw)
    assert torch.equal(codes, torch.stack([draw(logits[:, index], index) for index in range(GROUPS - 1)], dim=1))


@needs_compiler
def test_speech_is_the_same_alone_and_in_a_batch(nano: Path) -> None:
    bench = Bench(nano, talker={"enforce_eager": False})
    assert bench.talker.model.code_predictor.compiled is not None
    prompts = [bench.prompt(*range(30, 32 + 7 * index)) for index in range(6)]
    text = SamplingParams(temperature=1.0, max_tokens=12, seed=3, ignore_eos=True)
    speech = [
        SamplingParams(temperature=0.9 * (index != 2), top_k=50, max_tokens=10 + 3 * index, seed=index, ignore_eos=True)
        for index in range(6)
    ]
    for index, prompt in enumerate(prompts):
        bench.submit(f"alone-{index}", prompt, thinker=text, talker=speech[index])
        bench.run()
    for index, prompt in enumerate(prompts):
        bench.submit(f"batch-{index}", prompt, thinker=text, talker=speech[index])
    bench.run()
    for index in range(6):
        alone, batched = bench.replies[f"alone-{index}"], bench.replies[f"batch-{index}"]
        assert alone.done and alone.frames == batched.frames == 10 + 3 * index
        np.testing.assert_array_equal(alone.audio, batched.audio)


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of its own, and nothing remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled.cache_clear()
    yield tmp_path / "triptych" / "compiled"
    compiled.cache_clear()


@needs_compiler
def test_a_second_start_compiles_nothing(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    run = compiling._run
    monkeypatch.setattr(compiling, "_run", lambda command: ran.append(command) or run(command))
    for expected in (1, 1):
        assert isinstance(compiled(SOURCE), ctypes.CDLL)
        compiled.cache_clear()
        assert sum("-o" in command for command in ran) == expected
    assert [path.suffix for path in fresh.iterdir()] == [".so"]


@needs_compiler
@pytest.mark.parametrize("size", [0, 20_000])
def test_a_library_that_was_cut_short_is_compiled_again(
    fresh: Path, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    assert isinstance(compiled(SOURCE), ctypes.CDLL)
    (whole,) = fresh.iterdir()
    content = whole.read_bytes()
    cut = whole.with_name("cut")  # the library is mapped into this process: it must not shrink under it
    cut.write_bytes(content[:size])
    cut.replace(whole)
    compiled.cache_clear()
    assert isinstance(compiled(SOURCE), ctypes.CDLL)
    assert "is damaged, it is compiled again" in caplog.text
    assert [path.read_bytes() for path in fresh.iterdir()] == [content]


def test_a_user_without_a_home_runs_eager(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    compiled.cache_clear()
    assert compiled(SOURCE) is None
    compiled.cache_clear()
    assert "set the variable XDG_CACHE_HOME" in caplog.text


def test_without_a_compiler_a_stage_stays_eager_and_says_so_once(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, nano: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        benches = [Bench(nano, talker={"enforce_eager": eager}) for eager in (True, False, False)]
    for source, record in zip(("decoder.c", "code_predictor.c", "draw.c"), caplog.records, strict=True):
        assert record.message.startswith(source) and "there is no C compiler; install gcc" in record.message
    for bench in benches:
        assert bench.talker.model.backbone.compiled is None
        assert bench.talker.model.code_predictor.compiled is None
        bench.submit("a", bench.prompt(40, 41))
        bench.run()
    first, *others = (bench.replies["a"].audio for bench in benches)
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("says", ["", "no room for a.so\nand more"])
def test_a_compiler_that_fails_is_quoted(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, says: str
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert compiled(SOURCE) is None
    (record,) = caplog.records
    assert "code_predictor.c is not compiled" in record.message
    assert record.message.endswith("no room for a.so" if says else "returned non-zero exit status 1.")
