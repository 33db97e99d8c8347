"""Scenarios of the receiver ranks: an engine under test that knows config.json only, and a reference engine from the file.

What is compared, and with what (none of it uses `staged_sync` to know what is right):
on arrival     every tensor that the back end is about to load, byte for byte, with the checkpoint's safetensors
after finish   every parameter, byte for byte, with the reference engine's (readback.py says what that is for packed ones)
in use         greedy tokens and their logprobs, to the last bit, with the reference engine's
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from harness.checkpoints import config_only_copy, read_checkpoint
from harness.compare import compare, compare_arrivals
from harness.one_process import admit_experts
from harness.world import planted
from harness.world.rank import RankContext
from harness.world.readback import read_back, record_unpacked_weights
from harness.world.rpc import Target, public_methods

PROMPTS = ([1, 2, 3, 4], [9, 8, 7], [100, 50, 25, 12, 6], [33])
NEW_TOKENS = 12


class Generation(msgspec.Struct, frozen=True):
    """Greedy tokens of every prompt, and for every token the logprobs of the most likely ones."""

    tokens: list[list[int]]
    logprobs: list[list[dict[int, float]]]


class EngineReport(msgspec.Struct, frozen=True):
    """What one engine received and became, against the checkpoint that it should have."""

    engine: int
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
class Arrivals:
    """What came over the wire since the last `forget`, copied before vLLM loads it."""

    before: Callable[[str], None]
    stopped: bool = False
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)

    def on_receive(self, _engine: Any, group: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self.before("receive")
        if self.stopped:
            return
        self.groups.append("" if group is None else group.terms.name)
        self.tensors += [(name, tensor.clone()) for name, tensor in tensors]

    def forget(self) -> None:
        self.tensors.clear()
        self.groups.clear()


@dataclass(slots=True)
class Receiver:
    """The engine under test, what arrived for it, and reference engines by checkpoint."""

    llm: Any
    engine: Any
    arrivals: Arrivals


def prepare(context: RankContext, *, checkpoint: str, backend: str | None = None) -> dict[str, Any]:
    """A fresh engine under test, behind remote calls; what trainer ranks need to reach it. `backend`: its weight-transfer
    back end, by default the device's own (NCCL on GPUs, gloo on CPUs)."""
    _prepare_process(context)
    backend = backend or ("nccl" if context.topology.device == "cuda" else "gloo")
    from staged_sync.engines.in_process import InProcessEngine

    home = config_only_copy(checkpoint, context.files.directory / f"config{context.engine}")
    llm = build_llm(context, home, load_format="dummy", backend=backend)
    before = partial(planted.at_call, context)
    arrivals = Arrivals(before)
    _record_arrivals(arrivals, backend)
    engine = InProcessEngine(llm)
    context.state["receiver"] = Receiver(llm, engine, arrivals)
    target = Target(f"engine {context.engine}", context.serve(engine, before), os.getpid(), list(public_methods(engine)))
    assert context.server is not None
    context.server.group = lambda: engine.get_weight_transfer_info()["group_name"] or ""
    return msgspec.to_builtins(target)


def _record_arrivals(arrivals: Arrivals, backend: str) -> None:
    """Let `arrivals` see what the back end is about to load. Ours has a hook; of the stock NCCL one the loading itself is
    watched (not yet run on a GPU)."""
    if backend != "nccl":
        from staged_sync.vllm.gloo_engine import GlooWeightTransferEngine

        GlooWeightTransferEngine.on_receive[:] = [arrivals.on_receive]
        return
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    stock = getattr(NCCLWeightTransferEngine.receive_weights, "stock", NCCLWeightTransferEngine.receive_weights)

    def receive(self: Any, update_info: Any) -> None:
        load = self.model.load_weights

        def watched(tensors: Any) -> Any:
            named = list(tensors)
            arrivals.on_receive(self, None, named)
            return load(named)

        with patch.object(self.model, "load_weights", watched):
            stock(self, update_info)

    receive.stock = stock  # type: ignore[attr-defined]
    NCCLWeightTransferEngine.receive_weights = receive


def forget(context: RankContext, *, stop: bool = False) -> None:
    """Start a new recording, or `stop` recording (many updates would fill the memory)."""
    arrivals = _receiver(context).arrivals
    arrivals.forget()
    arrivals.stopped = stop


def state(context: RankContext) -> dict[str, Any]:
    """What the engine says of itself: version, paused, session (staged_sync.engines.info)."""
    info: dict[str, Any] = _receiver(context).engine.get_weight_transfer_info()
    return info


def dtypes(context: RankContext, *, ending: str) -> dict[str, str]:
    """In which dtype the engine keeps the parameters whose names end so."""
    (mine,) = read_back(_receiver(context).llm)
    return {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in mine.tensors.items() if name.endswith(ending)}


def generate(context: RankContext) -> dict[str, Any]:
    """What the engine says now."""
    return msgspec.to_builtins(greedy(_receiver(context).llm))


def check(context: RankContext, *, checkpoint: str) -> dict[str, Any]:
    """Compare what arrived and what the engine became with `checkpoint`."""
    receiver, want = _receiver(context), read_checkpoint(checkpoint)
    arrived = compare_arrivals(receiver.arrivals.tensors, want)
    reference = _reference(context, checkpoint)
    (mine,), (other,) = read_back(receiver.llm), read_back(reference)
    parameters = compare(mine.tensors, other.tensors)
    said, expected = greedy(receiver.llm), greedy(reference)
    report = EngineReport(
        engine=context.engine, version=str(receiver.llm.get_weight_version()),
        tensors_equal=arrived.equal, tensors_total=arrived.total,
        parameters_equal=parameters.equal, parameters_total=parameters.total, parameters_unpacked=len(mine.unpacked),
        tokens_equal=said.tokens == expected.tokens, logprobs_equal=said.logprobs == expected.logprobs,
        groups=list(dict.fromkeys(receiver.arrivals.groups)), bytes=sum(t.nbytes for _, t in receiver.arrivals.tensors),
        problems=[*arrived.problems, *(f"after finish, {problem}" for problem in parameters.problems)])
    return msgspec.to_builtins(report)


def sensitivity(context: RankContext, *, checkpoint: str, swapped: str) -> dict[str, bool]:
    """Whether two reference engines differ, where one has two layers' tensors swapped: the checks above can see a swap."""
    one, other = _reference(context, checkpoint), _reference(context, swapped)
    (mine,), (theirs,) = read_back(one), read_back(other)
    said, expected = greedy(one), greedy(other)
    return {"parameters differ": not compare(mine.tensors, theirs.tensors).exact,
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
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(context.rank))
    from staged_sync.vllm.plugin import register

    register()
    record_unpacked_weights()


def build_llm(context: RankContext, path: Path | str, *, load_format: str, backend: str | None) -> Any:
    """A tiny engine in this process. Kept for ever: all share vLLM's parallel state, which the first to be collected would
    take down; each costs 10 MB."""
    from vllm import LLM

    llm = LLM(str(path), skip_tokenizer_init=True, enforce_eager=True, load_format=load_format, max_model_len=64,
              dtype="bfloat16", num_gpu_blocks_override=64, use_tqdm_on_load=False,
              weight_transfer_config=None if backend is None else {"backend": backend})
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
