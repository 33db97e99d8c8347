"""Mutants of bridge export: in a world of two stages, or in one recorded story where no order of steps shows them."""

from __future__ import annotations

from harness.mutants import bridging
from harness.mutants.mutant import Mutant, NamedTest
from harness.sim.scenario import Scenario

_FAULTS = "tests_cpu.recording.test_bridge_faults"
_STAGE_LOCAL = Scenario(pp=2, export="stage-local")
_COLLECTIVE = Scenario(pp=2, stages=((2, 0), (2, 0)), export="bridge")

BRIDGED: tuple[Mutant, ...] = (
    Mutant("two barriers after a bridge export", 4, ("vllm-project/vime, _send_weights of inactive bridge stages",),
           bridging.two_barriers, _STAGE_LOCAL, "rank0  barrier   control0  send   1              rank 1"),
    Mutant("an inactive stage exports", 5, ("vllm-project/vime, _send_weights of inactive bridge stages",),
           bridging.inactive_stages_export, _STAGE_LOCAL,
           "rank 1 gathers for stage 0, which does not need it"),
    Mutant("a stage leaves the export early", 5, ("NVIDIA-NeMo/Megatron-Bridge, broadcast_from_pp_rank",),
           bridging.stage_leaves_early, _COLLECTIVE, "rank0  bridge hf.s1.dense1  pp[0,1]"),
    Mutant("every stage sends the export", 6, ("vllm-project/vime, _is_pp_src_rank with a bridge",), bridging.every_stage_sends,
           Scenario(pp=2, export="bridge", connects=True), "duplicate: hf.s0.dense0 is sent 2 times, by stages [0, 1]"),
    Mutant("nobody waits for the source", 11, ("huggingface/trl#7103", "huggingface/trl#7131"),
           bridging.nobody_waits_for_the_source, Scenario(pp=2, stages=((2, 0), (2, 0)), export="prefetching"),
           "takes item 2 before the bucket that item 1 closed is sent"),
    Mutant("views of a reused buffer are sent", 13, ("NVIDIA-NeMo/RL#3545", "modelscope/ms-swift#9060"), bridging.views_are_kept,
           _COLLECTIVE, "rule 12: engine0/worker0: hf.s0.dense0: other bytes than step"),
    Mutant("an export is not drained", 8, ("huggingface/trl#6765 (review)",), bridging.not_drained,
           NamedTest(f"{_FAULTS}:test_a_source_that_cannot_convert_goes_on_iterating_and_sends_nothing"), "took 60.0 s of 0 s"),
)
