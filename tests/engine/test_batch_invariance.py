"""A row's bits do not depend on the rows beside it: the arithmetic that reproducible speech rests on.

Each layer is run on whole tiles cut from a larger batch, and on single rows repeated to one tile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from triptych.config.schema import Quantization
from triptych.layers.attention import PagedAttention, PagedMetadata
from triptych.layers.linear import ROW_TILE, GatedMLP
from triptych.layers.moe import SparseMoE
from triptych.layers.norm import RMSNorm
from triptych.layers.product import (
    HalfProduct,
    Int8Product,
    PackedProduct,
    PlainProduct,
    Product,
    WidenedProduct,
    fits_half,
    half_tile,
    half_works,
    int8_works,
    make_product,
    packing_works,
)
from triptych.layers.quantized_weight import STORED, QuantizedWeight, quantize
from triptych.layers.rotary import Rotary, rotate

ROWS = 64


def assert_invariant(layer: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with torch.inference_mode():
        whole = layer(x)
        for size in (ROW_TILE, 2 * ROW_TILE, 5 * ROW_TILE, 32):
            pieces = torch.cat([layer(x[start : start + size]) for start in range(0, ROWS - ROWS % size, size)])
            assert torch.equal(whole[: pieces.shape[0]], pieces), f"tiles of {size} rows differ"
        single = torch.cat([layer(x[row : row + 1].repeat(ROW_TILE, 1))[:1] for row in range(ROWS)])
        assert torch.equal(whole, single), "single rows differ"


def randomise(module: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    module.prepare()  # type: ignore[operator]
    return module


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(64, 48), (256, 128), (512, 128), (3072, 128), (4160, 256), (512, 1024)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(outputs, inputs) * inputs**-0.5).to(dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    x = torch.randn(ROWS, inputs).to(dtype)
    products: list[Product] = [PlainProduct(weight), make_product(weight)]
    if packing_works(dtype):
        products.append(PackedProduct(weight))
    for product in products:
        assert_invariant(product, x)
        expected, residual = F.linear(x, weight), torch.randn(ROWS, outputs).to(dtype)
        torch.testing.assert_close(product(x), expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(product.add(residual, x), residual + expected, atol=tolerance, rtol=tolerance)


@pytest.mark.skipif(not half_works(), reason="this build of torch has no float16 products for a CPU")
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 48), (256, 128), (3072, 128), (512, 1024), (1, 128)])
def test_half_product_loses_nothing_of_a_bfloat16_weight(outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(outputs, inputs) * inputs**-0.5).bfloat16().float()
    assert fits_half(weight) and type(make_product(weight)) is HalfProduct
    x = torch.randn(ROWS, inputs)
    for product in (HalfProduct(weight), HalfProduct(weight, 3 * half_tile())):
        assert_invariant(product, x)
        torch.testing.assert_close(product(x), F.linear(x, weight), atol=1e-5, rtol=1e-5)
    narrow = x.bfloat16()  # the sums are rounded once
    assert torch.equal(HalfProduct(weight.bfloat16())(narrow), HalfProduct(weight)(narrow.float()).bfloat16())


def test_a_bfloat16_weight_is_packed_whatever_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without AVX-512 oneDNN refuses bfloat16; the operators are asked, not the name of the processor."""

    def refuse(weight: Tensor, rows: int) -> Tensor:
        raise RuntimeError("bf16 path needs the cpu support")

    weight = torch.randn(512, 256).bfloat16()
    fastest = PackedProduct if packing_works(torch.bfloat16) else HalfProduct if half_works() else PlainProduct
    assert type(make_product(weight)) is fastest
    packing_works.cache_clear()
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    try:
        assert type(make_product(weight)) is (HalfProduct if half_works() else PlainProduct)
        assert type(make_product(weight.float() * 1e6)) is PlainProduct
    finally:
        packing_works.cache_clear()


def test_a_weight_that_float16_would_round_is_not_kept_in_it() -> None:
    assert not fits_half(torch.randn(64, 64))
    assert not fits_half(torch.tensor([[1e6]]))
    assert type(make_product(torch.randn(64, 64))) is PlainProduct


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 48), (512, 128), (3072, 128), (512, 1024), (36, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", STORED)
def test_products_of_quantised_weights(outputs: int, inputs: int, dtype: torch.dtype, method: Quantization) -> None:
    torch.manual_seed(0)
    weight = quantize((torch.randn(outputs, inputs) * inputs**-0.5).to(dtype), method)
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    x, residual = torch.randn(ROWS, inputs).to(dtype), torch.randn(ROWS, outputs).to(dtype)
    products: list[Product] = [WidenedProduct(weight), make_product(weight)]
    packed = dtype is torch.bfloat16 and method == "int8" and inputs % 32 == 0 and int8_works()
    assert type(products[1]) is (Int8Product if packed else WidenedProduct)
    expected = F.linear(x, weight.widen())
    for product in products:
        assert_invariant(product, x)
        torch.testing.assert_close(product(x), expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(product.add(residual, x), residual + expected, atol=tolerance, rtol=tolerance)


@pytest.mark.skipif(not int8_works(), reason="this build of torch has no int8 products for a CPU")
def test_an_int8_product_takes_rows_and_weights_from_any_address() -> None:
    torch.manual_seed(0)
    whole = quantize(torch.randn(36, 64).bfloat16(), "int8")
    x = torch.randn(5 * 64 + 3).bfloat16()[3:].view(5, 64)
    shifted = torch.empty(36 * 64 + 1, dtype=torch.int8)[1:].view(36, 64).copy_(whole.stored)
    found = Int8Product(QuantizedWeight(shifted, whole.scale))(x)
    assert torch.equal(found, Int8Product(whole)(x.clone()))


@pytest.mark.parametrize("width", [48, 64, 128, 256])
def test_norm(width: int) -> None:
    norm = RMSNorm(width, 1e-6)
    torch.nn.init.normal_(norm.weight)
    norm.prepare()
    assert_invariant(norm, torch.randn(ROWS, width))
    x = torch.randn(ROWS, width)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (width,), norm.weight, 1e-6))


@pytest.mark.parametrize(("hidden", "width"), [(64, 32), (128, 256)])
def test_gated_mlp(hidden: int, width: int) -> None:
    mlp = randomise(GatedMLP(hidden, width))
    assert_invariant(lambda x: mlp(x.clone(), x), torch.randn(ROWS, hidden))


@pytest.mark.parametrize(
    ("hidden", "experts", "top_k", "width", "shared"), [(64, 4, 2, 32, 0), (128, 8, 2, 64, 128), (64, 32, 6, 16, 32)]
)
def test_mixture_of_experts(hidden: int, experts: int, top_k: int, width: int, shared: int) -> None:
    moe = SparseMoE(
        hidden=hidden,
        num_experts=experts,
        top_k=top_k,
        intermediate=width,
        norm_topk_prob=True,
        shared_intermediate=shared,
    )
    grouped = copy.deepcopy(moe)
    randomise(moe)
    assert_invariant(lambda x: moe(x.clone(), x), torch.randn(ROWS, hidden))
    # Stages on a CPU never take grouped products: some processors' kernels sum another number of rows in another order.
    grouped.prepare_single = grouped.prepare_grouped  # type: ignore[method-assign]
    randomise(grouped)
    x = torch.randn(ROWS, hidden)
    with torch.inference_mode():
        whole, alone = grouped(x.clone(), x), [grouped(tile.clone(), tile) for tile in x.split(ROW_TILE)]
    torch.testing.assert_close(torch.cat(alone), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", [None, *STORED])
@pytest.mark.parametrize("rows", [1, 2, ROWS])  # a few rows choose few experts: those that are widened
def test_grouped_experts_equal_single_ones(rows: int, method: Quantization | None) -> None:
    torch.manual_seed(0)
    moe = SparseMoE(hidden=32, num_experts=8, top_k=3, intermediate=16, norm_topk_prob=True)
    for weight in moe.parameters():
        torch.nn.init.normal_(weight)
    if method is not None:
        quantise_projections(moe, method)
    moe.prepare_grouped()
    x, residual = torch.randn(rows, 32), torch.randn(rows, 32)
    experts = torch.stack([torch.randperm(8)[:3] for _ in range(rows)])
    weights = torch.rand(rows, 3)
    grouped = moe.add_experts_grouped(residual.clone(), x, experts, weights)
    moe.prepare_single()
    torch.testing.assert_close(moe.add_experts_singly(residual.clone(), x, experts, weights), grouped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grouped", [False, True])
def test_mixture_of_quantised_experts(grouped: bool, dtype: torch.dtype) -> None:
    moe = SparseMoE(hidden=64, num_experts=16, top_k=3, intermediate=32, norm_topk_prob=True, shared_intermediate=48)
    for part in (moe, moe.shared):
        assert part is not None
        torch.manual_seed(0)
        for parameter in part.parameters(recurse=False):
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
            parameter.data = parameter.data.to(dtype)
        quantise_projections(part, "int8")
    if grouped:
        moe.prepare_single = moe.prepare_grouped  # type: ignore[method-assign]
    moe.prepare()
    assert_invariant(lambda x: moe(x.clone(), x), torch.randn(ROWS, 64).to(dtype))


def quantise_projections(part: SparseMoE | GatedMLP, method: Quantization) -> None:
    """As loading a checkpoint does."""
    for name in part.projections:
        weight = getattr(part, name).data
        delattr(part, name)
        setattr(part, name, quantize(weight, method))


@pytest.mark.parametrize("head_dim", [16, 64])
def test_rotary(head_dim: int) -> None:
    rotary = Rotary(head_dim, 1e6, (head_dim // 4, head_dim // 8, head_dim // 8))
    heads = torch.randn(ROWS, 3, head_dim)

    def turn(columns: Tensor) -> Tensor:
        index = columns[:, 0].long()
        cos, sin = rotary(index.expand(3, -1), torch.float32)
        return rotate(heads[index], cos, sin).flatten(1)

    assert_invariant(turn, torch.arange(ROWS).float().unsqueeze(1))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (2, 1, 64)])
def test_decode_attention(heads: int, kv_heads: int, dim: int) -> None:
    """A sequence attends alike alone and beside longer ones, whose length pads its keys."""
    torch.manual_seed(0)
    block, longest = 16, 300
    lengths = torch.randint(1, longest, (ROWS,))
    blocks = -(-longest // block)
    cache = torch.randn(ROWS * blocks + 1, block, 2 * kv_heads, dim)
    q, k, v = torch.randn(ROWS, heads, dim), torch.randn(ROWS, kv_heads, dim), torch.randn(ROWS, kv_heads, dim)

    def attend(rows: list[int]) -> Tensor:
        index = torch.tensor(rows)
        width = -(-int(lengths[index].max()) // block)
        table = torch.stack([1 + row * blocks + torch.arange(width) for row in rows])
        last = lengths[index] - 1
        metadata = PagedMetadata(
            slots=(1 + index * blocks + last // block) * block + last % block,
            num_decodes=len(rows),
            decode_blocks=table.flatten(),
            decode_mask=(torch.arange(width * block) < lengths[index].unsqueeze(1))[:, None, None, :],
            pieces=(),
        )
        return PagedAttention(cache.clone(), kv_heads, metadata)(q[index], k[index], v[index])

    with torch.inference_mode():
        whole = attend(list(range(ROWS)))
        for row in range(ROWS):
            assert torch.equal(whole[row], attend([row])[0])


def test_padding_repeats_the_first_row_through_attention() -> None:
    """Then it chooses the first row's experts in every layer, and reads no keys of its own."""
    torch.manual_seed(0)
    cache, q, kv = torch.randn(4, 16, 4, 16), torch.randn(ROW_TILE, 4, 16), torch.randn(ROW_TILE, 2, 16)
    metadata = PagedMetadata(
        slots=torch.tensor([53, 1, 2, 3]),
        num_decodes=1,
        decode_blocks=torch.tensor([1, 2, 3]),
        decode_mask=(torch.arange(48) < 38)[None, None, None],
        pieces=(),
    )
    out = PagedAttention(cache, 2, metadata)(q, kv, kv)
    assert out.shape == q.shape and torch.equal(out, out[:1].expand_as(out))
