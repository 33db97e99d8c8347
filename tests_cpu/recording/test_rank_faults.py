"""A trainer rank raises or dies at every event of an update, one at a time; and the stories of draining."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from harness.faults import Faults
from harness.recording.job import RecordingJob
from harness.recording.log import assert_story, calls
from tests_cpu.recording.failing import (
    CALL_S,
    GRACE_S,
    PHASE_S,
    assert_none,
    failing_job,
    problems_after,
    problems_of_recovery,
)

LAYOUTS = [{}, {"pp": 2}, {"tp": 2, "pp": 2}]


def places(**layout: Any) -> list[tuple[int, str, int, str]]:
    """(rank, event, nth, text) of everything a trainer rank does in an update that goes well."""
    with failing_job(Faults(), **layout) as run:
        run.connect().check()
        events = [e for e in run.update().check().events if e.rank is not None]
    seen: Counter[tuple[int, str]] = Counter()
    found = []
    for event in events:
        assert event.rank is not None
        key = (event.rank, event.event)
        found.append((*key, seen[key], event.text()))
        seen[key] += 1
    return found


def fail_everywhere(plant: Callable[[RecordingJob, int, str, int], object], judge: Callable[..., list[str]],
                    **layout: Any) -> list[str]:
    """One job per place: connect, plant, update, judge. Everything that was wrong anywhere."""
    wrong = []
    for rank, event, nth, text in places(**layout):
        faults = Faults()
        with failing_job(faults, **layout) as run:
            run.connect().check()
            plant(run, rank, event, nth)
            result = run.update()
            faults.assert_all_fired()
            wrong += [f"rank {rank} at '{text}' ({nth}): {problem}" for problem in judge(run, result, text)]
    return wrong


def has_just_been_agreed(text: str) -> bool:
    """All ranks have left the last barrier (or the one that publishes the version) and this one fails before it can take note
    of it: no code of ours runs there, and nobody is left to be told."""
    return text in ("barrier.done resumed", "barrier.done published")


def absorbed(text: str) -> bool:
    """Giving the lock back is tried again, so one failure there is no failure of the update."""
    return text.endswith("release lock")


def inside_a_gather(text: str) -> bool:
    """The trainer's own group is lost with a gather that one member left: nothing of ours can bring it back."""
    return text.startswith(("gather", "barrier.done"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_raises_anywhere_is_heard_everywhere_and_the_next_update_is_exact(layout: dict[str, int]) -> None:
    def judge(run: RecordingJob, result: object, text: str) -> list[str]:
        if absorbed(text) or has_just_been_agreed(text):
            return []
        found = problems_after(run, result, "injected: rank", limit_s=PHASE_S + 2 * GRACE_S)  # type: ignore[arg-type]
        lost = layout.get("tp", 1) > 1 and inside_a_gather(text)
        return found + ([] if lost else problems_of_recovery(run))

    wrong = fail_everywhere(lambda run, rank, event, nth: run.world.faults.fail_at(rank=rank, event=event, nth=nth),
                            judge, **layout)
    assert_none(wrong)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_a_rank_that_dies_anywhere_ends_every_other_rank_in_time(layout: dict[str, int]) -> None:
    def judge(run: RecordingJob, result: object, text: str) -> list[str]:
        if has_just_been_agreed(text):
            return []
        return problems_after(run, result, "", limit_s=CALL_S + PHASE_S + 2 * GRACE_S)  # type: ignore[arg-type]

    wrong = fail_everywhere(lambda run, rank, event, nth: run.world.faults.rank_dies(rank=rank, event=event, nth=nth),
                            judge, **layout)
    assert_none(wrong)


def failing(step: str, label: str) -> Callable[[str, str], None]:
    def before(now: str, what: str) -> None:
        if (now, what) == (step, label):
            raise ValueError(f"cannot {step} {label}")
    return before


@pytest.mark.parametrize(("rank", "step", "label"), [
    (2, "convert", "s1.dense0"), (2, "convert", "s1.dense1"), (2, "convert", "s1.expert0"), (0, "convert", "s0.dense1"),
    (3, "gather", "s1.dense0"), (3, "gather", "s1.expert0"),
])
def test_source_or_peer_that_fails_locally_drains_and_is_heard_without_any_wait(rank: int, step: str, label: str) -> None:
    with failing_job(Faults(), tp=2, pp=2) as run:
        run.connect().check()
        run.exporters[rank].before = failing_once(step, label)  # type: ignore[attr-defined]
        result = run.update()
        assert_none(problems_after(run, result, f"ValueError: cannot {step} {label}", limit_s=0))
        assert_none(problems_of_recovery(run))


def failing_once(step: str, label: str) -> Callable[[str, str], None]:
    raises = failing(step, label)
    left = [1]

    def before(now: str, what: str) -> None:
        if (now, what) == (step, label) and left:
            left.pop()
            raises(now, what)
    return before


def test_the_story_of_a_source_that_drains() -> None:
    """tp2·pp2, the source of stage 1 cannot convert its first tensor: it joins every remaining gather and sends nothing."""
    with failing_job(Faults(), tp=2, pp=2) as run:
        run.connect().check()
        run.exporters[2].before = failing("convert", "s1.dense0")  # type: ignore[attr-defined]
        result = run.update()
        source, peer = calls(result.events, 2), calls(result.events, 3)
        assert_story(source[source.index("barrier stage=1 stage 1 open"):], [
            "barrier stage=1 stage 1 open",
            "gather tp stage=1 s1.dense0",
            "error stage=1 ValueError: cannot convert s1.dense0",
            "close vime-pp_1 stage=1",
            "gather tp stage=1 s1.dense1",
            "barrier stage=1 stage 1 dense",
            "state group_name=None",
        ])
        assert_story(peer[peer.index("barrier stage=1 stage 1 open"):], [
            "barrier stage=1 stage 1 open",
            "gather tp stage=1 s1.dense0",
            "gather tp stage=1 s1.dense1",
            "barrier stage=1 stage 1 dense",
        ])
        assert {str(error).splitlines()[1] for error in result.errors.values()} == {
            "  - rank 2 (phase send, stage 1): ValueError: cannot convert s1.dense0"}


def test_a_peer_that_never_comes_to_a_gather_is_bounded_by_the_phase() -> None:
    with failing_job(Faults().rank_dies(rank=3, event="gather"), tp=2, pp=2) as run:
        run.connect().check()
        result = run.update()
        error = next(event for event in result.events if event.event == "error")
        assert (error.rank, error.time_s) == (2, PHASE_S + GRACE_S / 2)
        assert error.detail.startswith("GatherError: s1.dense0: gather in group tp[2,3]: rank 3 did not come within 102.5 s")


def test_a_rank_that_raises_before_the_first_barrier_is_heard() -> None:
    with failing_job(Faults(), pp=2) as run:
        run.connect().check()
        run.world.faults.fail_at(rank=0, event="phase")
        result = run.update()
        assert_none(problems_after(run, result, "injected: rank 0", limit_s=PHASE_S + 2 * GRACE_S))


def test_a_rank_that_leaves_while_engines_are_resumed_tells_the_truth_about_them() -> None:
    with failing_job(Faults().fail_at(rank=0, event="barrier", nth=16), pp=2) as run:
        run.connect().check()
        result = run.update()
        assert not any(engine.paused for engine in run.world.engines)
        assert all("The engines stay paused" not in str(error) for error in result.errors.values())


def test_a_published_version_is_never_used_again() -> None:
    with failing_job(Faults().fail_at(rank=0, event="barrier", nth=16), pp=2) as run:
        run.connect().check()
        run.update()
        assert run.world.engines[0].version == "1"
        run.step = 2
        run.update()
        assert run.world.engines[0].version == "2"
