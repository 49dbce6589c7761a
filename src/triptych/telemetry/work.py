"""What steps have to do at least, by arithmetic: the numerators of a roofline."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes that pass between memory and the processor, and floating-point operations; a multiply-add is two.

    Only what no implementation can avoid: each weight once in a pass, keys, values and state that lie in memory from
    one step to the next, and the rows that are looked up. Not counted: what one layer gives to the next, padding, and
    operations outside products (norms, softmax, sines, sampling). Floats: a busy year is more than 64 bits of them.
    """

    moved_bytes: float
    flops: float

    def __add__(self, other: Work) -> Work:
        return Work(self.moved_bytes + other.moved_bytes, self.flops + other.flops)
