"""What Megatron-Bridge 0.3.1 and mbridge 0.15.1 need to be imported and to export on a CPU without Transformer Engine.

Each thing here stands for something that a real trainer has; none of it touches how names are mapped, gathered or yielded:

`import_bridges`   Megatron-Bridge imports Transformer Engine and names of it at import time, for models and recipes that are not
                   used here. It gets empty classes under those names, which are taken away again after the import.
`mbridge_of`       a test process has tied and untied models one after the other, a trainer has one; see there.
`install`          both bridges ask for the current CUDA device to put received tensors on, which `harness.megatron_cpu` answers
                   with the CPU; nothing else.

That the model's parameters have the names that Transformer Engine's modules have is `harness/megatron_te.py`'s business.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any

from harness import megatron_cpu

STOOD_IN_FOR = ("transformer_engine", "transformer_engine_torch")


def install() -> None:
    """Once per process that exports. Does nothing where CUDA is available."""
    megatron_cpu.install()


def mbridge_of(checkpoint: str) -> Any:
    """mbridge's bridge of a checkpoint. mbridge 0.15.1 writes a tied model's mapping into its class, where the next untied model
    of the process would find it (its head would be exported as the embedding); here each bridge keeps its own."""
    from mbridge import AutoBridge

    bridge = AutoBridge.from_pretrained(checkpoint)
    bridge._DIRECT_MAPPING = dict(bridge._DIRECT_MAPPING)
    type(bridge)._DIRECT_MAPPING["output_layer.weight"] = "lm_head.weight"
    return bridge


def import_bridges() -> None:
    """Import both bridges, with stand-ins for Transformer Engine where it is not installed. After megatron.core, which looks for
    Transformer Engine itself and must not find the stand-ins."""
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.optimizer  # noqa: F401

    missing = [name for name in STOOD_IN_FOR if importlib.util.find_spec(name) is None]
    finder = _Finder(missing)
    sys.meta_path.append(finder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that the bridges would like to have
            importlib.import_module("megatron.bridge")
            importlib.import_module("mbridge")
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in missing]:
            del sys.modules[name]  # vLLM and transformers, in processes forked from this one, must not find them


class _NameOnly(type):
    """Class attributes of a stand-in are stand-ins."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn


class _StandIn(metaclass=_NameOnly):
    """A class or decorator that is imported and never used."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self


class _Module(types.ModuleType):
    __version__ = "2.10.0"  # what Megatron-Bridge 0.3.1 asks for at least

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_StandIn,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module under `tops`, after everybody else."""

    def __init__(self, tops: Sequence[str]) -> None:
        self._tops = tops

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._tops:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...
