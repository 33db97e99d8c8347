"""Rolling back what an abandoned session left in vLLM's layerwise reload (vllm/model_executor/model_loader/reload/layerwise.py).

A session that is abandoned leaves its unfinished layers on the meta device, with the weights they had received so far and a
count of their elements. The next `initialize_layerwise_reload` skips such layers, so that the next session's weights are
counted on top: a half-filled fused layer is taken for complete after, say, k, k and q, with v left to chance. With CPU-packed
weights the next update then fails (ran on 0.32.0); where it does not, the layer is right by luck only.
"""

from __future__ import annotations

import torch


def roll_back(model: torch.nn.Module) -> int:
    """Give every layer that a former session left unfinished its old tensors back, and forget what it had received.

    To be called right before a new session begins, not when the old one fails: until then the meta tensors keep vLLM from
    serving a mixture. Returns how many layers were rolled back; 0 after a session that was finished.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    unfinished = 0
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
            info.reset()
            unfinished += 1
    return unfinished
