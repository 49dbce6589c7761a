"""Weights in eight bits with a scale for each output, made by torchao, which is imported when the first one is.

torchao's own tensors are not multiplied with: they widen the whole weight in each product and know no packed order, and
experts are stacked here. What reads these weights is in `product` and `grouped_product`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.config.schema import Quantization
from triptych.errors import ConfigError

STORED: dict[Quantization, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
EXTRA = "triptych[quantization]"
# At its import torchao warns of kernels for other GPUs, and has torch warn of an enumeration of its own.
_NOISY = ("torchao", "torch.utils._pytree")


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """`stored` [..., N, K] of eight bits times `scale` [..., N, 1], which has the dtype of the rows it is for."""

    stored: Tensor
    scale: Tensor

    def __getitem__(self, index: int | Tensor) -> QuantizedWeight:
        """One weight of a stack, or some of them."""
        return QuantizedWeight(self.stored[index], self.scale[index])

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes + self.scale.nbytes

    def widen(self) -> Tensor:
        """The weight in the dtype of its scale, as a new tensor."""
        return self.stored.to(self.scale.dtype).mul_(self.scale)


def quantize(weight: Tensor, method: Quantization) -> QuantizedWeight:
    """A weight [..., N, K] in eight bits, every row of N by its largest number.

    Raises ConfigError where torchao is missing or cannot be imported.
    """
    make = _makers()[method]
    stored = torch.empty(weight.shape, dtype=STORED[method], device=weight.device)
    scale = weight.new_empty(*weight.shape[:-1], 1)
    # One matrix at a time: torchao takes several times the memory of what it works on.
    matrices = (tensor.view(-1, *tensor.shape[-2:]) for tensor in (weight, stored, scale))
    for one, its_stored, its_scale in zip(*matrices, strict=True):
        make(one, its_stored, its_scale)
    return QuantizedWeight(stored, scale)


@functools.cache
def _makers() -> dict[Quantization, Callable[[Tensor, Tensor, Tensor], None]]:
    """By method: what fills `stored` and `scale` from a weight [N, K]."""
    try:
        with _quiet():
            from torchao.quantization import Float8Tensor, Int8Tensor, PerRow
    except ImportError as error:
        raise ConfigError(f"torchao cannot be imported ({error}); install {EXTRA}", "quantization") from error

    # A row of zeros has a scale as well: the least that int8 has.
    least = torch.finfo(STORED["fp8"]).max * torch.finfo(torch.float32).eps

    def int8(weight: Tensor, stored: Tensor, scale: Tensor) -> None:
        scale.copy_(Int8Tensor.from_hp(weight, PerRow()).scale)
        # Again by the scale as it is kept, so that rounding it to bfloat16 costs nothing.
        stored.copy_(Int8Tensor.from_hp(weight, PerRow(), scale=scale.float()).qdata)

    def fp8(weight: Tensor, stored: Tensor, scale: Tensor) -> None:
        found = Float8Tensor.from_hp(weight, STORED["fp8"], PerRow(), hp_value_lb=least)
        stored.copy_(found.qdata)
        scale.copy_(found.scale)

    return {"int8": int8, "fp8": fp8}


@contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _NOISY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
