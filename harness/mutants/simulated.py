"""Mutants that the simulator catches: in a world of one or two engines, some schedule of the first hundred must show them."""

from __future__ import annotations

from harness.mutants import failing, ordering, roles, sending, staging
from harness.mutants.mutant import Mutant
from harness.sim.scenario import Scenario

_PP2 = Scenario(pp=2)
_STOCK = Scenario(pp=2, receiver="stock vllm")
_BUCKETS = Scenario(pp=2, stages=((3, 0), (2, 0)))
_ONE_BUCKET = Scenario(pp=2, stages=((3, 0), (2, 0)), bucket_bytes=1 << 20)
_EXPERTS = Scenario(pp=2, stages=((1, 1), (1, 0)))
_REFUSES = Scenario(pp=2, fault="engine0 raises update_weights_from_distributed#0")

SIMULATED: tuple[Mutant, ...] = (
    # --- who opens what, when
    Mutant("old behaviour", 1, ("vllm-project/vime#329",), staging.old_behaviour, _STOCK, "rank0            wait_any  vime-pp_0"),
    Mutant("opposite arrivals", 1, ("THUDM/slime#2331",), staging.no_deferral,
           Scenario(pp=2, engines=(1, 1), receiver="stock vllm"), "engine1          join"),
    Mutant("closed at the next turn", 1, ("vllm-project/vime, group destroyed at its own next turn",
           "vllm-project/vllm-ascend#17154"),
           ordering.closed_at_the_next_turn, _PP2,
           "rule 1: engine0 engine0/worker0 is asked to join vime-pp_1 while it holds live group"),
    Mutant("no barrier between the stages", 1, ("NovaSky-AI/SkyRL#1737 (review)",), ordering.no_barrier_after_open, _PP2,
           "rule 1"),
    Mutant("joins one engine after the other", 11, ("sgl-project/sglang#33934",), sending.joins_one_engine_after_the_other,
           Scenario(pp=2, engines=(1, 1)), "engine0/worker0  join      vime-pp_0"),
    Mutant("dialled before anybody is asked", 11, ("verl-project/verl#6967",), sending.dialled_before_anybody_is_asked, _PP2,
           "vime-pp_0 to be complete, missing group rank 1"),
    # --- who is who
    Mutant("source predicate without context parallel", 5, ("vllm-project/vime#66 (review)",),
           roles.source_without_context_parallel,
           Scenario(cp=2, pp=2, connects=True),
           "stage 0 must have exactly one source (DP with CP = 0, TP = 0), got ranks [0, 1]"),
    Mutant("source by tensor rank alone", 5, ("vllm-project/vime#66 (review)",), roles.source_by_tensor_rank_alone,
           Scenario(dp=2, pp=2, connects=True), "stage 0 must have exactly one source"),
    Mutant("expert peers of one replica only", 5, ("vllm-project/vime#388", "huggingface/trl#6765 (review)"),
           roles.expert_peers_of_one_replica_only, Scenario(dp=2, ep=2, pp=2, stages=((1, 1), (1, 0))), "gather    ep[0,1]"),
    Mutant("every replica gathers", 5, ("vllm-project/vime#66 (review)",), roles.every_replica_gathers,
           Scenario(tp=2, dp=2, pp=2), "rule 5"),
    Mutant("offsets from one engine size", 1, ("radixark/miles#3189", "NovaSky-AI/SkyRL#1399"),
           roles.offsets_from_one_engine_size,
           Scenario(pp=2, engines=(1, 2, 1)), "join vime-pp_0 rank 3 of 5"),
    Mutant("offsets without the source", 1, ("PrimeIntellect-ai/prime-rl#1693",), roles.offsets_without_the_source, _PP2,
           "it is out of range"),
    Mutant("group name never given back", 14, ("vllm-project/vime, group name left on the source",),
           roles.group_name_never_given_back, _PP2, "rule 14"),
    # --- the order of an update
    Mutant("no pause", 3, ("NovaSky-AI/SkyRL#1212",), ordering.no_pause, _PP2, "rule 3: engine0 flushed before it was paused"),
    Mutant("no flush", 3, ("vllm-project/vllm#9744", "NVIDIA-NeMo/RL#4018"), ordering.no_flush, _PP2,
           "rule 3: engine0 a session starts before pause and flush"),
    Mutant("flush inside the session", 3, ("huggingface/trl#6765 (review)",), ordering.flush_inside_the_session, _PP2, "rule 3"),
    Mutant("finish before the last stage", 2, ("vllm-project/vime#22 (comment)",), ordering.finish_before_the_last_stage, _PP2,
           "start_weight_update must be called before update_weights"),
    Mutant("resume before the last stage", 9, ("THUDM/slime#1420",), ordering.resume_before_the_last_stage, _PP2,
           "rule 9: engine0 generates with unfit weights"),
    Mutant("publish before finish", 9, ("vllm-project/vime#45", "rllm-org/rllm#622"), ordering.publish_before_finish, _PP2,
           "rule 9: engine0 publishes version"),
    Mutant("a session per stage", 2, ("vllm-project/vllm#48284", "NovaSky-AI/SkyRL#1680"), ordering.a_session_per_stage, _PP2,
           "rule 2"),
    Mutant("stages before their turn", 3, ("radixark/miles#788",), ordering.stages_before_their_turn, _PP2, "rule 3"),
    Mutant("barriers by what a rank owns", 4, ("vllm-project/vime, commit 45082eee",), ordering.barriers_by_what_a_rank_owns,
           _EXPERTS,
           "rank0  barrier"),
    Mutant("expert pass left out", 6, ("NovaSky-AI/SkyRL#1471",), ordering.expert_pass_left_out, _EXPERTS,
           "hf.s0.expert0 [1, 2, 5] bfloat16 was announced at connect and not sent"),
    # --- one bucket
    Mutant("no synchronize", 13, ("RLinf/RLinf#1540", "verl-project/verl#7083"), ordering.no_synchronize, _PP2, "rule 13"),
    Mutant("buffer used again too early", 13, ("modelscope/ms-swift#9060", "vllm-project/vllm-ascend#16960 (review)"),
           sending.buffer_used_again_too_early, Scenario(pp=2, stages=((3, 0), (2, 0)), sends="streams"), "rule 12"),
    Mutant("sent before it is announced", 11, ("lightseekorg/tokenspeed#1373 (a)",), sending.sent_before_it_is_announced, _PP2,
           "engine0/worker0 to receive"),
    Mutant("names from another iteration", 12, ("NovaSky-AI/SkyRL#1816 (comment)",), sending.names_from_another_iteration,
           _ONE_BUCKET,
           "loaded shape"),
    Mutant("metadata from another iteration", 12, ("NovaSky-AI/SkyRL#1505",), sending.metadata_from_another_iteration,
           _ONE_BUCKET,
           "over transfer group vime-pp_0, engine0/worker0 receives"),
    Mutant("packed by stage", 4, ("NovaSky-AI/SkyRL#2114", "huggingface/trl#7104 (review)"), sending.packed_by_stage, _ONE_BUCKET,
           "over transfer group vime-pp_1, engine0/worker0 receives"),
    Mutant("last bucket lost", 6, ("Tencent-Hunyuan/UniRL#166",), sending.last_bucket_lost, _BUCKETS,
           "was announced at connect and not sent"),
    Mutant("last bucket lost and nobody judges", 6, ("Tencent-Hunyuan/UniRL#166", "verl-project/verl#6666 (review)"),
           sending.last_bucket_lost_and_nobody_judges, _BUCKETS, "publishes version"),
    # --- failing
    Mutant("failures kept to itself", 8, ("MoonshotAI/checkpoint-engine#43", "modelscope/ms-swift#10098"),
           sending.failures_kept_to_itself, _REFUSES, "rule"),
    Mutant("group kept after a failure", 1, ("vllm-project/vllm#40646",), sending.group_kept_after_a_failure, _REFUSES,
           "transfer group vime-pp_0 of rank 0 is still open"),
    Mutant("resume after a failure", 9, ("sgl-project/sglang-omni#784 (review)", "vllm-project/vllm#57854"),
           failing.resume_in_finally,
           _REFUSES, "rule 9: engine0 generates with unfit weights"),
    Mutant("session left open after a failure", 10, ("vllm-project/vllm#39212 (review)",), failing.session_left_open, _REFUSES,
           "already active"),
)
