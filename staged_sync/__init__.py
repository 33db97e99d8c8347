"""Weight sync from a Megatron trainer to vLLM rollout engines, one pipeline stage at a time. See README.md."""

from staged_sync.errors import (
    CompletenessError,
    ConfigurationError,
    DeadlineExceeded,
    EngineError,
    StagedSyncError,
    UpdateFailed,
)
from staged_sync.functions import (
    connect_rollout_engines_from_distributed,
    disconnect_rollout_engines_from_distributed,
    update_weights_from_distributed,
)
from staged_sync.update_weight import UpdateWeightFromDistributed

__all__ = [
    "CompletenessError",
    "ConfigurationError",
    "DeadlineExceeded",
    "EngineError",
    "StagedSyncError",
    "UpdateFailed",
    "UpdateWeightFromDistributed",
    "connect_rollout_engines_from_distributed",
    "disconnect_rollout_engines_from_distributed",
    "update_weights_from_distributed",
]
