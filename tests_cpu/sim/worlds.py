"""Worlds of at most 16 ranks, drawn by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from harness.sim import Scenario
from harness.sim.exports import Export

MAX_RANKS = 16
EXPORTS: tuple[Export, ...] = ("raw", "raw", "raw", "raw", "bridge", "prefetching", "stage-local")


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """tp, pp, dp, cp, ep, vpp; raw and bridge export; up to 3 engines of unequal size; 0 to 5 buckets per stage, empty stages;
    dense and MoE."""
    pp = draw(st.sampled_from([1, 2, 2, 2, 3, 4]))
    tp = draw(st.sampled_from([n for n in (1, 1, 1, 1, 1, 2, 4) if n * pp <= MAX_RANKS]))
    dp = draw(st.sampled_from([n for n in (1, 1, 1, 1, 1, 2, 4) if n * tp * pp <= MAX_RANKS]))
    cp = draw(st.sampled_from([n for n in (1, 1, 1, 1, 2) if n * dp * tp * pp <= MAX_RANKS]))
    moe = draw(st.booleans())
    etp = draw(st.sampled_from([None, 1])) if moe else None
    per_stage, expert_tp = tp * dp * cp, tp if etp is None else etp
    ep = draw(st.sampled_from([n for n in (1, 2, 4) if per_stage % (n * expert_tp) == 0])) if moe else 1
    stages = tuple(draw(st.tuples(st.integers(0, 3), st.integers(0, 2 if moe else 0))) for _ in range(pp))
    if not any(dense + expert for dense, expert in stages):
        stages = ((1, 0), *stages[1:])
    packed = draw(st.booleans())
    export = draw(st.sampled_from(EXPORTS))
    return Scenario(
        tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, etp=etp, export=export, stages=stages, vpp=draw(st.integers(1, 2)),
        engines=tuple(draw(st.lists(st.sampled_from([1, 1, 2, 3]), min_size=1, max_size=draw(st.sampled_from([1, 1, 2, 3]))))),
        receiver=draw(st.sampled_from(["vllm", "stock vllm", "stock vllm 0.27", "vime"])),
        bucket_bytes=draw(st.sampled_from([1, 60, 1 << 20])), packed=packed, connects=draw(st.sampled_from([False] * 7 + [True])))


def weight(scenario: Scenario) -> int:
    """About how long one schedule takes, in tenths of a millisecond: steps of ranks at barriers, of workers at frames."""
    tensors = sum(dense + expert for dense, expert in scenario.stages or ())
    barriers = scenario.layout.world_size * (5 + 4 * scenario.pp)
    frames = (tensors + 2 * scenario.pp) * (1 + sum(scenario.engines))
    return (barriers + 2 * frames) * (2 if scenario.connects else 1) // 4 + 8
