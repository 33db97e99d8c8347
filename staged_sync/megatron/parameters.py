"""Finds the parameters of a rank's model chunks, under Megatron names with GLOBAL layer numbers.

Megatron numbers layers in parameter names from 0 in every chunk; the global number is only in the layer module itself
(`layer.layer_number`, from 1; `TransformerLayer` in megatron/core/transformer/transformer_layer.py). It is never
recomputed from offsets: uneven, virtual and custom pipeline layouts would each need their own arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from staged_sync.megatron.experts import take_apart
from staged_sync.megatron.families.common import expert_of, layer_of, template_of


@dataclass(frozen=True, slots=True)
class Located:
    """One parameter, or one expert of a grouped one: Megatron name with the global layer number (from 0) and the local expert
    number, and the config of the module that owns it."""

    name: str
    parameter: torch.Tensor
    config: Any | None
    is_buffer: bool = False


def locate(chunks: Sequence[nn.Module]) -> tuple[list[Located], list[str]]:
    """All parameters and persistent buffers of all chunks in the model's order, and what is wrong with their names."""
    located: list[Located] = []
    problems: list[str] = []
    for index, chunk in enumerate(chunks):
        found, wrong = _locate_chunk(unwrap(chunk))
        located += found
        problems += [f"chunk {index}: {line}" for line in wrong]
    names = [entry.name for entry in located if not entry.is_buffer]
    if len(set(names)) < len(names):
        twice = dict.fromkeys(name for name in names if names.count(name) > 1)
        problems.append(f"several modules of this rank claim to be {summary(twice)}: layer_number must differ")
    return located, problems


def unwrap(chunk: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, Float16Module and the like, which hold it as `module`."""
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    return chunk


_LAYER_MODULE = re.compile(r"(?:.*\.)?layers\.\d+")
_LAYER_PREFIX = re.compile(r"((?:.*?\.)?layers)\.(\d+)\.")


def _locate_chunk(model: nn.Module) -> tuple[list[Located], list[str]]:
    numbers = {path: getattr(module, "layer_number", None) for path, module in model.named_modules()
               if _LAYER_MODULE.fullmatch(path)}
    unnumbered = [path for path, number in numbers.items() if not isinstance(number, int)]
    problems = [] if not unnumbered else [
        f"cannot tell the global layer numbers of {', '.join(unnumbered)}: these modules have no layer_number, which "
        f"Megatron's TransformerLayer has"]
    located = []
    for name, tensor, is_buffer in _tensors(model):
        layer = _LAYER_PREFIX.match(name)
        number = None if layer is None else numbers[f"{layer[1]}.{layer[2]}"]
        if layer is not None and not isinstance(number, int):
            continue
        full = name if layer is None or number is None else f"{layer[1]}.{number - 1}.{name[layer.end():]}"
        config, owner = _owner(model, name)
        try:
            located += [Located(part, piece, config, is_buffer) for part, piece in take_apart(full, tensor, owner)]
        except ValueError as error:
            problems.append(str(error))
    return located, problems


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Parameters and persistent buffers, module by module: a buffer goes out next to its module's parameters."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield prefix + name, parameter, False
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield prefix + name, buffer, True


def _owner(model: nn.Module, name: str) -> tuple[Any | None, nn.Module]:
    """The config of the nearest module around `name` that has one, and the module that holds it."""
    config, module = getattr(model, "config", None), model
    for step in name.split(".")[:-1]:
        module = getattr(module, step)
        config = getattr(module, "config", config)
    return config, module


def summary(names: Iterable[str]) -> str:
    """Names as one line: those that differ by the layer or the expert only are written once, with the numbers."""
    layers: dict[str, tuple[set[int], set[int]]] = {}
    for name in names:
        numbers = layers.setdefault(template_of(name), (set(), set()))
        for found, number in zip(numbers, (layer_of(name), expert_of(name)), strict=True):
            if number is not None:
                found.add(number)
    return ", ".join(template.replace("{layer}", _numbers(of_layers)).replace("{expert}", _numbers(of_experts))
                     for template, (of_layers, of_experts) in layers.items())


def _numbers(numbers: Iterable[int]) -> str:
    return "{" + ",".join(map(str, sorted(numbers))) + "}"
