"""Adapters: a bridge, as what `BridgeExporter` drives. Each declares the contract that its bridge was seen to have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import nn

from staged_sync.megatron.bridge_export import MarkedExport

WeightsGetter = Callable[[], Mapping[str, torch.Tensor]]
"""vime's: `vp_stages.<chunk>.<parameter name inside the chunk>` -> this rank's tensor, wherever it is kept."""


def marked(bridge: Any, args: Any, model: Sequence[nn.Module], weights_getter: WeightsGetter | None) -> MarkedExport:
    """The export of `bridge`: a Megatron-Bridge or mbridge `AutoBridge`, a `MarkedExport`, or None for Megatron-Bridge's own of
    `args.hf_checkpoint`. Raises TypeError for anything else."""
    if isinstance(bridge, MarkedExport):
        return bridge
    if bridge is None:
        bridge = _auto_bridge(args)
    if hasattr(bridge, "export_hf_weights"):
        return megatron_bridge(bridge, model, weights_getter)
    if hasattr(bridge, "export_weights"):
        return mbridge(bridge, model)
    raise TypeError(f"bridge must have export_hf_weights (Megatron-Bridge) or export_weights (mbridge), or be a MarkedExport "
                    f"with a declared contract; got {type(bridge).__name__}")


def megatron_bridge(bridge: Any, model: Sequence[nn.Module], weights_getter: WeightsGetter | None = None) -> MarkedExport:
    """Megatron-Bridge. Its parameters are broadcast from stage to stage: pipeline-collective."""
    def begin() -> Iterator[tuple[Any, ...]]:
        # Made anew in every export: conversion tasks hold the tensors of the moment when they were made.
        tasks = {}
        if weights_getter is not None:
            tasks = {"conversion_tasks": _Tasks(bridge.get_conversion_tasks(list(model)), weights_getter())}
        yield from bridge.export_hf_weights(list(model), cpu=False, show_progress=False, **tasks)

    return MarkedExport(_name("megatron-bridge"), "pipeline_collective", begin, reads_model=weights_getter is None)


def mbridge(bridge: Any, model: Sequence[nn.Module]) -> MarkedExport:
    """mbridge. Names and parameters are broadcast from stage to stage: pipeline-collective. It reads the model itself, so a
    `weights_getter` is not asked."""
    return MarkedExport(_name("mbridge"), "pipeline_collective", lambda: bridge.export_weights(list(model)))


class _Tasks(Sequence[Any]):
    """Conversion tasks with the tensors of a `weights_getter` in the place of the model's; moved one at a time."""

    def __init__(self, tasks: Sequence[Any], weights: Mapping[str, torch.Tensor]) -> None:
        self._tasks = tasks
        self._weights = {_inside_the_chunk(name): tensor for name, tensor in weights.items()}

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: Any) -> Any:
        task = self._tasks[index]
        if task is None or task.param_weight is None:
            return task  # of another stage
        name = f"vp_stages.{task.vp_stage}.{_inside_the_chunk(task.param_name)}"
        if name not in self._weights:
            raise KeyError(f"weights_getter() has no {name}; the model has it. It has: {', '.join(list(self._weights)[:3])}, …")
        return dataclasses.replace(task, param_weight=self._weights[name].to(task.param_weight.device))


def _inside_the_chunk(name: str) -> str:
    """Without the wrappers around the model (DistributedDataParallel, Float16Module)."""
    return name.replace("module.", "")


def _auto_bridge(args: Any) -> Any:
    from megatron.bridge import AutoBridge
    return AutoBridge.from_hf_pretrained(args.hf_checkpoint, trust_remote_code=bool(getattr(args, "trust_remote_code", False)))


def _name(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return package
