"""The model that foreign code exports: the table of the scenario, as the rank that asks holds it.

For an adapter's `replace`, from the shortest to the one that leaves most to be tested:

* `named_tensors` stands for gathering and converting: HF names and full tensors of this rank's stage, experts and all.
* `named_parameters` stands for vime's and slime's `named_params_and_buffers`: Megatron names with global expert numbers, and this
  rank's shards; `convert_to_hf` for the converter of a gathered parameter. The gathers between them are the implementation's.
* `local_parameters` numbers experts as Megatron does, from 0 on every expert-parallel rank: the global number is to be found.
* `bridge_tensors` stands for an iterator of Megatron-Bridge or mbridge, and `local_weights` is the `weights_getter`.

Expert e of a stage with n of them belongs to expert-parallel rank e // (n / ep). A shard is 1-D: one of equal parts of the flat
parameter, padded with zeros at its end, as many as the (expert-)tensor-parallel group has ranks; `partition_dim` is 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from harness.foreign.active import Here, here
from harness.recording.bridge import step_together
from harness.recording.exporter import PASSES
from harness.recording.model import StubUnit, values
from staged_sync.exporter import Part, TensorMeta

_NAME = re.compile(r"(?:.*\.)?decoder\.layers\.(\d+)\.(mlp\.experts\.linear|dense)\.weight(\d+)")
_MODULE: dict[Part, str] = {"dense": "dense", "expert": "mlp.experts.linear"}


def named_tensors(*args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """HF names and full tensors of this rank's stage, dense ones first. No gather: ranks that do not send may leave it alone."""
    me = here()
    for unit in me.active.table[me.coordinates.pp]:
        for meta in unit.tensors:
            yield meta.name, values(meta, me.active.step())


def named_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's shards under Megatron's names, experts by their global numbers: `decoder.layers.<stage>.dense.weight<i>`,
    `decoder.layers.<stage>.mlp.experts.linear.weight<e>`. Attributes as Megatron sets them."""
    return _parameters(here(), local_numbers=False)


def local_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The same, with experts numbered from 0 on this rank, as in Megatron's `named_parameters()`."""
    return _parameters(here(), local_numbers=True)


def local_weights() -> dict[str, torch.Tensor]:
    """vime's `weights_getter`: this rank's tensors by `vp_stages.<chunk>.<Megatron name>`."""
    return {f"vp_stages.0.{name}": tensor for name, tensor in local_parameters()}


def convert_to_hf(args: Any, model_name: Any, name: str, param: torch.Tensor, *more: Any,
                  **kwargs: Any) -> list[tuple[str, torch.Tensor]]:
    """HF names and tensors of a parameter that was gathered in its tensor-parallel group. Experts are taken by global number.

    Raises KeyError for a name that the model does not have, ValueError for a parameter that is not all there.
    """
    me = here()
    unit, meta = _named(me, name)
    wanted = _padded(meta, _split(me, unit.part)[1])
    if param.numel() != wanted:
        raise ValueError(f"{name}: {param.numel()} elements were gathered, all shards have {wanted}: was it gathered in the "
                         f"{'expert-' if unit.part == 'expert' else ''}tensor-parallel group?")
    return [(meta.name, param.reshape(-1)[:_numel(meta)].reshape(meta.shape))]


def bridge_tensors(*args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All HF names and full tensors of the model, on every rank. Each step is a collective over the pipeline and over the ranks
    that hold a shard: whoever does not iterate hangs the others, and is hung."""
    me = here()
    for unit in (unit for units in me.active.table for unit in units):
        for meta in unit.tensors:
            me.record("gather", group="export", detail=meta.name)
            groups = [me.world.gather_group(me.rank, "pp")]
            groups += [me.world.gather_group(me.rank, group) for group in PASSES[unit.part]]
            step_together(groups, me.rank, meta.name, timeout_s=me.active.group_timeout_s)
            yield meta.name, values(meta, me.active.step())


def free_port(*args: Any, **kwargs: Any) -> int:
    """The next port, the same in every run: for an adapter, in place of asking the operating system."""
    return here().world.network.next_port()


# --- shards -------------------------------------------------------------------------------------------------------------
def _parameters(me: Here, *, local_numbers: bool) -> Iterator[tuple[str, torch.Tensor]]:
    c = me.coordinates
    dense, experts = (_of(me, c.pp, part) for part in ("dense", "expert"))
    for i, unit in enumerate(dense):
        yield _name(c.pp, "dense", i), _shard(me, unit)
    if len(experts) % c.ep_size:
        raise ValueError(f"stage {c.pp} has {len(experts)} experts, which {c.ep_size} expert-parallel ranks cannot share equally")
    mine = len(experts) // c.ep_size
    for i in range(mine):
        number = c.ep * mine + i
        yield _name(c.pp, "expert", i if local_numbers else number), _shard(me, experts[number])


def _shard(me: Here, unit: StubUnit) -> torch.Tensor:
    (meta,), (index, of) = unit.tensors, _split(me, unit.part)
    flat = values(meta, me.active.step()).reshape(-1)
    padded = torch.cat([flat, flat.new_zeros(_padded(meta, of) - flat.numel())])
    shard: Any = padded.chunk(of)[index].clone()
    shard.tensor_model_parallel, shard.partition_dim, shard.partition_stride = of > 1, 0, 1
    return shard  # type: ignore[no-any-return]


def _split(me: Here, part: Part) -> tuple[int, int]:
    """Which of how many shards this rank holds."""
    c = me.coordinates
    return (c.tp, c.tp_size) if part == "dense" else (c.etp, c.etp_size)


def _padded(meta: TensorMeta, of: int) -> int:
    return -(-_numel(meta) // of) * of


def _numel(meta: TensorMeta) -> int:
    return meta.nbytes // meta.dtype.itemsize


def _of(me: Here, stage: int, part: Part) -> Sequence[StubUnit]:
    return [unit for unit in me.active.table[stage] if unit.part == part]


def _name(stage: int, part: Part, number: int) -> str:
    return f"decoder.layers.{stage}.{_MODULE[part]}.weight{number}"


def _named(me: Here, name: str) -> tuple[StubUnit, TensorMeta]:
    match = _NAME.fullmatch(name)
    part: Part = "expert" if match and match[2] == _MODULE["expert"] else "dense"
    units = _of(me, int(match[1]), part) if match and int(match[1]) < len(me.active.table) else []
    if match is None or int(match[3]) >= len(units):
        raise KeyError(f"no parameter of this model: {name!r} (they look like {_name(0, 'expert', 0)})")
    unit = units[int(match[3])]
    return unit, unit.tensors[0]
