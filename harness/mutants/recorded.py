"""Mutants that one recorded story shows: the named test turns red."""

from __future__ import annotations

from harness.mutants import failing, staging
from harness.mutants.mutant import Mutant, NamedTest

_ORDER_PP1 = "tests_cpu.recording.test_call_order_pp1"
_ORDER_PP2 = "tests_cpu.recording.test_call_order_pp2"
_WIRE = "tests_cpu.recording.test_groups_and_wire"
_INPUT = "tests_cpu.recording.test_bad_input"
_ENGINE = "tests_cpu.recording.test_engine_faults"
_RANK = "tests_cpu.recording.test_rank_faults"
_WAITS = "tests_cpu.recording.test_waits_and_agreement"

_STORY_PP2 = NamedTest(f"{_ORDER_PP2}:test_tp1_pp2_each_source_opens_sends_and_closes_in_its_turn")
_REFUSED = f"{_ENGINE}:test_a_refusal_is_raised_on_every_rank_at_once_and_the_next_update_is_exact"
_REFUSED_BUCKET = NamedTest(_REFUSED, {"method": "update_weights_from_distributed", "nth": 1, "reply": None, "layout": {"pp": 2}})
_REFUSED_JOIN = NamedTest(_REFUSED, {"method": "init_weights_update_group", "nth": 1, "reply": None, "layout": {"pp": 2}})
_FAILS_LOCALLY = NamedTest(f"{_RANK}:test_source_or_peer_that_fails_locally_drains_and_is_heard_without_any_wait",
                           {"rank": 2, "step": "convert", "label": "s1.dense0"})

RECORDED: tuple[Mutant, ...] = (
    Mutant("no deferral", 1, ("vllm-project/vime#329", "THUDM/slime#2331"), staging.no_deferral,
           _STORY_PP2,
           "rule 1: engine0 engine0/worker0 is asked to join vime-pp_0 while it holds live group vime-pp_1"),
    Mutant("an inactive rank skips a barrier", 4, ("vllm-project/vime, commit 45082eee", "PrimeIntellect-ai/prime-rl#1492"),
           staging.inactive_rank_skips_a_barrier,
           _STORY_PP2, "status barrier 'stage 0 closed'"),
    Mutant("group not closed", 1, ("vllm-project/vllm-ascend#17154", "vllm-project/vllm#40646"), staging.group_not_closed,
           _STORY_PP2,
           "rule 1: engine0 engine0/worker0 is asked to join vime-pp_1 while it holds live group vime-pp_0"),
    Mutant("completeness off at connect", 6, ("Tencent-Hunyuan/UniRL#166", "NovaSky-AI/SkyRL#1505"),
           staging.completeness_off_at_connect,
           NamedTest(f"{_INPUT}:test_every_name_that_does_not_fit_the_checkpoint_is_listed"),
           "every rank must raise CompletenessError, raised were {}"),
    Mutant("completeness off per update", 6, ("NovaSky-AI/SkyRL#1505",), staging.completeness_off_per_update,
           NamedTest(f"{_WAITS}:test_a_tensor_lost_on_the_way_is_caught_before_finish"), "went on as if nothing had happened"),
    Mutant("version with the first bucket", 9, ("vllm-project/vime, weight_version with every bucket",),
           staging.version_with_the_first_bucket,
           NamedTest(f"{_ORDER_PP1}:test_tp1_pp1_is_vimes_single_source_path_plus_the_publish"),
           "rule 9: engine0 publishes version 1 with unfit weights: engine0/worker0 has a session open"),
    Mutant("engines compared by number", 10, ("radixark/miles#1724", "areal-project/AReaL#1101"),
           staging.engines_compared_by_number,
           NamedTest(f"{_WIRE}:test_connecting_other_engines_closes_the_old_group_and_uses_the_new_ones"),
           "rollout engine 0 failed in update_weights_from_distributed"),
    Mutant("lock kept", 10, ("THUDM/slime, update_weight_from_distributed.py",), failing.lock_kept,
           _REFUSED_BUCKET, "the lock is held"),
    Mutant("finish in finally", 9, ("vllm-project/vime, _end_vllm_weight_update_session in finally",), failing.finish_in_finally,
           NamedTest(f"{_ENGINE}:test_the_story_of_an_engine_that_refuses_a_bucket"), "finish_weight_update engine0"),
    Mutant("resume in finally", 9, ("THUDM/slime#2280", "vllm-project/vllm#57854"), failing.resume_in_finally,
           _REFUSED_BUCKET,
           "rule 9: engine0 generates with unfit weights"),
    Mutant("no draining", 8, ("huggingface/trl#6765 (review)",), failing.no_draining,
           _FAILS_LOCALLY, "took 102.5 s of 0 s"),
    Mutant("barrier without status", 8, ("NVIDIA-NeMo/RL#3472", "MoonshotAI/checkpoint-engine#43"),
           failing.barrier_without_status, NamedTest(f"{_RANK}:test_the_story_of_a_source_that_drains"),
           "> state group_name=None"),
    Mutant("control group reused after a timeout", 10, ("MoonshotAI/checkpoint-engine#106",),
           failing.control_group_reused_after_a_timeout,
           NamedTest(f"{_WAITS}:test_a_rank_that_is_late_for_a_barrier_costs_one_update_and_one_generation"),
           "the group is dead since"),
    Mutant("transfer group reused after a failure", 10, ("vllm-project/vllm#40646",),
           failing.transfer_group_reused_after_a_failure,
           NamedTest(f"{_WAITS}:test_a_failed_single_stage_update_opens_a_new_group_for_the_next"),
           "transfer group vime-pp_0 of rank 0 is still open"),
    Mutant("replies not looked at", 8, ("NVIDIA-NeMo/RL#398", "verl-project/verl#6666 (review)"), failing.replies_not_looked_at,
           NamedTest(_REFUSED, {"method": "finish_weight_update", "nth": 0, "reply": False, "layout": {"pp": 2}}),
           "went on as if nothing had happened"),
    Mutant("session left open", 10, ("NovaSky-AI/SkyRL#1605",), failing.session_left_open,
           _REFUSED_JOIN, "already active"),
    Mutant("lock without a deadline", 11, ("THUDM/slime, lock polled for ever",), failing.lock_without_deadline,
           NamedTest(f"{_WAITS}:test_a_lock_that_somebody_else_holds_is_given_up_at_the_deadline"), "polls without waiting"),
)
