"""The weighted mean of some states of one stage: clearer than the best of them (Wortsman et al., "Model soups", 2022).

    python -m training.average early.pt=0.4 late.pt=0.6 --out WORK/senses/state.pt

The states are of one run or go on from one, so that a straight line between them has no hill.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from training.checkpoints import load_state, save_state, weights_of


def average(parts: Sequence[tuple[Path, float]]) -> dict[str, object]:
    """A state at the last one's step, without an optimizer. Raises ValueError for shares that do not sum to one, and
    FileNotFoundError."""
    if abs(sum(share for _, share in parts) - 1) > 1e-6:
        raise ValueError(f"the shares sum to {sum(share for _, share in parts)}, not to 1")
    mean: dict[str, Tensor] = {}
    step = 0
    for path, share in parts:
        state = load_state(path)
        if state is None:
            raise FileNotFoundError(path)
        for name, tensor in weights_of(state).items():
            if not tensor.is_floating_point():
                mean[name] = tensor
            else:
                mean[name] = mean[name] + share * tensor if name in mean else share * tensor
        step = state["step"]
    return {"step": step, "model": mean}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", metavar="STATE=SHARE")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    named = [part.rpartition("=") for part in arguments.parts]
    save_state(arguments.out, average([(Path(path), float(share)) for path, _, share in named]))


if __name__ == "__main__":
    main()
