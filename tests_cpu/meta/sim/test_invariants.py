"""Every rule, broken by hand in the trace of a good update, is reported as that rule; the good trace breaks none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from harness.sim import Scenario
from harness.sim.explore import run_once
from harness.sim.invariants import RULES, Facts, violations
from harness.sim.schedulers.fair import Fair
from staged_sync.trace import Event

Story = list[Event]

STAGED = Scenario(tp=2, dp=2, pp=2, engines=(1, 2), stages=((2, 1), (1, 0)))
SINGLE = Scenario(stages=((2, 1),))
BRIDGE = Scenario(tp=2, pp=2, engines=(1, 2), export="bridge")
PREFETCHING = Scenario(pp=2, stages=((2, 0), (2, 0)), export="prefetching")
STAGE_LOCAL = Scenario(tp=2, pp=2, engines=(1, 2), export="stage-local")


def story(scenario: Scenario) -> tuple[Story, Facts]:
    run = run_once(scenario, Fair())
    assert run.facts is not None and run.outcome.kind == "well"
    return list(run.events), run.facts


def rules_broken(events: Sequence[Event], facts: Facts) -> set[int]:
    return {violation.rule for violation in violations(events, facts)}


def find(events: Story, text: str, nth: int = 0, actor: str = "") -> int:
    """The place of the nth event that begins with `text`."""
    return [i for i, e in enumerate(events) if e.text().startswith(text) and e.actor.startswith(actor)][nth]


def without(text: str, nth: int = 0, actor: str = "") -> Callable[[Story], Story]:
    def edit(events: Story) -> Story:
        at = find(events, text, nth, actor)
        return events[:at] + events[at + 1:]
    return edit


def moved(text: str, before: str, *, nth: int = 0, actor: str = "") -> Callable[[Story], Story]:
    def edit(events: Story) -> Story:
        event = events[find(events, text, nth, actor)]
        rest = [e for e in events if e is not event]
        at = find(rest, before)
        return [*rest[:at], event, *rest[at:]]
    return edit


def changed(text: str, *, nth: int = 0, actor: str = "", **fields: Any) -> Callable[[Story], Story]:
    def edit(events: Story) -> Story:
        at = find(events, text, nth, actor)
        return [*events[:at], replace(events[at], **fields), *events[at + 1:]]
    return edit


def again(text: str, *, actor: str = "") -> Callable[[Story], Story]:
    def edit(events: Story) -> Story:
        at = find(events, text, actor=actor)
        return [*events[:at + 1], events[at], *events[at + 1:]]
    return edit


BROKEN: list[tuple[int, str, Callable[[Story], Story]]] = [
    (1, "a group is never closed", without("close.done vime-pp_1")),
    (1, "a group is closed after the next one is opened", moved("open vime-pp_1", "close.done vime-pp_0")),
    (2, "a session is started twice", again("handle.done start_weight_update", actor="engine0")),
    (2, "a session is never finished", without("handle.done finish_weight_update", actor="engine1")),
    (2, "a bucket comes after the end", moved("handle.done finish_weight_update", "receive vime-pp_1", actor="engine0")),
    (3, "the cache is flushed before the pause", moved("handle flush_cache", "handle pause_generation")),
    (3, "it publishes before it finishes", moved("handle update_weight_version", "handle finish_weight_update")),
    (3, "a stage sends after the next has begun", moved("open vime-pp_1", "send vime-pp_0")),
    (4, "a rank meets once less", without("barrier stage=0 stage 0 expert", actor="rank3")),
    (4, "a rank meets elsewhere", changed("barrier paused", actor="rank5", detail="started")),
    (5, "another replica gathers", changed("gather tp", actor="rank1", rank=3)),
    (5, "a peer sends", changed("send vime-pp_0", rank=1)),
    (5, "a rank of another stage asks an engine", changed("rpc vime-pp_0 stage=0 init", rank=4)),
    (5, "a rank that is not the lead starts the session", changed("rpc start_weight_update", rank=1)),
    (6, "a tensor is sent twice", again("send vime-pp_0 stage=0 bucket=1")),
    (6, "a tensor is never sent", without("send vime-pp_1")),
    (6, "a worker misses a tensor", without("receive.done vime-pp_1", actor="engine1/worker1")),
    (9, "it serves in the middle", moved("generate", "receive vime-pp_1", actor="engine0")),
    (9, "it publishes in the middle", moved("handle.done update_weight_version", "handle finish_weight_update", actor="engine0")),
    (13, "a group is closed before the device has sent", without("synchronize.done vime-pp_0")),
    (13, "a send is never waited for", without("send.done vime-pp_1")),
    (14, "a group name is kept", without("state stage=1 group_name=None")),
]


@pytest.mark.parametrize(("rule", "edit"), [(rule, edit) for rule, _, edit in BROKEN], ids=[what for _, what, _ in BROKEN])
def test_a_rule_broken_by_hand_is_reported(rule: int, edit: Callable[[Story], Story]) -> None:
    events, facts = story(STAGED)
    assert rules_broken(events, facts) == set()
    assert rule in rules_broken(edit(events), facts)


SINGLE_STAGE: list[tuple[str, Callable[[Story], Story]]] = [
    ("a group is opened anew", again("send vime-pp_0")),
    ("one barrier more", again("barrier paused")),
    ("one barrier less", without("barrier stage=0 stage 0 dense")),
    ("one RPC more", again("rpc flush_cache")),
]


@pytest.mark.parametrize("edit", [edit for _, edit in SINGLE_STAGE], ids=[what for what, _ in SINGLE_STAGE])
def test_one_stage_that_pays_for_more_is_reported(edit: Callable[[Story], Story]) -> None:
    events, facts = story(SINGLE)
    assert rules_broken(events, facts) == set()
    assert 7 in rules_broken(edit(events), facts)


def inserted(text: str, like: str, **fields: Any) -> Callable[[Story], Story]:
    """An event as the one that begins with `text`, with other fields, ahead of the one that begins with `like`."""
    def edit(events: Story) -> Story:
        at = find(events, like)
        return [*events[:at], replace(events[find(events, text)], **fields), *events[at:]]
    return edit


BRIDGED: list[tuple[Scenario, int, str, Callable[[Story], Story]]] = [
    (BRIDGE, 3, "an engine is asked to join again", inserted(
        "handle flush_cache", "handle update_weights", detail="init_weights_update_group")),
    (BRIDGE, 4, "a rank meets once less", without("barrier stage=0 model exported", actor="rank3")),
    (BRIDGE, 5, "another stage's source sends", changed("send vime-pp_0", rank=2)),
    (BRIDGE, 5, "a turn of stage 1", changed("gather export", actor="rank2", stage=1)),
    (BRIDGE, 7, "a group is opened", inserted("send vime-pp_0", "send vime-pp_0", event="open")),
    (BRIDGE, 7, "one barrier more on every rank", lambda events: [
        copy for e in events for copy in [e] * (2 if e.text() == "barrier paused" else 1)]),
    (PREFETCHING, 11, "a rank of another stage runs ahead", moved(
        "gather export stage=0 item 2", "send.done vime-pp_0 stage=0 bucket=0", actor="rank1")),
    (PREFETCHING, 11, "it runs ahead of the last bucket but one", moved(
        "gather export stage=0 item 4", "send.done vime-pp_0 stage=0 bucket=2", actor="rank1")),
    (PREFETCHING, 11, "a bucket is never sent to its end", without("send.done vime-pp_0 stage=0 bucket=1")),
    (BRIDGE, 14, "another stage's source has a group name", inserted(
        "send", "barrier resumed", event="state", rank=2, actor="rank2", detail="group_name=vime-pp_0")),
    (BRIDGE, 14, "the source keeps another name", inserted(
        "send", "barrier resumed", event="state", detail="group_name=vime-pp_1")),
    (STAGE_LOCAL, 1, "a group is never closed", without("close.done vime-pp_1")),
    (STAGE_LOCAL, 4, "two barriers after the export", again("barrier stage=0 stage 0 exported", actor="rank2")),
    (STAGE_LOCAL, 5, "another stage exports", changed("gather export stage=0", actor="rank1", rank=3)),
    (STAGE_LOCAL, 14, "a group name is kept", without("state stage=0 group_name=None")),
]


@pytest.mark.parametrize(("scenario", "rule", "edit"), [(scenario, rule, edit) for scenario, rule, _, edit in BRIDGED],
                         ids=[f"{scenario.export}: {what}" for scenario, _, what, _ in BRIDGED])
def test_a_rule_of_bridge_export_broken_by_hand_is_reported(scenario: Scenario, rule: int,
                                                            edit: Callable[[Story], Story]) -> None:
    events, facts = story(scenario)
    assert rules_broken(events, facts) == set()
    assert rule in rules_broken(edit(events), facts)


def test_the_item_that_closes_a_bucket_may_be_taken_before_it_is_sent_and_a_bucket_that_is_not_sent_closes_nothing() -> None:
    events, facts = story(PREFETCHING)
    closing = moved("gather export stage=0 item 1", "send vime-pp_0 stage=0 bucket=0", actor="rank1")(events)
    assert rules_broken(closing, facts) == set()
    failed = replace(facts, raised=dict.fromkeys(range(2), "UpdateFailed: x"))
    assert rules_broken(without("send vime-pp_0 stage=0 bucket=3")(events), failed) == set()


def test_rank_0_may_keep_the_name_of_the_group_that_a_collective_export_keeps() -> None:
    events, facts = story(BRIDGE)
    named = inserted("send", "barrier resumed", event="state", detail="group_name=vime-pp_0")(events)
    assert 14 not in rules_broken(named, facts)
    assert 14 in rules_broken(named, replace(facts, export="stage-local"))


@pytest.mark.parametrize(("rule", "fields"), [
    (8, {"raised": {0: "UpdateFailed: x", 1: "UpdateFailed: x"}}),
    (8, {"raised": dict.fromkeys(range(7), "UpdateFailed: x") | {7: "UpdateFailed: y"}}),
    (8, {"died": (3,)}),
    (11, {"endless": ("rank1 waits without a deadline in ray.get",)}),
    (12, {"differences": ("engine0/worker0: hf.s0.dense0: other bytes than step 2",)}),
])
def test_a_rule_broken_in_the_facts_is_reported(rule: int, fields: dict[str, Any]) -> None:
    events, facts = story(STAGED)
    assert rule in rules_broken(events, replace(facts, **fields))


def test_a_failure_heard_by_everybody_breaks_nothing() -> None:
    events, facts = story(STAGED)
    assert rules_broken(events[:80], replace(facts, raised=dict.fromkeys(range(8), "UpdateFailed: x"))) == set()


def test_every_rule_is_broken_here() -> None:
    tested = {rule for rule, _, _ in BROKEN} | {7, 8, 11, 12}
    assert tested == set(RULES)


def test_a_violation_names_the_rule_and_the_event() -> None:
    events, facts = story(STAGED)
    edited = without("close.done vime-pp_0")(events)
    found = violations(edited, facts)[0]
    assert (found.rule, edited[found.at].text()) == (1, "open vime-pp_1 stage=1 world_size=4")
    assert found.text == "rank4 opens vime-pp_1 while rank0 still holds vime-pp_0"
