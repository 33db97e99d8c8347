"""At every operation of an update, one at a time: an engine refuses, never answers or dies; a trainer rank raises or dies.

Every surviving rank raises in time, nobody serves a mixture, nothing is left behind, and the next update is exact (rule 10). The
clock is virtual: a deadline costs nothing and fires exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from harness.sim import Scenario, replay
from harness.sim.explore import run_once
from harness.sim.faulty import Planted
from harness.sim.schedule import encode
from harness.sim.schedulers.base import Explorer
from harness.sim.schedulers.fair import Fair
from harness.sim.schedulers.pct import Pct
from harness.sim.schedulers.uniform import Uniform
from harness.sim.struck import all_places, strike_everywhere

LAYOUTS = {
    "pp1": Scenario(stages=((2, 1),), engines=(1, 2)),
    "pp2": Scenario(pp=2, stages=((1, 1), (2, 0)), engines=(1, 2)),
    "pp2, an empty stage": Scenario(pp=2, stages=((0, 0), (1, 1)), engines=(2,)),
    "tp2 pp2": Scenario(tp=2, pp=2, stages=((1, 1), (1, 0))),
    "dp2 ep2 pp2": Scenario(dp=2, ep=2, pp=2, stages=((1, 1), (0, 1))),
    "pp2, packed": Scenario(pp=2, stages=((2, 1), (1, 0)), packed=True, bucket_bytes=1 << 20, receiver="stock vllm 0.27"),
}

EXPLORERS: dict[str, Callable[[int], Explorer]] = {
    "round robin": lambda n: Fair(), "random": lambda n: Uniform(n), "pct": lambda n: Pct(n, 3)}


def fails_badly(world: Scenario, explorer: Callable[[int], Explorer]) -> str:
    """Plant every fault that there is, one at a time; what did not end as it must, with the calls that replay it."""
    struck = strike_everywhere(world, explorer)
    assert struck.faults > 80
    return struck.text()


ALWAYS = [("pp1", "random"), ("pp2", "round robin"), ("pp2", "random"), ("pp2, an empty stage", "pct"), ("tp2 pp2", "pct"),
          ("dp2 ep2 pp2", "random"), ("pp2, packed", "pct")]
THOROUGH = [pytest.param(layout, how, marks=pytest.mark.thorough) for layout in LAYOUTS for how in EXPLORERS
            if (layout, how) not in ALWAYS]


@pytest.mark.parametrize(("layout", "how"), ALWAYS + THOROUGH)
def test_every_fault_at_every_operation_is_heard_in_time_and_the_next_update_is_exact(layout: str, how: str) -> None:
    assert not fails_badly(LAYOUTS[layout], EXPLORERS[how])


def test_every_operation_is_a_place() -> None:
    """Two stages, one bucket each: what can be struck is every RPC of the engine and every event of a rank."""
    found = Counter((place.kind, place.what) for place in all_places(Scenario(pp=2)))
    engine = {what: count for (kind, what), count in found.items() if kind == "engine"}
    assert engine == {"pause_generation": 1, "flush_cache": 1, "start_weight_update": 1, "init_weights_update_group": 2,
                      "update_weights_from_distributed": 2, "finish_weight_update": 1, "update_weight_version": 1,
                      "continue_generation": 1}
    rank = {what: count for (kind, what), count in found.items() if kind == "rank"}
    assert rank == {"phase": 14, "rpc": 14, "barrier": 26, "barrier.done": 26, "state": 4, "listen": 2, "open": 2, "open.done": 2,
                    "send": 2, "send.done": 2, "synchronize": 2, "synchronize.done": 2, "close": 2, "close.done": 2}


@pytest.mark.parametrize(("method", "at_s"), [
    ("start_weight_update", 30.0), ("update_weights_from_distributed", 30.0),
    ("init_weights_update_group", 30.5)])  # the dial is over at 30 s; the engine then has half a second to say why
def test_a_deadline_fires_exactly(method: str, at_s: float) -> None:
    run = run_once(Scenario(pp=2, fault=f"engine0 silent {method}#0"), Fair())
    assert run.outcome.kind == "well"
    error = next(event for event in run.events if event.event == "error")
    assert error.time_s == at_s


def test_a_fault_that_does_not_strike_is_reported() -> None:
    run = run_once(Scenario(pp=2, fault="rank0 raises send#9"), Fair())
    assert run.outcome.kind == "not as planned" and "fired 0 times" in run.outcome.text


@pytest.mark.parametrize(("mutant", "fault", "text"), [
    ("session left open", "engine0 raises update_weights_from_distributed#0", "rule 10: the next update fails"),
    ("resume in finally", "engine0 raises update_weights_from_distributed#0", "rule 9: engine0 generates with unfit weights"),
    ("lock kept", "engine0 raises update_weights_from_distributed#1", "the rollout engine lock is still held"),
])
def test_a_library_that_fails_badly_is_reported_and_replayed(mutant: str, fault: str, text: str) -> None:
    scenario = Scenario(pp=2, mutant=mutant, fault=fault)
    run = run_once(scenario, Uniform(4))
    assert text in run.outcome.text
    assert replay(scenario, encode(run.choices)).outcome == run.outcome


@pytest.mark.parametrize("text", ["rank0 sulks send#1", "engine raises send#1", "rank0 raises send"])
def test_what_is_not_a_fault_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a fault: .*must look like 'engine1 raises finish_weight_update#0'"):
        Planted.read(text)
