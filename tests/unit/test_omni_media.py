"""`Omni` and media: a batch waits for its files where a server would send requests away."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from triptych import Omni
from triptych.media.loader import Loader
from triptych.pipeline import omni
from triptych.pipeline.launch import LaunchPlan
from triptych.pipeline.request import Done, GenerationRequest
from triptych.pipeline.stream import RequestStream

FAKE = (sys.executable, str(Path(__file__).parents[1] / "fake_media_worker.py"))


class Pipeline:
    """Ends every request at once."""

    @classmethod
    async def start(cls, **_: object) -> Pipeline:
        return cls()

    def submit(self, request: GenerationRequest) -> RequestStream:
        assert request.lease is not None
        request.lease.close()
        stream = RequestStream(request.request_id, on_taken=lambda: None, on_left=lambda: None)
        stream.push(Done(finish_reason="stop", prompt_tokens=1, text_tokens=0, audio_frames=0))
        return stream

    async def close(self) -> None: ...


@pytest.mark.parametrize("limit", ["max_waiting: 4", "max_waiting: 0", "max_bytes: 8"])
def test_a_batch_with_more_media_than_the_loader_takes_at_once_is_served(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    def make_loader(plan: LaunchPlan, *, patient: bool) -> Loader:
        return Loader(plan.deploy.media, str(plan.model_dir), command=FAKE, patient=patient)

    monkeypatch.setattr(omni, "make_loader", make_loader)
    monkeypatch.setattr(omni, "Orchestrator", Pipeline)
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text(f"base_config: tiny_cpu\nmedia: {{{limit}}}\n", encoding="utf-8")
    images = [[{"type": "image", "image": f"ok {prompt}.{part}".encode()} for part in range(3)] for prompt in range(6)]
    with Omni(str(nano), deploy_config=deploy, platform="cpu") as loaded:
        outputs = loaded.generate([[{"role": "user", "content": content}] for content in images])
    assert [output.error for output in outputs] == [None] * len(images)
