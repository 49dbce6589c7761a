"""The command line: `triptych serve | generate | demo | bench | checkpoint`.

Commands import what they need when they run, so that help and usage errors come at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from triptych import __version__
from triptych.cli import bench, checkpoint, demo, generate, serve
from triptych.errors import CheckpointError, ConfigError, RequestError, TriptychError

app = typer.Typer(
    name="triptych",
    help="Serve omni-modality models: text, images, audio and video in, text and streamed speech out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: nothing in brackets is taken for markup, no flag is cut to fit a table
)
app.command("serve")(serve.command)
app.command("generate")(generate.command)
app.command("demo")(demo.command)
app.add_typer(bench.app, name="bench")
app.add_typer(checkpoint.app, name="checkpoint")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"triptych {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None: ...


def main() -> None:
    """Run the command line. Exit status: 0 done, 1 something failed, 2 something given is wrong, 130 interrupted."""
    try:
        app()
    except TriptychError as error:
        typer.echo(f"triptych: {error}", err=True)
        sys.exit(2 if isinstance(error, ConfigError | CheckpointError | RequestError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
