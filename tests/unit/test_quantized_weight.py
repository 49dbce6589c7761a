"""Weights in eight bits: how far from the ones they stand for, and torchao only where it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from triptych.config.schema import Quantization
from triptych.errors import ConfigError
from triptych.layers import quantized_weight
from triptych.layers.quantized_weight import STORED, quantize


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_is_off_by_half_a_step_of_its_row_at_most(dtype: torch.dtype) -> None:
    weight = random(32, 48, dtype=dtype) * torch.logspace(-3, 2, 32).unsqueeze(1).to(dtype)
    found = quantize(weight, "int8")
    assert (found.stored.dtype, found.scale.dtype, found.scale.shape) == (torch.int8, dtype, (32, 1))
    exact = found.stored.double() * found.scale.double()
    # Half of a step, and what rounding the largest number's scale may cut off.
    assert ((exact - weight.double()).abs() <= found.scale.double() * (0.5 + 127 * torch.finfo(dtype).eps)).all()
    assert (found.stored.short().abs().amax(1) >= 126).all()  # every row uses its range
    assert found.nbytes == 32 * 48 + 32 * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_keeps_three_bits_behind_the_leading_one(dtype: torch.dtype) -> None:
    weight = random(32, 48, dtype=dtype)
    found = quantize(weight, "fp8")
    assert (found.stored.dtype, found.scale.dtype, found.scale.shape) == (torch.float8_e4m3fn, dtype, (32, 1))
    large = weight.abs() > 2.0**-6 * found.scale  # smaller ones have fewer bits
    error = ((found.widen() - weight).abs() / weight.abs()).float()
    assert error[large].max() <= 2.0**-4 + 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("method", STORED)
def test_a_row_of_zeros_stays_one(method: Quantization) -> None:
    weight = random(4, 16)
    weight[2] = 0
    widened = quantize(weight, method).widen()
    assert widened.isfinite().all() and not widened[2].any() and widened[1].any()


@pytest.mark.parametrize("method", STORED)
def test_a_stack_is_quantised_weight_by_weight(method: Quantization) -> None:
    stack = random(3, 8, 16)
    whole = quantize(stack, method)
    for index, weight in enumerate(stack):
        assert torch.equal(whole[index].widen(), quantize(weight, method).widen())
    assert torch.equal(whole[torch.tensor([2, 0])].widen(), whole.widen()[[2, 0]])


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    quantized_weight._makers.cache_clear()
    with pytest.raises(ConfigError, match=r"torchao cannot be imported .* install triptych\[quantization\]"):
        quantize(random(4, 16), "int8")
    monkeypatch.undo()
    assert quantize(random(4, 16), "int8").stored.dtype is torch.int8


def test_torchao_is_imported_when_a_weight_is_quantised_and_says_nothing() -> None:
    script = (
        "import sys, torch\n"
        "from triptych.layers.quantized_weight import quantize\n"
        "import triptych.stages.loading\n"
        "assert 'torchao' not in sys.modules\n"
        "quantize(torch.ones(4, 16), 'int8')\n"
        "assert 'torchao' in sys.modules\n"
    )
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
