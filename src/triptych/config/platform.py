"""Which platform this machine is, found without torch: the server process never imports it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Literal

Platform = Literal["cpu", "cuda"]


def num_cuda_devices() -> int:
    """How many CUDA devices a process started here may see: the driver's, or those CUDA_VISIBLE_DEVICES names."""
    driver = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    nodes = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = max(driver, nodes)
    if visible is None:
        return present
    return min(present, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def cuda_memory_bytes(index: int) -> int | None:
    """Bytes of the CUDA device that torch numbers `index`, as the driver says; None where there is no such device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, size = ctypes.c_int(), ctypes.c_size_t()
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), index)
        or driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    )
    return None if failed else size.value


def host_memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def detect_platform() -> Platform:
    """ "cuda" where at least one NVIDIA device is to be seen, else "cpu"."""
    return "cuda" if num_cuda_devices() else "cpu"
