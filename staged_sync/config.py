"""Reads the trainer's `args` once, into values that the rest of the library takes as required arguments.

`args` is any object with Megatron's and vime's attribute names. Every problem is collected; nothing is raised here, so that
the caller can raise all of them (from all ranks) as one `ConfigurationError` before anything is paused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20

DEFAULT_BUFFER_BYTES = 512 * MIB
"""vime's default of --update-weight-buffer-size."""

DEFAULT_PACKED_BUFFER_BYTES = 1024 * MIB
"""vllm/distributed/weight_transfer/packed_tensor.py, DEFAULT_PACKED_BUFFER_SIZE_BYTES: what an untold engine assumes."""

DEFAULT_CALL_S, DEFAULT_PHASE_S, DEFAULT_UPDATE_S = 120.0, 600.0, 1800.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Deadlines in seconds, nested: call < phase < phase + grace < update.

    `call_s` bounds one RPC, one dial, one bucket, one lock; `phase_s` one phase of the update (for `send`: one stage);
    `update_s` the whole. Whoever waits for other trainer ranks, in a gather or a status barrier, waits `grace_s` longer than
    the phase: the rank that is late raises first, cleans up inside the grace, and brings the cause with it.
    """

    call_s: float
    phase_s: float
    update_s: float

    @property
    def grace_s(self) -> float:
        return min(5.0, self.call_s)

    def problems(self) -> list[str]:
        nested = 0 < self.call_s < self.phase_s and self.phase_s + self.grace_s < self.update_s
        if nested and self.update_s != float("inf"):
            return []
        return [f"deadlines must nest as 0 < update_weight_call_timeout < update_weight_phase_timeout, and "
                f"update_weight_phase_timeout + {self.grace_s:g} s < update_weight_timeout, and be finite (got "
                f"{self.call_s:g} s, {self.phase_s:g} s, {self.update_s:g} s): otherwise an outer wait ends before the inner "
                f"one can say what went wrong"]


@dataclass(frozen=True, slots=True)
class Settings:
    bucket_bytes: int
    packed: bool
    packed_buffer_bytes: int
    timeouts: Timeouts
    address: str | None
    port_range: tuple[int, int] | None
    post_process: bool
    """Whether engines are told to restore their weights' checkpoint layout before a session and to quantise after it."""
    report_folder: str | None
    """Where hang reports go; the system's temporary folder if None."""


def read_settings(args: Any, quantization_config: Any = None) -> tuple[Settings, list[str]]:
    """Settings from `args` and the rollout's quantization, and every problem with them as a full sentence."""
    problems: list[str] = []
    timeouts = Timeouts(
        call_s=_number(args, "update_weight_call_timeout", DEFAULT_CALL_S, problems),
        phase_s=_number(args, "update_weight_phase_timeout", DEFAULT_PHASE_S, problems),
        update_s=_number(args, "update_weight_timeout", DEFAULT_UPDATE_S, problems))
    problems += timeouts.problems()
    settings = Settings(
        bucket_bytes=_bytes(args, "update_weight_buffer_size", DEFAULT_BUFFER_BYTES, problems),
        packed=_flag(args, "vllm_weight_sync_packed", True, problems),
        packed_buffer_bytes=_bytes(args, "update_weight_packed_buffer_size", DEFAULT_PACKED_BUFFER_BYTES, problems),
        timeouts=timeouts,
        address=getattr(args, "update_weight_master_address", None),
        port_range=_port_range(getattr(args, "update_weight_port_range", None), problems),
        post_process=post_processes(quantization_config),
        report_folder=getattr(args, "update_weight_report_folder", None))
    return settings, problems


def mode_problems(args: Any, quantization_config: Any, *, own_exporter: bool) -> list[str]:
    """What this version cannot do, said before anything is tried. `own_exporter`: the caller brings one, so that what is sent
    is what it says."""
    problems = []
    mode = getattr(args, "megatron_to_hf_mode", "raw")
    if mode not in ("raw", "bridge"):
        problems.append(f"megatron_to_hf_mode must be 'raw' or 'bridge' (got {mode!r})")
    if mode == "bridge" and quantization_config:
        problems.append("megatron_to_hf_mode must be 'raw' for a quantised rollout (got 'bridge'): what a bridge yields is not "
                        "quantised yet; set --megatron-to-hf-mode raw")
    if post_processes(quantization_config) and own_exporter:
        return problems
    return problems + (quantisation_problems(quantization_config) if quantization_config else [])


def post_processes(quantization_config: Any) -> bool:
    """Whether engines keep the weights in a layout of their own (compressed-tensors: int4, fp4), as vime decides it."""
    return isinstance(quantization_config, Mapping) and quantization_config.get("quant_method") == "compressed-tensors"


def quantisation_problems(config: Any) -> list[str]:
    """Why a `quantization_config` cannot be served, as sentences; empty if it can: FP8 with a scale per block."""
    method = config.get("quant_method") if isinstance(config, Mapping) else config
    if method != "fp8" or not isinstance(config, Mapping):
        if post_processes(config):
            return ["quantization_config compressed-tensors needs an exporter that yields packed weights (got none): the raw "
                    "export does not pack; give exporter=, or serve the engines in the checkpoint's own dtype"]
        return [f"quantization_config must be fp8 with weight_block_size (got quant_method {method!r}): other quantised rollouts "
                f"are not supported yet; serve the engines in the checkpoint's own dtype"]
    block = config.get("weight_block_size")
    fits = isinstance(block, (list, tuple)) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
    problems = [] if fits else [f"quantization_config.weight_block_size must be two positive ints, e.g. [128, 128] (got "
                                f"{block!r}): FP8 with one scale per tensor is not supported"]
    if config.get("activation_scheme", "dynamic") != "dynamic":
        problems.append(f"quantization_config.activation_scheme must be 'dynamic' (got {config['activation_scheme']!r}): a "
                        f"trainer knows no scales of activations")
    return problems

def engine_counts(args: Any, engines: Sequence[Any], counts: Sequence[int] | None) -> tuple[list[int], list[str]]:
    """Workers per engine (engine i starts at group rank `1 + sum(counts[:i])`), and what is wrong with them."""
    if not engines:
        return [], ["rollout_engines must name at least one engine (got none): without engines there is nobody to send to"]
    twice = [f"{i} and {j}" for j, b in enumerate(engines) for i, a in enumerate(engines[:j]) if a is b or a == b]
    if twice:
        return [], [f"rollout_engines must name each engine once (the same one stands at indices {', '.join(twice)})"]
    if counts is None:
        each = getattr(args, "rollout_num_gpus_per_engine", None)
        if not isinstance(each, int) or each < 1:
            return [], [f"args.rollout_num_gpus_per_engine must be a positive int where engine_gpu_counts is not given "
                        f"(got {each!r})"]
        return [each] * len(engines), []
    try:
        counts = list(counts)
    except TypeError:
        return [], [f"engine_gpu_counts must be a list of positive ints (got {counts!r})"]
    if len(counts) != len(engines):
        return [], [f"engine_gpu_counts must have one entry per engine (got {len(counts)} counts {counts} for "
                    f"{len(engines)} engines)"]
    wrong = [f"engine_gpu_counts[{i}] must be a positive int (got {c!r})" for i, c in enumerate(counts)
             if isinstance(c, bool) or not hasattr(c, "__index__") or c < 1]
    return ([] if wrong else [operator.index(c) for c in counts]), wrong


def _number(args: Any, name: str, default: float, problems: list[str]) -> float:
    value = getattr(args, name, None)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        problems.append(f"args.{name} must be a positive number (got {value!r})")
        return default
    return value


def _bytes(args: Any, name: str, default: int, problems: list[str]) -> int:
    value = _number(args, name, default, problems)
    if value < 1:
        problems.append(f"args.{name} must be at least one byte (got {value!r})")
    return int(value)


def _flag(args: Any, name: str, default: bool, problems: list[str]) -> bool:
    value = getattr(args, name, None)
    if value is not None and not isinstance(value, bool):
        problems.append(f"args.{name} must be True or False (got {value!r})")
    return default if value is None else bool(value)


def _port_range(value: Any, problems: list[str]) -> tuple[int, int] | None:
    if value is None:
        return None
    try:
        low, high = (int(part) for part in value)
    except (TypeError, ValueError):
        low, high = 0, -1
    if not 0 < low <= high < 65536:
        problems.append(f"args.update_weight_port_range must be two ports low <= high inside 1..65535 (got {value!r})")
        return None
    return low, high
