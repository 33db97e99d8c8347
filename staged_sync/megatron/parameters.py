"""Finds the parameters of a rank's model chunks, under Megatron names with GLOBAL layer numbers.

Megatron numbers layers in parameter names from 0 in every chunk; the global number is only in the layer module itself
(`layer.layer_number`, from 1; `TransformerLayer` in megatron/core/transformer/transformer_layer.py). It is never
recomputed from offsets: uneven, virtual and custom pipeline layouts would each need their own arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from staged_sync.megatron.families.common import layer_of, template_of


@dataclass(frozen=True, slots=True)
class Located:
    """One parameter: Megatron name with the global layer number (from 0), and the config of the module that owns it."""

    name: str
    parameter: nn.Parameter
    config: Any | None


def locate(chunks: Sequence[nn.Module]) -> tuple[list[Located], list[str]]:
    """All parameters (no buffers) of all chunks in the model's order, and what is wrong with their names."""
    located: list[Located] = []
    problems: list[str] = []
    for index, chunk in enumerate(chunks):
        found, unnumbered = _locate_chunk(unwrap(chunk))
        located += found
        if unnumbered:
            problems.append(f"chunk {index}: cannot tell the global layer numbers of {', '.join(unnumbered)}: these "
                            f"modules have no layer_number, which Megatron's TransformerLayer has")
    names = [entry.name for entry in located]
    if duplicates := {name for name in names if names.count(name) > 1}:
        problems.append(f"several modules of this rank claim to be {summary(duplicates)}: layer_number must differ")
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
    found = []
    for name, parameter in model.named_parameters():
        config = _config_of(model, name)
        layer = _LAYER_PREFIX.match(name)
        if layer is None:
            found.append(Located(name, parameter, config))
        elif isinstance(number := numbers[f"{layer[1]}.{layer[2]}"], int):
            found.append(Located(f"{layer[1]}.{number - 1}.{name[layer.end():]}", parameter, config))
    return found, [path for path, number in numbers.items() if not isinstance(number, int)]


def _config_of(model: nn.Module, name: str) -> Any | None:
    """The config of the nearest module around parameter `name` that has one."""
    config, module = getattr(model, "config", None), model
    for step in name.split(".")[:-1]:
        module = getattr(module, step)
        config = getattr(module, "config", config)
    return config


def summary(names: Iterable[str]) -> str:
    """Names as one line: those that differ by the layer only are written once, with the layers' numbers."""
    layers: dict[str, list[int]] = {}
    for name in names:
        numbers = layers.setdefault(template_of(name), [])
        if (layer := layer_of(name)) is not None:
            numbers.append(layer)
    return ", ".join(template.replace("{layer}", "{" + ",".join(map(str, sorted(numbers))) + "}")
                     for template, numbers in layers.items())
