"""The table: mutant, rule it breaks, where it was seen in public, the test that catches it, and what that test says.

A report is `owner/repository#number`; an entry without a number is public code that was read, not a report.
"""

from __future__ import annotations

from harness.mutants import bridging, failing, staging
from harness.mutants.mutant import Mutant

_ORDER_PP1 = "tests_cpu.recording.test_call_order_pp1"
_ORDER_PP2 = "tests_cpu.recording.test_call_order_pp2"
_WIRE = "tests_cpu.recording.test_groups_and_wire"
_INPUT = "tests_cpu.recording.test_bad_input"
_ENGINE = "tests_cpu.recording.test_engine_faults"
_RANK = "tests_cpu.recording.test_rank_faults"
_WAITS = "tests_cpu.recording.test_waits_and_agreement"
_ORDER_BRIDGE = "tests_cpu.recording.test_call_order_bridge"
_BRIDGE = "tests_cpu.recording.test_bridge_faults"
_STAGE_LOCAL = f"{_ORDER_BRIDGE}:test_stage_local_stages_take_turns_and_inactive_ones_join_one_barrier_and_do_not_export"
_COLLECTIVE = f"{_ORDER_BRIDGE}:test_pipeline_collective_all_ranks_iterate_once_and_stage_0_sends"

ZOO: tuple[Mutant, ...] = (
    Mutant("no deferral", 1, ("vllm-project/vime#329", "THUDM/slime#2331"), staging.no_deferral,
           f"{_ORDER_PP2}:test_tp1_pp2_each_source_opens_sends_and_closes_in_its_turn",
           "rule 1: engine0 engine0/worker0 is asked to join vime-pp_0 while it holds live group vime-pp_1"),
    Mutant("an inactive rank skips a barrier", 4, ("vllm-project/vime, commit 45082eee", "PrimeIntellect-ai/prime-rl#1492"),
           staging.inactive_rank_skips_a_barrier,
           f"{_ORDER_PP2}:test_tp1_pp2_each_source_opens_sends_and_closes_in_its_turn", "status barrier 'stage 0 closed'"),
    Mutant("group not closed", 1, ("vllm-project/vllm-ascend#17154", "vllm-project/vllm#40646"), staging.group_not_closed,
           f"{_ORDER_PP2}:test_tp1_pp2_each_source_opens_sends_and_closes_in_its_turn",
           "rule 1: engine0 engine0/worker0 is asked to join vime-pp_1 while it holds live group vime-pp_0"),
    Mutant("completeness off at connect", 6, ("Tencent-Hunyuan/UniRL#166", "NovaSky-AI/SkyRL#1505"),
           staging.completeness_off_at_connect,
           f"{_INPUT}:test_every_name_that_does_not_fit_the_checkpoint_is_listed",
           "every rank must raise CompletenessError, raised were {}"),
    Mutant("completeness off per update", 6, ("NovaSky-AI/SkyRL#1505",), staging.completeness_off_per_update,
           f"{_WAITS}:test_a_tensor_lost_on_the_way_is_caught_before_finish", "went on as if nothing had happened"),
    Mutant("version with the first bucket", 9, ("vllm-project/vime, weight_version with every bucket",),
           staging.version_with_the_first_bucket, f"{_ORDER_PP1}:test_tp1_pp1_is_vimes_single_source_path_plus_the_publish",
           "rule 9: engine0 publishes version 1 with unfit weights: engine0/worker0 has a session open"),
    Mutant("engines compared by number", 10, ("radixark/miles#1724", "areal-project/AReaL#1101"),
           staging.engines_compared_by_number,
           f"{_WIRE}:test_connecting_other_engines_closes_the_old_group_and_uses_the_new_ones",
           "rollout engine 0 failed in update_weights_from_distributed"),
    Mutant("lock kept", 10, ("THUDM/slime, update_weight_from_distributed.py",), failing.lock_kept,
           f"{_ENGINE}:test_a_refusal_is_raised_on_every_rank_at_once_and_the_next_update_is_exact", "the lock is held",
           {"method": "update_weights_from_distributed", "nth": 1, "reply": None, "layout": {"pp": 2}}),
    Mutant("finish in finally", 9, ("vllm-project/vime, _end_vllm_weight_update_session in finally",), failing.finish_in_finally,
           f"{_ENGINE}:test_the_story_of_an_engine_that_refuses_a_bucket", "finish_weight_update engine0"),
    Mutant("resume in finally", 9, ("THUDM/slime#2280", "vllm-project/vllm#57854"), failing.resume_in_finally,
           f"{_ENGINE}:test_a_refusal_is_raised_on_every_rank_at_once_and_the_next_update_is_exact",
           "rule 9: engine0 generates with unfit weights",
           {"method": "update_weights_from_distributed", "nth": 1, "reply": None, "layout": {"pp": 2}}),
    Mutant("no draining", 8, ("huggingface/trl#6765 (review)",), failing.no_draining,
           f"{_RANK}:test_source_or_peer_that_fails_locally_drains_and_is_heard_without_any_wait", "took 30.0 s of 0 s",
           {"rank": 2, "step": "convert", "label": "s1.dense0"}),
    Mutant("barrier without status", 8, ("NVIDIA-NeMo/RL#3472", "MoonshotAI/checkpoint-engine#43"),
           failing.barrier_without_status, f"{_RANK}:test_the_story_of_a_source_that_drains",
           "> state group_name=None"),
    Mutant("control group reused after a timeout", 10, ("MoonshotAI/checkpoint-engine#106",),
           failing.control_group_reused_after_a_timeout,
           f"{_WAITS}:test_a_rank_that_is_late_for_a_barrier_costs_one_update_and_one_generation",
           "the group is dead since"),
    Mutant("transfer group reused after a failure", 10, ("vllm-project/vllm#40646",),
           failing.transfer_group_reused_after_a_failure,
           f"{_WAITS}:test_a_failed_single_stage_update_opens_a_new_group_for_the_next",
           "transfer group vime-pp_0 of rank 0 is still open"),
    Mutant("session left open", 10, ("NovaSky-AI/SkyRL#1605",), failing.session_left_open,
           f"{_ENGINE}:test_a_refusal_is_raised_on_every_rank_at_once_and_the_next_update_is_exact", "already active",
           {"method": "init_weights_update_group", "nth": 1, "reply": None, "layout": {"pp": 2}}),
    Mutant("lock without a deadline", 11, ("THUDM/slime, lock polled for ever",), failing.lock_without_deadline,
           f"{_WAITS}:test_a_lock_that_somebody_else_holds_is_given_up_at_the_deadline", "polls without waiting"),
    Mutant("two barriers after a bridge export", 4, ("vllm-project/vime, _send_weights of inactive bridge stages",),
           bridging.two_barriers, _STAGE_LOCAL, "(status barrier 'stage 1 exported'): RanksAbsent"),
    Mutant("an inactive stage exports", 5, ("vllm-project/vime, _send_weights of inactive bridge stages",),
           bridging.inactive_stages_export, _STAGE_LOCAL, "the story differs"),
    Mutant("a stage leaves the export early", 5, ("NVIDIA-NeMo/Megatron-Bridge, broadcast_from_pp_rank",),
           bridging.stage_leaves_early, _COLLECTIVE, "rank 1 did not come within 60 s"),
    Mutant("every stage sends the export", 6, ("vllm-project/vime, _is_pp_src_rank with a bridge",), bridging.every_stage_sends,
           _COLLECTIVE, "duplicate: hf.s0.dense0 is sent 2 times, by stages [0, 1]"),
    Mutant("nobody waits for the source", 11, ("huggingface/trl#7103", "huggingface/trl#7131"),
           bridging.nobody_waits_for_the_source, f"{_BRIDGE}:test_no_rank_runs_ahead_of_a_slow_source",
           "rank 1 is at item 4 while bucket 0 is sent"),
    Mutant("views of a reused buffer are sent", 13, ("NVIDIA-NeMo/RL#3545", "modelscope/ms-swift#9060"), bridging.views_are_kept,
           f"{_ORDER_BRIDGE}:test_pipeline_collective_three_updates_keep_one_group", "hf.s0.dense0: other bytes than step 1"),
    Mutant("an export is not drained", 8, ("huggingface/trl#6765 (review)",), bridging.not_drained,
           f"{_BRIDGE}:test_a_source_that_cannot_convert_goes_on_iterating_and_sends_nothing", "took 60.0 s of 0 s"),
)


def named(name: str) -> Mutant:
    """The mutant of this name. Raises KeyError that lists all names."""
    found = next((mutant for mutant in ZOO if mutant.name == name), None)
    if found is None:
        raise KeyError(f"no mutant {name!r} in the zoo; there are: {', '.join(mutant.name for mutant in ZOO)}")
    return found
