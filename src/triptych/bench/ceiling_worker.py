"""Measures one setting of `triptych.bench.ceilings`, in a process of its own: torch and its threads are set up afresh.

    python -m triptych.bench.ceiling_worker '{"dtype": "float32", "threads": 1, "device": "cpu"}'

The last line that it prints is its result, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

ARRAY_BYTES = 256 * 2**20  # more than a cache holds
SIDE = {
    "cpu": 1024,
    "cuda": 8192,
}  # of the matrices: large enough for full speed, small enough for a fraction of a second
REPEATS = {"cpu": 1, "cuda": 10}  # in one run, so that starting it does not count
SECONDS = 0.3  # for each of the four


def measure(*, dtype: str, threads: int, device: str, array_bytes: int = ARRAY_BYTES) -> dict[str, float]:
    """The fields of `Ceilings` by name. Raises what torch raises for a device or a dtype that is not there."""
    import torch

    torch.set_num_threads(threads)
    kind = torch.device(device).type
    side, repeats = SIDE[kind], REPEATS[kind]
    count = array_bytes // 4
    one, two, three = (torch.full((count,), value, device=device) for value in (0.0, 1.0, 2.0))
    left, right = (torch.randn(side, side, device=device).to(getattr(torch, dtype)) for _ in range(2))
    product = torch.empty_like(left)

    def rate(amount: float, action: Callable[[], object]) -> float:
        """`amount` by the seconds of the fastest run."""
        fastest, runs, end = float("inf"), 0, time.perf_counter() + SECONDS
        while runs < 3 or time.perf_counter() < end:
            begin = time.perf_counter()
            for _ in range(repeats):
                action()
            if kind == "cuda":
                torch.cuda.synchronize(device)
            runs += 1
            if runs > 1:  # the first one warms up
                fastest = min(fastest, time.perf_counter() - begin)
        return amount * repeats / fastest

    with torch.inference_mode():
        return {
            "copy_bytes_per_s": rate(2 * array_bytes, lambda: one.copy_(two)),
            "triad_bytes_per_s": rate(3 * array_bytes, lambda: torch.add(two, three, alpha=3.0, out=one)),
            "read_bytes_per_s": rate(2 * array_bytes, lambda: torch.dot(two, three)),
            "flops_per_s": rate(2.0 * side**3, lambda: torch.mm(left, right, out=product)),
        }


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
