"""Two measures of media under load, on one machine and in one run.

1. A long video asked about twice: the time to the first text of the second time over that of the first.
2. Streams that speak while a long video that was never seen is decoded, encoded and read: how long each listener would
   have waited, against the same streams without the video. Playback is simulated from the arrival of the audio on.

    python benchmarks/media_load.py --model nano --seconds 60 --streams 4
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import statistics
import time
from typing import Any

import av
import numpy as np
import openai

from triptych.bench.server import served

RATE = 24_000
ANSWER_S = 600


def film(seconds: int, side: tuple[int, int], seed: int) -> str:
    """A `data:` URL of a video of noise that moves, ten frames a second, without sound."""
    rng = np.random.default_rng(seed)
    width, height = side
    ground = rng.integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=10, options={"crf": "30", "preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for index in range(seconds * 10):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.roll(ground, 3 * index, axis=1), "rgb24")))
        container.mux(stream.encode(None))
    return "data:video/mp4;base64," + base64.b64encode(file.getvalue()).decode()


async def first_text(client: openai.AsyncOpenAI, video: str) -> tuple[float, int]:
    """Seconds to the first text about a video, and the rows of the prompt."""
    parts = [{"type": "video_url", "video_url": {"url": video}}, {"type": "text", "text": "What moves?"}]
    started = time.monotonic()
    first, rows = 0.0, 0
    stream = await client.chat.completions.create(
        model="model", messages=[{"role": "user", "content": parts}], max_tokens=4, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    async for chunk in stream:
        if not first and any(choice.delta.content for choice in chunk.choices):
            first = time.monotonic() - started
        rows = chunk.usage.prompt_tokens if chunk.usage else rows
    return first, rows


async def underrun(client: openai.AsyncOpenAI, seed: int, tokens: int) -> tuple[float, float, float]:
    """One spoken answer: seconds of silence a listener hears, the longest at once, seconds of audio."""
    stream = await client.chat.completions.create(
        model="model", messages=[{"role": "user", "content": f"Tell me a story about {seed}."}], seed=seed, stream=True,
        max_tokens=tokens, modalities=["text", "audio"], audio={"voice": "chelsie", "format": "pcm16"},
        extra_body={"ignore_eos": True, "sampling_params_list": [{}, {"ignore_eos": True, "max_tokens": tokens * 2}]},
    )  # fmt: skip
    plays_until = silent = longest = length = 0.0
    async for chunk in stream:
        for choice in chunk.choices:
            part: Any = choice.delta.to_dict().get("audio") or {}
            if not (data := part.get("data")):
                continue
            now = time.monotonic()
            if plays_until:
                gap = max(0.0, now - plays_until)
                silent, longest = silent + gap, max(longest, gap)
            seconds = len(base64.b64decode(data)) / 2 / RATE
            plays_until, length = max(plays_until, now) + seconds, length + seconds
    return silent, longest, length


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    side = (arguments.width, arguments.height)
    report: dict[str, Any] = {"model": arguments.model, "video_s": arguments.seconds, "side": side}
    async with (
        served(arguments.model, "--served-model-name", "model", "--platform", "cpu") as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=ANSWER_S) as client,
    ):
        await first_text(client, film(2, side, 0))  # the worker is there
        pairs = []
        for seed in range(1, 4):
            video = film(arguments.seconds, side, seed)
            cold, rows = await first_text(client, video)
            warm, _ = await first_text(client, video)
            pairs.append((cold, warm))
            report["prompt_rows"] = rows
        report["first_s"] = round(statistics.median(cold for cold, _ in pairs), 3)
        report["again_s"] = round(statistics.median(warm for _, warm in pairs), 3)
        report["again_over_first"] = round(report["again_s"] / report["first_s"], 3)
        fresh = film(arguments.seconds, side, 99)
        for name, beside in (("alone", False), ("beside_video", True)):
            streams = [
                asyncio.create_task(underrun(client, seed, arguments.tokens)) for seed in range(arguments.streams)
            ]
            if beside:
                await asyncio.sleep(0.3)
                report["first_beside_streams_s"] = round((await first_text(client, fresh))[0], 3)
            found = await asyncio.gather(*streams)
            report[name] = {
                "audio_s": round(sum(length for *_, length in found), 1),
                "silent_s": [round(silent, 3) for silent, *_ in found],
                "longest_gap_s": round(max(longest for _, longest, _ in found), 3),
            }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--seconds", type=int, default=60, help="of the video")
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--height", type=int, default=192)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=200, help="of text of each stream; two frames of speech for each")
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
