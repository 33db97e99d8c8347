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


def get_gloo_group() -> Any:
    """The training framework's own gloo group."""
    raise NotImplementedError("made by the framework")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def hf_tensors(args: Any, model: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Gathered and converted parameters of this rank's stage."""
    raise NotImplementedError("made by the framework")


class UpdateWeightFromDistributed:
    def __init__(self, args: Any, model: Sequence[torch.nn.Module], weights_getter: Any, *, model_name: str,
                 quantization_config: Any) -> None:
        self.args = args
        self.model = model
        self.weight_version = 0
        self.group: Any = None

    def connect_rollout_engines(self, rollout_engines: Sequence[Any], rollout_engine_lock: Any,
                                engine_gpu_counts: Sequence[int] | None = None,
                                engine_gpu_offsets: Sequence[int] | None = None) -> None:
        self.engines, self.lock = rollout_engines, rollout_engine_lock
        self.counts = list(engine_gpu_counts or [self.args.rollout_num_gpus_per_engine] * len(rollout_engines))
        self.is_source = mpu.get_data_parallel_rank(with_context_parallel=True) == 0 and mpu.get_tensor_model_parallel_rank() == 0
        self.group_name = f"vime-pp_{mpu.get_pipeline_model_parallel_rank()}"
        if self.is_source:
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
        ray.get(references)

    def close_group(self) -> None:
        dist.destroy_process_group(self.group)
        self.group = None

    @torch.no_grad()
    def update_weights(self) -> None:
        self.weight_version += 1
        if dist.get_rank() == 0:
            ray.get([engine.pause_generation.remote() for engine in self.engines])
            ray.get([engine.flush_cache.remote() for engine in self.engines])
            ray.get([engine.start_weight_update.remote(is_checkpoint_format=True) for engine in self.engines])
        dist.barrier(group=get_gloo_group())
        self.send_all()
        if dist.get_rank() == 0:
            ray.get([engine.finish_weight_update.remote() for engine in self.engines])
            ray.get([engine.continue_generation.remote() for engine in self.engines])
        dist.barrier(group=get_gloo_group())

    def send_all(self) -> None:
        if self.is_source:
            self.send_stage()
        dist.barrier(group=get_gloo_group())

    def send_stage(self) -> None:
        bucket: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, tensor in hf_tensors(self.args, self.model):
            if bucket and size + tensor.numel() * tensor.element_size() > self.args.update_weight_buffer_size:
                self.send_bucket(bucket)
                bucket, size = [], 0
            bucket.append((name, tensor))
            size += tensor.numel() * tensor.element_size()
        if bucket:
            self.send_bucket(bucket)

    def send_bucket(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        while not ray.get(self.lock.acquire.remote()):
            time.sleep(0.1)  # noqa: TID251 (as public code does)
        references = [engine.update_weights_from_distributed.remote(
            names=[name for name, _ in bucket], dtypes=[tensor.dtype for _, tensor in bucket],
            shapes=[tuple(tensor.shape) for _, tensor in bucket], group_name=self.group_name,
            weight_version=str(self.weight_version), packed=self.args.vllm_weight_sync_packed) for engine in self.engines]
        NCCLWeightTransferEngine.trainer_send_weights(iter(bucket), NCCLTrainerSendWeightsArgs(
            group=self.group, packed=self.args.vllm_weight_sync_packed,
            packed_buffer_size_bytes=self.args.update_weight_packed_buffer_size))
        ray.get(references)
        ray.get(self.lock.release.remote())
