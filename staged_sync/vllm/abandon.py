"""Abandoning an open weight-update session without communication: the one place that knows how.

vLLM has no call for it: `start` says "already active", `shutdown` is refused, and `finish` after an incomplete session
answers OK with old weights or uninitialised memory in half-filled layers. What works (ran on 0.32.0): an update that is
rejected *while it is parsed*. The worker parses before it receives (vllm/distributed/weight_transfer/base.py,
`WeightTransferEngine.update_weights`) and clears its session when an update raises (vllm/v1/worker/gpu_worker.py,
`update_weights`). So we announce one name with no dtype and no shape
(vllm/distributed/weight_transfer/nccl_engine.py, `NCCLWeightTransferUpdateInfo.__post_init__`).

Afterwards the parameters may still be on the meta device: the engine must not generate until a complete session has run.
And vLLM still counts what the abandoned session had brought for layers that it left half-filled, on top of which the next
session's weights would come (staged_sync/vllm/reload.py): our back ends roll that back when a session starts. For stock back
ends, start and finish an empty session before the next real one, as `staged_sync.engines.in_process` does.

    reply = engine.update_weights_from_distributed(**abandon.request())
    trouble = abandon.objection(reply or the exception it raised)
"""

from __future__ import annotations

from typing import Any

METHOD = "update_weights_from_distributed"
"""The engine method, of vime's names, that carries the rejected update."""

_NAME = "staged-sync.abandon"
_REJECTED = "should be of the same size as `names`"
_NO_SESSION = "start_weight_update must be called before update_weights"


def request() -> dict[str, Any]:
    """Keyword arguments for `METHOD`: an update that every vLLM rejects while it parses it, before it receives a byte."""
    return {"names": [_NAME], "dtypes": [], "shapes": [], "group_name": _NAME, "packed": False}


def is_request(names: list[str]) -> bool:
    """Whether an engine adapter is looking at an abandon request, which its own checks must let through to vLLM."""
    return list(names) == [_NAME]


def objection(outcome: Any) -> str | None:
    """What speaks against the session being gone, given what `METHOD` returned or the exception it raised; None if nothing.

    Rejected as expected, and "there was no session", both mean that none is open now. An update that was *accepted*, or that
    failed in another way, means that the engine's state is unknown: replace it.
    """
    if not isinstance(outcome, BaseException):
        return f"the engine accepted an update that it should have rejected (it answered {outcome!r}); its state is unknown"
    text = _chain_text(outcome)
    if _REJECTED in text or _NO_SESSION in text:
        return None
    return f"the session could not be abandoned: {type(outcome).__name__}: {outcome}"


def _chain_text(error: BaseException) -> str:
    """The texts of an error and of its causes: control planes wrap the engine's error in their own."""
    texts, seen = [], set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        texts.append(str(current))
        current = current.__cause__ or current.__context__
    return "\n".join(texts)
