"""Bad input is said in full sentences, all of it at once, before anything is tried."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from staged_sync.config import Timeouts, engine_counts, mode_problems, read_settings

ENGINES = [object(), object(), object()]


def test_defaults_are_without_problems_and_nest() -> None:
    settings, problems = read_settings(SimpleNamespace())
    assert problems == []
    assert settings.bucket_bytes == 512 << 20
    assert settings.packed is True
    assert settings.packed_buffer_bytes == 1 << 30
    timeouts = settings.timeouts
    assert timeouts.call_s < timeouts.phase_s < timeouts.phase_s + timeouts.grace_s < timeouts.update_s


@pytest.mark.parametrize(("call", "phase", "update"), [
    (10.0, 10.0, 100.0), (20.0, 10.0, 100.0), (10.0, 100.0, 104.0), (10.0, 20.0, float("inf")), (1.0, 100.0, 50.0)])
def test_deadlines_that_do_not_nest_are_refused(call: float, phase: float, update: float) -> None:
    (problem,) = Timeouts(call, phase, update).problems()
    assert "deadlines must nest" in problem and f"{update:g} s" in problem


def test_all_wrong_settings_are_named_at_once() -> None:
    args = SimpleNamespace(update_weight_buffer_size=0, update_weight_call_timeout="soon", update_weight_timeout=True,
                           update_weight_port_range=(9, 3))
    _, problems = read_settings(args)
    assert problems == [
        "args.update_weight_call_timeout must be a positive number (got 'soon')",
        "args.update_weight_timeout must be a positive number (got True)",
        "args.update_weight_buffer_size must be a positive number (got 0)",
        "args.update_weight_port_range must be two ports low <= high inside 1..65535 (got (9, 3))",
    ]


@pytest.mark.parametrize(("counts", "args", "expected"), [
    ([1, 2, 4], {}, ([1, 2, 4], [])),
    (None, {"rollout_num_gpus_per_engine": 2}, ([2, 2, 2], [])),
])
def test_counts_of_workers(counts: list[int] | None, args: dict[str, Any], expected: Any) -> None:
    assert engine_counts(SimpleNamespace(**args), ENGINES, counts) == expected


@pytest.mark.parametrize(("engines", "counts", "args", "text"), [
    ([], [1], {}, "rollout_engines must name at least one engine"),
    (ENGINES, [1, 2], {}, r"engine_gpu_counts must have one entry per engine (got 2 counts [1, 2] for 3 engines)"),
    (ENGINES, [1, 0, 1], {}, "engine_gpu_counts[1] must be a positive int (got 0)"),
    (ENGINES, [1, 2.0, 1], {}, "engine_gpu_counts[1] must be a positive int (got 2.0)"),
    (ENGINES, None, {}, "args.rollout_num_gpus_per_engine must be a positive int"),
    (ENGINES, None, {"rollout_num_gpus_per_engine": 0}, "args.rollout_num_gpus_per_engine must be a positive int"),
])
def test_wrong_counts_are_named(engines: list[Any], counts: Any, args: dict[str, Any], text: str) -> None:
    found, problems = engine_counts(SimpleNamespace(**args), engines, counts)
    assert found == []
    assert len(problems) == 1 and text in problems[0]


def test_unknown_modes_and_quantised_rollouts_are_refused_with_what_to_do() -> None:
    problems = mode_problems(SimpleNamespace(megatron_to_hf_mode="other"), {"quant_method": "awq"}, own_exporter=False)
    assert problems[0] == "megatron_to_hf_mode must be 'raw' or 'bridge' (got 'other')"
    assert "got quant_method 'awq'" in problems[1]
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    bridge = mode_problems(SimpleNamespace(megatron_to_hf_mode="bridge"), fp8, own_exporter=False)
    assert "set --megatron-to-hf-mode raw" in bridge[0]
    for mode in ("raw", "bridge"):
        assert mode_problems(SimpleNamespace(megatron_to_hf_mode=mode), None, own_exporter=False) == []
    assert mode_problems(SimpleNamespace(), {}, own_exporter=False) == []


def test_compressed_tensors_need_an_exporter_that_packs() -> None:
    packed = {"quant_method": "compressed-tensors"}
    (problem,) = mode_problems(SimpleNamespace(), packed, own_exporter=False)
    assert "needs an exporter that yields packed weights" in problem
    assert mode_problems(SimpleNamespace(), packed, own_exporter=True) == []
    assert read_settings(SimpleNamespace(), packed)[0].post_process
    assert not read_settings(SimpleNamespace(), {"quant_method": "fp8"})[0].post_process
