"""When requests are sent."""

from __future__ import annotations

import math
import random


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which each of `count` requests is due: a Poisson process of `rate` requests a second,
    whose first one is due at once. An infinite rate makes all of them due at once. Raises ValueError unless rate > 0.
    """
    if not rate > 0:
        raise ValueError(f"a rate of {rate} requests a second")
    if math.isinf(rate):
        return [0.0] * count
    draw = random.Random(f"arrival {seed}")
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + draw.expovariate(rate))
    return times[:count]
