"""Dense and mixture-of-experts engines in one process: vLLM makes its parallel groups for the first engine only."""

from __future__ import annotations

import torch.distributed as dist


def admit_experts() -> None:
    """To be called after an engine has been built: make the expert parallel group that a dense first engine leaves out, as vLLM
    itself would (vllm/distributed/parallel_state.py, `initialize_model_parallel`: the ranks of the tensor parallel group)."""
    from vllm.distributed import parallel_state

    if parallel_state._EP is not None:
        return
    tp, world = parallel_state.get_tp_group(), parallel_state.get_world_group()
    parallel_state._EP = parallel_state.init_model_parallel_group(
        [tp.ranks], world.local_rank, dist.get_backend(world.device_group), group_name="ep")
