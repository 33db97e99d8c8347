"""Bridge export: all ranks iterate, because the iterator is a collective over the pipeline; rank 0 keeps one group and sends."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from megatron.bridge import AutoBridge

from harness.foreign.examples import old_style


class UpdateWeightFromDistributed(old_style.UpdateWeightFromDistributed):
    def is_source(self) -> bool:
        return dist.get_rank() == 0

    def exported(self) -> Iterator[old_style.NamedTensor]:
        bridge = AutoBridge.from_hf_pretrained(self.args.hf_checkpoint)
        yield from bridge.export_hf_weights(self.model, cpu=False)
