"""In slime's manner: a torch.distributed group per stage with a name of its own, all stages at once, one asynchronous broadcast
per tensor, and engines that look at the name."""

from __future__ import annotations

from typing import Any

import ray
import torch
import torch.distributed as dist

from harness.foreign.examples import old_style


def init_process_group(backend: str, init_method: str, world_size: int, rank: int, group_name: str) -> Any:
    """A group beside the default one; public code carries a copy of torch's."""
    raise NotImplementedError("made by the framework")


class UpdateWeightFromDistributed(old_style.UpdateWeightFromDistributed):
    def open_group(self) -> None:
        address, port = ray.util.get_node_ip_address(), old_style.free_port()
        world_size, offset, references = 1 + sum(self.counts), 1, []
        for engine, count in zip(self.engines, self.counts, strict=True):
            references.append(engine.init_weights_update_group.remote(
                master_address=address, master_port=port, rank_offset=offset, world_size=world_size,
                group_name=self.group_name, backend="nccl"))
            offset += count
        self.group = init_process_group("nccl", f"tcp://{address}:{port}", world_size, 0, self.group_name)
        ray.get(references)

    @torch.no_grad()
    def update_weights(self) -> None:
        self.weight_version += 1
        if dist.get_rank() == 0:
            ray.get([engine.pause_generation.remote() for engine in self.engines])
            ray.get([engine.flush_cache.remote() for engine in self.engines])
        dist.barrier(group=old_style.get_gloo_group())
        self.send_all()
        if dist.get_rank() == 0:
            ray.get([engine.continue_generation.remote() for engine in self.engines])
        dist.barrier(group=old_style.get_gloo_group())

    def send_bucket(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        references = [engine.update_weights_from_distributed.remote(
            names=[name for name, _ in bucket], dtypes=[tensor.dtype for _, tensor in bucket],
            shapes=[tuple(tensor.shape) for _, tensor in bucket], group_name=self.group_name,
            weight_version=str(self.weight_version)) for engine in self.engines]
        handles = [dist.broadcast(tensor, 0, group=self.group, async_op=True) for _, tensor in bucket]
        for handle in handles:
            handle.wait()
        ray.get(references)
