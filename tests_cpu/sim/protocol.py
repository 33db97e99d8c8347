"""The protocol suite: what any implementation must do in every schedule. Ours, the harness' examples, and `--impl`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.foreign.adapter import Adapter
from harness.foreign.simulation import load
from harness.sim import Scenario

WORLDS: dict[str, tuple[Scenario, frozenset[str]]] = {
    "one stage": (Scenario(stages=((3, 0),)), frozenset()),
    "one stage, engines of 1 and 2": (Scenario(stages=((2, 0),), engines=(1, 2)), frozenset()),
    "one stage, packed": (Scenario(stages=((3, 0),), packed=True, bucket_bytes=1 << 20), frozenset({"packed"})),
    "two stages": (Scenario(pp=2, stages=((2, 0), (1, 0))), frozenset({"deferral"})),
    "two stages, engines of 1 and 2": (Scenario(pp=2, stages=((1, 0), (2, 0)), engines=(1, 2)), frozenset({"deferral"})),
    "two stages, packed": (Scenario(pp=2, stages=((2, 0), (2, 0)), packed=True, bucket_bytes=1 << 20),
                           frozenset({"deferral", "packed"})),
    "three stages, one empty": (Scenario(pp=3, stages=((1, 0), (0, 0), (2, 0)), engines=(2,)), frozenset({"deferral"})),
    "two stages, two replicas": (Scenario(dp=2, pp=2, stages=((1, 0), (1, 0))), frozenset({"deferral"})),
}
"""World, and the capabilities that it needs."""


@dataclass(frozen=True)
class Implementation:
    """`impl` empty: ours."""

    impl: str = ""
    adapter: str = ""

    def capabilities(self) -> frozenset[str]:
        from harness.foreign.adapter import CAPABILITIES
        return self.declared().capabilities if self.impl else frozenset(CAPABILITIES)

    def declared(self) -> Adapter:
        found: Adapter = load(self.adapter) if self.adapter else Adapter()
        return found

    def world(self, name: str) -> Scenario:
        return replace(WORLDS[name][0], impl=self.impl, adapter=self.adapter)

    def lacks(self, name: str) -> list[str]:
        """Capabilities that this world needs and the implementation does not declare. Named groups need no deferral."""
        needed = set(WORLDS[name][1])
        if self.impl and self.declared().receiver == "named groups":
            needed.discard("deferral")
        return sorted(needed - self.capabilities())
