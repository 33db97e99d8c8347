"""The actors of a job as RL frameworks lay it out: trainer ranks and rollout engines, each a Ray actor of its own."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from staged_sync.engines.in_process import InProcessEngine

JOIN_S = 60.0


class TrainerRank:
    """One Megatron rank: its model, and the updater as a trainer makes it."""

    def __init__(self, rank: int, world_size: int, store_file: str, *, pp: int, checkpoint: str) -> None:
        import torch.distributed as dist
        from megatron.core import parallel_state as mpu

        from harness.megatron_oracle import build_megatron_model, megatron_args
        from staged_sync import UpdateWeightFromDistributed

        dist.init_process_group("gloo", init_method=f"file://{store_file}", rank=rank, world_size=world_size,
                                timeout=timedelta(seconds=JOIN_S))
        mpu.initialize_model_parallel(1, pp)
        self._model = build_megatron_model(checkpoint)
        args = megatron_args(checkpoint, update_weight_buffer_size=1 << 17, update_weight_call_timeout=20.0,
                             update_weight_phase_timeout=40.0, update_weight_timeout=80.0)
        self._updater = UpdateWeightFromDistributed(args, self._model, None, model_name="qwen3", quantization_config=None)

    def connect(self, engines: list[Any], lock: Any, counts: list[int]) -> None:
        self._updater.connect_rollout_engines(engines, lock, engine_gpu_counts=counts)

    def update(self, checkpoint: str) -> dict[str, Any]:
        """An optimizer step that ends at `checkpoint`, and the sync."""
        from harness.megatron_oracle import load_step

        load_step(self._model, checkpoint)
        self._updater.update_weights()
        return {"version": self._updater.weight_version, "metrics": self._updater.pop_metrics(),
                "sends": [event.group for event in self._updater.trace.events if event.event == "send"]}


class RolloutEngine(InProcessEngine):
    """vLLM inside the actor, from config.json alone."""

    def __init__(self, config: str) -> None:
        os.environ["STAGED_SYNC_RECEIVER_PID"] = str(os.getpid())
        super().__init__(_llm(config, load_format="dummy", weight_transfer_config={"backend": "gloo"}))
        self._references: dict[str, Any] = {}

    def problems(self, checkpoint: str, prompts: list[list[int]]) -> list[str]:
        """What differs from `checkpoint`: bytes that arrived since the last call, and answers to prompts."""
        (arrived,) = self.llm.collective_rpc("probe_arrived", args=(checkpoint,))
        self.llm.collective_rpc("probe_forget", args=(False,))
        if checkpoint not in self._references:
            llm = _llm(checkpoint, load_format="auto", weight_transfer_config={"backend": "gloo"})
            self._references[checkpoint] = InProcessEngine(llm)
        same = self.generate(prompts) == self._references[checkpoint].generate(prompts)
        return arrived.comparison.problems + ([] if same else ["other tokens or logprobs than an engine of the checkpoint"])


class Lock:
    """vime's lock around a bucket."""

    def __init__(self) -> None:
        self._held = False

    def acquire(self) -> bool:
        free, self._held = not self._held, True
        return free

    def release(self) -> None:
        assert self._held
        self._held = False

    def is_held(self) -> bool:
        return self._held


def _llm(path: str, **options: Any) -> Any:
    from vllm import LLM

    from harness.world.worker_probe import EXTENSION
    from staged_sync.vllm.plugin import register

    register()
    return LLM(str(Path(path)), skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, dtype="bfloat16",
               num_gpu_blocks_override=64, use_tqdm_on_load=False, worker_extension_cls=EXTENSION, **options)
