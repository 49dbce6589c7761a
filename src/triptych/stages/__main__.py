"""`python -m triptych.stages --endpoint ipc://... --process NAME`: how the supervisor starts a stage process."""

from __future__ import annotations

import argparse
import faulthandler
import signal
import sys
from collections.abc import Sequence

from triptych.stages.build import Load, load_stage
from triptych.stages.process import run_process


def main(arguments: Sequence[str] | None = None, load: Load = load_stage) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then stops its processes
    faulthandler.enable()
    parser = argparse.ArgumentParser(
        prog="python -m triptych.stages", description="A stage process of `triptych serve`."
    )
    parser.add_argument("--endpoint", required=True, help="control socket of the server, ipc://...")
    parser.add_argument("--process", required=True, help="name of this process in the deploy config")
    options = parser.parse_args(arguments)
    return run_process(endpoint=options.endpoint, process=options.process, load=load)


if __name__ == "__main__":
    sys.exit(main())
