"""What the real seam finds out by itself when it is made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from staged_sync.live_seam import LiveSeam

EMPTY, ON_CPU = nn.Module(), nn.Linear(2, 2)
ON_CUDA: Any = SimpleNamespace(parameters=lambda: [SimpleNamespace(device=torch.device("cuda", 3))])


@pytest.mark.parametrize(("chunks", "cuda", "backend"), [
    ([ON_CPU], True, "gloo"), ([EMPTY, ON_CPU], True, "gloo"), ([ON_CUDA], True, "nccl"), ([EMPTY, ON_CUDA], True, "nccl"),
    ([EMPTY], True, "nccl"), ([], True, "nccl"), ([EMPTY, EMPTY], False, "gloo"), ([], False, "gloo"),
])
def test_the_wire_follows_the_parameters_and_without_any_the_machine(
        chunks: list[nn.Module], cuda: bool, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage may be empty; its rank must not tell the others that the trainer is on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert LiveSeam(chunks).backend == backend
