"""Every streaming layer: chunks in any cut, joined, equal the one-shot run, which equals a plain PyTorch layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triptych.streaming.attention import WindowedAttention, window_geometry
from triptych.streaming.conv import CausalConv1d, PointwiseConv1d, TransposedConv1d
from triptych.streaming.state import StreamChunk, StreamState, last_steps

WINDOW = 5
Module = TypeVar("Module", bound=nn.Module)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def randomise(module: Module) -> Module:
    for parameter in module.parameters():
        parameter.normal_(0, 0.5)
    return module


def conv(dilation: int = 1, groups: int = 1, kernel_size: int = 3) -> CausalConv1d:
    layer = CausalConv1d(4, 4, kernel_size, dilation=dilation, groups=groups)
    randomise(layer).prepare()
    return layer


def transposed(stride: int, taps: int) -> TransposedConv1d:
    layer = TransposedConv1d(4, 2, stride, taps=taps)
    randomise(layer).prepare()
    return layer


class Attention(nn.Module):
    """[B, C, T] in and out, so that it streams like the convolutions."""

    def __init__(self, num_kv_heads: int, window: int = WINDOW) -> None:
        super().__init__()
        self.attention = WindowedAttention(4, num_heads=2, num_kv_heads=num_kv_heads, head_dim=4, window=window)
        self.inverse_frequencies = torch.tensor([1.0, 0.1])
        self.window = window

    def forward(self, x: Tensor, chunk: StreamChunk | None) -> Tensor:
        x = x.transpose(1, 2)
        geometry = window_geometry(x, self.inverse_frequencies, self.window, chunk)
        mixed: Tensor = self.attention(x, geometry, chunk)
        return mixed.transpose(1, 2)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "causal": conv,
    "causal dilated": lambda: conv(dilation=3),
    "causal depthwise": lambda: conv(groups=4),
    "causal kernel 1": lambda: conv(kernel_size=1),
    "transposed with overlap": lambda: transposed(3, taps=2),
    "transposed without overlap": lambda: transposed(2, taps=1),
    "attention": lambda: randomise(Attention(num_kv_heads=2)),
    "attention with grouped heads": lambda: randomise(Attention(num_kv_heads=1)),
    "attention window 1": lambda: randomise(Attention(num_kv_heads=2, window=1)),
}


def compositions(total: int) -> Iterator[list[int]]:
    """Every way of cutting `total` steps into chunks."""
    for cuts in itertools.product((False, True), repeat=total - 1):
        bounds = [0, *(index + 1 for index, cut in enumerate(cuts) if cut), total]
        yield [end - start for start, end in itertools.pairwise(bounds)]


def stream(layer: nn.Module, state: StreamState, x: Tensor, sizes: list[int], slots: list[int]) -> Tensor:
    rows = torch.tensor(slots)
    outputs = []
    for index, piece in enumerate(torch.split(x, sizes, dim=-1)):
        chunk = state.chunk(rows, first=index == 0)
        outputs.append(layer(piece, chunk))
        chunk.advance(piece.shape[-1])
    return torch.cat(outputs, dim=-1)


def new_state(layer: nn.Module, num_slots: int = 3) -> StreamState:
    return StreamState(layer, num_slots, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("name", LAYERS)
def test_every_cut_equals_the_one_shot_run(name: str) -> None:
    layer = LAYERS[name]()
    x = torch.randn(1, 4, 9)
    whole = layer(x, None)
    state = new_state(layer)
    for sizes in compositions(9):
        torch.testing.assert_close(stream(layer, state, x, sizes, [1]), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_batched_streams_in_any_slots_equal_the_one_shot_run(name: str) -> None:
    layer = LAYERS[name]()
    x = torch.randn(3, 4, 23)
    whole = layer(x, None)
    outputs = stream(layer, new_state(layer), x, [2, 7, 1, 1, 9, 3], [2, 0, 1])
    torch.testing.assert_close(outputs, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_rows_on_the_trash_slot_do_not_touch_streams(name: str) -> None:
    layer = LAYERS[name]()
    x = torch.randn(1, 4, 12)
    state = new_state(layer)
    whole = layer(x, None)
    padded = torch.cat([torch.randn(1, 4, 12), x, torch.full((1, 4, 12), 1e6)])
    outputs = stream(layer, state, padded, [3, 4, 5], [state.trash_slot, 0, state.trash_slot])
    torch.testing.assert_close(outputs[1:2], whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_a_used_slot_carries_nothing_over(name: str) -> None:
    layer = LAYERS[name]()
    state = new_state(layer)
    x = torch.randn(1, 4, 8)
    fresh = stream(layer, new_state(layer), x, [2, 6], [1])
    stream(layer, state, torch.full((1, 4, 30), 1e6), [30], [1])
    assert torch.equal(stream(layer, state, x, [2, 6], [1]), fresh)


@pytest.mark.parametrize("name", LAYERS)
def test_a_snapshot_continues_in_another_slot(name: str) -> None:
    layer = LAYERS[name]()
    state = new_state(layer)
    x = torch.randn(1, 4, 12)
    whole = stream(layer, state, x, [7, 5], [0])
    stream(layer, state, x[..., :7], [7], [0])
    saved = state.snapshot(0)
    stream(layer, state, torch.randn(1, 4, 9), [9], [0])
    state.restore(2, saved)
    continued = layer(x[..., 7:], state.chunk(torch.tensor([2]), first=False))
    assert torch.equal(continued, whole[..., whole.shape[-1] - continued.shape[-1] :])


def test_reset_forgets_the_slots_it_names_only() -> None:
    layer = conv()
    state = new_state(layer)
    stream(layer, state, torch.randn(2, 4, 5), [5], [0, 2])
    kept = state.snapshot(2)
    state.reset(torch.tensor([0]))
    assert all(not tensor.any() for tensor in state.snapshot(0))
    assert all(torch.equal(new, old) for new, old in zip(state.snapshot(2), kept, strict=True))
    assert int(state.num_frames[2]) == 5


@pytest.mark.parametrize(("dilation", "groups"), [(1, 1), (3, 1), (9, 1), (1, 4)])
def test_causal_convolution_equals_pytorch_with_left_padding(dilation: int, groups: int) -> None:
    layer = conv(dilation=dilation, groups=groups, kernel_size=7)
    x = torch.randn(2, 4, 31)
    padded = F.pad(x, (layer.reach, 0))
    expected = F.conv1d(padded, layer.weight.contiguous(), layer.bias, dilation=dilation, groups=groups)
    torch.testing.assert_close(layer(x, None), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("stride", "taps"), [(2, 1), (3, 2), (8, 2), (2, 3)])
def test_transposed_convolution_equals_pytorch_trimmed_on_both_sides(stride: int, taps: int) -> None:
    layer = transposed(stride, taps)
    x = torch.randn(2, 4, 11)
    trim = (taps - 1) * stride
    raw = F.conv_transpose1d(x, layer.weight.contiguous(), layer.bias, stride=stride)
    expected = raw[..., trim : raw.shape[-1] - trim]
    torch.testing.assert_close(layer(x, None), expected, rtol=1e-5, atol=1e-5)


def test_pointwise_convolution_adds_to_its_total() -> None:
    layer = randomise(PointwiseConv1d(4, 4))
    layer.prepare()
    x, total = torch.randn(2, 4, 5), torch.randn(2, 4, 5)
    expected = total + F.conv1d(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer.accumulate(total, x), expected, rtol=1e-5, atol=1e-5)


def test_attention_looks_no_further_back_than_its_window() -> None:
    layer = randomise(Attention(num_kv_heads=2))
    x = torch.randn(1, 4, 12)
    disturbed = x.clone()
    disturbed[..., 3] += 1.0
    changed = (layer(x, None) - layer(disturbed, None)).abs().amax((0, 1)) > 1e-6
    assert changed.tolist() == [3 <= step < 3 + WINDOW for step in range(12)]


def test_preparing_twice_changes_nothing_and_keeps_the_weight() -> None:
    layer = CausalConv1d(4, 4, 3)
    randomise(layer)
    weight = layer.weight.clone()
    layer.prepare()
    once = layer(torch.ones(1, 4, 6), None)
    layer.prepare()
    assert torch.equal(layer.weight, weight)
    assert torch.equal(layer(torch.ones(1, 4, 6), None), once)


def test_groups_that_are_neither_dense_nor_depthwise_are_refused() -> None:
    with pytest.raises(ValueError, match="groups must be 1"):
        CausalConv1d(4, 4, 3, groups=2)


def test_last_steps_pads_in_front() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    assert last_steps(x, 2, 0).tolist() == [2.0, 3.0]
    assert last_steps(x, 5, 0).tolist() == [0.0, 0.0, 1.0, 2.0, 3.0]
