"""As before staged sync: every pipeline stage's source opens a transfer group of its own when it connects, and keeps it.

Written the way public code is: it imports megatron, ray and vllm, calls them without deadlines, and knows nothing of a simulator.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import ray
import torch
import torch.distributed as dist
from megatron.core import mpu
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine

NamedTensor = tuple[str, torch.Tensor]


def get_gloo_group() -> Any:
    """The training framework's own gloo group."""
    raise NotImplementedError("made by the framework")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def hf_tensors(args: Any, model: Sequence[torch.nn.Module]) -> Iterator[NamedTensor]:
    """Gathered and converted parameters of this rank's stage."""
    raise NotImplementedError("made by the framework")


class UpdateWeightFromDistributed:
    def __init__(self, args: Any, model: Sequence[torch.nn.Module], weights_getter: Any, *, model_name: str,
                 quantization_config: Any) -> None:
        self.args = args
        self.model = model
        self.weight_version = 0
        self.group: Any = None

    def is_source(self) -> bool:
        return mpu.get_data_parallel_rank(with_context_parallel=True) == 0 and mpu.get_tensor_model_parallel_rank() == 0

    # --- transfer groups ------------------------------------------------------------------------------------------------
    def connect_rollout_engines(self, rollout_engines: Sequence[Any], rollout_engine_lock: Any,
                                engine_gpu_counts: Sequence[int] | None = None,
                                engine_gpu_offsets: Sequence[int] | None = None) -> None:
        self.engines, self.lock = rollout_engines, rollout_engine_lock
        self.counts = list(engine_gpu_counts or [self.args.rollout_num_gpus_per_engine] * len(rollout_engines))
        self.group_name = f"vime-pp_{mpu.get_pipeline_model_parallel_rank()}"
        if self.is_source():
            self.open_group()

    def open_group(self) -> None:
        address, port = ray.util.get_node_ip_address(), free_port()
        world_size, offset, references = 1 + sum(self.counts), 1, []
        for engine, count in zip(self.engines, self.counts, strict=True):
            references.append(engine.init_weights_update_group.remote(
                master_address=address, master_port=port, rank_offset=offset, world_size=world_size,
                group_name=self.group_name, backend="nccl"))
            offset += count
        self.group = NCCLWeightTransferEngine.trainer_init(
            {"master_address": address, "master_port": port, "world_size": world_size, "group_name": self.group_name})
        self.get(references)

    def close_group(self) -> None:
        dist.destroy_process_group(self.group)
        self.group = None

    # --- an update ------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def update_weights(self) -> None:
        self.weight_version += 1
        if dist.get_rank() == 0:
            self.begin()
        dist.barrier(group=get_gloo_group())
        self.send_all()
        if dist.get_rank() == 0:
            self.finish()
        dist.barrier(group=get_gloo_group())

    def begin(self) -> None:
        self.get([engine.pause_generation.remote() for engine in self.engines])
        self.get([engine.flush_cache.remote() for engine in self.engines])
        self.get([engine.start_weight_update.remote(is_checkpoint_format=True) for engine in self.engines])

    def finish(self) -> None:
        self.get([engine.finish_weight_update.remote() for engine in self.engines])
        self.get([engine.continue_generation.remote() for engine in self.engines])

    def send_all(self) -> None:
        self.send_stage()
        dist.barrier(group=get_gloo_group())

    def send_stage(self) -> None:
        """Every rank of the stage iterates, because gathers need it; its source sends."""
        for bucket in self.buckets():
            if self.is_source():
                self.send_bucket(bucket)

    def buckets(self) -> Iterator[list[NamedTensor]]:
        bucket: list[NamedTensor] = []
        size = 0
        for name, tensor in self.exported():
            if bucket and size + tensor.numel() * tensor.element_size() > self.args.update_weight_buffer_size:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, tensor))
            size += tensor.numel() * tensor.element_size()
        if bucket:
            yield bucket

    def exported(self) -> Iterator[NamedTensor]:
        return hf_tensors(self.args, self.model)

    def send_bucket(self, bucket: list[NamedTensor]) -> None:
        while not self.get(self.lock.acquire.remote()):
            time.sleep(0.1)  # noqa: TID251 (as public code does)
        self.broadcast(bucket)
        self.get(self.lock.release.remote())

    def broadcast(self, bucket: list[NamedTensor]) -> None:
        references = [engine.update_weights_from_distributed.remote(**self.announced(bucket)) for engine in self.engines]
        NCCLWeightTransferEngine.trainer_send_weights(iter(bucket), NCCLTrainerSendWeightsArgs(
            group=self.group, packed=self.args.vllm_weight_sync_packed,
            packed_buffer_size_bytes=self.args.update_weight_packed_buffer_size))
        self.get(references)

    def announced(self, bucket: list[NamedTensor]) -> dict[str, Any]:
        return {"names": [name for name, _ in bucket], "dtypes": [tensor.dtype for _, tensor in bucket],
                "shapes": [tuple(tensor.shape) for _, tensor in bucket], "group_name": self.group_name,
                "packed": self.args.vllm_weight_sync_packed, "weight_version": str(self.weight_version)}

    def get(self, references: Any) -> Any:
        return ray.get(references)
