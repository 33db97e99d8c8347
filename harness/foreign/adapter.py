"""What a foreign implementation needs said about it: a few lines, in a file of its owner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.sim.scenario import Receiver

CAPABILITIES = {
    "moe": "experts are exported and gathered in the expert groups",
    "deferral": "one stage after the other opens its group (pipeline parallel > 1 with receivers that hold one group)",
    "deadlines": "no wait is without a time-out",
    "session": "start_weight_update and finish_weight_update are used",
    "packed": "packed streams (args.vllm_weight_sync_packed)",
    "bridge": "bridge export",
}


@dataclass(frozen=True)
class Adapter:
    """`replace`: what the implementation imports from its own tree and cannot have here, by dotted path: its gloo group getter
    (`harness.foreign.dist.gloo_group`), its free-port function (`harness.foreign.model.free_port`), its converter or parameter
    iterator (`harness.foreign.model.named_tensors`, …). `stubs`: contents of more stub modules. `make`: builds one rank's
    updater; by default `Class(args, model, weights_getter, model_name=, quantization_config=)`.
    """

    capabilities: frozenset[str] = frozenset()
    receiver: Receiver = "stock vllm 0.27"
    replace: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    stubs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    make: Callable[[type, Any], Any] | None = None

    def __post_init__(self) -> None:
        if unknown := self.capabilities - CAPABILITIES.keys():
            raise ValueError(f"unknown capabilities {sorted(unknown)}; there are: "
                             f"{'; '.join(f'{name}: {text}' for name, text in CAPABILITIES.items())}")

    def missing(self) -> list[str]:
        return [f"{name} ({text})" for name, text in CAPABILITIES.items() if name not in self.capabilities]
