"""The adapter files that the owners of these implementations would write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
EXPERTS = Adapter(frozenset({"session", "packed", "deferral", "moe"}), replace={
    **_FRAMEWORK, f"{_HERE}.experts.local_parameters": model.local_parameters,
    f"{_HERE}.experts.convert_to_hf": model.convert_to_hf})
BRIDGED = Adapter(frozenset({"session", "packed", "bridge", "moe"}), replace=_FRAMEWORK)
BOUNDED = replace(DEFERRED, capabilities=DEFERRED.capabilities | {"deadlines", "recovery"}, patience_s=1000.0)
