"""The architecture as rules: who may import whom, what the server process never loads, what no file may contain."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import triptych

SOURCE = Path(triptych.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
FOUNDATION = {"config", "errors", "log"}
BELOW_STAGES = {"engine", "streaming", "models", "connectors", "layers", "telemetry", *FOUNDATION}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "log": {"errors"},
    "config": FOUNDATION,
    "telemetry": {"config"},
    "layers": FOUNDATION,
    "engine": {"layers", "telemetry", *FOUNDATION},
    "connectors": {"telemetry", *FOUNDATION},
    "streaming": {"layers", *FOUNDATION},
    "models": {"streaming", "layers", *FOUNDATION},
    "media": {"models", "connectors", *FOUNDATION},
    "stages": BELOW_STAGES,
    "pipeline": {"stages", "media", *BELOW_STAGES},
    "server": {"pipeline", "stages", "media", *BELOW_STAGES},
    "bench": FOUNDATION,
    "cli": {"bench", "server", "pipeline", "stages", "media", *BELOW_STAGES},
}
POLICY = [
    *("engine/request.py", "engine/block_pool.py", "engine/scheduler.py", "engine/step_cost.py"),
    *("stages/cadence.py", "stages/playout_clock.py"),
]
SERVER_SIDE = ["server", "pipeline", "cli", "bench", "connectors", "config", "telemetry"]


def name_of(file: Path) -> str:
    return str(file.relative_to(SOURCE))


def modules_imported(file: Path) -> Iterator[str]:
    """Dotted names of every module that a file imports anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(file)}: imports are written in full"
            yield node.module or ""
            if node.module == "triptych":
                yield from (f"triptych.{alias.name}" for alias in node.names)


def package_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "triptych" and len(parts) > 1 else None


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_point_down(file: Path) -> None:
    own = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    if own in ("__init__", "__main__"):
        return
    assert own in ALLOWED, f"{own} has no place in the import direction; give it one"
    for module in modules_imported(file):
        package = package_of(module)
        if package is not None and package != own and package != "__version__":
            assert package in ALLOWED[own], f"{own} may not import {module}"


@pytest.mark.parametrize("name", POLICY)
def test_policy_imports_no_torch(name: str) -> None:
    assert not [module for module in modules_imported(SOURCE / name) if module.split(".")[0] == "torch"]


def test_the_server_process_loads_neither_torch_nor_transformers() -> None:
    modules = [
        "triptych." + ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        for file in FILES
        if file.relative_to(SOURCE).parts[0] in SERVER_SIDE
    ]
    script = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "import triptych\nassert triptych.Omni\n"
        "sys.exit(', '.join({'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_loads_nothing_else() -> None:
    script = "import sys, triptych\nsys.exit(', '.join({'torch', 'numpy', 'msgspec', 'zmq'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_no_pickle_no_sleep_no_remote_code_nothing_swallowed(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    for module in modules_imported(file):
        assert module.split(".")[0] not in ("pickle", "cloudpickle", "dill", "marshal", "shelve"), module
        assert not module.startswith("multiprocessing") or module == "multiprocessing.shared_memory", module
    for node in ast.walk(ast.parse(text)):
        where = f"{name_of(file)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute):
            assert node.attr != "sleep", f"{where}: wait for an event instead"
            assert ast.unparse(node) != "torch.load", f"{where}: torch.load unpickles"
        if isinstance(node, ast.keyword):
            assert node.arg != "trust_remote_code", where
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            empty = all(isinstance(item, ast.Pass | ast.Continue) for item in node.body)
            assert not (broad and empty), f"{where}: an error disappears here"
    assert not [mark for mark in ("TODO", "FIXME", "XXX") if mark in text]


def test_the_public_names_are_these() -> None:
    assert triptych.__all__ == ["Omni", "OmniOutput", "__version__"]
    assert all(getattr(triptych, name) for name in triptych.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nope'"):
        _ = triptych.Nope
