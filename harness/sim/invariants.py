"""The rules of design.md section 4 that can be seen in the trace of one update; pure.

Written from the rules and from `harness.recording.topology`, not from the library: nothing here asks plan.py what is right.
Rule 10 needs a second update (tests_cpu/sim/test_faults.py).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from harness.recording.topology import Layout
from harness.sim.exports import COLLECTIVE, Export
from staged_sync.seam import Coordinates
from staged_sync.trace import Event


@dataclass(frozen=True)
class Violation:
    """`at` is the number of the event at which it shows, -1 where it is about the whole."""

    rule: int
    at: int
    text: str


@dataclass(frozen=True)
class Facts:
    """What is known about a run apart from its events."""

    layout: Layout
    engines: tuple[int, ...]
    """Workers of each."""
    names: tuple[tuple[str, ...], ...]
    """HF names by stage."""
    raised: Mapping[int, str]
    """What each rank raised."""
    died: tuple[int, ...] = ()
    endless: tuple[str, ...] = ()
    """Waits without a deadline."""
    differences: tuple[str, ...] = ()
    """Where a worker's bytes are not those of this step."""
    publishes: bool = True
    """Whether engines have `update_weight_version`."""
    sends_are_named: bool = True
    """Whether `send` events tell HF names (a broadcast of foreign code does not)."""
    export: Export = "raw"

    @property
    def went_well(self) -> bool:
        return not self.raised and not self.died

    @property
    def all_iterate(self) -> bool:
        return self.export in COLLECTIVE

    @property
    def keeps_its_group(self) -> bool:  # rank 0 alone sends, over a group that is opened at connect
        return self.layout.pp == 1 or self.all_iterate


@dataclass(frozen=True)
class Trace:
    events: Sequence[Event]
    facts: Facts

    @cached_property
    def by_name(self) -> Mapping[str, list[tuple[int, Event]]]:
        found: defaultdict[str, list[tuple[int, Event]]] = defaultdict(list)
        for number, event in enumerate(self.events):
            found[event.event].append((number, event))
        return found

    def of(self, *names: str) -> list[tuple[int, Event]]:
        """Events of these names, in order."""
        if len(names) == 1:
            return self.by_name.get(names[0], [])
        return sorted([numbered for name in names for numbered in self.by_name.get(name, ())])


Rule = Callable[[Trace], Iterator[Violation]]


def violations(events: Sequence[Event], facts: Facts, rules: Iterable[int] | None = None) -> list[Violation]:
    """All that is violated of `rules` (default: every rule here), in order of the events."""
    trace = Trace(events, facts)
    found = [v for number, rule in RULES.items() if rules is None or number in rules for v in rule(trace)]
    return sorted(found, key=lambda v: (v.at if v.at >= 0 else len(events), v.rule))


def one_receiver_communicator(trace: Trace) -> Iterator[Violation]:
    live: dict[str, str] = {}
    for at, event in trace.of("open", "close.done"):
        if event.event == "close.done":
            live.pop(event.group, None)
            continue
        for group, owner in live.items():
            yield Violation(1, at, f"{event.actor} opens {event.group} while {owner} still holds {group}")
        live[event.group] = event.actor
    if trace.facts.went_well:
        for group, owner in live.items():
            yield Violation(1, -1, f"{owner} never closes {group}")


def one_session(trace: Trace) -> Iterator[Violation]:
    for engine in range(len(trace.facts.engines)):
        name = f"engine{engine}"
        done = [(at, e.detail) for at, e in trace.of("handle.done") if e.actor == name]
        for method in ("start_weight_update", "finish_weight_update"):
            times = [at for at, detail in done if detail == method]
            if len(times) > 1 or (trace.facts.went_well and len(times) != 1):
                yield Violation(2, times[-1] if times else -1, f"{name} does {method} {len(times)} times in one update")
        begin = next((at for at, detail in done if detail == "start_weight_update"), None)
        end = next((at for at, detail in done if detail == "finish_weight_update"), None)
        for at, event in trace.of("receive"):
            if event.actor.startswith(f"{name}/") and (begin is None or at < begin or (end is not None and at > end)):
                yield Violation(2, at, f"{event.actor} receives {event.detail} outside the session")


_LETTERS = {"pause_generation": "P", "flush_cache": "F", "start_weight_update": "S", "init_weights_update_group": "I",
            "update_weights_from_distributed": "U", "finish_weight_update": "N", "update_weight_version": "V",
            "continue_generation": "R"}


def order(trace: Trace) -> Iterator[Violation]:
    if trace.facts.went_well:
        staged = not trace.facts.keeps_its_group
        wanted = re.compile("PFS" + ("(IU+)*" if staged else "U*") + ("NVR" if trace.facts.publishes else "NR"))
        for engine in range(len(trace.facts.engines)):
            handled = [(at, e.detail) for at, e in trace.of("handle") if e.actor == f"engine{engine}" and e.detail in _LETTERS]
            if not wanted.fullmatch("".join(_LETTERS[method] for _, method in handled)):
                yield Violation(3, handled[-1][0] if handled else -1, f"engine{engine} is asked in this order: "
                                                                      f"{', '.join(method for _, method in handled)}")
    last = -1
    for at, event in trace.of("open", "send"):
        if event.stage is not None and event.stage < last:
            yield Violation(3, at, f"{event.actor} does '{event.text()}' after stage {last} has begun")
        last = max(last, -1 if event.stage is None else event.stage)


def barrier_symmetry(trace: Trace) -> Iterator[Violation]:
    met: dict[int, list[str]] = {rank: [] for rank in range(trace.facts.layout.world_size)}
    places: dict[int, list[int]] = {rank: [] for rank in met}
    for at, event in trace.of("barrier"):
        if event.rank is not None:
            met[event.rank].append(event.detail)
            places[event.rank].append(at)
    wanted = met[0]
    for rank, labels in met.items():
        if labels == wanted:
            continue
        turn = next((turn for turn, pair in enumerate(zip(wanted, labels, strict=False)) if pair[0] != pair[1]), None)
        if turn is not None:
            yield Violation(4, places[rank][turn], f"barrier {turn} of rank {rank} is '{labels[turn]}', that of rank 0 is "
                                                   f"'{wanted[turn]}'")
        elif trace.facts.went_well:
            yield Violation(4, places[rank][-1] if labels else -1,
                            f"rank {rank} meets {len(labels)} times, rank 0 {len(wanted)} times")


_SOURCES_ONLY = ("listen", "open", "send", "synchronize", "close", "state")


def inactive_ranks_touch_nothing(trace: Trace) -> Iterator[Violation]:
    ranks, sources = trace.facts.layout.ranks, trace.facts.layout.sources
    sources_of_all = {c.rank for stage, c in sources.items() if stage == 0 or not trace.facts.all_iterate}
    for at, event in trace.of("gather"):
        if event.rank is None or event.stage is None:
            continue
        if not _exports(trace.facts, event, ranks[event.rank], sources[event.stage]):
            yield Violation(5, at, f"rank {event.rank} gathers for stage {event.stage}, which does not need it")
    for at, event in trace.of(*_SOURCES_ONLY):
        if event.event in ("state", "close", "close.done") and event.stage is None and event.rank in sources_of_all:
            continue  # given back in `finally`, outside of any stage
        if event.stage is None or event.rank != sources[event.stage].rank:
            yield Violation(5, at, f"{event.actor} is not the source of stage {event.stage} and does '{event.text()}'")
    for at, event in trace.of("rpc"):
        lead_may = event.stage is None or not trace.facts.went_well
        if not (event.rank == 0 and lead_may) and (event.stage is None or event.rank != sources[event.stage].rank):
            yield Violation(5, at, f"{event.actor} has no business with engines and does '{event.text()}'")


def _exports(facts: Facts, event: Event, c: Coordinates, source: Coordinates) -> bool:
    """Whether the export of the stage needs this rank: all ranks, all of the stage, or those of the gather's group."""
    if facts.all_iterate:
        return event.stage == 0
    return c.pp == event.stage and (facts.export != "raw" or (c.dp == 0 if event.group == "tp" else c.edp == source.edp))


def once_each(trace: Trace) -> Iterator[Violation]:
    wanted = [name for names in trace.facts.names for name in names]
    for what, told in _told(trace):
        found = [name for _, event in told for name in event.detail.split()]
        if sorted(found) != sorted(wanted):
            yield from _miscounted(what, told, Counter(wanted), trace.facts.went_well)


def _told(trace: Trace) -> Iterator[tuple[str, list[tuple[int, Event]]]]:
    """What all sources have sent, and what each worker has received."""
    if trace.facts.sends_are_named:
        yield "send", trace.of("send")
    received: dict[str, list[tuple[int, Event]]] = {
        f"engine{i}/worker{j}": [] for i, count in enumerate(trace.facts.engines) for j in range(count)}
    for at, event in trace.of("receive.done"):
        received[event.actor].append((at, event))
    for told in received.values():
        yield "receive.done", told


def _miscounted(what: str, told: list[tuple[int, Event]], wanted: Counter[str], went_well: bool) -> Iterator[Violation]:
    seen: Counter[str] = Counter()
    for at, event in told:
        for name in event.detail.split():
            seen[name] += 1
            if seen[name] > wanted[name]:
                yield Violation(6, at, f"{event.actor}: {what} of {name}, {'once too often' if wanted[name] else 'unknown'}")
    if went_well:
        for name in wanted - seen:
            yield Violation(6, -1, f"{name} is missing from what was {'received' if what != 'send' else 'sent'}")


def one_source_pays_nothing(trace: Trace) -> Iterator[Violation]:
    facts = trace.facts
    if not facts.keeps_its_group or not facts.went_well:
        return
    for at, event in trace.of("listen", "open", "join", "close", "state"):
        yield Violation(7, at, f"{event.actor} does '{event.text()}' in an update that one source sends")
    barriers = Counter(event.rank for _, event in trace.of("barrier"))
    if set(barriers.values()) != {5 + (while_sending := 2 if facts.export == "raw" else 1)}:
        yield Violation(7, -1, f"barriers per rank: {dict(barriers)}, must be {while_sending} while sending and 5 around")
    engines, sends = len(facts.engines), len(trace.of("send"))
    lead = (6 if facts.publishes else 5) * engines
    if (calls := len(trace.of("rpc"))) != lead + sends * (engines + 2):
        yield Violation(7, -1, f"{calls} RPCs, must be {lead} and {engines} + 2 (lock) for each of {sends} buckets")


def failures_reach_everybody(trace: Trace) -> Iterator[Violation]:
    facts = trace.facts
    if facts.went_well:
        return
    alive = [rank for rank in range(facts.layout.world_size) if rank not in facts.died]
    if silent := [rank for rank in alive if rank not in facts.raised]:
        yield Violation(8, -1, f"ranks {silent} go on as if nothing had happened; raised was {dict(facts.raised)}")
    if len(texts := {facts.raised[rank] for rank in alive if rank in facts.raised}) > 1:
        yield Violation(8, -1, f"ranks raise different texts: {sorted(texts)}")


def fail_stop(trace: Trace) -> Iterator[Violation]:
    touched: set[str] = set()
    for at, event in trace.of("handle", "handle.done", "generate"):
        does = (event.event, event.detail)
        if does == ("handle", "start_weight_update"):
            touched.add(event.actor)
        elif does == ("handle.done", "finish_weight_update"):
            touched.discard(event.actor)
        elif does == ("handle.done", "update_weight_version") and event.actor in touched:
            yield Violation(9, at, f"{event.actor} publishes a version inside a session")
        elif event.event == "generate" and event.actor in touched:
            yield Violation(9, at, f"{event.actor} serves between start and finish")


def no_endless_wait(trace: Trace) -> Iterator[Violation]:
    for text in trace.facts.endless:
        yield Violation(11, -1, text)
    if trace.facts.all_iterate and trace.facts.sends_are_named:  # else nobody knows which items a bucket has
        yield from _no_running_ahead(trace)


def _no_running_ahead(trace: Trace) -> Iterator[Violation]:
    """Until a bucket has been sent, nobody goes on behind the item that closed it, which is the first one of the next: its next
    step would be a wait for the source in a group of the trainer, which no deadline of ours bounds. An item is a tensor here."""
    closing = accumulate(len(event.detail.split()) for _, event in trace.of("send"))
    last = next(closing, math.inf)
    for at, event in trace.of("gather", "send.done"):
        if event.event == "send.done":
            last = next(closing, math.inf)  # what was never sent does not say which item would have closed it
        elif (item := int(event.detail.removeprefix("item "))) > last:
            yield Violation(11, at, f"rank {event.rank} takes item {item} before the bucket that item {last} closed is sent")


def bit_for_bit(trace: Trace) -> Iterator[Violation]:
    if trace.facts.went_well:
        for difference in trace.facts.differences:
            yield Violation(12, -1, difference)


def sent_before_closed(trace: Trace) -> Iterator[Violation]:
    """Of rule 13, what a trace shows: nothing is closed under a send, and the device is synchronized first."""
    if not trace.facts.went_well:
        return
    sending: Counter[str] = Counter()
    synchronized: set[str] = set()
    for at, event in trace.of("send", "send.done", "synchronize.done", "close"):
        if event.event == "send":
            sending[event.actor] += 1
            synchronized.discard(event.actor)
        elif event.event == "send.done":
            sending[event.actor] -= 1
        elif event.event == "synchronize.done":
            synchronized.add(event.actor)
        elif sending[event.actor] or event.actor not in synchronized:
            yield Violation(13, at, f"{event.actor} closes {event.group} before its device has sent everything")
    for actor, left in sending.items():
        if left:
            yield Violation(13, -1, f"{actor} never waits for {left} of its sends")


def local_state(trace: Trace) -> Iterator[Violation]:
    named: dict[str, tuple[int, str]] = {}
    facts = trace.facts
    for at, event in trace.of("state"):
        named[event.actor] = (at, event.detail)
    for actor, (at, detail) in named.items():
        kept = facts.layout.pp == 1 or (facts.keeps_its_group and (actor, detail) == ("rank0", "group_name=vime-pp_0"))
        if detail != "group_name=None" and not kept and actor not in {f"rank{r}" for r in facts.died}:
            yield Violation(14, at, f"{actor} keeps {detail} after the update")


RULES: Mapping[int, Rule] = {
    1: one_receiver_communicator, 2: one_session, 3: order, 4: barrier_symmetry, 5: inactive_ranks_touch_nothing, 6: once_each,
    7: one_source_pays_nothing, 8: failures_reach_everybody, 9: fail_stop, 11: no_endless_wait, 12: bit_for_bit,
    13: sent_before_closed, 14: local_state,
}
