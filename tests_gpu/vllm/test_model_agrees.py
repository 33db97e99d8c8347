"""The simulator's receiver is vLLM's: the same table of scenarios, asked of a real worker (harness/sim/agreement.py)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.checkpoints import read_checkpoint
from harness.sim.agreement import OK, TABLE, Agreed
from staged_sync.seam import Wire
from staged_sync.vllm import abandon
from tests_gpu.vllm.conftest import PROMPTS
from tests_gpu.vllm.source import DEADLINE_S, Receiver, dial, update, wait

pytestmark = pytest.mark.beyond_main_job

Reference = Callable[[Path], list[dict[str, list[Any]]]]


class RealDriver:
    """The table's driver for an engine in this process."""

    def __init__(self, receiver: Receiver, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self._receiver = receiver
        self._groups: list[Any] = []

    def ask(self, method: str, **kwargs: Any) -> str:
        return _answer(getattr(self._receiver.handle, method).remote(**kwargs))

    def open(self, name: str, *, packed: bool = False) -> Any:
        listener, opening, calls = dial([self._receiver], name, Wire("gloo", packed, 1 << 16))
        try:
            group = wait(opening, *calls)[0]
        finally:
            listener.close()
        self._groups.append(group)
        return group

    def update(self, group: Any, names: Sequence[str], tensors: Sequence[torch.Tensor], *, dtypes: Sequence[Any] | None = None,
               shapes: Sequence[Any] | None = None, packed: bool = False, sends: bool = True) -> str:
        reply = self._receiver.handle.update_weights_from_distributed.remote(
            names=list(names), dtypes=[t.dtype for t in tensors] if dtypes is None else dtypes,
            shapes=[tuple(t.shape) for t in tensors] if shapes is None else shapes, group_name="any", packed=packed)
        if group is not None and sends:
            group.send([tensor.contiguous() for tensor in tensors])
        return _answer(reply)

    def close(self, group: Any) -> None:
        group.close(timeout_s=5)

    def leave(self) -> None:
        for group in self._groups:
            group.close(timeout_s=5)


def _answer(call: Any) -> str:
    try:
        call.result(DEADLINE_S)
    except Exception as error:
        return f"{error} {error.__cause__ or ''}"
    return OK


@pytest.fixture
def driver(engine: Receiver, checkpoint: Path) -> Iterator[RealDriver]:
    """The shared engine, whole and without a group; the same afterwards."""
    tensors = read_checkpoint(checkpoint)
    found = RealDriver(engine, tensors)
    yield found
    found.leave()
    found.ask(abandon.METHOD, **abandon.request())
    found.ask("destroy_weights_update_group", group_name=_group_of(engine))
    update(engine, tensors, "whole")


def _group_of(receiver: Receiver) -> str:
    return str(receiver.ask("get_weight_transfer_info")["group_name"])


@pytest.mark.parametrize("agreed", TABLE, ids=lambda agreed: agreed.name)
def test_a_real_worker_ends_every_step_as_the_simulated_one(agreed: Agreed, driver: RealDriver, engine: Receiver,
                                                           checkpoint: Path, reference: Reference) -> None:
    said = agreed.steps(driver)
    assert len(said) == len(agreed.expects)
    for answer, expected in zip(said, agreed.expects, strict=True):
        assert re.search(expected, answer), f"'{answer}' is not '{expected}'"
    if not engine.engine.is_paused() and agreed.expects[-1] == OK:
        assert engine.engine.generate(PROMPTS) == reference(checkpoint)
