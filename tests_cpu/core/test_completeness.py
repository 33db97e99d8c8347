"""Every HF tensor exactly once: the index, the check at connect, and the record of what was really sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from staged_sync.completeness import (
    CheckpointIndexError,
    SentRecord,
    StageReport,
    coverage_problems,
    judge,
    read_index,
)
from staged_sync.exporter import TensorMeta

A = TensorMeta("a", torch.bfloat16, (2, 3))
B = TensorMeta("b", torch.float32, (4,))
C = TensorMeta("c", torch.bfloat16, ())
INDEX = {"a": A, "b": B, "c": C}


def test_a_single_file_and_a_sharded_index_say_the_same(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(meta.shape, dtype=meta.dtype) for name, meta in INDEX.items()}
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    single.mkdir()
    sharded.mkdir()
    save_file(tensors, single / "model.safetensors")
    save_file({"a": tensors["a"]}, sharded / "one.safetensors")
    save_file({"b": tensors["b"], "c": tensors["c"]}, sharded / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert read_index(single) == read_index(sharded) == INDEX


def test_a_folder_without_weights_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointIndexError, match="expected model.safetensors.index.json or model.safetensors"):
        read_index(tmp_path)


def test_a_file_that_is_no_safetensors_file_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointIndexError, match="not a readable safetensors file: .*header of 18446744073709551615 bytes"):
        read_index(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"metadata": {}}', '{"weight_map": {"a": "gone.safetensors"}}'])
def test_a_broken_index_is_a_clear_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointIndexError, match="is not a safetensors index|names gone.safetensors, which is not in"):
        read_index(tmp_path)


def test_a_checkpoint_without_tensors_is_an_error(tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointIndexError, match="names no tensors: there would be nothing to send"):
        read_index(tmp_path)


def test_an_index_that_names_a_tensor_no_shard_holds_is_an_error(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    weight_map = {"a": "one.safetensors", "z": "one.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointIndexError, match=r"that are not in their shard: \['z in one.safetensors'\] \(1 in all\)"):
        read_index(tmp_path)


def write_shards(folder: Path, weight_map: dict[str, str]) -> None:
    """Two shards that both hold `a`, the second one in another form: left over from a conversion."""
    save_file({"a": torch.zeros(2, 3, dtype=torch.bfloat16)}, folder / "one.safetensors")
    save_file({"a": torch.zeros(7), "b": torch.zeros(4)}, folder / "two.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(("shard", "expected"), [("one", A), ("two", TensorMeta("a", torch.float32, (7,)))])
def test_a_name_in_two_shards_is_what_the_index_s_shard_says(tmp_path: Path, shard: str, expected: TensorMeta) -> None:
    write_shards(tmp_path, {"a": f"{shard}.safetensors", "b": "two.safetensors"})
    assert read_index(tmp_path) == {"a": expected, "b": B}


def test_a_name_that_only_another_shard_holds_is_an_error(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    with pytest.raises(CheckpointIndexError, match=r"not in their shard: \['b in one.safetensors'\]"):
        read_index(tmp_path)


def test_complete_stages_have_no_problems_in_any_split() -> None:
    assert coverage_problems([[A, B, C]], INDEX) == []
    assert coverage_problems([[C], [], [B, A]], INDEX) == []


def test_all_problems_are_listed_at_once_by_name() -> None:
    wrong_shape = TensorMeta("c", torch.bfloat16, (1,))
    extra = TensorMeta("x", torch.int8, (9,))
    assert coverage_problems([[A, extra], [A, wrong_shape]], INDEX) == [
        "missing: b [4] float32 is in the checkpoint, no stage sends it",
        "duplicate: a is sent 2 times, by stages [0, 1]",
        "extra: stage 0 sends x [9] int8, not in the checkpoint",
        "shape: c is [] in the checkpoint, stage 1 sends [1]",
    ]


def test_another_dtype_is_a_problem() -> None:
    cast = TensorMeta("b", torch.bfloat16, (4,))
    assert coverage_problems([[A, cast, C]], INDEX) == [
        "dtype: b is torch.float32 in the checkpoint, stage 0 sends torch.bfloat16"]


def test_optional_names_may_be_missing_or_extra_and_must_fit_where_both_have_them() -> None:
    extra = TensorMeta("draft.x", torch.int8, (9,))
    assert coverage_problems([[A, B, extra]], INDEX, optional=lambda name: name in ("c", "draft.x")) == []
    misfit = TensorMeta("c", torch.bfloat16, (7,))
    assert coverage_problems([[A, B, misfit]], INDEX, optional=lambda name: name == "c") == [
        "shape: c is [] in the checkpoint, stage 0 sends [7]"]


def tensor(meta: TensorMeta) -> tuple[str, torch.Tensor]:
    return meta.name, torch.zeros(meta.shape, dtype=meta.dtype)


def test_what_was_announced_and_sent_in_another_order_is_complete() -> None:
    record = SentRecord(1, [A, B, C])
    record.bucket([tensor(C), tensor(A)])
    record.bucket([tensor(B)])
    report = record.report()
    assert (report.count, report.buckets, report.bytes, report.offender) == (3, 2, 12 + 16 + 2, "")
    assert judge(report, [A, B, C]) is None
    assert StageReport.from_json(json.loads(json.dumps(report.to_json()))) == report


@pytest.mark.parametrize(("sent", "offender"), [
    ([A, B], "c [] bfloat16 was announced at connect and not sent"),
    ([A, B, C, A], "a [2, 3] bfloat16 was sent more often than announced at connect"),
    ([A, B, TensorMeta("c", torch.bfloat16, (1,))], "c was announced as [] bfloat16 at connect and sent as [1] bfloat16"),
    ([A, B, TensorMeta("c", torch.float32, ())], "c was announced as [] bfloat16 at connect and sent as [] float32"),
])
def test_the_verdict_names_the_first_offender(sent: list[TensorMeta], offender: str) -> None:
    record = SentRecord(0, [A, B, C])
    record.bucket([tensor(meta) for meta in sent])
    verdict = judge(record.report(), [A, B, C])
    assert verdict == f"stage 0 sent {len(sent)} tensors, announced 3 at connect; first offender: {offender}"


def test_two_metas_swapped_between_names_do_not_cancel_in_the_digest() -> None:
    swapped = [TensorMeta("a", B.dtype, B.shape), TensorMeta("b", A.dtype, A.shape), C]
    record = SentRecord(0, swapped)
    record.bucket([tensor(meta) for meta in swapped])
    assert judge(record.report(), [A, B, C]) is not None
