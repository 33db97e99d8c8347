"""Scenarios of the receiver ranks: an engine under test that knows config.json only, and a reference engine from the file.

What is compared, and with what (none of it uses `staged_sync` to know what is right):
on arrival     every tensor that the back end is about to load, byte for byte, with the checkpoint's safetensors
after finish   every parameter, byte for byte, with the reference engine's (readback.py says what that is for packed ones)
in use         greedy tokens and their logprobs, to the last bit, with the reference engine's
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from harness.checkpoints import config_only_copy
from harness.compare import Comparison, compare
from harness.one_process import admit_experts
from harness.world import planted
from harness.world.rank import RankContext
from harness.world.rpc import Target, public_methods

if TYPE_CHECKING:
    from harness.world.readback import ReadBack
    from harness.world.worker_probe import Arrived

PROMPTS = ([1, 2, 3, 4], [9, 8, 7], [100, 50, 25, 12, 6], [33])
NEW_TOKENS = 12


class Generation(msgspec.Struct, frozen=True):
    """Greedy tokens of every prompt, and for every token the logprobs of the most likely ones."""

    tokens: list[list[int]]
    logprobs: list[list[dict[int, float]]]


class EngineReport(msgspec.Struct, frozen=True):
    """What one engine received and became, against the checkpoint that it should have. Counts are over all of its workers:
    each receives every tensor, and keeps its share."""

    engine: int
    workers: int
    version: str
    tensors_equal: int
    tensors_total: int
    parameters_equal: int
    parameters_total: int
    parameters_unpacked: int
    tokens_equal: bool
    logprobs_equal: bool
    groups: list[str]
    bytes: int
    problems: list[str]

    @property
    def exact(self) -> bool:
        return (not self.problems and self.tokens_equal and self.logprobs_equal and self.tensors_total > 0
                and self.tensors_equal == self.tensors_total and self.parameters_equal == self.parameters_total)


@dataclass(slots=True)
class Receiver:
    """The engine under test."""

    llm: Any
    engine: Any


def prepare(context: RankContext, *, checkpoint: str, backend: str | None = None) -> dict[str, Any]:
    """A fresh engine under test, behind remote calls; what trainer ranks need to reach it. `backend`: its weight-transfer
    back end, by default the device's own (NCCL on GPUs, gloo on CPUs)."""
    _prepare_process(context)
    backend = backend or ("nccl" if context.topology.device == "cuda" else "gloo")
    from staged_sync.engines.in_process import InProcessEngine

    home = config_only_copy(checkpoint, context.files.directory / f"config{context.engine}")
    llm = build_llm(context, home, load_format="dummy", backend=backend)
    before = partial(planted.at_call, context)
    from harness.world.worker_probe import ARRIVALS

    ARRIVALS.before = before
    engine = InProcessEngine(llm)
    context.state["receiver"] = Receiver(llm, engine)
    forget(context)
    target = Target(f"engine {context.engine}", context.serve(engine, before), os.getpid(), list(public_methods(engine)))
    assert context.server is not None
    context.server.group = lambda: engine.get_weight_transfer_info()["group_name"] or ""
    return msgspec.to_builtins(target)


def forget(context: RankContext, *, stop: bool = False) -> None:
    """Start a new recording, or `stop` recording (many updates would fill the memory)."""
    _receiver(context).llm.collective_rpc("probe_forget", args=(stop,))


def kill_worker(context: RankContext, *, worker: int, broadcast: int) -> None:
    """One of several workers dies in the middle of a bucket: see `WorkerProbe.probe_die`."""
    _receiver(context).llm.collective_rpc("probe_die", args=(worker, broadcast))


def state(context: RankContext) -> dict[str, Any]:
    """What the engine says of itself: version, paused, session (staged_sync.engines.info)."""
    info: dict[str, Any] = _receiver(context).engine.get_weight_transfer_info()
    return info


def dtypes(context: RankContext, *, ending: str) -> dict[str, str]:
    """In which dtype the engine keeps the parameters whose names end so."""
    return {name: str(tensor.dtype).removeprefix("torch.") for worker in _read_back(_receiver(context).llm)
            for name, tensor in worker.tensors.items() if name.endswith(ending)}


def generate(context: RankContext) -> dict[str, Any]:
    """What the engine says now."""
    return msgspec.to_builtins(greedy(_receiver(context).llm))


def check(context: RankContext, *, checkpoint: str) -> dict[str, Any]:
    """Compare what arrived and what the engine became with `checkpoint`."""
    receiver, reference = _receiver(context), _reference(context, checkpoint)
    arrived: list[Arrived] = receiver.llm.collective_rpc("probe_arrived", args=(checkpoint,))
    arrivals = [worker.comparison for worker in arrived]
    mine = _read_back(receiver.llm)
    parameters = _compare_workers(mine, _read_back(reference))
    said, expected = greedy(receiver.llm), greedy(reference)
    report = EngineReport(
        engine=context.engine, workers=len(arrived), version=str(receiver.llm.get_weight_version()),
        tensors_equal=sum(c.equal for c in arrivals), tensors_total=sum(c.total for c in arrivals),
        parameters_equal=sum(c.equal for c in parameters), parameters_total=sum(c.total for c in parameters),
        parameters_unpacked=sum(len(worker.unpacked) for worker in mine),
        tokens_equal=said.tokens == expected.tokens, logprobs_equal=said.logprobs == expected.logprobs,
        groups=list(dict.fromkeys(group for worker in arrived for group in worker.groups)),
        bytes=sum(worker.bytes for worker in arrived),
        problems=_problems(arrivals, "on arrival") + _problems(parameters, "after finish"))
    return msgspec.to_builtins(report)


def _problems(workers: Sequence[Comparison], when: str) -> list[str]:
    return [f"{when}, worker {number}: {problem}" for number, worker in enumerate(workers) for problem in worker.problems]


def _read_back(llm: Any) -> list[ReadBack]:
    """Every parameter of every worker."""
    return list(llm.collective_rpc("probe_parameters"))


def _compare_workers(mine: Sequence[ReadBack], theirs: Sequence[ReadBack]) -> list[Comparison]:
    return [compare(one.tensors, other.tensors) for one, other in zip(mine, theirs, strict=True)]


def sensitivity(context: RankContext, *, checkpoint: str, swapped: str) -> dict[str, bool]:
    """Whether two reference engines differ, where one has two layers' tensors swapped: the checks above can see a swap."""
    one, other = _reference(context, checkpoint), _reference(context, swapped)
    parameters = _compare_workers(_read_back(one), _read_back(other))
    said, expected = greedy(one), greedy(other)
    return {"parameters differ": not all(worker.exact for worker in parameters),
            "tokens differ": said.tokens != expected.tokens, "logprobs differ": said.logprobs != expected.logprobs}


def transformers_logits(context: RankContext, *, checkpoint: str, tokens: list[list[int]]) -> list[list[list[float]]]:
    """The independent opinion on what the checkpoint computes, in float32 on the CPU."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.tolist()


def _prepare_process(context: RankContext) -> None:
    """Once per process, before vLLM is used."""
    if context.topology.device == "cuda":
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, context.topology.gpus_of(context.engine))))
    os.environ["STAGED_SYNC_RECEIVER_PID"] = str(os.getpid())  # for worker_probe, which is imported next, here and in workers
    from staged_sync.vllm.plugin import register

    register()


def build_llm(context: RankContext, path: Path | str, *, load_format: str, backend: str | None) -> Any:
    """A tiny engine. Kept for ever: all of a process share vLLM's parallel state, which the first to be collected would take
    down; each costs 10 MB. An engine of several workers has them in processes of their own, which live as long as this one."""
    from vllm import LLM

    from harness.world.worker_probe import EXTENSION

    workers = context.topology.engine_workers[context.engine]
    llm = LLM(str(path), skip_tokenizer_init=True, enforce_eager=True, load_format=load_format, max_model_len=64,
              dtype="bfloat16", num_gpu_blocks_override=64, use_tqdm_on_load=False, worker_extension_cls=EXTENSION,
              tensor_parallel_size=workers, distributed_executor_backend="mp" if workers > 1 else None,
              weight_transfer_config=None if backend is None else {"backend": backend})
    if workers == 1:
        admit_experts()
    context.state.setdefault("llms", []).append(llm)
    return llm


def _reference(context: RankContext, checkpoint: str) -> Any:
    """An engine that loaded `checkpoint` itself; kept, since tests compare with the same few again and again."""
    _prepare_process(context)
    references: dict[str, Any] = context.state.setdefault("references", {})
    if checkpoint not in references:
        references[checkpoint] = build_llm(context, checkpoint, load_format="auto", backend=None)
    return references[checkpoint]


def greedy(llm: Any) -> Generation:
    from vllm import SamplingParams

    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS],
                           SamplingParams(max_tokens=NEW_TOKENS, temperature=0, detokenize=False, logprobs=3, ignore_eos=True),
                           use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    generation = Generation([list(answer.token_ids) for answer in answers],
                            [[{token: entry.logprob for token, entry in step.items()} for step in answer.logprobs]
                             for answer in answers])
    if not all(math.isfinite(p) for answer in generation.logprobs for step in answer for p in step.values()):
        raise ValueError("the engine computed logprobs that are not finite: its weights are not a model's")
    return generation


def _receiver(context: RankContext) -> Receiver:
    if "receiver" not in context.state:
        raise RuntimeError(f"engine {context.engine} does not exist yet: run harness.world.receiver:prepare first")
    return context.state["receiver"]
