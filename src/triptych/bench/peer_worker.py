"""Transformers generating the requests of `triptych bench peers`, in a process of its own: the only one that loads it.

    python -m triptych.bench.peer_worker '{"folder": ..., "dtype": ..., "threads": ..., "device": ..., ...}'

The last line that it prints is its result, as JSON.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import sys
import time
from typing import Any

from triptych.bench.audio import SAMPLE_RATE, SILENT_RMS, speech_samples
from triptych.bench.workload import RandomWorkload

TEXT_TOKENS, FRAMES, WORDS = 64, 125, 9  # of each request, on both sides
SAMPLES = speech_samples(FRAMES)


def generate(
    *, folder: str, dtype: str, threads: int, device: str, voice: str, num_prompts: int, seed: int
) -> dict[str, float | None]:
    """Answer requests one after another, with speech, then as text alone. Raises RuntimeError for a reply that is not
    what was asked for."""
    started = time.perf_counter()
    import torch
    from transformers import AutoTokenizer, Qwen3OmniMoeForConditionalGeneration, logging

    logging.set_verbosity_error()
    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=getattr(torch, dtype)).eval().to(device)
    load_s = time.perf_counter() - started

    def inputs(messages: list[dict[str, Any]]) -> Any:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, return_tensors="pt").to(device)

    def speak(messages: list[dict[str, Any]]) -> float:
        asked = inputs(messages)
        begin = time.perf_counter()
        sequences, wave = model.generate(
            **asked,
            speaker=voice,
            thinker_max_new_tokens=TEXT_TOKENS,
            thinker_min_new_tokens=TEXT_TOKENS,
            thinker_do_sample=False,
            talker_max_new_tokens=FRAMES + 1,
            talker_min_new_tokens=FRAMES + 1,
        )
        samples = wave.float().flatten().cpu()
        seconds = time.perf_counter() - begin
        tokens = sequences.shape[1] - asked["input_ids"].shape[1]
        rms = math.sqrt(float(samples.square().mean()))
        if tokens != TEXT_TOKENS or samples.numel() != SAMPLES or rms < SILENT_RMS:
            raise RuntimeError(f"a reply of {tokens} tokens and {samples.numel()} samples with an rms of {rms:.1e}")
        return seconds

    def write(messages: list[dict[str, Any]]) -> float:
        asked = inputs(messages)
        begin = time.perf_counter()
        model.thinker.generate(**asked, max_new_tokens=TEXT_TOKENS, do_sample=False, eos_token_id=None)
        return time.perf_counter() - begin

    warm_up, *prompts = [prompt.messages for prompt in RandomWorkload(input_len=WORDS).prompts(num_prompts + 1, seed)]
    speak(warm_up)
    spoken = [speak(messages) for messages in prompts]
    written = [write(messages) for messages in prompts]
    audio_s = SAMPLES / SAMPLE_RATE
    return {
        "load_s": load_s,
        "audio_throughput": audio_s * num_prompts / sum(spoken),
        "output_throughput": TEXT_TOKENS * num_prompts / sum(spoken),
        "text_only_throughput": TEXT_TOKENS * num_prompts / sum(written),
        "median_audio_rtf": statistics.median(spoken) / audio_s,
        "median_ttft_ms": 1000 * statistics.median(spoken),  # all of it comes at the end
        "median_audio_ttfp_ms": 1000 * statistics.median(spoken),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "device_peak_mib": torch.cuda.max_memory_allocated() / 2**20 if device.startswith("cuda") else None,
    }


if __name__ == "__main__":
    print(json.dumps(generate(**json.loads(sys.argv[1]))))
