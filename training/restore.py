"""Give the trainers back what an exported checkpoint holds: every stage goes on from it under a new schedule.

A checkpoint has only the decoder of the codec. Its encoder, which the Talker's training needs, lies beside this file;
`--keep-encoder` writes it, and belongs to every change of the package's checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3OmniMoeForConditionalGeneration

from training.checkpoints import load_state, save_state
from training.codec import Codec
from training.parts import SHARPER
from training.tiny_config import tiny_config
from training.tokenizer import build_tokenizer
from training.train_talker import TalkerTrainee
from triptych.models.registry import EMBEDDED

ENCODER = Path(__file__).parent / "codec_encoder.safetensors"
_DECODER = "decoder."
_TEXT = "model.language_model."


def keep_encoder(work: Path, path: Path = ENCODER) -> None:
    """Write what the codec trained under `work` has beside its decoder. Raises FileNotFoundError without one."""
    state = load_state(work / "codec" / "state.pt")
    if state is None:
        raise FileNotFoundError(f"{work / 'codec' / 'state.pt'} does not exist; train the codec first")
    parts = {name: part for name, part in state["model"].items() if not name.startswith(_DECODER)}
    halved = {name: part.half() if name.startswith("encoder.") else part for name, part in parts.items()}
    save_file(halved, path, metadata={"step": str(state["step"])})


def is_text(name: str) -> bool:
    """Whether a tensor of the Thinker belongs to its text decoder."""
    return name.startswith((_TEXT, "lm_head."))


def restore(checkpoint: Path, work: Path) -> None:
    """Write the states of all stages but the senses under `work`: these begin with the Thinker's parts.

    Raises FileExistsError where a state is already.
    """
    model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    codec = Codec()
    decoder = {f"{_DECODER}{name}": part for name, part in model.code2wav.state_dict().items()}
    codec.load_state_dict({name: part.float() for name, part in load_file(ENCODER).items()} | decoder)
    trainee = TalkerTrainee(tiny_config(build_tokenizer()))
    trainee.talker.load_state_dict(model.talker.state_dict())
    for head in trainee.talker.code_predictor.lm_head:
        head.weight.data /= SHARPER
    text = {name.replace(_TEXT, "model."): part for name, part in model.thinker.state_dict().items() if is_text(name)}
    parts = {
        "codec": codec.state_dict(),
        "thinker": text,
        "eyes": model.thinker.model.visual.state_dict(),
        "ears": model.thinker.model.audio_tower.state_dict(),
        "talker": trainee.state_dict(),
    }
    for stage, part in parts.items():
        path = work / stage / "state.pt"
        if path.exists():
            raise FileExistsError(f"{path} would be lost; choose another folder")
        save_state(path, {"step": 0, "model": part})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=EMBEDDED["tiny"], help="the package's own when not given")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--keep-encoder", action="store_true", help="keep what the codec under WORK has, and no more")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.keep_encoder:
        keep_encoder(arguments.work)
    else:
        restore(arguments.checkpoint, arguments.work)


if __name__ == "__main__":
    main()
