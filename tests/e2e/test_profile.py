"""`triptych serve --profile`: the traces of a live server."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import httpx

from tests.live_server import STOP_S, LiveServer

SPEECH = {
    "model": "nano",
    "messages": [{"role": "user", "content": "hello"}],
    "modalities": ["text", "audio"],
    "audio": {"voice": "chelsie", "format": "pcm16"},
    "seed": 3,
    "max_tokens": 24,
    "stream": True,
}


def test_a_server_leaves_a_trace_of_every_stage_and_says_where(nano: Path, tmp_path: Path) -> None:
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text("base_config: tiny_cpu\nprofile: {skip_steps: 1, max_steps: 3}\n", encoding="utf-8")
    traces = tmp_path / "traces"
    with LiveServer(nano, "--profile", str(traces), log=tmp_path / "log", deploy=deploy) as server:
        for _ in range(2):
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=SPEECH, timeout=120)
            assert answer.status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(STOP_S) == 0, server.said()
        said = server.said()
    files = {file.name.partition(".")[0]: file for file in traces.iterdir()}
    assert set(files) == {"thinker", "talker", "code2wav"}, said
    for stage, file in files.items():
        assert f"steps of {stage} is in {file}" in said
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
        spans = [event["name"] for event in events if " step " in event["name"]]
        assert 1 <= len(spans) <= 3
        assert all(re.fullmatch(rf"{stage} step \d+: batch \d+, (tokens|rows|frames) \d+", span) for span in spans)
