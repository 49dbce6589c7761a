"""Triptych beside Hugging Face Transformers: the same checkpoint and requests, one run, one machine.

    python benchmarks/side_by_side.py --model bench --out benchmarks/side_by_side_<machine>_<date>.md

Transformers generates the requests one after another, in the best of the dtypes and thread counts tried. Triptych
serves them over HTTP at concurrency 1, 8 and 32. Each side runs in processes of its own while the other is idle. Every
reply is checked: its length, and that it is not silence. The last line printed is the record as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import datetime
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

TEXT_TOKENS, FRAMES, SAMPLE_RATE = 64, 125, 24000
WORDS = "the quick brown fox jumps over a lazy dog and runs far away from here to there".split()


def prompt(index: int) -> str:
    """A seeded sentence of about thirty tokens with the chat template around it."""
    rng = random.Random(index)
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(8, 10)))


# -- Transformers, in a child process ---------------------------------------------------------------------------------


def hf_worker(model: str, dtype: str, threads: int, count: int) -> None:
    """Generate `count` replies one after another; print one JSON line."""
    started = time.perf_counter()
    import torch
    from transformers import AutoTokenizer, Qwen3OmniMoeForConditionalGeneration, logging

    logging.set_verbosity_error()
    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(model)
    hf = Qwen3OmniMoeForConditionalGeneration.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    loaded = time.perf_counter() - started

    def reply(index: int) -> tuple[float, float]:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt(index)}], tokenize=False, add_generation_prompt=True
        )
        inputs = tokenizer(text, return_tensors="pt")
        begin = time.perf_counter()
        sequences, wave = hf.generate(
            **inputs,
            speaker=next(iter(hf.config.talker_config.speaker_id)),
            thinker_max_new_tokens=TEXT_TOKENS,
            thinker_do_sample=False,
            talker_max_new_tokens=FRAMES + 1,
        )
        seconds = time.perf_counter() - begin
        assert sequences.shape[1] - inputs["input_ids"].shape[1] == TEXT_TOKENS
        check_audio(wave.float().flatten().numpy())
        return seconds, wave.numel() / SAMPLE_RATE

    def text_only(index: int) -> float:
        ids = torch.tensor([tokenizer(prompt(index))["input_ids"]])
        begin = time.perf_counter()
        hf.thinker.generate(input_ids=ids, max_new_tokens=TEXT_TOKENS, do_sample=False, eos_token_id=None)
        return TEXT_TOKENS / (time.perf_counter() - begin)

    reply(-1)
    start_up = time.perf_counter() - started
    replies = [reply(index) for index in range(count)]
    rates = [text_only(index) for index in range(count)]
    print(
        json.dumps(
            {
                "dtype": dtype,
                "threads": threads,
                "load_s": loaded,
                "start_up_s": start_up,
                "rtf": statistics.median(seconds / audio for seconds, audio in replies),
                "ttfp_ms": 1000 * statistics.median(seconds for seconds, _ in replies),
                "audio_s_per_s": sum(audio for _, audio in replies) / sum(seconds for seconds, _ in replies),
                "text_tok_per_s": statistics.median(rates),
                "peak_mib": peak_mib(),
            }
        )
    )


def peak_mib() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_hf(model: str, dtype: str, threads: int, count: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--hf-worker", model, dtype, str(threads), str(count)]
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    return json.loads(out.stdout.strip().splitlines()[-1])


# -- Triptych, over HTTP ----------------------------------------------------------------------------------------------


def check_audio(samples: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    """Right length and not silence: speed must not come from broken output."""
    assert samples.size == FRAMES * 1920 - 555, samples.size
    assert float(np.sqrt(np.mean(np.square(samples)))) > 1e-3


class Server:
    """`triptych serve` as a child process, and what its process tree costs."""

    def __init__(self, model: str, extra: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.peak = 0.0
        started = time.perf_counter()
        command = [sys.executable, "-m", "triptych", "serve", model, "--port", str(self.port), "--log-level", "warning"]
        self.process = subprocess.Popen([*command, *extra], stdout=subprocess.DEVNULL)
        with httpx.Client() as client:
            while True:
                if self.process.poll() is not None:
                    raise SystemExit(f"triptych serve ended with status {self.process.returncode}")
                try:
                    if client.get(f"{self.url}/ready").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.05)
            self.model_id = client.get(f"{self.url}/v1/models").json()["data"][0]["id"]
        self.start_up_s = time.perf_counter() - started

    def memory_mib(self) -> float:
        """Memory of all processes; pages they share are counted once (proportional set size)."""
        tree = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        return sum(process.memory_full_info().pss for process in tree) / 2**20

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=20)


async def speech(client: httpx.AsyncClient, server: Server, index: int) -> dict[str, float]:
    body = {
        "model": server.model_id,
        "messages": [{"role": "user", "content": prompt(index)}],
        "modalities": ["text", "audio"],
        "audio": {"voice": server.voice, "format": "pcm16"},  # type: ignore[attr-defined]
        "stream": True,
        "stream_options": {"include_usage": True},
        "sampling_params_list": [{"max_tokens": TEXT_TOKENS, "temperature": 0.0}, {"max_tokens": FRAMES}],
    }
    begin = time.perf_counter()
    first_text = first_audio = None
    pcm = bytearray()
    stalls, usage = 0.0, None
    async with client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            now = time.perf_counter()
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                delta = choice["delta"]
                if delta.get("content"):
                    first_text = first_text or now
                if data := (delta.get("audio") or {}).get("data"):
                    if first_audio is None:
                        first_audio = now
                    # Silence a listener would hear: the chunk comes after what came before has been played.
                    played_until = first_audio + stalls + len(pcm) / 2 / SAMPLE_RATE
                    stalls += max(0.0, now - played_until)
                    pcm += base64.b64decode(data)
    end = time.perf_counter()
    assert usage is not None and first_audio is not None
    check_audio(np.frombuffer(bytes(pcm), dtype="<i2").astype(np.float32) / 32767)
    seconds = len(pcm) / 2 / SAMPLE_RATE
    assert usage["completion_tokens_details"]["text_tokens"] == TEXT_TOKENS, usage
    return {
        "e2e_s": end - begin,
        "rtf": (end - begin) / seconds,
        "ttft_ms": 1000 * ((first_text or end) - begin),
        "ttfp_ms": 1000 * (first_audio - begin),
        "underrun_s": stalls,
        "audio_s": seconds,
    }


async def text(client: httpx.AsyncClient, server: Server, index: int) -> float:
    body = {
        "model": server.model_id,
        "messages": [{"role": "user", "content": prompt(index)}],
        "max_tokens": TEXT_TOKENS,
        "temperature": 0.0,
    }
    response = await client.post(f"{server.url}/v1/chat/completions", json=body)
    response.raise_for_status()
    return float(response.json()["usage"]["completion_tokens"])


async def closed_loop(server: Server, concurrency: int, count: int, kind: Any) -> tuple[list[Any], float]:
    """`count` requests, `concurrency` at a time -> (results, seconds)."""
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency + 1)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:

        async def one(index: int) -> Any:
            async with gate:
                result = await kind(client, server, index)
                server.peak = max(server.peak, server.memory_mib()) if index % 8 == 0 else server.peak
                return result

        begin = time.perf_counter()
        results = await asyncio.gather(*(one(index) for index in range(count)))
        return results, time.perf_counter() - begin


def run_triptych(model: str, levels: list[int], per_level: int, extra: list[str]) -> dict[str, Any]:
    server = Server(model, extra)
    try:
        voices = httpx.get(f"{server.url}/v1/audio/voices").json()
        server.voice = _first_voice(voices)  # type: ignore[attr-defined]
        asyncio.run(closed_loop(server, 2, 2, speech))
        rows = []
        for level in levels:
            count = max(per_level, 2 * level)
            replies, seconds = asyncio.run(closed_loop(server, level, count, speech))
            tokens, text_seconds = asyncio.run(closed_loop(server, level, count, text))
            rows.append(
                {
                    "concurrency": level,
                    "requests": count,
                    "audio_s_per_s": sum(reply["audio_s"] for reply in replies) / seconds,
                    "output_tok_per_s": TEXT_TOKENS * count / seconds,
                    "text_tok_per_s": sum(tokens) / text_seconds,
                    **{
                        name: statistics.median(reply[name] for reply in replies)
                        for name in ("rtf", "ttft_ms", "ttfp_ms", "underrun_s")
                    },
                    "streams_without_underrun": sum(reply["underrun_s"] < 0.1 for reply in replies) / count,
                }
            )
        return {"start_up_s": server.start_up_s, "peak_mib": server.peak, "levels": rows}
    finally:
        server.stop()


def _first_voice(answer: Any) -> str:
    voices = answer["voices"] if isinstance(answer, dict) else answer
    first = voices[0]
    return first if isinstance(first, str) else str(first.get("name") or first["id"])


# -- the record -------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    import torch
    import transformers

    cpu = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    here = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True).stdout
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit.strip(),
    }


def markdown(record: dict[str, Any], command: str) -> str:
    hf, ours = record["transformers"], record["triptych"]
    best = hf["best"]
    lines = [
        f"# Triptych beside Transformers, checkpoint `{record['model']}`",
        "",
        f"Command: `{command}`. One request: about {record['prompt_tokens']} prompt tokens, {TEXT_TOKENS} text tokens, "
        f"{FRAMES} codec frames ({(FRAMES * 1920 - 555) / SAMPLE_RATE:.2f} s of speech). Medians over the requests of "
        "one run; throughput over the whole run. Memory is the peak over all processes, shared pages counted once.",
        "",
        ", ".join(f"{key} {value}" for key, value in record["machine"].items()),
        "",
        "| system | audio-s/s | RTF | TTFP, ms | TTFT, ms | output tok/s | text only, tok/s | without underrun |",
        "|---|---|---|---|---|---|---|---|",
        f"| Transformers, {best['dtype']}, {best['threads']} thread(s), one after another "
        f"| {best['audio_s_per_s']:.2f} | {best['rtf']:.3f} | {best['ttfp_ms']:.0f} | {best['ttfp_ms']:.0f} "
        f"| {TEXT_TOKENS / best['ttfp_ms'] * 1000:.1f} | {best['text_tok_per_s']:.0f} | - |",
    ]
    for row in ours["levels"]:
        lines.append(
            f"| Triptych, concurrency {row['concurrency']} | {row['audio_s_per_s']:.2f} | {row['rtf']:.3f} "
            f"| {row['ttfp_ms']:.0f} | {row['ttft_ms']:.0f} | {row['output_tok_per_s']:.1f} "
            f"| {row['text_tok_per_s']:.0f} | {100 * row['streams_without_underrun']:.0f} % |"
        )
    single, last = ours["levels"][0], ours["levels"][-1]
    lines += [
        "",
        f"- RTF at concurrency 1: {single['rtf'] / best['rtf']:.3f} of Transformers'.",
        f"- audio-s/s at concurrency {last['concurrency']}: {last['audio_s_per_s'] / best['audio_s_per_s']:.1f} times "
        "Transformers'.",
        f"- Ready in {ours['start_up_s']:.1f} s (Transformers: loaded in {best['load_s']:.1f} s); "
        f"peak memory {ours['peak_mib']:.0f} MiB over all processes (Transformers: {best['peak_mib']:.0f} MiB).",
        "- Transformers, every setting tried: "
        + "; ".join(f"{run['dtype']} x {run['threads']} thread(s): RTF {run['rtf']:.3f}" for run in hf["runs"])
        + ".",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bench", help="bench, mini or a checkpoint folder")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=8, help="requests per concurrency level, at least")
    parser.add_argument("--hf-requests", type=int, default=4)
    parser.add_argument("--out", type=Path, help="write the record there, as Markdown")
    parser.add_argument("--serve-args", nargs=argparse.REMAINDER, default=[], help="passed on to triptych serve")
    parser.add_argument("--hf-worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hf_worker:
        model, dtype, threads, count = arguments.hf_worker
        hf_worker(model, dtype, int(threads), int(count))
        return
    from triptych.models.qwen3_omni.processor import Processor
    from triptych.models.qwen3_omni.synthetic import cached_checkpoint

    folder = arguments.model if os.path.isdir(arguments.model) else str(cached_checkpoint(arguments.model))
    ours = run_triptych(arguments.model, arguments.levels, arguments.requests, arguments.serve_args)
    cores = os.cpu_count() or 1
    settings = [("float32", 1), ("bfloat16", 1), ("float32", cores)]
    runs = [run_hf(folder, dtype, threads, 1) for dtype, threads in settings]
    best = min(runs, key=lambda run: run["rtf"])
    best = run_hf(folder, best["dtype"], best["threads"], arguments.hf_requests)
    processor = Processor(folder)
    lengths = [len(processor.encode([{"role": "user", "content": prompt(index)}])) for index in range(8)]
    record = {
        "model": arguments.model,
        "machine": machine(),
        "prompt_tokens": round(statistics.median(lengths)),
        "transformers": {"best": best, "runs": runs},
        "triptych": ours,
    }
    command = "python " + " ".join(["benchmarks/side_by_side.py", *sys.argv[1:]])
    report = markdown(record, command)
    if arguments.out:
        arguments.out.write_text(report, encoding="utf-8")
    print(report)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
