"""In slime's manner: a torch.distributed group per stage with a name of its own, all stages at once, one asynchronous broadcast
per tensor, and engines that look at the name."""

from __future__ import annotations

from typing import Any

import ray
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
        self.group = init_process_group(backend="nccl", init_method=f"tcp://{address}:{port}", world_size=world_size, rank=0,
                                        group_name=self.group_name)
        self.get(references)

    def begin(self) -> None:
        self.get([engine.pause_generation.remote() for engine in self.engines])
        self.get([engine.flush_cache.remote() for engine in self.engines])

    def finish(self) -> None:
        self.get([engine.continue_generation.remote() for engine in self.engines])

    def send_bucket(self, bucket: list[old_style.NamedTensor]) -> None:
        references = [engine.update_weights_from_distributed.remote(**self.announced(bucket)) for engine in self.engines]
        handles = [dist.broadcast(tensor, 0, group=self.group, async_op=True) for _, tensor in bucket]
        for handle in handles:
            handle.wait()
        self.get(references)
