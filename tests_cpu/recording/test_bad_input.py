"""Bad input ends as one error on every rank, with every problem in it, before anything is paused, opened or sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.recording.engines import EngineOptions
from harness.recording.job import RecordingJob
from harness.recording.log import order
from harness.recording.model import StubUnit
from harness.recording.world import RunResult
from staged_sync.errors import CompletenessError, ConfigurationError, UpdateFailed, UpdateInProgress
from staged_sync.exporter import TensorMeta


def the_error(run: RecordingJob, result: RunResult, kind: type[Exception]) -> str:
    """The one text that every rank raised; nothing was handled by an engine but the question what it is."""
    ranks = run.world.layout.world_size
    raised = {rank: type(error) for rank, error in result.errors.items()}
    assert raised == dict.fromkeys(range(ranks), kind), f"every rank must raise {kind.__name__}, raised were {raised}"
    assert result.violations == () and result.elapsed_s == 0
    assert set(order(result.events, "handle")) <= {f"engine{i}: handle get_weight_transfer_info" for i in range(9)}
    assert run.world.network.channels == []
    texts = {str(error) for error in result.errors.values()}
    assert len(texts) == 1
    return texts.pop()


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "pp": 2}])
def test_no_engines(layout: dict[str, int]) -> None:
    with RecordingJob(engines=[], **layout) as run:
        text = the_error(run, run.connect(), ConfigurationError)
    assert "rollout_engines must name at least one engine (got none)" in text


@pytest.mark.parametrize(("counts", "problem"), [
    ([1], "engine_gpu_counts must have one entry per engine (got 1 counts [1] for 2 engines)"),
    ([1, 2, 1], "engine_gpu_counts must have one entry per engine (got 3 counts [1, 2, 1] for 2 engines)"),
    ([1, 0], "engine_gpu_counts[1] must be a positive int (got 0)"),
    ([1, 4], "engine_gpu_counts[1] must be the number of workers of rollout engine 1 (got 4, the engine has 2)"),
])
def test_counts_that_do_not_fit(counts: list[int], problem: str) -> None:
    with RecordingJob(engines=[1, 2], pp=2) as run:
        assert problem in the_error(run, run.connect(counts=counts), ConfigurationError)


def test_all_problems_of_all_ranks_come_as_one_error() -> None:
    args = {"megatron_to_hf_mode": "fridge", "update_weight_buffer_size": -1, "update_weight_port_range": "9"}
    with RecordingJob(engines=[1], args=args, pp=2) as run:
        text = the_error(run, run.connect(counts=[1, 1]), ConfigurationError)
    for problem in ("megatron_to_hf_mode must be 'raw' or 'bridge' (got 'fridge')",
                    "update_weight_buffer_size must be a positive number",
                    "update_weight_port_range must be two ports", "engine_gpu_counts must have one entry per engine"):
        assert problem in text


def test_a_transport_the_engine_does_not_have() -> None:
    with RecordingJob(engines=[1, EngineOptions(info={"backend": "nccl"})]) as run:
        text = the_error(run, run.connect(), ConfigurationError)
    assert "rollout engine 1 receives with weight-transfer backend 'nccl', this trainer sends with 'gloo'" in text


def test_a_packed_stream_that_an_older_engine_would_cut_elsewhere() -> None:
    engines = [EngineOptions(packed_in="update")]
    with RecordingJob(engines=engines, args={"vllm_weight_sync_packed": True, "update_weight_packed_buffer_size": 64}) as run:
        text = the_error(run, run.connect(), ConfigurationError)
    assert "update_weight_packed_buffer_size" in text


def test_an_engine_that_answers_nonsense() -> None:
    with RecordingJob(engines=[EngineOptions(info={"workers": "two"})]) as run:
        text = the_error(run, run.connect(), ConfigurationError)
    assert "rollout engine 0 cannot be asked what it is" in text and "'workers' must be int, got 'two'" in text


def meta(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> TensorMeta:
    return TensorMeta(name, dtype, shape)


def test_every_name_that_does_not_fit_the_checkpoint_is_listed() -> None:
    exported = [[StubUnit("a", "dense", (meta("same", 2), meta("extra", 3), meta("twice", 4)))],
                [StubUnit("b", "dense", (meta("twice", 4), meta("shape", 5, 6), meta("dtype", 7, dtype=torch.float32)))]]
    checkpoint = [[StubUnit("a", "dense", (meta("same", 2), meta("twice", 4), meta("shape", 6, 5), meta("dtype", 7),
                                          meta("missing", 8)))]]
    with RecordingJob(table=exported, checkpoint=checkpoint, pp=2) as run:
        text = the_error(run, run.connect(), CompletenessError)
    assert text.splitlines()[1:] == [
        "  - missing: missing [8] bfloat16 is in the checkpoint, no stage sends it",
        "  - duplicate: twice is sent 2 times, by stages [0, 1]",
        "  - extra: stage 0 sends extra [3] bfloat16, not in the checkpoint",
        "  - shape: shape is [6, 5] in the checkpoint, stage 1 sends [5, 6]",
        "  - dtype: dtype is torch.bfloat16 in the checkpoint, stage 1 sends torch.float32",
    ]


def test_a_checkpoint_without_weights() -> None:
    with RecordingJob(pp=2, args={"hf_checkpoint": "nowhere"}) as run:
        text = the_error(run, run.connect(), ConfigurationError)
    assert "no weights index in nowhere" in text


def test_an_update_before_connect() -> None:
    with RecordingJob(pp=2) as run:
        text = the_error(run, run.update(), ConfigurationError)
    assert "call connect_rollout_engines() first" in text


def test_a_second_update_while_one_runs_is_refused() -> None:
    with RecordingJob() as run:
        run.connect().check()
        said: list[Any] = []

        def meddle(step: str, label: str) -> None:
            if step == "convert" and not said:
                with pytest.raises(UpdateInProgress) as caught:
                    run.updaters[0].update_weights()
                said.append(str(caught.value))

        run.exporters[0].before = meddle
        run.update().check()
        assert "update_weights() was called on rank 0 while another weight sync call is running" in said[0]
        assert run.differences() == []


def test_ports_that_are_all_taken() -> None:
    with RecordingJob(pp=2, args={"update_weight_port_range": (4000, 4000)}) as run:
        run.connect().check()
        run.update().check()  # each stage releases the port for the next
        held = run.world.network.listen("10.0.0.1", (4000, 4000))
        result = run.update()
        assert {type(error) for error in result.errors.values()} == {UpdateFailed}
        assert "no free port on 10.0.0.1 in the configured range 4000-4000" in str(result.errors[1])
        held.close()
        run.step = 2
        run.update().check()
        assert run.differences() == []


def test_plain_vime_engines_with_wrong_counts_fail_in_time_and_name_who_is_missing() -> None:
    """They cannot be asked, so the rendezvous waits for a rank that does not exist: bounded, and recoverable."""
    engines = [EngineOptions(plain_vime=True, packed_in="update")]
    with RecordingJob(pp=2, engines=engines, args={"update_weight_call_timeout": 20.0}) as run:
        run.connect(counts=[2]).check()
        result = run.update()
        assert {type(error) for error in result.errors.values()} == {UpdateFailed}
        assert "2 workers to join vime-pp_0" in str(result.errors[0]) or "did not join in time" in str(result.errors[0])
        assert 20 <= result.elapsed_s <= 20 + 2 * 5
        run.connect().check()  # with the real number of workers
        run.update().check()
        assert run.differences() == []


@pytest.mark.parametrize("layout", [{}, {"pp": 2}])
def test_a_trainer_that_an_engine_cannot_dial_is_told_at_connect(layout: dict[str, int]) -> None:
    """A stock worker would wait 300 s for it in the middle of an update."""
    with RecordingJob(engines=[EngineOptions(dials=True), EngineOptions(dials=False)], **layout) as run:
        result = run.connect()
        assert {type(error) for error in result.errors.values()} == {UpdateFailed}
        assert len(result.errors) == run.world.layout.world_size
        assert all("engine1 got no answer from 10.0.0.1:20000" in str(error) for error in result.errors.values())
        assert run.world.network.channels == [] and result.elapsed_s == 0
    with RecordingJob(engines=[EngineOptions(dials=True)], **layout) as run:
        run.connect().check()
        run.update().check()
        assert run.differences() == []
