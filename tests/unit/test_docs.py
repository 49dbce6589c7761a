"""What the docs say is so: the tree of the README, its commands and programs, links, keys and flags."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path

import msgspec
import pytest
import typer.main

import triptych
from triptych.bench.driver import Run
from triptych.bench.metrics import DISTRIBUTIONS, STATISTICS, parse_targets, summarise
from triptych.cli import app
from triptych.config.load import profiles
from triptych.config.sampling import SamplingParams
from triptych.config.schema import (
    ConnectorConfig,
    ConnectorExtra,
    DeployConfig,
    MediaConfig,
    ProfileConfig,
    StageConfig,
)
from triptych.config.units import parse_bytes
from triptych.server.protocol import ChatCompletionRequest, parse_chat_request

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "triptych"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """Every line of shell in the docs, without comments, split into words."""
    joined: list[list[str]] = []
    for page in PAGES:
        for block in blocks(page, "bash"):
            if block.startswith("curl"):
                continue
            for line in block.splitlines():
                joined += [shlex.split(part, comments=True) for part in line.split("&&")]
    return [words for words in joined if words]


def documented(text: str) -> set[str]:
    """Names in the first column of the tables in `text`."""
    return {name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)}


def section(page: str, title: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE)
    assert found, f"{page} has no section {title!r}"
    return found[2]


def test_the_tree_of_the_readme_is_the_source_tree() -> None:
    [tree] = [block for block in blocks(ROOT / "README.md", "text") if block.startswith("src/triptych/")]
    listed: dict[str, set[str]] = {"": set()}
    package = ""
    for line in tree.splitlines()[1:]:
        if found := re.match(r"  (\S+)/ ", line):
            package = found[1]
            listed[package] = set()
        elif line.startswith("    "):
            listed[package] |= set(line.split())
        elif line.startswith("  "):
            listed[""] |= set(line.split())
    actual: dict[str, set[str]] = {}
    for file in [*SOURCE.rglob("*.py"), *SOURCE.rglob("*.yaml")]:
        folder = file.parent.relative_to(SOURCE).as_posix().removeprefix(".")
        actual.setdefault(folder, set())
        if not file.stem.startswith("__"):
            actual[folder].add(file.stem)
    assert listed == actual


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_parses(words: list[str]) -> None:
    match words:
        case ["triptych", *arguments]:
            root = typer.main.get_command(app)
            with root.make_context("triptych", list(arguments)) as context:
                name, command, rest = root.resolve_command(context, [*context._protected_args, *context.args])  # type: ignore[attr-defined]
                if "--help" in rest:
                    return
                while hasattr(command, "commands"):
                    command, name, rest = command.commands[rest[0]], rest[0], rest[1:]
                with command.make_context(name, rest, parent=context) as parsed:
                    assert not parsed.args
        case ["make", target, *assignments]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), target
            for assignment in assignments:
                assert re.match(r"[A-Z]+=", assignment)
        case [".venv/bin/pytest", *arguments]:
            assert all((ROOT / name).exists() for name in arguments if name.startswith("tests/"))
        case ["git", "clone", *_] | ["cd", _]:
            pass
        case _:
            pytest.fail(f"a command that this test does not know: {words}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_program_compiles_and_every_body_is_a_request(page: Path) -> None:
    for program in blocks(page, "python"):
        ast.parse(program)
    for block in blocks(page, "bash"):
        for body in re.findall(r"-d '(.*?)'", block, re.DOTALL):
            parse_chat_request(json.dumps(json.loads(body)).encode())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_the_deploy_reference_names_every_key_and_no_other() -> None:
    assert documented(section("docs/deploy.md", "Top level")) == {
        *DeployConfig.__struct_fields__,
        "base_config",
        "platforms",
    }
    assert documented(section("docs/deploy.md", "`stages[]`")) == set(StageConfig.__struct_fields__)
    assert documented(section("docs/deploy.md", "`media`")) == set(MediaConfig.__struct_fields__)
    assert documented(section("docs/deploy.md", "`profile`")) == set(ProfileConfig.__struct_fields__)
    connectors = {f"extra.{name}" for name in ConnectorExtra.__struct_fields__}
    assert documented(section("docs/deploy.md", "`connectors`")) == {"kind", *connectors}
    assert set(ConnectorConfig.__struct_fields__) == {"kind", "extra"}
    assert documented(section("docs/deploy.md", "Deploy config")) == set(profiles())


def test_the_deploy_reference_names_every_sampling_parameter() -> None:
    text = section("docs/deploy.md", "`stages[]`")
    assert [name for name in SamplingParams.__struct_fields__ if f"`{name}`" not in text] == []


def test_the_deploy_reference_gives_the_defaults_of_the_schema() -> None:
    for title, kind in (
        ("Top level", DeployConfig),
        ("`stages[]`", StageConfig),
        ("`media`", MediaConfig),
        ("`profile`", ProfileConfig),
    ):
        rows = dict(re.findall(r"^\| `(\w+)` \| `?([^|`]*)`? \|", section("docs/deploy.md", title), re.MULTILINE))
        for field in msgspec.structs.fields(kind):
            if isinstance(field.default, bool | int | float | str):
                shown = str(field.default).lower() if isinstance(field.default, bool) else f"{field.default}"
                documented_default = rows[field.name]
                if field.name.endswith("_bytes") and "iB" in documented_default:
                    documented_default = str(parse_bytes(documented_default))
                assert documented_default == shown.removesuffix(".0"), field.name


def test_every_flag_of_serve_in_the_deploy_reference_exists() -> None:
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    known = {name for option in serve.params for name in (*option.opts, *option.secondary_opts)}
    flags = {word for row in documented(section("docs/deploy.md", "Flags")) for word in row.split() if word[:2] == "--"}
    assert flags and flags <= known


def test_the_bench_reference_names_every_number_and_only_flags_that_exist() -> None:
    page = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    targets = parse_targets(["ttft:1"], speaks=True)
    numbers = set(summarise(Run([], 0.0), targets))
    distributions = {f"{statistic}_{name}" for statistic in STATISTICS for name in DISTRIBUTIONS}
    assert documented(section("docs/bench.md", "What the numbers mean")) == {*DISTRIBUTIONS, *(numbers - distributions)}
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = [
        option for command in (commands["serve"], *commands["bench"].commands.values()) for option in command.params
    ]
    known = {name for option in options for name in (*option.opts, *option.secondary_opts)}
    flags = {word for words in re.findall(r"`(--[^`]+)`", page) for word in words.split() if word[:2] == "--"}
    assert flags and flags <= known


def test_the_api_reference_names_every_field_that_is_not_refused() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    refused = {name for name, field in ChatCompletionRequest.model_fields.items() if field.annotation is type(None)} | {
        "response_format"
    }
    names = set(ChatCompletionRequest.model_fields) - refused
    assert {name for name in names if not re.search(rf"`{name}[`.:]", text)} == set()


def test_the_changelog_has_the_version_or_says_unreleased() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{triptych.__version__}]" in text or "## [Unreleased]" in text
