"""What is asked of a foreign implementation in an update in which a fault strikes.

Of everybody: somebody raises, and no engine serves or publishes a mixture. That much comes by itself where `ray.get` raises the
error. Of those who declare `deadlines`: every rank that lives raises, in time, and no version names weights that are not there.
"""

from __future__ import annotations

from harness.foreign.adapter import Adapter
from harness.foreign.job import ForeignJob
from harness.recording.world import RunResult
from harness.sim.faulty import is_complete, not_fired, not_heard, serving_mixtures, wrong_versions
from harness.sim.outcome import Findings


def rules_of_a_failure(adapter: Adapter) -> tuple[int, ...]:
    """Those of the trace that hold on every path."""
    return (4, 9, 11) if "deadlines" in adapter.capabilities else (4, 9)


def aftermath(job: ForeignJob, found: Findings, result: RunResult | None) -> Findings:
    """`result` is None where some rank still waited (`found.stopped`): for those who promise no deadlines, that is all right once
    somebody else has raised."""
    promises = "deadlines" in job.adapter.capabilities
    unplanned = [*not_fired(job.world.faults), *serving_mixtures(job), *(wrong_versions(job) if promises else ())]
    if result is None and (promises or not job.raised):
        return Findings(stopped=found.stopped, unplanned=unplanned)
    if promises and result is not None and not is_complete(job):
        unplanned += not_heard(job, job.raised, result.died)
    lives = result is None or len(result.died) < job.world.layout.world_size
    if lives and not job.raised and not is_complete(job):
        unplanned.append("rule 8: no rank raised, and not every engine serves the new weights")
    return Findings(unplanned=unplanned)
