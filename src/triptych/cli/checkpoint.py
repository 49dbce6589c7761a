"""`triptych checkpoint`: make checkpoints with random weights, for tests, benchmarks and first steps."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Make checkpoints with random weights.", no_args_is_help=True)


class SizeName(StrEnum):
    """The sizes of `triptych.models.qwen3_omni.synthetic_config` as choices."""

    nano = "nano"
    bench = "bench"
    mini = "mini"


class LayoutName(StrEnum):
    """How experts are stored: one by one as published, or stacked."""

    per_expert = "per_expert"
    fused = "fused"


@app.callback()
def _root() -> None: ...


@app.command("make")
def make(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write it.", file_okay=False)],
    size: Annotated[
        SizeName, typer.Option(help="nano: 1.7 M parameters, float32; bench: 20 M, mini: 115 M, bfloat16.")
    ] = SizeName.nano,
    seed: Annotated[int, typer.Option(help="The same seed gives the same weights.")] = 0,
    layout: Annotated[LayoutName, typer.Option(help="How the experts are stored.")] = LayoutName.per_expert,
    shards: Annotated[int, typer.Option(min=1, max=100, help="Number of weight files.")] = 1,
    force: Annotated[bool, typer.Option("--force", help="Delete what DIR holds, whatever it is.")] = False,
) -> None:
    """Make a Qwen3-Omni checkpoint with random weights. It speaks noise: every other part is real."""
    from triptych.models.qwen3_omni.synthetic import make_checkpoint

    started = time.monotonic()
    made = make_checkpoint(
        folder.expanduser().absolute(), size.value, seed=seed, shards=shards, layout=layout.value, force=force
    )
    nbytes = sum(file.stat().st_size for file in made.glob("*.safetensors"))
    typer.echo(f"{made}: {size} checkpoint, {nbytes / 1e6:.1f} MB of weights, {time.monotonic() - started:.1f} s")
