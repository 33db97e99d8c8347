"""Weight-transfer back end `gloo`: vLLM's own NCCL receiver, for engines that run on CPUs.

Subclasses vllm/distributed/weight_transfer/nccl_engine.py, `NCCLWeightTransferEngine` (0.29+), and replaces only what needs
CUDA: the communicator, and the receive loop with its streams. The session's lifecycle (layerwise reload) and the single slot
`model_update_group`, which every init overwrites, stay vLLM's own. Select it with
`weight_transfer_config={"backend": "gloo"}`; `staged_sync.vllm.plugin` registers it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

from staged_sync.errors import TransportError
from staged_sync.exporter import NamedTensor, TensorMeta
from staged_sync.vllm import api, cpu_repairs, reload
from staged_sync.vllm.gloo_group import GlooReceiver, Terms


@dataclass(kw_only=True)
class GlooInitInfo(NCCLWeightTransferInitInfo):
    """vLLM's NCCL init info and what this back end adds: a name for error texts, and bounds in seconds for joining and for
    receiving one tensor or chunk (a source that has died is noticed at once; this is for one that is stuck)."""

    group_name: str = "unnamed"
    timeout_s: float = 120.0
    receive_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if self.nccl_unique_id_b64 is not None:
            raise ValueError("back end gloo meets at master_address and master_port; it has no use for an NCCL unique id")
        super().__post_init__()

    def terms(self) -> Terms:
        return Terms(self.group_name, self.world_size, self.packed, self.packed_buffer_size_bytes)


class GlooWeightTransferEngine(NCCLWeightTransferEngine):
    """Receives over gloo. One group at a time: an init destroys the group it replaces, before it joins the new one."""

    init_info_cls = GlooInitInfo
    update_info_cls = NCCLWeightTransferUpdateInfo

    on_receive: ClassVar[list[OnReceive]] = []
    """Hooks for test harnesses, called on the worker with what arrived, before it is loaded: once per broadcast. They must
    copy what they keep."""

    model_update_group: GlooReceiver | None

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        """Raises UnsupportedVllm or cpu_repairs.Unrepaired where an update could not make this engine right."""
        super().__init__(config, vllm_config, device, model)
        api.installed()
        cpu_repairs.prepare(model)

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the source's group. Raises TransportError, bounded by `init_info.timeout_s`; no group is held then."""
        self._drop_group()
        assert init_info.master_address is not None and init_info.master_port is not None  # NCCLWeightTransferInitInfo checks
        self.model_update_group = GlooReceiver.join(
            init_info.master_address, init_info.master_port, self._group_rank(init_info.rank_offset), init_info.terms(),
            timeout_s=init_info.timeout_s, receive_timeout_s=init_info.receive_timeout_s)

    def start_weight_update(self) -> None:
        reload.roll_back(self.model)
        cpu_repairs.make_room(self.model)
        super().start_weight_update()

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive one bucket and load it. Raises RuntimeError before any init, TransportError where the source is gone."""
        if self.model_update_group is None:
            raise RuntimeError(f"{type(self).__name__} holds no transfer group: init_weight_transfer_engine must come first, "
                               f"and a failed one leaves no group")
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        with disable_mtp_completeness_check():
            for tensors in self.model_update_group.receive(_metas(update_info)):
                for hook in self.on_receive:
                    hook(self, self.model_update_group, tensors)
                self.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        cpu_repairs.repair(self.model)

    def _drop_group(self) -> None:
        if self.model_update_group is not None:
            self.model_update_group.destroy()
            self.model_update_group = None

    def _group_rank(self, rank_offset: int) -> int:
        """This worker's rank in the transfer group (vllm nccl_common.py, `worker_init_process_group`)."""
        parallel = self.parallel_config
        return rank_offset + int(parallel.data_parallel_index) * int(parallel.world_size) + int(parallel.rank)


class RetainingGlooWeightTransferEngine(GlooWeightTransferEngine):
    """Back end `gloo_retain`: keeps every replaced group open, as the stock NCCL back end does. For showing what that costs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.retained: list[GlooReceiver] = []

    def _drop_group(self) -> None:
        if self.model_update_group is not None:
            self.retained.append(self.model_update_group)
            self.model_update_group = None

    def shutdown(self) -> None:
        super().shutdown()
        for group in self.retained:
            group.destroy()
        self.retained.clear()


OnReceive: TypeAlias = Callable[[GlooWeightTransferEngine, GlooReceiver, list[NamedTensor]], None]
"""Back end (`parallel_config` tells the worker), group (`terms.name`, `rank`), names and tensors of one broadcast."""


def _metas(update_info: NCCLWeightTransferUpdateInfo) -> list[TensorMeta]:
    metas = []
    for name, dtype_name, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise TransportError(f"tensor {name!r} is announced with dtype {dtype_name!r}, which torch does not know")
        metas.append(TensorMeta(name, dtype, tuple(shape)))
    return metas
