"""The weights loader: what it fills, what it opens, and that every fault is named before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from triptych.config.schema import Quantization
from triptych.errors import CheckpointError
from triptych.layers.quantized_weight import STORED, QuantizedWeight, quantize
from triptych.models.placement import Layout, Placement
from triptych.models.safetensors_index import INDEX, SINGLE, tensor_index
from triptych.models.weights import load_weights, read_tensor

EXPERTS, WIDTH, HIDDEN = 3, 2, 4


class Toy(nn.Module):
    """A fused qkv, stacked experts and a computed buffer: one of each thing that the real stages have."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.empty(8, HIDDEN))
        self.norm = nn.Parameter(torch.empty(HIDDEN))
        self.gate_up = nn.Parameter(torch.empty(EXPERTS, 2 * WIDTH, HIDDEN))
        self.steps = nn.Buffer(torch.arange(3, device="cpu"), persistent=False)

    def placements(self, layout: Layout) -> Iterator[Placement]:
        for name, start, rows in (("q", 0, 4), ("k", 4, 2), ("v", 6, 2)):
            yield Placement(f"own.{name}.weight", "qkv", (rows, HIDDEN), start=start)
        yield Placement("own.norm.weight", "norm", (HIDDEN,))
        if layout == "fused":
            yield Placement("own.experts.gate_up_proj", "gate_up", (EXPERTS, 2 * WIDTH, HIDDEN))
            return
        for expert in range(EXPERTS):
            for start, part in ((0, "gate"), (WIDTH, "up")):
                source = f"own.experts.{expert}.{part}_proj.weight"
                yield Placement(source, "gate_up", (WIDTH, HIDDEN), start=start, index=expert)


def build() -> Toy:
    with torch.device("meta"):
        return Toy()


def load(folder: Path, **overrides: object) -> Toy:
    module = build()
    load_weights(module, module.placements, folder, prefixes=("own.",), dtype=torch.float32, **overrides)  # type: ignore[arg-type]
    return module


def tensors(layout: Layout) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    stacked = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator)
    values = {
        f"own.{name}.weight": torch.randn(rows, HIDDEN, generator=generator)
        for name, rows in (("q", 4), ("k", 2), ("v", 2))
    }
    values["own.norm.weight"] = torch.randn(HIDDEN, generator=generator)
    if layout == "fused":
        values["own.experts.gate_up_proj"] = stacked
    else:
        for expert, matrix in enumerate(stacked):
            values[f"own.experts.{expert}.gate_proj.weight"] = matrix[:WIDTH].clone()
            values[f"own.experts.{expert}.up_proj.weight"] = matrix[WIDTH:].clone()
    return values


def save(folder: Path, values: dict[str, Tensor], shards: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    if shards == 1:
        save_file(values, folder / SINGLE)
        return folder
    weight_map = {name: f"part-{place % shards}.safetensors" for place, name in enumerate(values)}
    for file in set(weight_map.values()):
        save_file({name: values[name] for name in values if weight_map[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("layout", ["per_expert", "fused"])
def test_every_tensor_lands_in_its_place(tmp_path: Path, layout: Layout) -> None:
    values = tensors(layout)
    module = load(save(tmp_path, values))
    assert torch.equal(module.qkv, torch.cat([values[f"own.{name}.weight"] for name in "qkv"]))
    assert torch.equal(module.norm, values["own.norm.weight"])
    assert torch.equal(module.gate_up, tensors("fused")["own.experts.gate_up_proj"])
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in module.parameters())


def test_sharded_and_single_and_both_layouts_load_the_same(tmp_path: Path) -> None:
    folders = [
        save(tmp_path / f"{layout}-{shards}", tensors(layout), shards)
        for layout in ("per_expert", "fused")
        for shards in (1, 2, 4)
    ]
    first, *others = [load(folder).state_dict() for folder in folders]
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_the_layout_found_is_returned(tmp_path: Path) -> None:
    for layout in ("per_expert", "fused"):
        module = build()
        folder = save(tmp_path / layout, tensors(layout))
        found = load_weights(module, module.placements, folder, prefixes=("own.",), dtype=torch.float32)
        assert found == layout


def test_parameters_take_the_dtype_asked_for_and_computed_buffers_keep_theirs(tmp_path: Path) -> None:
    module = build()
    folder = save(tmp_path, {name: value.double() for name, value in tensors("fused").items()})
    load_weights(module, module.placements, folder, prefixes=("own.",), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    assert module.steps.tolist() == [0, 1, 2]


def test_a_parameter_under_two_names_stays_one(tmp_path: Path) -> None:
    module = build()
    module.register_parameter("alias", module.norm)
    folder = save(tmp_path, tensors("fused"))
    load_weights(module, module.placements, folder, prefixes=("own.",), dtype=torch.float32)
    assert module.alias is module.norm


@pytest.mark.parametrize("method", STORED)
@pytest.mark.parametrize("layout", ["per_expert", "fused"])
@pytest.mark.parametrize("shards", [1, 3])
def test_what_is_quantised_while_it_loads_is_the_whole_weight_quantised(
    tmp_path: Path, layout: Layout, shards: int, method: Quantization
) -> None:
    folder = save(tmp_path / "own", tensors(layout), shards)
    whole, module = load(folder), load(folder, quantized={"qkv": method, "gate_up": method})
    for name in ("qkv", "gate_up"):
        expected, found = quantize(getattr(whole, name).data, method), getattr(module, name)
        assert isinstance(found, QuantizedWeight) and found.stored.dtype is STORED[method]
        assert torch.equal(found.widen(), expected.widen()) and torch.equal(found.scale, expected.scale)
    assert torch.equal(module.norm, whole.norm)
    assert [name for name, _ in module.named_parameters()] == ["norm"]


def test_progress_counts_the_bytes_of_the_own_tensors_up_to_their_total(tmp_path: Path) -> None:
    values = tensors("per_expert")
    total = sum(value.nbytes for value in values.values())
    seen: list[tuple[int, int]] = []
    load(save(tmp_path, values | {"other.weight": torch.ones(100)}), progress=lambda *step: seen.append(step))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (total, total)


def test_only_files_with_own_tensors_are_needed(tmp_path: Path) -> None:
    values = tensors("per_expert")
    folder = save(tmp_path, values)
    (folder / SINGLE).rename(folder / "own.safetensors")
    weight_map = dict.fromkeys(values, "own.safetensors") | {"other.weight": "never-downloaded.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(load(folder).norm, values["own.norm.weight"])


def test_ignored_names_are_neither_read_nor_extra(tmp_path: Path) -> None:
    folder = save(tmp_path, tensors("fused") | {"own.encoder.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"holds own\.encoder\.weight, for which"):
        load(folder)
    load(folder, ignored=("own.encoder.",))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    values = tensors("per_expert")
    del values["own.experts.1.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"lacks own\.experts\.1\.up_proj\.weight, which"):
        load(save(tmp_path, values))


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lacks .*and 4 more"):
        load(save(tmp_path, {"own.norm.weight": torch.ones(HIDDEN)}))


def test_a_wrong_shape_says_both(tmp_path: Path) -> None:
    values = tensors("fused") | {"own.k.weight": torch.ones(3, HIDDEN)}
    with pytest.raises(CheckpointError, match=r"own\.k\.weight has shape \[3, 4\] in .*asks for \[2, 4\]"):
        load(save(tmp_path, values))


def test_a_type_that_is_no_float_is_refused(tmp_path: Path) -> None:
    values = tensors("fused") | {"own.k.weight": torch.ones(2, HIDDEN, dtype=torch.int8)}
    with pytest.raises(CheckpointError, match=r"own\.k\.weight has type I8"):
        load(save(tmp_path, values))


def test_mixed_layouts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="mixes experts"):
        load(save(tmp_path, tensors("fused") | tensors("per_expert")))


def test_a_missing_shard_is_named_with_a_tensor_it_should_hold(tmp_path: Path) -> None:
    folder = save(tmp_path, tensors("per_expert"), shards=2)
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"part-1\.safetensors does not exist.*own\.k\.weight"):
        load(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"holds neither {SINGLE} nor {INDEX}"):
        load(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 20, -1])
def test_a_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    path = save(tmp_path, tensors("fused")) / SINGLE
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is (truncated|corrupt)"):
        load(tmp_path)


@pytest.mark.parametrize("header", [b"\xff" * 64, b"[]" + b" " * 62, b'{"own.q.weight": {"dtype": "F32"}}'.ljust(64)])
def test_a_corrupt_header_is_named(tmp_path: Path, header: bytes) -> None:
    (tmp_path / SINGLE).write_bytes((64).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is corrupt"):
        load(tmp_path)


def test_surplus_bytes_are_corruption(tmp_path: Path) -> None:
    path = save(tmp_path, tensors("fused")) / SINGLE
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is corrupt"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"own.q.weight": "../x"}}'])
def test_a_bad_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX):
        load(tmp_path)


def test_an_index_that_disagrees_with_a_file_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, tensors("fused"), shards=2)
    index = json.loads((folder / INDEX).read_text())
    promised = {"weight_map": index["weight_map"] | {"own.ghost": "part-0.safetensors"}}
    (folder / INDEX).write_text(json.dumps(promised))
    with pytest.raises(CheckpointError, match=r"part-0\.safetensors does not hold own\.ghost"):
        load(folder)
    del index["weight_map"]["own.q.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"part-0\.safetensors holds own\.q\.weight, which"):
        load(folder)


class Misplaced(Toy):
    """Placements with one mistake each."""

    def __init__(self, drop: str = "", extra: Placement | None = None) -> None:
        super().__init__()
        self.drop, self.extra = drop, extra

    def placements(self, layout: Layout) -> Iterator[Placement]:
        yield from (place for place in super().placements(layout) if place.source != self.drop)
        if self.extra is not None:
            yield self.extra


@pytest.mark.parametrize(
    ("drop", "extra", "message"),
    [
        ("own.norm.weight", None, r"parameter norm is not filled from row 0"),
        ("own.v.weight", None, r"parameter qkv is not filled from row 6"),
        ("own.k.weight", None, r"parameter qkv is not filled from row 4"),
        ("own.experts.2.up_proj.weight", None, r"parameter gate_up\[2\] is not filled from row 2"),
        ("", Placement("own.norm.weight", "qkv", (HIDDEN,)), r"own\.norm\.weight of shape \[4\] does not fit qkv"),
        ("", Placement("own.k.weight", "qkv", (2, HIDDEN), start=3), r"parameter qkv is filled twice from row 3"),
        ("", Placement("own.k.weight", "gone", (2, HIDDEN)), r"placed at gone, which the module does not have"),
        ("", Placement("own.k.weight", "gate_up", (2, HIDDEN), index=EXPERTS), r"does not fit gate_up .*index 3"),
    ],
)
def test_a_parameter_not_filled_exactly_once_is_named(
    tmp_path: Path, drop: str, extra: Placement | None, message: str
) -> None:
    values = tensors("per_expert")
    values.pop(drop, None)
    with torch.device("meta"):
        module = Misplaced(drop, extra)
    with pytest.raises(CheckpointError, match=message):
        load_weights(module, module.placements, save(tmp_path, values), prefixes=("own.",), dtype=torch.float32)


def test_nothing_is_allocated_when_a_tensor_does_not_fit(tmp_path: Path) -> None:
    module = build()
    values = tensors("fused") | {"own.k.weight": torch.ones(3, HIDDEN)}
    with pytest.raises(CheckpointError):
        load_weights(module, module.placements, save(tmp_path, values), prefixes=("own.",), dtype=torch.float32)
    assert all(parameter.is_meta for parameter in module.parameters())


def test_a_computed_buffer_left_on_the_meta_device_is_named(tmp_path: Path) -> None:
    module = build()
    module.steps = nn.Buffer(module.steps.to("meta"), persistent=False)
    with pytest.raises(RuntimeError, match="buffer steps is on the meta device"):
        load_weights(
            module, module.placements, save(tmp_path, tensors("fused")), prefixes=("own.",), dtype=torch.float32
        )


def test_one_tensor_can_be_read_alone(tmp_path: Path) -> None:
    values = tensors("fused")
    folder = save(tmp_path, values, shards=2)
    assert torch.equal(read_tensor(folder, "own.k.weight"), values["own.k.weight"])
    with pytest.raises(CheckpointError, match=r"does not hold own\.w\.weight"):
        read_tensor(folder, "own.w.weight")


def test_the_index_gives_file_shape_and_type_of_each_tensor(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.ones(())})
    index = tensor_index(tmp_path)
    assert (index["a"].file, index["a"].shape, index["a"].dtype) == (tmp_path / SINGLE, (2, 3), "BF16")
    assert (index["b"].shape, index["b"].nbytes) == ((), 4)
