"""Real vLLM engines in this process, and a source in the same process that feeds them over gloo.

The engine under test starts from a directory with config.json only and dummy weights; the reference engine is loaded from the
checkpoint by vLLM itself. Engine calls run in a `LocalHandle`'s thread, so that the source can send meanwhile.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoints import config_only_copy, make_checkpoint
from harness.one_process import admit_experts
from tests_gpu.vllm.source import Receiver

PROMPTS = [[1, 2, 3, 4], [9, 8, 7], [100, 50, 25, 12, 6]]

EngineFactory = Callable[..., Receiver]


@pytest.fixture(scope="session")
def vllm_cpu() -> None:
    """vLLM's CPU build, set up for engines in this process; skips where vLLM was built for something else."""
    for name, value in {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
                        "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                        "TORCHDYNAMO_DISABLE": "1"}.items():
        os.environ.setdefault(name, value)
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("the gloo back end is for vLLM's CPU build; this vLLM was built for another platform")


@pytest.fixture(scope="session")
def make_llm(vllm_cpu: None) -> Callable[..., Any]:
    """Builds a tiny in-process LLM of a checkpoint directory. All of them live until the end: they share vLLM's parallel
    state, which the first one to be collected takes down."""
    from vllm import LLM

    from staged_sync.vllm.plugin import register

    built: list[Any] = []
    register()  # idempotent: a clone that is not installed has no entry point

    def build(path: Path, *, backend: str = "gloo", load_format: str = "dummy") -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM and torch warn about each other while a model is built; not about us
            built.append(LLM(str(path), skip_tokenizer_init=True, enforce_eager=True, load_format=load_format, max_model_len=64,
                             dtype="bfloat16", num_gpu_blocks_override=64, seed=0,
                             weight_transfer_config={"backend": backend}))
        admit_experts()
        return built[-1]

    return build


@pytest.fixture(scope="session")
def make_engine(make_llm: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineFactory]:
    """Builds an engine under test: config.json only, dummy weights."""
    receivers: list[Receiver] = []

    def build(checkpoint: Path, *, backend: str = "gloo") -> Receiver:
        bare = config_only_copy(checkpoint, tmp_path_factory.mktemp("engine"))
        receivers.append(Receiver(make_llm(bare, backend=backend)))
        return receivers[-1]

    yield build
    for receiver in receivers:
        receiver.handle.shut_down(timeout_s=10)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3") / "step0", "qwen3")


@pytest.fixture(scope="session")
def reference(make_llm: Callable[..., Any]) -> Callable[[Path], list[dict[str, list[Any]]]]:
    """What an engine answers that vLLM loaded from a checkpoint by itself."""
    from staged_sync.engines.in_process import InProcessEngine

    answers: dict[Path, list[dict[str, list[Any]]]] = {}

    def answer(path: Path) -> list[dict[str, list[Any]]]:
        if path not in answers:
            answers[path] = InProcessEngine(make_llm(path, load_format="auto")).generate(PROMPTS)
        return answers[path]

    return answer


@pytest.fixture(scope="session")
def engine(make_engine: EngineFactory, checkpoint: Path) -> Receiver:
    """One engine that most tests share; each must leave it with no session and no group."""
    return make_engine(checkpoint)
