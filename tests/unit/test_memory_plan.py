"""The memory plan is what the stages do: their weights, state and cache, and the published model on real cards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from triptych.config.sampling import SamplingParams
from triptych.config.schema import Quantization, StageKind
from triptych.engine import kv_cache
from triptych.engine.sampler import Sampler
from triptych.errors import CheckpointError
from triptych.layers.attention import AttentionProjections
from triptych.layers.linear import ROW_TILE, GatedMLP, padded_rows
from triptych.layers.moe import SparseMoE
from triptych.layers.product import Int8Product, WidenedProduct, int8_works
from triptych.layers.quantized_weight import QuantizedWeight
from triptych.models.qwen3_omni.backbone import Backbone, projections
from triptych.models.qwen3_omni.code2wav import Code2Wav
from triptych.models.qwen3_omni.code_predictor import FrameCache
from triptych.models.qwen3_omni.config import OmniConfig, load_config
from triptych.models.qwen3_omni.encoders import Encoders
from triptych.models.qwen3_omni.meta_shapes import meta_shapes
from triptych.models.qwen3_omni.talker import Talker
from triptych.models.qwen3_omni.tensor_shapes import tensor_shapes
from triptych.models.qwen3_omni.thinker import Thinker
from triptych.models.safetensors_index import INDEX
from triptych.models.weights import load_weights
from triptych.pipeline import memory_plan as memory_plan_module
from triptych.pipeline.footprint import Footprint, weight_parts
from triptych.pipeline.launch import LaunchPlan, plan
from triptych.pipeline.memory_advice import advice
from triptych.pipeline.memory_plan import CUDA_PROCESS_BYTES, GIB, MemoryPlan, ReplicaLoad, memory_plan
from triptych.stages.loading import set_up_decoder
from triptych.streaming.state import StreamState

PUBLISHED = Path(__file__).parents[1] / "data" / "qwen3_omni_30b_config.json"
CARD_80, CARD_141 = 80 * 10**9, 141 * 10**9
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KINDS: tuple[StageKind, ...] = ("thinker", "talker", "code2wav")


def planned(model: Path, *, platform: Any = "cpu", overrides: dict[str, dict[str, Any]] | None = None) -> MemoryPlan:
    return memory_plan(plan(str(model), deploy_config="tiny_cpu", platform=platform, stage_overrides=overrides))


def replica(memory: MemoryPlan, name: str) -> ReplicaLoad:
    [found] = [each for device in memory.devices.values() for each in device.replicas if each.name == name]
    return found


def parts(held: Footprint) -> dict[str, int]:
    return {item.name: item.nbytes for item in (*held.taken, *held.state)}


def everywhere(dtype: str) -> dict[str, dict[str, Any]]:
    return {str(stage): {"dtype": dtype} for stage in range(3)}


def nbytes(module: nn.Module) -> int:
    weights = [weight for part in module.modules() for weight in vars(part).values()]
    quantised = sum(weight.nbytes for weight in weights if isinstance(weight, QuantizedWeight))
    return quantised + sum(parameter.nbytes for parameter in module.parameters())


def loaded(build: Callable[[], Any], model: Path, dtype: torch.dtype, quantization: Quantization | None = None) -> Any:
    """A stage's module with its weights, as the stage loads it on a CPU."""
    with torch.device("meta"):
        module = build()
    quantized = {} if quantization is None else dict.fromkeys(projections(module), quantization)
    load_weights(module, module.placements, model, prefixes=module.prefixes, dtype=dtype, quantized=quantized)
    return module


@pytest.mark.parametrize("dtype", DTYPES)
def test_planned_weights_are_the_bytes_of_the_loaded_parameters(nano: Path, dtype: str) -> None:
    memory, config = planned(nano, overrides=everywhere(dtype)), load_config(nano)
    thinker = parts(replica(memory, "thinker").footprint)
    text = loaded(lambda: Thinker(config), nano, DTYPES[dtype])
    assert thinker["backbone"] == nbytes(text.backbone)
    assert (thinker["embedding table"], thinker["text head"]) == (text.embed_tokens.nbytes, text.lm_head.nbytes)
    raw = json.loads((nano / "config.json").read_text(encoding="utf-8"))
    encoders = loaded(lambda: Encoders(raw), nano, torch.float32)  # on a CPU, whatever the stage's dtype is
    assert thinker["audio encoder"] == nbytes(encoders.audio_tower)
    assert thinker["vision encoder"] == nbytes(encoders.visual)

    talker = parts(replica(memory, "talker").footprint)
    speech = loaded(lambda: Talker(config), nano, DTYPES[dtype])
    projections = nbytes(speech.text_projection) + nbytes(speech.hidden_projection)
    tables = speech.code_predictor.tables.nbytes
    assert (talker["backbone"], talker["projections"]) == (nbytes(speech.backbone), projections)
    assert talker["codec head"] == speech.codec_head.nbytes
    assert talker["code predictor"] == nbytes(speech.code_predictor) - tables
    speech.prepare()
    assert talker["projected text table"] == speech.text_table.nbytes
    assert talker["code tables"] == speech.code_table.nbytes
    assert speech.thinker_embedding.nbytes == 0

    assert config.code2wav is not None
    vocoder = config.code2wav
    assert parts(replica(memory, "code2wav").footprint)["vocoder"] == nbytes(
        loaded(lambda: Code2Wav(vocoder), nano, torch.float32)  # on a CPU, whatever the stage's dtype is
    )


@pytest.mark.parametrize(("quantization", "platform"), [("int8", "cpu"), ("int8", "cuda"), ("fp8", "cuda")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_planned_quantised_weights_are_the_bytes_of_the_loaded_ones(
    nano: Path, dtype: str, quantization: Quantization, platform: str
) -> None:
    override = {"dtype": dtype, "quantization": quantization}
    memory, config = planned(nano, platform=platform, overrides={"0": override, "1": override}), load_config(nano)
    plain = planned(nano, platform=platform, overrides=everywhere(dtype))
    for name, build in (("thinker", lambda: Thinker(config)), ("talker", lambda: Talker(config))):
        module = loaded(build, nano, DTYPES[dtype], quantization)
        ours, theirs = parts(replica(memory, name).footprint), parts(replica(plain, name).footprint)
        assert ours["backbone"] == nbytes(module.backbone) < 0.7 * theirs["backbone"]
        assert {part for part in ours if ours[part] != theirs[part]} == {"backbone"}
        if platform == "cpu":
            before = nbytes(module.backbone)
            module.prepare()
            held = products(module.backbone)
            kinds = {type(product) for product in held}
            assert Int8Product in kinds if dtype == "bfloat16" and int8_works() else kinds == {WidenedProduct}
            assert sum(map(product_bytes, held)) == before - others(module.backbone, DTYPES[dtype])


def products(backbone: nn.Module) -> list[Any]:
    """The products of the projections of a prepared backbone."""
    found = [(part.into, part.back) for part in backbone.modules() if isinstance(part, AttentionProjections | GatedMLP)]
    for part in backbone.modules():
        if isinstance(part, SparseMoE):
            found += part.experts
    return [product for pair in found for product in pair]


def product_bytes(product: Any) -> int:
    if isinstance(product, Int8Product):
        return product.stored.nbytes + product.scale.nbytes
    return int(product.stored_t.nbytes + product.scale_t.nbytes)


def others(backbone: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of what is never quantised: norms, routers, gates of shared experts."""
    with torch.device("meta"):
        whole = type(backbone)(backbone.config)  # type: ignore[arg-type,call-arg]
    names = set(projections(nn.ModuleDict({"backbone": whole})))
    kept = [value for name, value in whole.named_parameters() if f"backbone.{name}" not in names]
    return sum(value.numel() for value in kept) * dtype.itemsize


def test_a_step_that_widens_weights_needs_room_for_the_largest(nano: Path) -> None:
    def workspace(platform: str, **keys: Any) -> int:
        return replica(planned(nano, platform=platform, overrides={"0": keys}), "thinker").footprint.workspace

    small = {"max_num_batched_tokens": 128, "max_num_seqs": 4, "dtype": "bfloat16"}
    assert workspace("cpu", **small, quantization="int8") == workspace("cpu", **small)  # multiplied as it lies
    assert workspace("cuda", **small, quantization="fp8") > workspace("cuda", **small)


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_planned_state_is_what_the_stages_keep_for_each_sequence_and_stream(nano: Path, batch_invariant: bool) -> None:
    override = {"max_num_seqs": 6, "batch_invariant": batch_invariant}
    memory, config = planned(nano, overrides={str(stage): override for stage in range(3)}), load_config(nano)
    assert config.talker is not None and config.code2wav is not None
    params = SamplingParams(repetition_penalty=1.1, presence_penalty=0.5)
    talker = config.talker
    for name, vocab, suppress in (("thinker", config.thinker.vocab_size, []), ("talker", talker.text.vocab_size, [1])):
        sampler = Sampler(num_slots=6, vocab_size=vocab, device="cpu", suppress=suppress)
        sampler.admit(0, params)
        tables = [table for table in (sampler._factors, sampler._counts, sampler._suppress) if table is not None]
        assert parts(replica(memory, name).footprint)["sampling"] == sum(table.nbytes for table in tables)
    sizes = {padded_rows(count, ROW_TILE if batch_invariant else 1) for count in range(1, 7)}
    caches = [FrameCache(talker.code_predictor, size, talker.num_code_groups, torch.empty(0)) for size in sizes]
    assert parts(replica(memory, "talker").footprint)["frame caches"] == sum(each.memory.nbytes for each in caches)
    state = StreamState(Code2Wav(config.code2wav), 6, device="cpu", dtype=torch.float32)
    assert parts(replica(memory, "code2wav").footprint)["streams"] == state.nbytes + state.num_frames.nbytes


@pytest.mark.parametrize("kind", ["thinker", "talker"])
@pytest.mark.parametrize("override", [{}, {"kv_cache_bytes": 7_777_777, "max_model_len": 900}, {"num_kv_blocks": 1500}])
def test_planned_blocks_are_those_that_a_stage_makes_on_a_cpu(nano: Path, kind: str, override: dict[str, Any]) -> None:
    load = replica(planned(nano, overrides={"0": override, "1": override}), kind)
    decoder = load_config(nano).decoder(kind)
    assert decoder is not None
    with torch.device("meta"):
        layers = Backbone(decoder)
    device, keep_hidden = torch.device("cpu"), kind == "thinker"
    setup = set_up_decoder(load.config, decoder, layers, 0, device, torch.float32, keep_hidden=keep_hidden)
    assert load.starts(None)
    assert (load.blocks(None), load.blocks(None) * load.block_bytes) == (setup.cache.num_blocks, setup.cache.nbytes)


def test_planned_blocks_are_those_that_a_stage_counts_on_a_cuda_device(
    nano: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 3 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, size))
    override = {"gpu_memory_utilization": 0.13}
    for name in ("thinker", "talker"):
        load = replica(planned(nano, platform="cuda", overrides={"0": override, "1": override}), name)
        counted = kv_cache.num_blocks(load.config, load.block_bytes, torch.device("cuda", 0), load.taken_bytes)
        assert load.blocks(size) == counted
        assert load.taken_bytes + counted * load.block_bytes <= int(0.13 * size) < CUDA_PROCESS_BYTES


def test_a_folder_without_weights_is_planned_as_the_one_with_them(nano: Path, tmp_path: Path) -> None:
    shutil.copy(nano / "config.json", tmp_path)
    (tmp_path / INDEX).write_text("{}", encoding="utf-8")  # of files that are not there
    assert weight_parts(tensor_shapes(tmp_path)) == weight_parts(tensor_shapes(nano))
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    raw["code2wav_config"]["decoder_dim"] = 33
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(
        CheckpointError, match=r"cannot be worked out: code2wav_config: decoder_dim 33 cannot be halved"
    ):
        tensor_shapes(tmp_path)


def test_a_checkpoint_without_a_stage_of_its_config_is_refused(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {name: shape for name, shape in tensor_shapes(nano).items() if not name.startswith("code2wav.")}
    monkeypatch.setattr(memory_plan_module, "tensor_shapes", lambda folder: shapes)
    with pytest.raises(CheckpointError, match="holds no weights of the code2wav"):
        planned(nano)


def test_replicas_processes_and_devices_are_told_apart(nano: Path) -> None:
    override = {"num_replicas": 2, "devices": "1,0", "gpu_memory_utilization": 0.2}
    devices = planned(nano, platform="cuda", overrides={"1": override}).devices
    names = {name: [each.name for each in device.replicas] for name, device in devices.items()}
    assert names == {"cuda:0": ["thinker", "talker:1", "code2wav"], "cuda:1": ["talker:0"]}
    assert list(devices["cuda:0"].processes) == ["text", "speech:1"]
    # What takes turns in one process needs the workspace of one step, and one process.
    here, size = devices["cuda:0"], 8 * GIB
    [thinker, talker, code2wav] = here.replicas
    caches = sum(each.blocks(size) * each.block_bytes for each in here.replicas)
    steps = max(thinker.workspace_bytes(size), code2wav.workspace_bytes(size)) + talker.workspace_bytes(size)
    fixed = sum(each.fixed_bytes for each in here.replicas)
    assert here.total(size) == fixed + caches + steps + 2 * CUDA_PROCESS_BYTES


def test_advice_makes_it_fit_and_nothing_nearer_would(nano: Path) -> None:
    memory, size = planned(nano, platform="cuda"), 2 * GIB
    assert not memory.devices["cuda:0"].fits(size)
    assert "stages[0].max_num_seqs: 32" not in advice(memory, "cuda:0", size)  # its share is the trouble
    [share] = [line for line in advice(memory, "cuda:0", size) if "[0].gpu_memory_utilization: " in line]
    value = float(share.rpartition(" ")[2])
    assert memory.changed(0, gpu_memory_utilization=value).devices["cuda:0"].fits(size)
    assert not memory.changed(0, gpu_memory_utilization=value - 0.01).devices["cuda:0"].fits(size)
    smallest = memory.devices["cuda:0"].smallest()
    assert smallest is not None and memory.devices["cuda:0"].fits(smallest)
    assert not memory.devices["cuda:0"].fits(smallest - GIB)
    assert advice(memory, "cuda:0", GIB // 2) == []  # less than the processes take by themselves


# --- The published model -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    shutil.copy(PUBLISHED, folder / "config.json")
    return folder


@cache
def published_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    return meta_shapes(folder)


def published_plan(folder: Path, profile: str, overrides: dict[str, dict[str, Any]] | None = None) -> MemoryPlan:
    launch: LaunchPlan = plan(str(folder), deploy_config=profile, platform="cuda", stage_overrides=overrides)
    return MemoryPlan(deploy=launch.deploy, config=launch.config, parts=weight_parts(published_shapes(folder)))


def test_the_published_model_has_the_weights_of_its_modules(published: Path) -> None:
    memory = published_plan(published, "qwen3_omni_moe")
    config: OmniConfig = load_config(published)
    assert config.code2wav is not None
    with torch.device("meta"):
        thinker, talker = Thinker(config).bfloat16(), Talker(config).bfloat16()
        encoders = Encoders(json.loads(PUBLISHED.read_text(encoding="utf-8"))).bfloat16()
        vocoder = Code2Wav(config.code2wav).bfloat16()
    held = {kind: replica(memory, kind) for kind in KINDS}
    rows = parts(held["thinker"].footprint)["encoded media"]
    assert held["thinker"].taken_bytes - rows == nbytes(thinker) + nbytes(encoders)
    # The text table replaces the Thinker's embedding; one row of zeros is added to the code tables.
    table = 152064 * 1024 * 2
    assert parts(held["talker"].footprint)["projected text table"] == table
    assert held["talker"].taken_bytes == nbytes(talker) - 152064 * 2048 * 2 + table + 1024 * 2
    assert held["code2wav"].taken_bytes == nbytes(vocoder)
    state = StreamState(vocoder, 64, device="meta", dtype=torch.bfloat16)
    assert parts(held["code2wav"].footprint)["streams"] == state.nbytes + state.num_frames.nbytes


def test_the_published_model_fits_two_cards_of_80_gb(published: Path) -> None:
    memory = published_plan(published, "qwen3_omni_moe")
    text, speech = memory.devices["cuda:0"], memory.devices["cuda:1"]
    assert [each.name for each in text.replicas] == ["thinker"]
    assert [each.name for each in speech.replicas] == ["talker", "code2wav"]
    assert text.fits(CARD_80) and speech.fits(CARD_80)
    [thinker] = text.replicas
    # 16 tokens a block, keys and values of 48 layers x 4 heads x 128, and a hidden state of 2048 for the Talker.
    assert thinker.block_bytes == 16 * (48 * 2 * 4 * 128 + 2048) * 2
    share = int(0.9 * CARD_80) - thinker.taken_bytes
    assert thinker.blocks(CARD_80) == share // thinker.block_bytes > 65536 // 16
    assert 63 * 10**9 < thinker.taken_bytes < 64 * 10**9
    assert not text.fits(70 * 10**9)


def test_the_published_model_fits_one_card_of_141_gb(published: Path) -> None:
    memory = published_plan(published, "qwen3_omni_moe_1gpu")
    [device] = memory.devices.values()
    assert device.name == "cuda:0" and [each.name for each in device.replicas] == list(KINDS)
    assert list(device.processes) == ["text", "speech"]
    assert device.fits(CARD_141) and device.total(CARD_141) < CARD_141
    assert device.fits(80 * GIB)  # what cards sold as 80 GB have
    assert not device.fits(CARD_80) and not device.replicas[0].starts(CARD_80)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_the_published_model_fits_one_card_of_80_gb_quantised(published: Path, quantization: str) -> None:
    override = {"quantization": quantization}
    memory = published_plan(published, "qwen3_omni_moe_1gpu", {"0": override, "1": override})
    [device] = memory.devices.values()
    assert device.fits(CARD_80)
    thinker = parts(device.replicas[0].footprint)
    assert 29 * 10**9 < thinker["backbone"] < 31 * 10**9


def test_the_published_model_in_float32_is_told_what_to_do(published: Path) -> None:
    memory = published_plan(published, "qwen3_omni_moe", {"0": {"dtype": "float32"}})
    assert not memory.devices["cuda:0"].fits(CARD_80)
    assert advice(memory, "cuda:0", CARD_80) == ["stages[0].dtype: bfloat16"]
    memory = published_plan(published, "qwen3_omni_moe", {"0": {"gpu_memory_utilization": 0.85}})
    changes = advice(memory, "cuda:0", CARD_80)
    # One context of 65536 is 4097 blocks: with 63.7 GB of weights 0.880 of the card. 0.85 leaves 2619 blocks.
    assert changes == [
        "stages[0].quantization: int8",
        "stages[0].gpu_memory_utilization: 0.89",
        "stages[0].max_model_len: 40960",
    ]
    memory = published_plan(published, "qwen3_omni_moe", {"1": {"devices": "0", "gpu_memory_utilization": 0.15}})
    assert "stages[1].devices: another device of this size" in advice(memory, "cuda:0", CARD_80)
