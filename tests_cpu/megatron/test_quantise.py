"""FP8 with a scale per block: against a slow second opinion, at every edge, and through a whole export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.checkpoints import checkpoint_tensors, hf_config
from harness.fp8 import FP8_CONFIG, quantise_slowly, quantised
from harness.recording.job import RecordingJob
from staged_sync.buckets import Bucketer
from staged_sync.completeness import coverage_problems
from staged_sync.megatron.quantise import FP8, quantise, read_block
from staged_sync.megatron.raw_export import RawExporter
from tests_cpu.megatron.fakes import RecordingSeam, World, export_world, header, stage_model, world, write_config


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (256, 384), (129, 127), (1, 1), (100, 300), (384, 5)],
                         ids=lambda size: str(size))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_and_partial_blocks_are_the_second_opinion_s(rows: int, columns: int, dtype: torch.dtype) -> None:
    weight = (torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows)) - 0.5).to(dtype)
    values, scales = quantise(weight, (128, 128))
    expected = quantise_slowly(weight)
    assert same_bytes(values, expected[0])
    assert same_bytes(scales.contiguous(), expected[1])


def test_a_block_of_zeros_is_zeros_and_not_nan() -> None:
    """B150: 0 / 448 as a scale would be a division by zero."""
    weight = torch.ones(256, 200)
    weight[128:, :128] = 0
    values, scales = quantise(weight, (128, 128))
    assert torch.equal(scales, torch.tensor([[1 / 448, 1 / 448], [1.0, 1 / 448]]))
    assert not values.float().isnan().any()
    assert values[128:, :128].float().eq(0).all()
    assert values[:128].float().eq(448).all()


def test_a_block_s_largest_magnitude_becomes_the_largest_number() -> None:
    weight = torch.tensor([[-3.0, 1.5], [0.75, 0.0]])
    values, scales = quantise(weight, (2, 2))
    assert values.float().tolist() == [[-448.0, 224.0], [112.0, 0.0]]
    assert scales.item() == (torch.tensor(3.0) / 448).item()


def test_shapes_are_known_without_weights() -> None:
    values, scales = quantise(torch.empty(300, 130, dtype=torch.bfloat16, device="meta"), (128, 128))
    assert (values.dtype, values.shape, scales.dtype, scales.shape) == (FP8, (300, 130), torch.float32, (3, 2))


QUANTISED = hf_config("qwen3_moe", num_layers=2, heads=4, groups=2, hidden_size=160, quantization_config=FP8_CONFIG)


def quantised_checkpoint() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The bf16 weights that a trainer holds, and the checkpoint that an engine would load: linears in FP8, the rest as it is."""
    weights = checkpoint_tensors(QUANTISED)
    return weights, quantised(weights)


@pytest.mark.parametrize("at", [world(QUANTISED), world(QUANTISED, tp=2, pp=2, ep=2), world(QUANTISED, tp=2, etp=2, ep=2, dp=2)],
                         ids=["one rank", "tp2·pp2·ep2", "tp2·etp2·ep2"])
def test_an_export_into_a_quantised_checkpoint_is_exact_on_any_layout(at: World, tmp_path: Path) -> None:
    """Blocks do not end where shards do: the full tensor is quantised, once, on the source."""
    weights, checkpoint = quantised_checkpoint()
    stages = export_world(tmp_path, at, hf=weights, named=header(checkpoint))
    assert coverage_problems([stage.described for stage in stages], header(checkpoint)) == []
    sent = {name: tensor for stage in stages for name, tensor in stage.tensors}
    assert sent.keys() == checkpoint.keys()
    assert [name for name, tensor in checkpoint.items() if not same_bytes(sent[name].contiguous(), tensor)] == []


def test_weight_and_scale_are_never_in_two_buckets(tmp_path: Path) -> None:
    weights, checkpoint = quantised_checkpoint()
    at = world(QUANTISED, args={"update_weight_buffer_size": 1})
    (stage,) = export_world(tmp_path, at, hf=weights, named=header(checkpoint))
    sent, bucketer = dict(stage.tensors), Bucketer(1)
    buckets = [bucketer.add([(name, sent[name]) for name in unit]) for unit in stage.units] + [bucketer.flush()]
    for bucket in buckets:
        names = {name for name, _ in bucket}
        assert {name + "_scale_inv" for name in names if name.endswith("_proj.weight")} <= names


@pytest.mark.parametrize(("config", "text"), [
    ({"quant_method": "awq"}, "quantization_config must be fp8 with weight_block_size (got quant_method 'awq')"),
    ({"quant_method": "fp8"}, "weight_block_size must be two positive ints, e.g. [128, 128] (got None)"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "(got [128])"),
    (FP8_CONFIG | {"activation_scheme": "static"}, "activation_scheme must be 'dynamic' (got 'static')"),
])
def test_what_cannot_be_served_is_said(config: dict[str, object], text: str) -> None:
    block, problems = read_block({"quantization_config": config}, None)
    assert block is None
    assert len(problems) == 1 and text in problems[0]


def test_what_can_be_served() -> None:
    assert read_block({}, None) == (None, [])
    assert read_block({"quantization_config": FP8_CONFIG}, None) == ((128, 128), [])


FP8_64 = {"quant_method": "fp8", "weight_block_size": [64, 64]}


@pytest.mark.parametrize(("given", "in_hf", "got"), [
    (FP8_64, None, "quant_method 'fp8' and not None, weight_block_size [64, 64] and not None"),
    (FP8_64, FP8_CONFIG, "weight_block_size [64, 64] and not [128, 128]"),
    (FP8_CONFIG, FP8_64, "weight_block_size [128, 128] and not [64, 64]"),
    (FP8_CONFIG | {"activation_scheme": "static"}, FP8_CONFIG, "activation_scheme 'static' and not 'dynamic'"),
])
def test_a_given_config_that_is_not_the_checkpoint_s_is_refused(given: object, in_hf: object, got: str, tmp_path: Path) -> None:
    weights, _ = quantised_checkpoint()
    config = {key: value for key, value in QUANTISED.items() if key != "quantization_config"}
    at = world(config | ({"quantization_config": in_hf} if in_hf else {}))
    export = RawExporter(write_config(tmp_path, at.config), stage_model(weights, at), model_name="tiny", seam=RecordingSeam(at),
                         hf_tensors=None, quantization_config=given)
    assert export.problems() == [
        f"quantization_config must say what config.json at args.hf_checkpoint says, or be None (got {got}): weights are sent in "
        f"the checkpoint's form"]


def test_what_the_updater_was_given_is_compared_at_connect(tmp_path: Path) -> None:
    args = vars(write_config(tmp_path, QUANTISED))
    with RecordingJob(pp=2, args=args, quantization_config=FP8_64) as job:
        for updater in job.updaters:
            updater._exporter = None  # its own, a raw one
        errors = job.connect().errors
    assert len(errors) == 2
    assert all("(got weight_block_size [64, 64] and not [128, 128])" in str(error) for error in errors.values())


@pytest.mark.parametrize("given", [None, {}, FP8_CONFIG, {"quant_method": "fp8", "weight_block_size": (128, 128)}],
                         ids=["none", "empty", "the same", "as a tuple, without the defaults"])
def test_a_given_config_that_says_the_same_is_fine(given: object, tmp_path: Path) -> None:
    weights, checkpoint = quantised_checkpoint()
    at = world(QUANTISED)
    export = RawExporter(write_config(tmp_path, QUANTISED), stage_model(weights, at), model_name="tiny", seam=RecordingSeam(at),
                         hf_tensors=header(checkpoint), quantization_config=given)
    assert export.problems() == []
    assert coverage_problems([export.describe()], header(checkpoint)) == []
