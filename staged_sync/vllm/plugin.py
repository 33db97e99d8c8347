"""Entry point `vllm.general_plugins`: vLLM calls `register` in every one of its processes."""

from __future__ import annotations

BACKENDS = {"gloo": "GlooWeightTransferEngine", "gloo_retain": "RetainingGlooWeightTransferEngine"}
"""Names for `weight_transfer_config={"backend": ...}`, and the classes of `staged_sync.vllm.gloo_engine` behind them."""


def register() -> None:
    """Make our weight-transfer back ends known to vLLM. Idempotent; imports the back ends only when they are used."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    for name, class_name in BACKENDS.items():
        # vLLM raises for a name it knows, and offers no public way to ask
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, "staged_sync.vllm.gloo_engine", class_name)
