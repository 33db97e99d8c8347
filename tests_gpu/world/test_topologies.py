"""Every way in which Megatron deals out layers and ranks, with real Megatron models and real engines, three updates in a row.

Which layers each stage's chunks must hold is a literal here: Megatron's own arithmetic is compared with it, not used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.world.job import SyncJob, SyncReport

ThreeUpdates = Callable[..., tuple[SyncJob, list[SyncReport]]]

pytestmark = pytest.mark.own_world


def groups(*stages: int) -> list[list[str]]:
    """The transfer groups of three updates, in order."""
    return [[f"vime-pp_{stage}" for stage in stages]] * 3


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_b111_b119_virtual_chunks_of_two_stages(three_updates: ThreeUpdates, tied: bool) -> None:
    _, reports = three_updates({"pp": 2, "vpp": 2}, "qwen3", num_layers=4, tied=tied,
                            build={"layers": [[[0], [2]], [[1], [3]]]})
    assert [report.stages for report in reports] == groups(0, 1)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_b112_b114_three_uneven_stages_whose_middle_owns_neither_end(three_updates: ThreeUpdates, tied: bool) -> None:
    _, reports = three_updates({"pp": 3}, "qwen3", num_layers=6, tied=tied, build={
        "settings": {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 2},
        "layers": [[[0]], [[1, 2, 3]], [[4, 5]]]})
    assert [report.stages for report in reports] == groups(0, 1, 2)


LAYOUTS: dict[str, tuple[dict[str, int], int, dict[str, Any]]] = {
    "first-stage-counted": ({"pp": 2}, 5, {"settings": {"num_layers_in_first_pipeline_stage": 4},
                                           "layers": [[[0, 1, 2, 3]], [[4]]]}),
    "embedding-and-loss-count-as-layers": ({"pp": 2}, 6, {
        "settings": {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
        "layers": [[[0, 1, 2]], [[3, 4, 5]]]}),
    "embedding-counts-as-a-layer": ({"pp": 2}, 5, {
        "settings": {"account_for_embedding_in_pipeline_split": True}, "layers": [[[0, 1]], [[2, 3, 4]]]}),
    "layout-string": ({"pp": 2}, 5, {"settings": {"pipeline_model_parallel_layout": "Et|t*4L"},
                                     "layers": [[[0]], [[1, 2, 3, 4]]]}),
    "layout-list": ({"pp": 2}, 3, {"settings": {"pipeline_model_parallel_layout": [
        ["embedding", "decoder", "decoder"], ["decoder", "loss"]]}, "layers": [[[0, 1]], [[2]]]}),
    "stages-with-no-layer": ({"pp": 3}, 3, {"settings": {"pipeline_model_parallel_layout": "E|t*3|L"},
                                            "layers": [[[]], [[0, 1, 2]], [[]]]}),
    "layout-with-virtual-chunks": ({"pp": 2, "vpp": 2}, 7, {"settings": {"pipeline_model_parallel_layout": "Et|t*3|t|t*2L"},
                                                            "layers": [[[0], [4]], [[1, 2, 3], [5, 6]]]}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_b116_layers_may_be_split_as_megatron_can(three_updates: ThreeUpdates, name: str) -> None:
    topology, layers, build = LAYOUTS[name]
    _, reports = three_updates(topology, "qwen3", num_layers=layers, tied=True, build=build)
    assert [report.stages for report in reports] == groups(*range(topology["pp"]))


def test_a_stage_that_holds_nothing_opens_no_group(three_updates: ThreeUpdates) -> None:
    _, reports = three_updates({"pp": 4}, "qwen3", num_layers=3, tied=True, build={
        "settings": {"pipeline_model_parallel_layout": "Et*2||t|L"}, "layers": [[[0, 1]], [[]], [[2]], [[]]]})
    assert [report.stages for report in reports] == groups(0, 2, 3)


@pytest.mark.parametrize("replicas", [{"dp": 2}, {"cp": 2}], ids=["dp2", "cp2"])
def test_data_and_context_parallel_replicas_stay_inactive(three_updates: ThreeUpdates, replicas: dict[str, int]) -> None:
    """Ranks 1 and 3 are the replicas: they join the barriers and do nothing else."""
    job, reports = three_updates({"pp": 2, **replicas}, "qwen3", num_layers=3)
    assert [report.stages for report in reports] == groups(0, 1)
    did = {rank: {event["event"] for event in events["events"]} for rank, events in enumerate(job.updates[-1])}
    assert did[1] == did[3] == {"phase", "barrier", "barrier.done"}
    assert {"open", "send", "close"} <= did[0] & did[2]
