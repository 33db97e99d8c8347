"""Bridge export when something is wrong: wrong contracts, exporters that fail, ranks out of step, names that do not fit."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.faults import Faults
from harness.recording.bridge import StubBridge, bridge
from harness.recording.job import MakeExporter, RecordingJob
from harness.recording.log import assert_story, calls
from harness.recording.model import StubUnit, Table, small_table, write_checkpoint
from harness.recording.world import RankContext, RunResult
from staged_sync.errors import ConfigurationError
from staged_sync.exporter import TensorMeta
from tests_cpu.recording.failing import (
    DEADLINES,
    GRACE_S,
    PHASE_S,
    assert_none,
    failing_job,
    problems_after,
    problems_of_engines_at_rest,
    problems_of_recovery,
)
from tests_cpu.recording.test_rank_faults import absorbed, fail_everywhere, has_just_been_agreed

COLLECTIVE = bridge("pipeline_collective")
UNCOUPLED = bridge("pipeline_collective", ())
"""All ranks must iterate, but nothing inside makes one wait for another."""


def job(faults: Faults | None = None, *, make: MakeExporter = COLLECTIVE, **layout: Any) -> RecordingJob:
    """Four tensors, two of each stage, each a bucket of its own."""
    return failing_job(faults or Faults(), expert=0, make_exporter=make, **{"pp": 2, **layout})


def stub(run: RecordingJob, rank: int) -> StubBridge:
    exporter = run.exporters[rank]
    assert isinstance(exporter, StubBridge)
    return exporter


def raising(step: str, what: str) -> Callable[[str, str], None]:
    """Raises the first time that `step` comes to `what`."""
    left = [1]

    def before(now: str, label: str) -> None:
        if (now, label) == (step, what) and left:
            left.pop()
            raise ValueError(f"cannot {step} {what}")
    return before


# --- declared wrongly -----------------------------------------------------------------------------------------------------

WRONG = "exporter declared stage_local but behaves as pipeline-collective"


@pytest.mark.parametrize(("group_timeout_s", "first"), [
    (60.0, "rank 0 (phase send, stage 0): GatherError: the stub bridge failed at item 0"),
    (3 * PHASE_S, "(status barrier 'stage 0 exported'): RanksAbsent"),
], ids=["the export times out first", "the others give up first"])
def test_a_collective_declared_stage_local_is_told_in_time_and_called_by_its_name(group_timeout_s: float, first: str) -> None:
    """Stage 0 iterates alone and waits inside the export for stage 1, which waits for it in a barrier."""
    with job(make=bridge("stage_local", ("pp", "tp"), group_timeout_s=group_timeout_s)) as run:
        run.connect().check()
        result = run.update()
        assert first in str(result.errors[1]) and WRONG in str(result.errors[1]), str(result.errors[1])
        assert WRONG in str(result.errors[0])
        assert_none(problems_of_engines_at_rest(run))
        others = next(event for event in result.events if event.rank == 1 and event.event.startswith("barrier.")
                      and event.detail == "stage 0 exported")
        assert others.time_s == min(group_timeout_s, PHASE_S + GRACE_S)
        assert result.elapsed_s <= max(group_timeout_s, PHASE_S + GRACE_S) + 2 * GRACE_S


def test_ranks_that_declare_different_contracts_are_refused_at_connect() -> None:
    def make(context: RankContext, run: RecordingJob) -> StubBridge:
        return (bridge("stage_local", ("tp",)) if context.rank == 1 else COLLECTIVE)(context, run)  # type: ignore[return-value]

    with job(make=make) as run:
        result = run.connect()
        assert {type(error) for error in result.errors.values()} == {ConfigurationError} and len(result.errors) == 2
        assert ("must be the same on all ranks (got pipeline_collective model on rank 0; stage_local stage on rank 1)"
                in str(result.errors[0]))


def test_a_stage_local_export_that_does_not_say_its_names_is_refused_at_connect() -> None:
    with job(make=bridge("stage_local", ("tp",))) as run:
        for rank in (0, 1):
            object.__setattr__(stub(run, rank)._export, "names", None)
        result = run.connect()
        assert all("must say which HF names this stage will yield" in str(error) for error in result.errors.values())
        assert len(result.errors) == 2


# --- draining and ending --------------------------------------------------------------------------------------------------

def test_a_source_that_cannot_convert_goes_on_iterating_and_sends_nothing() -> None:
    """All in one bucket, so there is nothing to meet at before the end of the export: it is drained to the end."""
    with RecordingJob(table=small_table(2, dense=2), pp=2, make_exporter=COLLECTIVE, args=DEADLINES) as run:
        run.connect().check()
        stub(run, 0).before = raising("convert", "item 1")
        result = run.update()
        assert_none(problems_after(run, result, "rank 0 (phase send, stage 0): ValueError: cannot convert item 1", limit_s=0))
        source = calls(result.events, 0)
        assert_story(source[source.index("barrier started"):], [
            "barrier started",
            "gather export stage=0 item 0",
            "gather export stage=0 item 1",
            "error stage=0 ValueError: cannot convert item 1",
            "close vime-pp_0 stage=0",
            "gather export stage=0 item 2",
            "gather export stage=0 item 3",
            "gather export stage=0 item 4",
            "barrier stage=0 model exported",
            "rpc stage=0 update_weights_from_distributed engine0",  # as the lead, it abandons the session
        ])
        peer = calls(result.events, 1)
        assert_story(peer[peer.index("barrier started"):], [
            "barrier started",
            "gather export stage=0 item 0",
            "gather export stage=0 item 1",
            "gather export stage=0 item 2",
            "gather export stage=0 item 3",
            "gather export stage=0 item 4",
            "barrier stage=0 model exported",
        ])
        assert_none(problems_of_recovery(run))


def test_a_bucket_that_fails_ends_the_export_on_all_ranks_before_the_next_one() -> None:
    """The engine refuses bucket 0 of 4: nobody iterates a model that nobody will get."""
    faults = Faults().engine_error(engine=0, method="update_weights_from_distributed")
    with job(faults, tp=2) as run:
        run.connect().check()
        result = run.update()
        assert_none(problems_after(run, result, "rollout engine 0 failed in update_weights_from_distributed", limit_s=GRACE_S))
        for rank in range(4):
            gathered = [line for line in calls(result.events, rank) if line.startswith("gather")]
            assert gathered == ["gather export stage=0 item 0", "gather export stage=0 item 1"], rank
        assert_none(problems_of_engines_at_rest(run) + problems_of_recovery(run))


def test_a_group_that_cannot_be_opened_anew_after_a_failure_does_not_leave_the_others_in_the_export() -> None:
    faults = (Faults().engine_error(engine=0, method="update_weights_from_distributed")
              .engine_error(engine=0, method="init_weights_update_group", nth=1))
    with job(faults, tp=2) as run:
        run.connect().check()
        run.update()
        result = run.update()
        assert_none(problems_after(run, result, "rollout engine 0 failed in init_weights_update_group", limit_s=GRACE_S))
        assert_none(problems_of_recovery(run))


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_an_iterator_that_raises_on_one_rank_is_heard_when_the_trainers_group_gives_up(rank: int) -> None:
    """Its peers are inside the export's next collective, which only the trainer's own group bounds (60 s here)."""
    with job(tp=2) as run:
        run.connect().check()
        stub(run, rank).before = raising("yield", "hf.s0.dense1")
        result = run.update()
        cause = f"rank {rank} (phase send, stage 0): GatherError: the stub bridge failed at item 1: ValueError: cannot yield"
        assert_none(problems_after(run, result, cause, limit_s=60))
        assert_none(problems_of_engines_at_rest(run))


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_that_fails_before_it_takes_an_item_takes_it_all_the_same(rank: int) -> None:
    """Planted where the trace notes the item, before the iterator is asked: nobody waits for anybody."""
    with job(tp=2) as run:
        run.connect().check()
        run.world.faults.fail_at(rank=rank, event="gather", nth=1)
        result = run.update()
        assert_none(problems_after(run, result, f"injected: rank {rank} at gather", limit_s=0))
        assert_none(problems_of_recovery(run))


def test_a_rank_that_dies_in_the_export_ends_every_other_rank_in_time() -> None:
    with job(Faults().rank_dies(rank=3, event="gather", nth=1), tp=2) as run:
        run.connect().check()
        result = run.update()
        assert_none(problems_after(run, result, "", limit_s=60 + PHASE_S + 2 * GRACE_S))


BOTH = {"pipeline_collective": COLLECTIVE, "stage_local": bridge("stage_local", ("tp",))}


@pytest.mark.parametrize("contract", BOTH)
def test_a_rank_that_raises_anywhere_is_heard_everywhere_and_the_next_update_is_exact(contract: str) -> None:
    def judge(run: RecordingJob, result: RunResult, text: str) -> list[str]:
        if absorbed(text) or has_just_been_agreed(text):
            return []
        found = problems_after(run, result, "injected: rank", limit_s=60 + PHASE_S + 2 * GRACE_S)
        return found + ([] if run.world.lost_a_gather_group else problems_of_recovery(run))

    assert_none(fail_everywhere(lambda run, rank, event, nth: run.world.faults.fail_at(rank=rank, event=event, nth=nth),
                                judge, pp=2, expert=0, make_exporter=BOTH[contract]))


@pytest.mark.parametrize("contract", BOTH)
def test_a_rank_that_dies_anywhere_ends_every_other_rank_in_time(contract: str) -> None:
    def judge(run: RecordingJob, result: RunResult, text: str) -> list[str]:
        return [] if has_just_been_agreed(text) else problems_after(run, result, "", limit_s=60 + 2 * PHASE_S + 2 * GRACE_S)

    assert_none(fail_everywhere(lambda run, rank, event, nth: run.world.faults.rank_dies(rank=rank, event=event, nth=nth),
                                judge, pp=2, expert=0, make_exporter=BOTH[contract]))


# --- in step --------------------------------------------------------------------------------------------------------------

def test_no_rank_runs_ahead_of_a_slow_source() -> None:
    """Nothing inside the export couples the ranks. When the source sends bucket b, item b + 1 has opened the next one, and
    nobody may have gone further."""
    with job(make=UNCOUPLED, tp=2) as run:
        run.connect().check()
        stub(run, 0).before = lambda step, what: run.world.contexts[0].seam.sleep(7.0) if step == "convert" else None
        result = run.update()
        ahead = []
        last: dict[int, int] = {}
        for event in result.events:
            if event.event == "gather" and event.rank is not None:
                last[event.rank] = int(event.detail.removeprefix("item "))
            if event.event == "send" and event.bucket is not None:
                ahead += [f"rank {rank} is at item {item} while bucket {event.bucket} is sent"
                          for rank, item in last.items() if item > event.bucket + 1]
        assert_none([*ahead, *(f"rank {rank}: {error}" for rank, error in result.errors.items())])
        assert run.differences() == []


def test_ranks_that_yield_different_things_are_told_apart_at_once() -> None:
    with job(make=UNCOUPLED) as run:
        run.connect().check()
        stub(run, 1).change = lambda metas: metas[:2]
        result = run.update()
        cause = ("OutOfStep: ranks [0] have exported 2 buckets; ranks [1] have ended. A pipeline-collective exporter must yield "
                 "the same tensors, in the same order, on every rank")
        assert_none(problems_after(run, result, cause, limit_s=0))
        stub(run, 1).change = list
        assert_none(problems_of_recovery(run))


def test_no_rank_holds_an_item_while_the_next_one_is_made() -> None:
    """Not the source either: what it sends is its own copy."""
    alive: list[weakref.ref[torch.Tensor]] = []
    held: list[str] = []

    def watched(exporter: StubBridge) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
        def begin() -> Iterator[tuple[str, torch.Tensor]]:
            mine: list[weakref.ref[torch.Tensor]] = []
            for name, tensor in exporter._begin():
                held.extend(f"an item is held when {name} comes" for ref in mine if ref() is not None)
                copy = tensor.clone()
                mine.append(weakref.ref(copy))
                yield name, copy
                del copy
            alive.extend(mine)
        return begin

    with job(tp=2) as run:
        run.connect().check()
        for rank in range(4):
            object.__setattr__(stub(run, rank)._export, "begin", watched(stub(run, rank)))
        run.update().check()
        assert_none(held)
        assert len(alive) == 16 and not any(ref() is not None for ref in alive)
        assert run.differences() == []


# --- completeness ---------------------------------------------------------------------------------------------------------

def everywhere(run: RecordingJob, change: Callable[[list[TensorMeta]], list[TensorMeta]]) -> None:
    for rank in range(run.world.layout.world_size):
        stub(run, rank).change = change


def renamed(meta: TensorMeta) -> TensorMeta:
    return TensorMeta("hf.unknown", meta.dtype, meta.shape)


@pytest.mark.parametrize(("change", "cause"), [
    (lambda metas: metas[:3], "stage 0 sent 3 tensors, announced 4 at connect; first offender: hf.s1.dense1"),
    (lambda metas: [*metas, metas[0]], "yields hf.s0.dense0 twice; only a tied embedding may come again"),
    (lambda metas: [*metas, renamed(metas[0])], "yields hf.unknown [2, 3, 5] bfloat16 on cpu, which the HF checkpoint"),
], ids=["missing", "twice", "unknown"])
def test_every_tensor_comes_exactly_once_or_the_session_is_never_finished(
        change: Callable[[list[TensorMeta]], list[TensorMeta]], cause: str) -> None:
    with job() as run:
        run.connect().check()
        everywhere(run, change)
        result = run.update()
        assert_none(problems_after(run, result, cause, limit_s=0) + problems_of_engines_at_rest(run))
        everywhere(run, list)
        assert_none(problems_of_recovery(run))


@pytest.mark.parametrize("tp", [1, 2])
def test_a_stage_that_announces_nothing_opens_no_group_and_may_not_send_all_the_same(tp: int) -> None:
    """Its iterator does not say that it is empty before it is asked."""
    table = [[], small_table(2)[1]]
    with RecordingJob(table=table, tp=tp, pp=2, make_exporter=BOTH["stage_local"], args=DEADLINES) as run:
        run.connect().check()
        opened = [event.group for event in run.update().check().events if event.event == "open"]
        assert opened == ["vime-pp_1"] and run.differences() == []
        everywhere(run, lambda metas: metas or [meta for unit in table[1] for meta in unit.tensors])
        result = run.update()
        assert_none(problems_after(run, result, "stage 0 announced no tensor at connect and now exports hf.s1.dense0", limit_s=0))
        everywhere(run, list)
        assert_none(problems_of_recovery(run))


def tied_table() -> Table:
    shape = (6, 4)
    names = [["model.embed_tokens.weight", "hf.s0"], ["hf.s1"]]
    return [[StubUnit(name, "dense", (TensorMeta(name, torch.bfloat16, shape),)) for name in stage] for stage in names]


def test_a_tied_embedding_that_is_yielded_again_by_the_last_stage_is_sent_once(tmp_path: Path) -> None:
    """As mbridge does: the head's copy on the last stage has the embedding's HF name."""
    table = tied_table()
    folder = write_checkpoint(tmp_path, [meta for stage in table for unit in stage for meta in unit.tensors],
                              tie_word_embeddings=True)
    with job_of(table, folder) as run:
        run.connect().check()
        everywhere(run, lambda metas: [*metas, metas[0]])
        result = run.update().check()
        sent = " ".join(event.detail for event in result.events if event.event == "send")
        assert sent == "model.embed_tokens.weight hf.s0 hf.s1"
        assert run.differences() == []


def job_of(table: Table, folder: Path) -> RecordingJob:
    return RecordingJob(table=table, folder=folder, pp=2, make_exporter=COLLECTIVE)
