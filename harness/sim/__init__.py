"""Layer 2: many trainer ranks and engines in one process, every interleaving. See docs/simulator.md.

    from harness.sim import Scenario, check_all, check_pct, check_random, replay

    check_random(Scenario(pp=2, engines=(1, 2)), schedules=1000, seed=7)   # raises ScheduleFailed, with the replaying call
    check_all(Scenario(pp=2))                                              # every order that can matter; says if complete
    replay(Scenario(pp=2, mutant="old behaviour"), "3-0x12-1")             # one schedule again
"""

from harness.sim.explore import Exploration, ScheduleFailed, check_all, check_pct, check_random, explore, replay
from harness.sim.outcome import Outcome
from harness.sim.scenario import Scenario

__all__ = ["Exploration", "Outcome", "Scenario", "ScheduleFailed", "check_all", "check_pct", "check_random", "explore", "replay"]
