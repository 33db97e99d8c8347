"""The protocol suite: what any implementation must do in every schedule. Ours, the harness' examples, and `--impl`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.foreign.adapter import CAPABILITIES, Adapter
from harness.foreign.job import load
from harness.sim import Scenario

PACKED = 1 << 20
"""Of bytes in a bucket: all of a stage."""

WORLDS: dict[str, tuple[Scenario, frozenset[str]]] = {
    "one stage": (Scenario(stages=((3, 0),)), frozenset()),
    "one stage, engines of 1 and 2": (Scenario(stages=((2, 0),), engines=(1, 2)), frozenset()),
    "one stage, packed": (Scenario(stages=((3, 0),), packed=True, bucket_bytes=PACKED), frozenset({"packed"})),
    "two stages": (Scenario(pp=2, stages=((2, 0), (1, 0))), frozenset({"deferral"})),
    "two stages, engines of 1 and 2": (Scenario(pp=2, stages=((1, 0), (2, 0)), engines=(1, 2)), frozenset({"deferral"})),
    "two stages, packed": (Scenario(pp=2, stages=((2, 0), (2, 0)), packed=True, bucket_bytes=PACKED),
                           frozenset({"deferral", "packed"})),
    "three stages, one empty": (Scenario(pp=3, stages=((1, 0), (0, 0), (2, 0)), engines=(2,)), frozenset({"deferral"})),
    "two stages, two replicas": (Scenario(dp=2, pp=2, stages=((1, 0), (1, 0))), frozenset({"deferral"})),
    "experts over two replicas": (Scenario(dp=2, ep=2, stages=((1, 4),)), frozenset({"moe"})),
    "experts over two replicas, tensor parallel": (Scenario(tp=2, dp=2, ep=2, stages=((1, 2),)), frozenset({"moe"})),
    "two stages, experts over two replicas": (
        Scenario(dp=2, pp=2, ep=2, stages=((1, 2), (0, 4)), engines=(1, 2), bucket_bytes=PACKED), frozenset({"moe", "deferral"})),
    "two stages, experts over tensor-parallel ranks": (
        Scenario(tp=2, pp=2, ep=2, etp=1, stages=((1, 4), (1, 2))), frozenset({"moe", "deferral"})),
    "bridge, one stage": (Scenario(tp=2, stages=((2, 0),), export="bridge"), frozenset({"bridge"})),
    "bridge, two stages": (Scenario(pp=2, stages=((2, 0), (1, 0)), engines=(1, 2), export="bridge"), frozenset({"bridge"})),
    "bridge, two stages, experts": (
        Scenario(tp=2, pp=2, ep=2, etp=1, stages=((1, 2), (1, 2)), export="bridge", bucket_bytes=PACKED),
        frozenset({"bridge", "moe"})),
}
"""World, and the capabilities that it needs."""

FAULTS: dict[str, frozenset[str]] = {
    "engine raises": frozenset(), "engine dies": frozenset(),  # ray.get raises: somebody hears of it without doing anything
    "engine silent": frozenset({"deadlines"}), "rank raises": frozenset({"deadlines"}), "rank dies": frozenset({"deadlines"}),
}
"""What is planted, one at a time, at every operation of an update, and the capabilities that it needs."""

STRUCK = ("one stage, engines of 1 and 2", "two stages, engines of 1 and 2", "experts over two replicas", "bridge, two stages")
"""The worlds in which faults are planted."""


@dataclass(frozen=True)
class Implementation:
    """`impl` empty: ours."""

    impl: str = ""
    adapter: str = ""

    def capabilities(self) -> frozenset[str]:
        return self.declared().capabilities if self.impl else frozenset(CAPABILITIES)

    def declared(self) -> Adapter:
        found: Adapter = load(self.adapter) if self.adapter else Adapter()
        return found

    def world(self, name: str) -> Scenario:
        return replace(WORLDS[name][0], impl=self.impl, adapter=self.adapter)

    def lacks(self, world: str, fault: str = "") -> list[str]:
        """Capabilities that this world, and a fault in it, need and the implementation does not declare. Named groups need no
        deferral."""
        needed = set(WORLDS[world][1] | FAULTS.get(fault, frozenset()))
        if self.impl and self.declared().receiver == "named groups":
            needed.discard("deferral")
        return sorted(needed - self.capabilities())

    def not_declared(self) -> list[str]:
        """One line for each capability that is missing: what it says, and what is left out for want of it."""
        return [f"not declared: {name} ({text}): {_left_out(name)}" for name, text in CAPABILITIES.items()
                if name not in self.capabilities()]


_RULES = {
    "session": "rules 2 and 3 are not asked", "recovery": "no update is asked for after a fault",
    "deadlines": "rule 11 is not asked, and of engines that fail only that somebody raises and nobody serves a mixture"}
"""What else hangs on a capability."""


def _left_out(capability: str) -> str:
    worlds = [name for name, (_, needed) in WORLDS.items() if capability in needed]
    faults = [name for name, needed in FAULTS.items() if capability in needed]
    skipped = [f"{what} skipped: {', '.join(map(repr, names))}"
               for what, names in (("worlds", worlds), ("faults", faults)) if names]
    return "; ".join([*skipped, *([_RULES[capability]] if capability in _RULES else [])])


EXAMPLES = "harness.foreign.examples"


def example(name: str) -> Implementation:
    """One of the harness' own."""
    return Implementation(f"{EXAMPLES}.{name}:UpdateWeightFromDistributed", f"{EXAMPLES}.adapters:{name.upper()}")
