"""Mutants of bridge export; each shows in one recorded story."""

from __future__ import annotations

from harness.mutants import bridging
from harness.mutants.mutant import Mutant, NamedTest

_ORDER = "tests_cpu.recording.test_call_order_bridge"
_FAULTS = "tests_cpu.recording.test_bridge_faults"
_STAGE_LOCAL = NamedTest(f"{_ORDER}:test_stage_local_stages_take_turns_and_inactive_ones_join_one_barrier_and_do_not_export")
_COLLECTIVE = NamedTest(f"{_ORDER}:test_pipeline_collective_all_ranks_iterate_once_and_stage_0_sends")

BRIDGED: tuple[Mutant, ...] = (
    Mutant("two barriers after a bridge export", 4, ("vllm-project/vime, _send_weights of inactive bridge stages",),
           bridging.two_barriers, _STAGE_LOCAL, "(status barrier 'stage 1 exported'): RanksAbsent"),
    Mutant("an inactive stage exports", 5, ("vllm-project/vime, _send_weights of inactive bridge stages",),
           bridging.inactive_stages_export, _STAGE_LOCAL, "the story differs"),
    Mutant("a stage leaves the export early", 5, ("NVIDIA-NeMo/Megatron-Bridge, broadcast_from_pp_rank",),
           bridging.stage_leaves_early, _COLLECTIVE, "rank 1 did not come within 60 s"),
    Mutant("every stage sends the export", 6, ("vllm-project/vime, _is_pp_src_rank with a bridge",), bridging.every_stage_sends,
           _COLLECTIVE, "duplicate: hf.s0.dense0 is sent 2 times, by stages [0, 1]"),
    Mutant("nobody waits for the source", 11, ("huggingface/trl#7103", "huggingface/trl#7131"),
           bridging.nobody_waits_for_the_source, NamedTest(f"{_FAULTS}:test_no_rank_runs_ahead_of_a_slow_source"),
           "rank 1 is at item 4 while bucket 0 is sent"),
    Mutant("views of a reused buffer are sent", 13, ("NVIDIA-NeMo/RL#3545", "modelscope/ms-swift#9060"), bridging.views_are_kept,
           NamedTest(f"{_ORDER}:test_pipeline_collective_three_updates_keep_one_group"), "hf.s0.dense0: other bytes than step 1"),
    Mutant("an export is not drained", 8, ("huggingface/trl#6765 (review)",), bridging.not_drained,
           NamedTest(f"{_FAULTS}:test_a_source_that_cannot_convert_goes_on_iterating_and_sends_nothing"), "took 60.0 s of 0 s"),
)
