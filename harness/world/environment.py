"""Environment variables of a world's processes, set before Python starts in them. Each with its reason."""

from __future__ import annotations

import os

VARIABLES = {
    # One thread per rank: two cores are shared by all ranks, and a process with OpenMP or BLAS threads cannot fork.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # vLLM's CPU worker would pin its threads to NUMA nodes, and dies where there are fewer than it wants.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The engine lives in the receiver's own process: no worker to start, nothing to pickle.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # A tiny model's first generate with logprobs compiles for two seconds otherwise.
    "TORCHDYNAMO_DISABLE": "1",
    # Tests read local files only; a typo in a path must not become a download.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",  # hundreds of lines about kernels and tokenizers that a tiny model does not have
    "TOKENIZERS_PARALLELISM": "false",
}


def world_environment() -> dict[str, str]:
    """This process' environment with the world's variables; what the user has set explicitly for vLLM's log level wins."""
    keep = {name: os.environ[name] for name in ("VLLM_LOGGING_LEVEL",) if name in os.environ}
    return {**os.environ, **VARIABLES, **keep}
