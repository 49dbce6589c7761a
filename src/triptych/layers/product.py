"""Products with weights that do not change any more, each laid out once for the machine at hand.

A decode step multiplies a few rows with every weight of the model, so its time is the time to read the weights. The
BLAS behind `torch.mm` copies a weight into an order of its own at each call; a weight that oneDNN has packed once is
read as it lies. On two Zen 4 cores and four rows, read from memory, 2048 x 128 took 168 us plain, 66 us packed by
oneDNN, 27 us packed by FBGEMM in half the bytes.
"""

from __future__ import annotations

import functools
import warnings
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triptych.layers.quantized_weight import QuantizedWeight

# Smaller weights than this cost less as a plain product: a packed one has about 10 us of overhead.
PACKED_FROM = 512 * 256
_TYPICAL_ROWS = 4  # the packed order hardly depends on it
_PROBED_ROWS, _MOST_TILE = 260, 8  # FBGEMM takes up to 120 rows at a time


class Product(Protocol):
    """x @ weight.T for one weight [N, K]. `itemsize` is bytes of an element of it as a step reads it."""

    itemsize: int

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N]."""

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [M, N] + x @ weight.T, as a new tensor."""


class PlainProduct:
    """The weight as [K, N] in memory, in the dtype that it is multiplied in; `torch.mm` reads it fastest that way."""

    def __init__(self, weight: Tensor) -> None:
        weight_t = weight.t().to(summing_dtype(weight))
        self.weight_t = weight_t.contiguous() if weight.device.type == "cpu" else weight_t
        self.itemsize = self.weight_t.itemsize

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x.to(self.weight_t.dtype), self.weight_t).to(x.dtype)

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        dtype = self.weight_t.dtype
        return torch.addmm(residual.to(dtype), x.to(dtype), self.weight_t).to(x.dtype)


class PackedProduct:
    """The weight in oneDNN's own order. Its rows do not depend on how many there are."""

    def __init__(self, weight: Tensor) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
        self.itemsize = weight.itemsize
        self.linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = self.linear(x, self.packed, None, "none", [], "")
        return product

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        return self(x).add_(residual)


class HalfProduct:
    """Rows times a weight kept in float16, summed in float32: half the memory to read, in FBGEMM's own order.

    For weights that float16 holds (`fits_half`): those of a bfloat16 checkpoint do, so nothing is lost. bfloat16 rows
    are widened, and the sums rounded once. Rows do not depend on how many there are, as they go by whole tiles.
    """

    itemsize = 2

    def __init__(self, weight: Tensor, tile: int | None = None) -> None:
        """`tile` rows go together: `half_tile()` unless given."""
        self.packed = torch.fbgemm_pack_gemm_matrix_fp16(weight.float().contiguous())
        self.linear = torch.fbgemm_linear_fp16_weight_fp32_activation
        self.tile = tile or half_tile()

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows % self.tile:
            return self(F.pad(x, (0, 0, 0, -rows % self.tile)))[:rows]
        product: Tensor = self.linear(x.float().contiguous(), self.packed, None)
        return product.to(x.dtype)

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        return self(x).add_(residual)


class Int8Product:
    """bfloat16 rows times a weight in int8 on a CPU, as it lies. Its rows do not depend on how many there are.

    For weights that `suits`: ATen's kernel reads whole vectors, aligned ones, and does not look whether they are.
    """

    itemsize = 1
    vector = 32  # inputs
    alignment = 32  # bytes

    def __init__(self, weight: QuantizedWeight) -> None:
        stored = weight.stored.contiguous()
        self.stored = stored if stored.data_ptr() % self.alignment == 0 else stored.clone()
        self.scale = weight.scale.flatten()
        self.linear = torch.ops.aten._weight_int8pack_mm.default

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        product: Tensor = self.linear(x if x.data_ptr() % self.alignment == 0 else x.clone(), self.stored, self.scale)
        return product

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        return self(x).add_(residual)

    @classmethod
    def suits(cls, weight: QuantizedWeight) -> bool:
        """Of the dtypes that the operator takes, only bfloat16 has a kernel worth the name."""
        stored = weight.stored
        kind = (stored.device.type, stored.dtype, weight.scale.dtype)
        return kind == ("cpu", torch.int8, torch.bfloat16) and stored.shape[1] % cls.vector == 0


class WidenedProduct:
    """A weight in eight bits that each call widens for `torch.mm`: it saves memory and costs time."""

    itemsize = 1

    def __init__(self, weight: QuantizedWeight) -> None:
        on_cpu = weight.stored.device.type == "cpu"
        self.stored_t = weight.stored.t().contiguous() if on_cpu else weight.stored.t()
        self.scale_t = weight.scale.t().contiguous()
        self.dtype = summing_dtype(weight.scale)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x.to(self.dtype), self.weight_t()).to(x.dtype)

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        return torch.addmm(residual.to(self.dtype), x.to(self.dtype), self.weight_t()).to(x.dtype)

    def weight_t(self) -> Tensor:
        """The weight as [K, N]."""
        return self.stored_t.to(self.scale_t.dtype).mul_(self.scale_t).to(self.dtype)


def make_product(weight: Tensor | QuantizedWeight) -> Product:
    """The fastest of them for this weight [N, K], its dtype and its device."""
    if isinstance(weight, QuantizedWeight):
        return Int8Product(weight) if Int8Product.suits(weight) and int8_works() else WidenedProduct(weight)
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return PlainProduct(weight)
    if weight.dtype is torch.bfloat16 and packing_works(torch.bfloat16):
        return PackedProduct(weight)
    if fits_half(weight) and half_works():
        return HalfProduct(weight)
    if weight.numel() >= PACKED_FROM and packing_works(weight.dtype):
        return PackedProduct(weight)
    return PlainProduct(weight)


def summing_dtype(weight: Tensor) -> torch.dtype:
    """What `torch.mm` is to multiply a weight in: float32 for bfloat16 on a processor that cannot multiply in that.

    There torch's own loops take a hundred times as long, and their sums depend on how many rows and threads there are.
    """
    emulated = weight.device.type == "cpu" and weight.dtype is torch.bfloat16 and not packing_works(torch.bfloat16)
    return torch.float32 if emulated else weight.dtype


def fits_half(weight: Tensor) -> bool:
    """Whether float16 holds a weight, but for less than 2^-25: the rounding of a float32 sum near 1."""
    return bool(((weight.half().float() - weight.float()).abs() <= 2.0**-25).all())


def take_product(module: nn.Module, name: str) -> Product:
    """The product of parameter `name`, whose memory the module gives up: the product holds the weight from now on."""
    product = make_product(held_weight(module, name))
    give_up(module, name)
    return product


def held_weight(module: nn.Module, name: str) -> Tensor | QuantizedWeight:
    """Weight `name` of a loaded module."""
    weight: nn.Parameter | QuantizedWeight = getattr(module, name)
    return weight if isinstance(weight, QuantizedWeight) else weight.data


def give_up(module: nn.Module, name: str) -> None:
    """Release the memory of weight `name`: something else holds it from now on."""
    weight = held_weight(module, name)
    like = weight.scale if isinstance(weight, QuantizedWeight) else weight
    setattr(module, name, nn.Parameter(like.new_empty(0), requires_grad=False))


@functools.cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of a dtype (with operators that torch's compiler uses).

    In bfloat16 it takes a processor with AVX-512. On others FBGEMM reads the weight in float16: on two Zen 3 cores and
    four rows 2048 x 512 took 0.14 ms so, by `torch.mm` in bfloat16 15.8 ms.
    """
    try:
        weight = torch.eye(4, dtype=dtype)
        return bool(torch.equal(PackedProduct(weight)(weight), weight))
    except (AttributeError, RuntimeError):
        return False


@functools.cache
def half_works() -> bool:
    """Whether this build of torch multiplies by float16 weights with FBGEMM.

    torch means to drop the operators some day and says so once in a process; until then nothing comes near them for a
    few rows. Without them the other products serve.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            weight = torch.eye(4)
            return bool(torch.equal(HalfProduct(weight, tile=1)(weight), weight)) and half_tile() > 0
    except (AttributeError, RuntimeError):
        return False


@functools.cache
def half_tile() -> int:
    """By how many rows FBGEMM must go for the bits of a row not to depend on how many there are; 0 where none is found.

    With AVX-512 one. With AVX2 it sums one row, two, and as few left over of more in another order than three and more.
    """
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.rand(16, 64, generator=generator), torch.rand(_PROBED_ROWS, 64, generator=generator)
    for tile in range(1, _MOST_TILE + 1):
        product = HalfProduct(weight, tile)
        whole = product(x)
        if all(torch.equal(product(x[:rows]), whole[:rows]) for rows in range(1, _PROBED_ROWS)):
            return tile
    return 0


@functools.cache
def int8_works() -> bool:
    """Whether this build of torch multiplies bfloat16 rows by int8 weights on a CPU."""
    try:
        weight = QuantizedWeight(torch.eye(64, dtype=torch.int8), torch.ones(64, 1, dtype=torch.bfloat16))
        x = torch.eye(64, dtype=torch.bfloat16)
        return bool(torch.equal(Int8Product(weight)(x), x))
    except (AttributeError, RuntimeError):
        return False
