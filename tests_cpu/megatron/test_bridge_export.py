"""What a bridge may yield and what becomes of it; what it must not yield, by name; the adapters."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness.recording.world import RecordingWorld
from staged_sync.errors import CompletenessError, GatherError
from staged_sync.exporter import Contract, NamedTensor, TensorMeta
from staged_sync.megatron.bridge_export import BridgeExporter, MarkedExport
from staged_sync.megatron.bridges import marked

BF16, F32 = torch.bfloat16, torch.float32


class Setup:
    """A `BridgeExporter` of rank 0 for a checkpoint with these tensors."""

    def __init__(self, folder: Path, metas: Iterable[TensorMeta]) -> None:
        self.folder = folder
        self.metas = {meta.name: meta for meta in metas}

    def exporter(self, begin: Callable[[], Iterable[Any]], *, contract: Contract = "pipeline_collective", model: Any = (),
                 pp: int = 1, model_type: str = "a stub", **config: Any) -> BridgeExporter:
        (self.folder / "config.json").write_text(json.dumps({"model_type": model_type, **config}))
        with RecordingWorld(pp=pp) as world:
            return BridgeExporter(SimpleNamespace(hf_checkpoint=str(self.folder)), model,
                                  MarkedExport("a bridge", contract, begin), seam=world.contexts[0].seam, hf_tensors=self.metas)


@pytest.fixture
def setup(tmp_path: Path) -> Callable[..., Setup]:
    return lambda *metas: Setup(tmp_path, metas)


def export(exporter: BridgeExporter) -> list[NamedTensor]:
    """All of it, as a source collects it in one bucket."""
    (part,) = exporter.passes
    return [pair for unit in exporter.units(part) for pair in exporter.convert(unit, exporter.gather(unit, timeout_s=5))]


def numbers(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=F32).reshape(shape).to(dtype)


# --- what may come --------------------------------------------------------------------------------------------------------

YIELDED: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: numbers(4, 6),
    "transposed": lambda: numbers(6, 4).t(),
    "every other column": lambda: torch.stack([numbers(4, 6), -numbers(4, 6)], dim=-1)[..., 0],
    "a slice": lambda: torch.cat([-numbers(4, 6), numbers(4, 6)])[4:],
    "a parameter": lambda: nn.Parameter(numbers(4, 6)),
    "wider": lambda: numbers(4, 6, dtype=F32),
}


@pytest.mark.parametrize("kind", YIELDED)
def test_a_tensor_goes_into_the_bucket_contiguous_in_the_checkpoints_dtype_and_as_a_copy(
        setup: Callable[..., Setup], kind: str) -> None:
    source = YIELDED[kind]()
    expected = source.detach().clone().to(BF16)
    ((name, tensor),) = export(setup(TensorMeta("w", BF16, (4, 6))).exporter(lambda: [("w", source)]))
    assert name == "w" and tensor.is_contiguous() and tensor.dtype == BF16 and not tensor.requires_grad
    assert torch.equal(tensor, expected)
    with torch.no_grad():
        source.fill_(-1)
    assert torch.equal(tensor, expected), "the exporter's buffer was reused"


def test_scalars_and_empty_tensors_pass(setup: Callable[..., Setup]) -> None:
    found = export(setup(TensorMeta("s", F32, ()), TensorMeta("e", F32, (0, 3))).exporter(
        lambda: [("s", torch.tensor(7.0)), ("e", torch.empty(0, 3))]))
    assert [(name, tuple(tensor.shape)) for name, tensor in found] == [("s", ()), ("e", (0, 3))]


def test_any_order_is_as_good_as_another_and_more_fields_than_two_are_ignored(setup: Callable[..., Setup]) -> None:
    """A stage's output block may come before its layers; newer bridges yield the Megatron name as well."""
    metas = [TensorMeta(name, BF16, (2,)) for name in ("model.layers.0.w", "model.norm.weight", "lm_head.weight")]
    found = export(setup(*metas).exporter(lambda: [(meta.name, numbers(2), "megatron name") for meta in reversed(metas)]))
    assert [name for name, _ in found] == ["lm_head.weight", "model.norm.weight", "model.layers.0.w"]


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", "language_model.model.embed_tokens.weight"])
def test_rows_that_only_pad_the_vocabulary_are_cut(setup: Callable[..., Setup], name: str) -> None:
    ((_, tensor),) = export(setup(TensorMeta(name, BF16, (5, 3))).exporter(lambda: [(name, numbers(8, 3))]))
    assert torch.equal(tensor, numbers(5, 3))


def test_a_tied_head_that_the_checkpoint_names_is_sent_once_whoever_yields_it(setup: Callable[..., Setup]) -> None:
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    ready = setup(TensorMeta(embedding, BF16, (2,)), TensorMeta(head, BF16, (2,)))
    for names in ([embedding], [embedding, head], [embedding, embedding]):
        exporter = ready.exporter(lambda names=names: [(name, numbers(2)) for name in names], tie_word_embeddings=True)
        assert [name for name, _ in export(exporter)] == [embedding, head]
        assert [meta.name for meta in exporter.describe()] == [embedding, head]


def test_copies_that_predict_more_tokens_are_sent_as_the_family_says(setup: Callable[..., Setup]) -> None:
    """The trainer has one such layer (HF's number 2) and the checkpoint two: the second is nobody's."""
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    copies = ["model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"]
    nobodys = ["model.layers.3.embed_tokens.weight", "model.layers.3.enorm.weight"]
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(mtp_num_layers=1)  # type: ignore[assignment]
    ready = setup(*(TensorMeta(name, BF16, (2,)) for name in (embedding, head, *copies, *nobodys)))
    for names in ([embedding, head], [embedding, copies[0], head, copies[1]]):
        exporter = ready.exporter(lambda names=names: [(name, numbers(2)) for name in names], model=[model],
                                  model_type="deepseek_v3", num_hidden_layers=2)
        assert {meta.name for meta in exporter.describe()} == {embedding, head, *copies}
        found = [name for name, _ in export(exporter)]
        assert sorted(found) == sorted([embedding, head, *copies])


def test_nothing_is_kept_of_what_has_been_converted(setup: Callable[..., Setup]) -> None:
    """Ranks that do not send hold the exporter's own working set, sources the bucket."""
    metas = [TensorMeta(f"w{i}", BF16, (64,)) for i in range(8)]
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def begin() -> Iterator[NamedTensor]:
        nonlocal most
        for meta in metas:
            tensor = numbers(64)
            alive.append(weakref.ref(tensor))
            most = max(most, sum(ref() is not None for ref in alive))
            yield meta.name, tensor
            del tensor

    exporter = setup(*metas).exporter(begin)
    for unit in exporter.units("model"):
        exporter.convert(unit, exporter.gather(unit, timeout_s=5))
    gc.collect()
    assert most == 1 and not any(ref() is not None for ref in alive)


def test_an_export_that_is_left_in_the_middle_is_closed_and_the_next_one_starts_anew(setup: Callable[..., Setup]) -> None:
    closed = []

    def begin() -> Iterator[NamedTensor]:
        try:
            yield "w", numbers(2)
            yield "x", numbers(2)
        finally:
            closed.append(True)

    exporter = setup(TensorMeta("w", BF16, (2,)), TensorMeta("x", BF16, (2,))).exporter(begin)
    units = exporter.units("model")
    exporter.convert(unit := next(units), exporter.gather(unit, timeout_s=5))
    units.close()
    assert closed == [True]
    assert [name for name, _ in export(exporter)] == ["w", "x"]


# --- what must not come ---------------------------------------------------------------------------------------------------

W = TensorMeta("w", BF16, (4,))


@pytest.mark.parametrize(("items", "message"), [
    ([("v", numbers(4))], "a bridge yields v [4] bfloat16 on cpu, which the HF checkpoint does not name"),
    ([("w", numbers(5))], "a bridge yields w as [5] bfloat16 on cpu; it is [4] in the checkpoint"),
    ([("w", numbers(4)), ("w", numbers(4))], "a bridge yields w twice; only a tied embedding may come again"),
    ([("w", numbers(4).to(torch.int64))], "it is bfloat16 in the checkpoint: these are no two precisions of one number"),
    ([("w", torch.empty(4, dtype=BF16, device="meta"))], "[4] bfloat16 on meta as item 0; it must be an HF name and a tensor"),
    ([("w", None)], "a bridge yields str and NoneType as item 0; it must be an HF name and a tensor with its bytes"),
], ids=["unknown", "shape", "twice", "integer", "meta", "no tensor"])
def test_what_does_not_fit_is_refused_by_name(setup: Callable[..., Setup], items: list[Any], message: str) -> None:
    with pytest.raises(CompletenessError) as error:
        export(setup(W, TensorMeta("other", BF16, (1,))).exporter(lambda: items))
    assert message in str(error.value)


def test_a_tensor_that_the_checkpoint_keeps_wider_than_the_others_must_not_come_rounded(setup: Callable[..., Setup]) -> None:
    """A router's expert bias in float32 among bf16 weights, cast by the bridge or by the whole module's cast."""
    ready = setup(W, TensorMeta("x", BF16, (4,)), TensorMeta("bias", F32, (4,)))
    with pytest.raises(CompletenessError, match="bias as .4. bfloat16 .* kept wider than the others .* Keep the trainer's copy"):
        export(ready.exporter(lambda: [("bias", numbers(4))]))
    ((_, tensor),) = export(ready.exporter(lambda: [("bias", numbers(4, dtype=F32))]))
    assert tensor.dtype == F32


def test_a_checkpoint_in_float32_throughout_is_served_from_bf16(setup: Callable[..., Setup]) -> None:
    ((_, tensor),) = export(setup(TensorMeta("w", F32, (4,))).exporter(lambda: [("w", numbers(4))]))
    assert tensor.dtype == F32 and torch.equal(tensor, numbers(4, dtype=F32))


def test_an_iterator_that_raises_is_over_and_says_at_which_item(setup: Callable[..., Setup]) -> None:
    def begin() -> Iterator[NamedTensor]:
        yield "w", numbers(4)
        raise ValueError("no mapping found")

    with pytest.raises(GatherError, match="a bridge failed at item 1: ValueError: no mapping found"):
        export(setup(W).exporter(begin))


@pytest.mark.parametrize(("contract", "pp", "error", "told"), [
    ("stage_local", 2, RuntimeError("Timed out waiting 30000ms for recv operation to complete"), True),
    ("stage_local", 1, RuntimeError("Timed out waiting 30000ms for recv operation to complete"), False),
    ("pipeline_collective", 2, RuntimeError("Timed out waiting 30000ms for recv operation to complete"), False),
    ("stage_local", 2, ValueError("no mapping found"), False),
])
def test_only_a_time_out_of_a_stage_local_export_with_several_stages_looks_like_a_wrong_contract(
        setup: Callable[..., Setup], contract: Contract, pp: int, error: Exception, told: bool) -> None:
    def begin() -> Iterator[NamedTensor]:
        raise error
        yield

    with pytest.raises(GatherError) as raised:
        export(setup(W).exporter(begin, contract=contract, pp=pp))
    assert ("declared stage_local but behaves as pipeline-collective" in str(raised.value)) == told


def test_parameters_without_storage_are_told_at_connect(setup: Callable[..., Setup]) -> None:
    model = nn.Linear(2, 3, bias=False)
    model.weight.data = torch.empty(0)
    (problem,) = setup(W).exporter(list, model=[model]).problems()
    assert "parameters without storage (offloaded?): weight" in problem


# --- adapters -------------------------------------------------------------------------------------------------------------

@dataclass
class Task:
    vp_stage: int | None
    param_name: str
    param_weight: torch.Tensor | None


class FakeMegatronBridge:
    """The two methods of Megatron-Bridge's AutoBridge that are used."""

    def __init__(self, model: list[nn.Module]) -> None:
        self.model = model

    def get_conversion_tasks(self, model: Any) -> list[Task | None]:
        own = [Task(0, name, p) for name, p in self.model[0].named_parameters()]
        return [*own, Task(None, "of another stage", None), None]

    def export_hf_weights(self, model: Any, *, cpu: bool, show_progress: bool,
                          conversion_tasks: Iterable[Task | None] | None = None) -> Iterator[NamedTensor]:
        assert not cpu and not show_progress and model == self.model
        for task in self.get_conversion_tasks(model) if conversion_tasks is None else conversion_tasks:
            if task is not None and task.param_weight is not None:
                yield task.param_name, task.param_weight


class FakeMBridge:
    def export_weights(self, models: list[nn.Module]) -> Iterator[NamedTensor]:
        return ((name, p) for model in models for name, p in model.named_parameters())


def test_the_adapters_declare_what_the_bridges_are() -> None:
    model: list[nn.Module] = [nn.Linear(2, 3)]
    for bridge, name in ((FakeMegatronBridge(model), "megatron-bridge"), (FakeMBridge(), "mbridge")):
        made = marked(bridge, None, model, None)
        assert made.name.startswith(name) and made.contract == "pipeline_collective" and made.reads_model
        assert [item[0] for item in made.begin()] == ["weight", "bias"]
    own = MarkedExport("mine", "stage_local", list)
    assert marked(own, None, model, None) is own
    with pytest.raises(TypeError, match="must have export_hf_weights .Megatron-Bridge. or export_weights .mbridge.*got object"):
        marked(object(), None, model, None)


def test_a_weights_getter_is_asked_in_every_export_and_its_names_are_vimes() -> None:
    model: list[nn.Module] = [nn.Linear(2, 3)]
    step = 0

    def getter() -> dict[str, torch.Tensor]:
        return {f"vp_stages.0.module.module.{name}": torch.full_like(p, step) for name, p in model[0].named_parameters()}

    made = marked(FakeMegatronBridge(model), None, model, getter)
    assert not made.reads_model
    for step in (1, 2, 3):
        assert all(torch.equal(item[1], torch.full_like(item[1], step)) for item in made.begin())


def test_a_weights_getter_without_a_tensor_of_the_model_is_an_error_that_names_it() -> None:
    model: list[nn.Module] = [nn.Linear(2, 3)]
    made = marked(FakeMegatronBridge(model), None, model, lambda: {"vp_stages.0.weight": torch.zeros(3, 2)})
    with pytest.raises(KeyError, match="vp_stages.0.bias; the model has it. It has: vp_stages.0.weight"):
        list(made.begin())
