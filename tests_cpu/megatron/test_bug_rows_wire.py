"""Public bug reports about what travels: names, shapes, sizes and buckets (class WIRE), with real exports of real layouts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.checkpoints import checkpoint_tensors, hf_config
from staged_sync.buckets import Bucketer
from staged_sync.completeness import SentRecord, judge
from staged_sync.errors import TransportError
from staged_sync.exporter import NamedTensor
from staged_sync.packing import pack, plan_chunks, unpack
from staged_sync.vllm.gloo_group import Terms
from tests_cpu.megatron.fakes import (
    RecordingSeam,
    Stage,
    differences,
    export_world,
    exporter,
    header,
    run,
    stage_model,
    world,
    write_config,
)

GLM = hf_config("glm4_moe", num_layers=2, heads=4, groups=2, n_routed_experts=4, vocab_size=61)
DEEPSEEK = hf_config("deepseek_v3", num_layers=2, heads=4, q_lora_rank=20, kv_lora_rank=28, qk_nope_head_dim=6,
                     qk_rope_head_dim=8, v_head_dim=5, n_routed_experts=4)


def buckets_of(stage: Stage, limit: int) -> list[list[NamedTensor]]:
    """A stage's stream as the lifecycle cuts it."""
    sent, bucketer = dict(stage.tensors), Bucketer(limit)
    closed = [bucketer.add([(name, sent[name]) for name in unit]) for unit in stage.units] + [bucketer.flush()]
    return [bucket for bucket in closed if bucket]


def received(bucket: list[NamedTensor], buffer_bytes: int) -> list[NamedTensor]:
    """One bucket over the packed wire: names and forms from the announcement, bytes from the chunks."""
    tensors = [tensor.contiguous() for _, tensor in bucket]
    specs = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    chunks = plan_chunks([tensor.nbytes for tensor in tensors], buffer_bytes)
    arrived = [piece for chunk, indices in zip(pack(tensors, buffer_bytes), chunks, strict=True)
               for piece in unpack(chunk, [specs[i] for i in indices])]
    return [(name, tensor) for (name, _), tensor in zip(bucket, arrived, strict=True)]


@pytest.mark.parametrize("buffer_bytes", [1, 5000, 1 << 30])
def test_b82_a_float32_bias_among_bfloat16_weights_arrives_under_its_own_name(buffer_bytes: int, tmp_path: Path) -> None:
    hf = checkpoint_tensors(GLM)
    (stage,) = export_world(tmp_path, world(GLM, ep=2, dp=2), hf=hf)
    (bucket,) = buckets_of(stage, 1 << 30)
    stage.tensors = received(bucket, buffer_bytes)
    assert differences([stage], hf) == []


def test_b82_a_sender_that_regroups_by_dtype_is_seen(tmp_path: Path) -> None:
    """The mutant: bytes grouped by dtype under names in export order. Totals match; everything after the bias is shifted."""
    hf = checkpoint_tensors(GLM)
    (stage,) = export_world(tmp_path, world(GLM), hf=hf)
    (bucket,) = buckets_of(stage, 1 << 30)
    regrouped = sorted((tensor.contiguous() for _, tensor in bucket), key=lambda tensor: tensor.dtype != torch.bfloat16)
    (chunk,) = pack(regrouped, 1 << 30)
    arrived = unpack(chunk, [(tensor.dtype, tuple(tensor.shape)) for _, tensor in bucket])
    stage.tensors = [(name, tensor) for (name, _), tensor in zip(bucket, arrived, strict=True)]
    bias = [name for name, tensor in bucket].index("model.layers.1.mlp.gate.e_score_correction_bias")
    wrong = {line.removeprefix("bytes ") for line in differences([stage], hf)}
    assert wrong == {name for name, _ in bucket[bias:]}


def test_b83_a_parameter_that_somebody_added_is_named_before_anything_is_sent(tmp_path: Path) -> None:
    at = world(GLM)
    model = stage_model(checkpoint_tensors(GLM), at)
    model[0].module.module.decoder.layers.get_submodule("1").mlp.router.bias = nn.Parameter(torch.ones(4))
    (said,) = exporter(write_config(tmp_path, GLM), model, RecordingSeam(at)).problems()
    assert "decoder.layers.{1}.mlp.router.bias" in said


def test_b83_what_is_announced_and_what_is_sent_come_from_one_place(tmp_path: Path) -> None:
    at, hf = world(GLM), checkpoint_tensors(GLM)
    export = exporter(write_config(tmp_path, GLM), stage_model(hf, at), RecordingSeam(at), header(hf))
    announced, record = export.describe(), SentRecord(0, export.describe())
    record.bucket(list(run(export)))
    assert judge(record.report(), announced) is None
    short = SentRecord(0, announced)
    short.bucket(list(run(export))[1:])
    assert "model.embed_tokens.weight" in str(judge(short.report(), announced))


@pytest.mark.parametrize(("theirs", "said"), [
    (Terms("g", 2, False, 1 << 20), "packed: the source has False, the engine was told True"),
    (Terms("g", 2, True, 4 << 20), "packed_buffer_size_bytes: the source has 4194304, the engine was told 1048576"),
], ids=["b84", "b85"])
def test_b84_b85_terms_that_differ_are_an_error_before_a_byte_moves(theirs: Terms, said: str) -> None:
    with pytest.raises(TransportError, match=said):
        Terms("g", 2, True, 1 << 20).check_source(theirs.encode())


def test_b85_another_buffer_size_would_cut_the_stream_elsewhere() -> None:
    """Why it has to be agreed."""
    assert plan_chunks([600, 600, 600], 1000) != plan_chunks([600, 600, 600], 4000)


def test_b86_no_local_quantity_decides_where_a_chunk_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts with different free memory cut alike; neither is even asked."""
    cut = []
    for free in (8 << 30, 80 << 30):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device, free=free: (free, free))
        cut.append(plan_chunks([7, 900, 13, 400, 400], 1000))
    assert cut[0] == cut[1] == [range(4), range(4, 5)]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: pytest.fail("asked how much memory is free"))
    assert plan_chunks([7, 900, 13, 400, 400], 1000) == cut[0]


@pytest.mark.parametrize("over", [-1, 0, 1], ids=["smaller", "equal", "larger"])
@pytest.mark.parametrize("place", range(3), ids=["first", "middle", "last"])
def test_b87_a_tensor_as_large_as_a_bucket_is_one_of_its_own(over: int, place: int) -> None:
    sizes = [40, 40]
    sizes.insert(place, 100 + over)
    bucketer = Bucketer(100)
    closed = [bucketer.add([(str(i), torch.zeros(size, dtype=torch.uint8))]) for i, size in enumerate(sizes)] + [bucketer.flush()]
    buckets = [[tensor.numel() for _, tensor in bucket] for bucket in closed if bucket]
    assert list(itertools.chain(*buckets)) == sizes
    assert [100 + over] in buckets


@pytest.mark.parametrize("limit", [1, 3000, 20000, 1 << 30])
def test_b89_as_many_bytes_go_out_as_the_checkpoint_has(limit: int, tmp_path: Path) -> None:
    """No bucket is padded to its capacity, the last one neither."""
    hf = checkpoint_tensors(GLM)
    stages = export_world(tmp_path, world(GLM, pp=2, tp=2, ep=2), hf=hf)
    sent = sum(chunk.numel() for stage in stages for bucket in buckets_of(stage, limit)
               for chunk in pack([tensor.contiguous() for _, tensor in bucket], 4096))
    assert sent == sum(tensor.nbytes for tensor in hf.values())


def test_b90_parameters_without_storage_are_an_error_and_no_plan(tmp_path: Path) -> None:
    def offload(model: nn.Module) -> None:
        for parameter in model.decoder.layers.get_submodule("1").mlp.experts.parameters():
            parameter.data = parameter.data.new_empty(0)

    for container in ("sequential", "te", "grouped"):
        at: Any = world(GLM, ep=2, dp=2, container=container)
        model = stage_model(checkpoint_tensors(GLM), at)
        offload(model[0].module.module)
        said = exporter(write_config(tmp_path, GLM), model, RecordingSeam(at)).problems()
        assert said[0].startswith("parameters without storage (offloaded?): decoder.layers.{1}.mlp.experts."), container
        assert len(said) == 1, said


@pytest.mark.parametrize("names", ["local", "te"])
@pytest.mark.parametrize("limit", [1, 3000, 1 << 30])
def test_b92_both_down_projections_are_in_one_bucket_of_any_size(limit: int, names: Any, tmp_path: Path) -> None:
    at = world(DEEPSEEK, tp=2, names=names, args={"update_weight_buffer_size": limit})
    (stage,) = export_world(tmp_path, at)
    pairs = [[name for name, _ in bucket if "_a_proj" in name] for bucket in buckets_of(stage, limit)]
    assert sum(len(pair) for pair in pairs) == 4
    assert all(len({name.split("self_attn")[0] for name in pair}) * 2 == len(pair) for pair in pairs)
