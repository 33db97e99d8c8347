"""What a foreign implementation needs said about it: a few lines, in a file of its owner."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.sim.scenario import Receiver

CAPABILITIES = {
    "session": "start_weight_update and finish_weight_update are used",
    "deferral": "one stage after the other opens its group (pipeline parallel > 1 with receivers that hold one group)",
    "packed": "packed streams (args.vllm_weight_sync_packed)",
    "moe": "experts are exported and gathered in the expert groups",
    "bridge": "bridge export (args.megatron_to_hf_mode = \"bridge\")",
    "deadlines": "no wait is without a time-out, and a failure on any rank or engine is raised on every rank",
    "recovery": "after a failure, connect_rollout_engines and update_weights make every engine exact again",
}

TORCH_TIMEOUT_S = 1800.0
"""torch's default time-out of a collective."""


@dataclass(frozen=True)
class Adapter:
    """`replace`: what the implementation imports from its own tree and cannot have here, by dotted path: its gloo group getter
    (`harness.foreign.dist.gloo_group`), its free-port function (`harness.foreign.model.free_port`), its converter or parameter
    iterator (`harness.foreign.model.named_tensors`, …). `stubs`: contents of more stub modules. `make`: builds one rank's
    updater; by default `Class(args, model, weights_getter, model_name=, quantization_config=)`.

    `patience_s`: with `deadlines`, how long after the beginning of an update that fails a rank may still wait, in seconds of
    virtual time: its time-outs that can follow each other, added up. `group_timeout_s`: of the trainer's own process groups.
    """

    capabilities: frozenset[str] = frozenset()
    receiver: Receiver = "stock vllm 0.27"
    replace: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    stubs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    make: Callable[[type, Any], Any] | None = None
    patience_s: float | None = None
    group_timeout_s: float = TORCH_TIMEOUT_S

    def __post_init__(self) -> None:
        if unknown := self.capabilities - CAPABILITIES.keys():
            raise ValueError(f"unknown capabilities {sorted(unknown)}; there are: "
                             f"{'; '.join(f'{name}: {text}' for name, text in CAPABILITIES.items())}")
        if ("deadlines" in self.capabilities) != (self.patience_s is not None):
            raise ValueError(f"patience_s belongs to the capability deadlines: after how many seconds no rank may wait any more, "
                             f"and None without it (got {self.patience_s})")
        if self.patience_s is not None and not 0 < self.patience_s < math.inf:
            raise ValueError(f"patience_s must be positive and finite, in seconds (got {self.patience_s})")
        if self.capabilities >= {"recovery"} and "deadlines" not in self.capabilities:
            raise ValueError("recovery needs deadlines: a rank that waits for ever never gets to its next update")
