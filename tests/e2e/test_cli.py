"""The command line as a user meets it: real processes, real signals, the nano model."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import wave
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from PIL import Image

from triptych import __version__
from triptych.config.load import load_deploy

TRIPTYCH = [sys.executable, "-m", "triptych"]
LOAD_S = 120


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The user's, with a cache folder of its own and no CUDA device to be found."""
    cache = str(tmp_path_factory.mktemp("cache"))
    return os.environ | {"XDG_CACHE_HOME": cache, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def run(environment: dict[str, str], *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TRIPTYCH, *arguments], env=environment, cwd=cwd, capture_output=True, text=True, timeout=LOAD_S
    )


class Served:
    """A `triptych serve` that has said it is ready, or is still loading."""

    def __init__(self, environment: dict[str, str], *arguments: str) -> None:
        command = [*TRIPTYCH, "serve", "nano", "--port", "0", *arguments]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self.url = ""

    def wait_for(self, text: str) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if text in line:
                return line
        raise AssertionError(f"{text!r} was never said:\n" + "".join(self.log))

    def stop(self, number: signal.Signals) -> tuple[int, str]:
        """Send a signal; the exit status and everything that was written to stderr."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(number)
        _, rest = self.process.communicate(timeout=30)
        assert [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
        return self.process.returncode, "".join(self.log) + rest


@contextmanager
def serving(environment: dict[str, str], *arguments: str) -> Iterator[Served]:
    served = Served(environment, *arguments)
    try:
        served.url = served.wait_for("ready in").split(" at ")[1].strip()
        yield served
    finally:
        served.process.kill()
        served.process.communicate(timeout=30)


@pytest.fixture(scope="module")
def server(environment: dict[str, str]) -> Iterator[Served]:
    with serving(environment) as served:
        yield served


def test_help_and_version_come_at_once(environment: dict[str, str]) -> None:
    assert run(environment, "--version").stdout == f"triptych {__version__}\n"
    script = (
        "import sys\nfrom triptych.cli import app\ntry: app(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'msgspec', 'zmq', 'uvicorn', 'openai', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("serve", "generate", "demo", "checkpoint"))


def test_dry_run_prints_a_deploy_file_with_every_flag_in_it(environment: dict[str, str], tmp_path: Path) -> None:
    overrides = '{"1": {"max_num_seqs": 3, "default_sampling_params": {"temperature": 0.4}}}'
    flags = ["--no-async-chunk", "--stage-init-timeout", "12", "--stage-overrides", overrides, "--omni"]
    done = run(environment, "serve", "nano", *flags, "--dry-run")
    assert done.returncode == 0, done.stderr
    printed = tmp_path / "printed.yaml"
    printed.write_text(done.stdout, encoding="utf-8")
    deploy = load_deploy(printed, platform="cpu", flags={}, stage_overrides={})
    assert (deploy.async_chunk, deploy.stage_init_timeout_s) == (False, 12.0)
    assert deploy.stages[1].max_num_seqs == 3
    assert deploy.stages[1].default_sampling_params["temperature"] == 0.4
    alone = yaml.safe_load(run(environment, "serve", "nano", "--text-only", "--dry-run").stdout)
    assert [stage["stage"] for stage in alone["stages"]] == ["thinker"]


def test_replicas_and_their_devices_are_in_the_dry_run(environment: dict[str, str]) -> None:
    override = '{"1": {"num_replicas": 2, "devices": "1,2", "gpu_memory_utilization": 0.3}}'
    done = run(environment, "serve", "nano", "--platform", "cuda", "--stage-overrides", override, "--dry-run")
    talker = yaml.safe_load(done.stdout)["stages"][1]
    assert (talker["num_replicas"], talker["devices"]) == (2, "cuda:1,cuda:2")


def test_what_requests_may_name_is_in_the_dry_run(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    domains = ["--allowed-media-domains", "a.com, b.org", "--allowed-media-domains", "c.net"]
    done = run(environment, "serve", "nano", "--allowed-local-media-path", "clips", *domains, "--dry-run", cwd=tmp_path)
    media = yaml.safe_load(done.stdout)["media"]
    assert media["local_path"] == str(tmp_path / "clips") and media["allowed_domains"] == ["a.com", "b.org", "c.net"]
    none = run(environment, "serve", "nano", "--allowed-local-media-path", "", "--dry-run")
    assert yaml.safe_load(none.stdout)["media"]["local_path"] == ""


def test_both_names_of_the_deploy_flag_mean_the_same(environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base_config: tiny_cpu\nmax_queued_requests: 7\n", encoding="utf-8")
    for flag in ("--deploy-config", "--stage-configs-path"):
        done = run(environment, "serve", "nano", flag, str(file), "--dry-run")
        assert yaml.safe_load(done.stdout)["max_queued_requests"] == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "no/where/at-all"], "is not a checkpoint folder"),
        (["serve", "nano", "--deploy-config", "nope"], "neither a file nor a profile"),
        (["serve", "nano", "--stage-overrides", '{"0": {"num_replicas": 2}}'], "stages[2].num_replicas"),
        (["serve", "nano", "--stage-overrides", '{"1": {"num_replicas": 0}}'], "0 is not between 1 and 64"),
        (["serve", "nano", "--stage-overrides", '{"1": {"max_seqs": 2}}'], "did you mean 'max_num_seqs'"),
        (["serve", "nano", "--stage-overrides", "{"], "--stage-overrides: not JSON"),
        (["serve", "nano", "--stage-overrides", '{"0": {"devices": "cuda:0"}}'], "the platform is cpu"),
        (["serve", "nano", "--stage-init-timeout", "-1"], "stage_init_timeout_s: -1.0 is not a positive number"),
        (["serve", "nano", "--omni", "--text-only"], "give one of them"),
        (["serve", "nano", "--api-key", " "], "the API key is empty"),
        (["serve", "nano", "--log-level", "loud"], "loud"),
        (["generate", "nano", "--prompt", "x", "--modalities", "text,audio"], "give --out"),
        (["generate", "nano", "--prompt", "x", "--out", "no/such/a.wav"], "is not a folder"),
        (["generate", "nano", "--prompt", "x", "--modalities", "video"], "must be text, or text,audio"),
        (["generate", "nano", "--prompt", "x", "--voice", "chelsie"], "--voice is for speech"),
        (
            ["generate", "nano", "--prompt", "x", "--seed", "9" * 20],
            "triptych: --seed: 9999999999999999999",
        ),
        (["generate", "nano", "--prompt", "x", "--max-tokens", "0"], "triptych: --max-tokens: 0 is not at least 1"),
        (["generate", "nano"], "give --prompt, --image, --audio or --video"),
        (["generate", "nano", "--image", "no/such.png"], "--image 'no/such.png' is not a file"),
        (["generate", "nano", "--prompt", "x", "--use-audio-in-video"], "give --video as well"),
        (["generate", "nano", "--video", "https://x/a.mp4", "--fps", "0"], "'mm_processor_kwargs.fps'"),
        (["serve", "nano", "--allowed-media-domains", ","], "names no host"),
        (["serve", "nano", "--allowed-local-media-path", "no/where"], "media.local_path"),
        (["serve", "nano", "--limit-mm-per-prompt", "{}"], "media.max_parts"),
    ],
)
def test_what_is_wrong_is_said_in_a_line_with_status_2(
    environment: dict[str, str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = run(environment, *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    if done.stderr.startswith("triptych: "):
        assert done.stderr.count("\n") == 1


def test_a_port_in_use_is_found_before_anything_is_loaded(environment: dict[str, str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run(environment, "serve", "nano", "--port", str(port))
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in done.stderr
    assert "load" not in done.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_a_server_cleanly(environment: dict[str, str], number: signal.Signals, status: int) -> None:
    with serving(environment, "--text-only", "--served-model-name", "mine") as served:
        models = httpx.get(f"{served.url}/v1/models").json()
        assert [model["id"] for model in models["data"]] == ["mine"]
        returned, log = served.stop(number)
    assert returned == status, log
    assert "Traceback" not in log


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_while_loading_ends_it_too(environment: dict[str, str], number: signal.Signals, status: int) -> None:
    served = Served(environment)
    served.wait_for("loading")
    returned, log = served.stop(number)
    assert returned == status, log
    assert "Traceback" not in log and "ready in" not in log


ENDLESS = {
    "model": "nano",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 2500,
    "ignore_eos": True,
    "temperature": 1.0,
    "seed": 1,
}


@pytest.mark.parametrize("seconds", ["0", "1000"])
def test_answers_that_a_stop_cuts_end_with_an_error(environment: dict[str, str], seconds: str) -> None:
    """At once, or with a second signal; a client that stalls holds nothing up."""
    with serving(environment, "--shutdown-timeout", seconds) as served, ExitStack() as stack:
        address = served.url.removeprefix("http://")
        stalled, whole = (HTTPConnection(address, timeout=LOAD_S) for _ in range(2))
        stack.callback(stalled.close)
        stack.callback(whole.close)
        stalled.putrequest("POST", "/v1/chat/completions")
        stalled.putheader("Content-Type", "application/json")
        stalled.putheader("Content-Length", "500")
        stalled.endheaders(b"{")
        spoken = ENDLESS | {"modalities": ["text", "audio"], "audio": {"format": "flac"}}
        whole.request("POST", "/v1/chat/completions", json.dumps(spoken), {"Content-Type": "application/json"})
        client = stack.enter_context(httpx.Client(timeout=LOAD_S))
        with client.stream("POST", f"{served.url}/v1/chat/completions", json=ENDLESS | {"stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            served.process.send_signal(signal.SIGTERM)
            if seconds != "0":
                served.wait_for("Waiting for connections")
                served.process.send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
        cut = whole.getresponse()
        error = json.loads(cut.read())["error"]
        returned, log = served.stop(signal.SIGTERM)
    assert (returned, cut.status, cut.headers["retry-after"]) == (0, 503, "1"), log
    assert error["message"] == "the server is shutting down"
    assert json.loads(events[-1].removeprefix("data: "))["error"]["message"] == "the server is shutting down"
    assert "Traceback" not in log and "failed while it was streamed: the server is shutting down" in log


def test_answers_under_way_end_before_the_server_does(environment: dict[str, str]) -> None:
    with serving(environment) as served:
        body = ENDLESS | {"stream": True, "max_tokens": 300}
        with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=LOAD_S) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            served.process.send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
        returned, log = served.stop(signal.SIGTERM)
    assert (returned, events[-1]) == (0, "data: [DONE]"), log


def test_an_api_key_from_the_environment_is_asked_for(environment: dict[str, str]) -> None:
    with serving(environment | {"TRIPTYCH_API_KEY": "secret"}, "--text-only") as served:
        assert httpx.get(f"{served.url}/v1/models").status_code == 401
        answer = httpx.get(f"{served.url}/v1/models", headers={"Authorization": "Bearer secret"})
        assert answer.status_code == 200


def test_generate_gives_the_bytes_that_the_server_streams(
    environment: dict[str, str], server: Served, tmp_path: Path
) -> None:
    out = tmp_path / "answer.wav"
    done = run(
        environment, "generate", "nano", "--prompt", "hello", "--seed", "5", "--max-tokens", "12", "--out", str(out)
    )
    assert done.returncode == 0, done.stderr
    body = {
        "model": "nano",
        "messages": [{"role": "user", "content": "hello"}],
        "modalities": ["text", "audio"],
        "audio": {"format": "pcm16"},
        "seed": 5,
        "max_tokens": 12,
        "stream": True,
    }
    samples, transcript = b"", ""
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=LOAD_S) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    audio = choice["delta"].get("audio") or {}
                    samples += base64.b64decode(audio.get("data") or "")
                    transcript += audio.get("transcript") or ""
    with wave.open(str(out)) as file:
        assert file.getparams()[:3] == (1, 2, 24000)
        assert file.readframes(file.getnframes()) == samples
    assert len(samples) > 24000 // 2
    assert done.stdout == transcript + "\n"


def test_generate_writes_text_alone_without_speech_stages(environment: dict[str, str]) -> None:
    done = run(environment, "generate", "nano", "--prompt", "hello", "--system", "Be brief.", "--max-tokens", "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "5 tokens, finish_reason length" in done.stderr


def test_generate_looks_listens_and_needs_no_prompt(environment: dict[str, str], tmp_path: Path) -> None:
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    with wave.open(str(tmp_path / "clip.wav"), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(bytes(32_000))
    media = ["--image", "red.png", "--audio", "clip.wav", "--image", str(tmp_path / "red.png")]
    done = run(environment, "generate", "nano", *media, "--max-tokens", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "5 tokens, finish_reason length" in done.stderr
    (tmp_path / "broken.png").write_bytes(b"no image")
    done = run(environment, "generate", "nano", "--image", "broken.png", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("triptych: --image 'broken.png': this is not an image")


def test_what_generate_and_a_dry_run_cannot_do_is_told_at_once(environment: dict[str, str], tmp_path: Path) -> None:
    done = run(environment, "generate", "nano", "--prompt", "x", "--out", str(tmp_path / "a.mp3"))
    assert done.returncode == 2 and ".wav" in done.stderr
    done = run(environment, "serve", "nano", "--allowed-local-media-path", str(tmp_path / "none"), "--dry-run")
    assert done.returncode == 2 and "media.local_path" in done.stderr and not done.stdout
    done = run(environment, "serve", "nano", "--allowed-media-domains", "http://a.org", "--dry-run")
    assert done.returncode == 2 and "not the name of a host" in done.stderr


def test_a_voice_that_is_not_there_is_refused_with_those_that_are(environment: dict[str, str], tmp_path: Path) -> None:
    done = run(environment, "generate", "nano", "--prompt", "x", "--voice", "nope", "--out", str(tmp_path / "a.wav"))
    assert done.returncode == 2
    assert "chelsie" in done.stderr


def test_the_demo_leaves_a_wav_and_its_numbers(environment: dict[str, str], tmp_path: Path) -> None:
    done = run(environment, "demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("assistant", "TTFT", "TTFP", "RTF"))
    with wave.open(str(tmp_path / "demo.wav")) as file:
        assert file.getparams()[:3] == (1, 2, 24000)
        samples = file.readframes(file.getnframes())
    assert len(samples) > 24000 and any(samples)
