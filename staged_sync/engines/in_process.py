"""A vLLM `LLM` that lives in this process, behind vime's method names (docs/seam.md).

What a Ray actor, an HTTP server or the world harness exposes for an engine; here as plain blocking methods. The rules that keep
a mixture of weights from being served are checked here, because vLLM does not: generating is refused while the engine is
paused, while a session is open and until an interrupted session has been followed by a complete one (vLLM would compute on
meta tensors, and die).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from staged_sync.engines.info import EngineInfo
from staged_sync.errors import StagedSyncError
from staged_sync.vllm import abandon, api, rendezvous
from staged_sync.vllm.plugin import BACKENDS


class EngineRefused(StagedSyncError):
    """This engine does not do that now; the text says why and what must come first."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """What was agreed when the transfer group was opened."""

    group_name: str
    packed: bool
    packed_buffer_size_bytes: int | None


class InProcessEngine:
    """One rollout engine around `llm` (vllm.LLM with a `weight_transfer_config`). Not thread-safe: one call at a time."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._api = api.installed()
        config = llm.llm_engine.vllm_config.weight_transfer_config
        if config is None:
            raise EngineRefused("this LLM cannot take weights: build it with weight_transfer_config={'backend': 'gloo'} (CPU) "
                                "or {'backend': 'nccl'} (CUDA)")
        self._registered_as = str(config.backend)
        self._agreed: Agreed | None = None
        self._paused = False
        self._session_open = False
        self._weights_complete = True

    # --- generation -------------------------------------------------------------------------------------------------------

    def pause_generation(self) -> None:
        """Schedule nothing more. Requests in flight are kept."""
        self.llm.sleep(level=0, mode="keep")  # level 0 only pauses the scheduler
        self._paused = True

    def continue_generation(self) -> None:
        """Schedule again. Raises EngineRefused where the weights are a mixture."""
        self._refuse_mixture()
        self.llm.wake_up(tags=["scheduling"])
        self._paused = False

    def is_paused(self) -> bool:
        return self._paused

    def flush_cache(self) -> None:
        """Forget cached prefixes: they were computed with other weights. Raises EngineRefused where vLLM does not."""
        if not self.llm.reset_prefix_cache():
            raise EngineRefused("vLLM did not reset its prefix cache: requests still hold blocks of it; pause or abort them "
                                "first")

    def generate(self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 16) -> list[dict[str, list[Any]]]:
        """Greedy continuation of prompts of token ids: `{"tokens": [int], "logprobs": [float]}` each, of `max_tokens` tokens
        (the end-of-sequence token does not stop it); logprobs are those of the chosen tokens.

        Raises EngineRefused while paused, while a session is open, and while the weights are incomplete.
        """
        if self._paused:
            raise EngineRefused("this engine is paused: continue_generation must come first")
        self._refuse_mixture()
        outputs = self.llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], api.greedy(max_tokens),
                                    use_tqdm=False)
        return [_generation(output.outputs[0]) for output in outputs]

    def check_reachable(self, host: str, port: int, timeout_s: float) -> str:
        """Try to dial a source before anybody waits for it; this engine's own address on the way there.

        Raises TransportError with both names where nobody answers within `timeout_s`.
        """
        return rendezvous.reach(host, port, timeout_s=timeout_s)

    # --- the transfer group -----------------------------------------------------------------------------------------------

    def init_weights_update_group(self, master_address: str, master_port: int, rank_offset: int, world_size: int,
                                  group_name: str, backend: str, packed: bool = False,
                                  packed_buffer_size_bytes: int | None = None, timeout_s: float | None = None) -> None:
        """Make every worker join the source's group, and drop the group it held. Blocks until all members have joined.

        `timeout_s` bounds that, and later each receive, for our own back ends; a stock one waits for vLLM's 300 s. Raises
        EngineRefused where `backend` is not the transport that this engine receives with.
        """
        if backend != self._transport():
            raise EngineRefused(f"group {group_name!r} is to be opened with back end {backend!r}, this engine receives with "
                                f"{self._registered_as!r}")
        extra: dict[str, Any] = {}
        if self._registered_as in BACKENDS:
            bounds = {} if timeout_s is None else {"timeout_s": timeout_s, "receive_timeout_s": timeout_s}
            extra = {"group_name": group_name, **bounds}
        self._agreed = None
        self.llm.init_weight_transfer_engine({"init_info": self._api.init_info(
            master_address=master_address, master_port=master_port, rank_offset=rank_offset, world_size=world_size,
            packed=packed, packed_buffer_size_bytes=packed_buffer_size_bytes, extra=extra)})
        self._agreed = Agreed(group_name, packed, packed_buffer_size_bytes)

    def destroy_weights_update_group(self, group_name: str) -> None:
        """Leave the group. Harmless where none is held; raises EngineRefused where another one is."""
        if self._agreed is None:
            return
        if self._agreed.group_name != group_name:
            raise EngineRefused(f"this engine holds transfer group {self._agreed.group_name!r}, not {group_name!r}")
        self.llm.shutdown_weight_transfer_engine()
        self._agreed = None

    # --- the session ------------------------------------------------------------------------------------------------------

    def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        """Open a session. Raises EngineRefused for weights that are not in checkpoint format."""
        if not is_checkpoint_format:
            raise EngineRefused("this engine takes weights in checkpoint format only (HF names, full tensors)")
        if not self._weights_complete and not self._session_open and self._registered_as not in BACKENDS:
            # A stock back end would count this session's weights on top of the abandoned one's (staged_sync/vllm/reload.py).
            # Finishing an empty session makes vLLM forget them; nothing can be generated in between.
            self.llm.start_weight_update()
            self.llm.finish_weight_update()
        self.llm.start_weight_update()
        self._session_open, self._weights_complete = True, False

    def update_weights_from_distributed(self, names: list[str], dtypes: Sequence[torch.dtype | str],
                                        shapes: Sequence[Sequence[int]], group_name: str, packed: bool = False,
                                        weight_version: str | None = None) -> None:
        """Receive one bucket and load it. Any failure closes the session (vllm/v1/worker/gpu_worker.py, `update_weights`).

        Raises EngineRefused, before anything is received, where `packed` differs from what was agreed when the group was
        opened. Like vLLM, it does not compare `group_name`.
        """
        if self._agreed is not None and packed != self._agreed.packed and not abandon.is_request(names):
            raise EngineRefused(f"the update over {group_name!r} is announced with packed={packed}, but group "
                                f"{self._agreed.group_name!r} was opened with packed={self._agreed.packed}")
        try:
            self.llm.update_weights({"update_info": self._api.update_info(names, dtypes, shapes)})
        except BaseException:
            self._session_open = False
            raise
        if weight_version is not None:  # vime's engines record it at once
            self.update_weight_version(weight_version)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the session; the engine takes whatever it got for complete."""
        self.llm.finish_weight_update(weight_version)
        self._session_open, self._weights_complete = False, True

    def update_weight_version(self, weight_version: str) -> None:
        self.llm.update_weight_version(str(weight_version))

    def get_weight_version(self) -> str:
        return str(self.llm.get_weight_version())

    # --- what it is -------------------------------------------------------------------------------------------------------

    def get_weight_transfer_info(self) -> dict[str, Any]:
        """An `EngineInfo`, as a dict of plain values."""
        agreed = asdict(self._agreed) if self._agreed is not None else {}
        return EngineInfo(
            vllm_version=api.vllm_version(), backend=self._transport(), workers=int(self.llm.get_world_size()),
            packed_in=self._api.packed_in, weight_version=self.get_weight_version(), paused=self._paused,
            session_open=self._session_open, weights_complete=self._weights_complete,
            weight_transfer_backend=self._registered_as, **agreed).as_dict()

    def _transport(self) -> str:
        return "gloo" if self._registered_as in BACKENDS else self._registered_as

    def _refuse_mixture(self) -> None:
        if self._session_open:
            raise EngineRefused("a weight update is open on this engine: finish_weight_update must come first")
        if not self._weights_complete:
            raise EngineRefused("the last weight update of this engine was broken off, its weights are a mixture: a complete "
                                "update (start, every bucket, finish) must come first")


def _generation(completion: Any) -> dict[str, list[Any]]:
    tokens = list(completion.token_ids)
    return {"tokens": tokens,
            "logprobs": [step[token].logprob for token, step in zip(tokens, completion.logprobs, strict=True)]}
