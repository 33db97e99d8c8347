"""The adapter files that the owners of these implementations would write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.foreign import dist, model
from harness.foreign.adapter import Adapter

_HERE = "harness.foreign.examples"
_FRAMEWORK: dict[str, Callable[..., Any]] = {
    f"{_HERE}.old_style.get_gloo_group": dist.gloo_group,
    f"{_HERE}.old_style.free_port": model.free_port,
    f"{_HERE}.old_style.hf_tensors": model.named_tensors,
}

OLD_STYLE = Adapter(frozenset({"session", "packed"}), replace=_FRAMEWORK)
DEFERRED = Adapter(frozenset({"session", "packed", "deferral"}), replace=_FRAMEWORK)
NAMED_GROUPS = Adapter(frozenset(), receiver="named groups", replace={
    **_FRAMEWORK, f"{_HERE}.named_groups.init_process_group": dist.init_process_group})
