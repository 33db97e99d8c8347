"""Real megatron-core models of this rank, built from and loaded with a HF checkpoint by the independent cutter
(harness.cutter).

torch.distributed and Megatron's parallel state must be initialised. Local layer spec, so nothing needs Transformer
Engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from harness import megatron_cpu
from harness.checkpoints import read_checkpoint, read_config
from harness.cutter import head_dim, padded_vocab_size, shard_tensors, stage_layers, virtual_layers
from harness.cutting import Names, Place
from harness.megatron_config import transformer_config
from harness.megatron_te import layer_spec
from harness.model_shapes import experts_of, mtp_layers


def build_megatron_model(hf_dir: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16,
                         settings: Mapping[str, Any] | None = None,
                         layers: Sequence[Sequence[Sequence[int]]] | None = None,
                         names: Names = "local") -> list[torch.nn.Module]:
    """This rank's model chunks, wrapped in Float16Module as Megatron's training loop does, with `hf_dir`'s weights.

    `settings`: fields of TransformerConfig that split the layers otherwise than evenly; then `layers` says which global
    layers (from 0) each stage's chunks must get: a literal of the test, not computed by Megatron.

    `names="te"`: parameters are named as with Transformer Engine (harness/megatron_te.py), as bridges expect them.

    `dtype=torch.float32` leaves the wrapper out: bf16 weights held in float32, whose logits are those of transformers
    to rounding (1e-5 instead of 1e-1), so that a comparison of forwards leaves no room for a wrong weight.
    """
    megatron_cpu.install()
    hf = read_config(hf_dir)
    config = transformer_config(hf, dtype=dtype, settings=settings)
    vpp = mpu.get_virtual_pipeline_model_parallel_world_size()
    models = [_build_chunk(hf, config, None if vpp is None else chunk, names) for chunk in range(vpp or 1)]
    built = [[layer.layer_number - 1 for layer in model.decoder.layers] for model in models]
    expected = [list(chunk) for chunk in _expected_layers(hf, layers, vpp)]
    if built != expected:
        raise AssertionError(f"Megatron built layers {built} on this stage (by chunk), {expected} were expected")
    chunks: list[torch.nn.Module] = [model if dtype == torch.float32 else Float16Module(config, model) for model in models]
    chunks = [chunk.to(device).eval() for chunk in chunks]
    load_step(chunks, hf_dir)
    return chunks


def _build_chunk(hf: Mapping[str, Any], config: TransformerConfig, vp_stage: int | None, names: Names) -> GPTModel:
    where = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    if names == "te":
        spec = layer_spec(config)
    elif experts_of(hf) or config.multi_latent_attention:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    last = mpu.is_pipeline_last_stage(**where)
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=vp_stage) \
        if mtp_layers(hf) and last else None
    return GPTModel(
        config,
        spec,
        vocab_size=padded_vocab_size(hf["vocab_size"], tp=mpu.get_tensor_model_parallel_world_size()),
        max_sequence_length=hf["max_position_embeddings"],
        pre_process=mpu.is_pipeline_first_stage(**where),
        post_process=last,
        share_embeddings_and_output_weights=hf["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=hf["rope_theta"],
        rotary_percent=hf.get("partial_rotary_factor", 1.0),
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
    )


def _expected_layers(hf: Mapping[str, Any], layers: Sequence[Sequence[Sequence[int]]] | None,
                     vpp: int | None) -> Sequence[Sequence[int]]:
    """Global layers of this stage's chunks, by the second opinion: the test's literal, or the cutter's own arithmetic."""
    pp, stage = mpu.get_pipeline_model_parallel_world_size(), mpu.get_pipeline_model_parallel_rank()
    if layers is not None:
        return layers[stage]
    if vpp is not None:
        return virtual_layers(hf["num_hidden_layers"], pp=pp, vpp=vpp)[stage]
    return [stage_layers(hf["num_hidden_layers"], pp=pp)[stage]]


def load_step(chunks: Sequence[torch.nn.Module], hf_dir: str | Path) -> None:
    """Overwrite every parameter of this rank's chunks in place with `hf_dir`'s weights, as an optimizer step would.

    Strict: the cutter's names must be the model's, every parameter is poisoned first, and none may stay so.
    """
    hf, config = read_checkpoint(hf_dir), read_config(hf_dir)
    place = Place(mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank(),
                  mpu.get_expert_model_parallel_world_size(), mpu.get_expert_model_parallel_rank(),
                  mpu.get_expert_tensor_parallel_world_size(), mpu.get_expert_tensor_parallel_rank())
    for chunk in chunks:
        model = inner(chunk)
        fused = any(name.endswith("layer_norm_weight") for name, _ in model.named_parameters())
        shards = shard_tensors(hf, config, place=place, layers=[layer.layer_number - 1 for layer in model.decoder.layers],
                               names="te" if fused else "local", container="te" if fused else "sequential",
                               first=model.pre_process, last=model.post_process,
                               padded_vocab=padded_vocab_size(config["vocab_size"], tp=place.tp),
                               mtp=mtp_layers(config) if model.mtp_process else ())
        _assign(dict(model.named_parameters()) | _router_biases(model), shards)


def _router_biases(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The routers' persistent buffers, in float32 as Megatron keeps them whenever it loads a checkpoint or computes."""
    found = {}
    for name, module in model.named_modules():
        if getattr(module, "expert_bias", None) is not None:
            module._maintain_float32_expert_bias()
            found[f"{name}.expert_bias"] = module.expert_bias
    return found


@torch.no_grad()
def _assign(parameters: dict[str, torch.Tensor], shards: dict[str, torch.Tensor]) -> None:
    if parameters.keys() != shards.keys():
        raise AssertionError(f"the model alone has {sorted(parameters.keys() - shards.keys())}, "
                             f"the cutter alone has {sorted(shards.keys() - parameters.keys())}")
    for parameter in parameters.values():
        parameter.fill_(float("nan"))
    for name, shard in shards.items():
        parameter = parameters[name]
        exact = torch.promote_types(shard.dtype, parameter.dtype) == parameter.dtype
        if parameter.shape != shard.shape or not exact:
            raise AssertionError(f"{name} is {tuple(parameter.shape)} {parameter.dtype} in the model, "
                                 f"{tuple(shard.shape)} {shard.dtype} from the cutter")
        parameter.copy_(shard)
    left = [name for name, parameter in parameters.items() if parameter.isnan().any()]
    if left:
        raise AssertionError(f"parameters still poisoned after loading: {left}")


def inner(chunk: torch.nn.Module) -> Any:
    """The GPTModel inside DDP and Float16Module."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def megatron_args(hf_dir: str | Path, **overrides: Any) -> SimpleNamespace:
    """Training arguments with Megatron's and vime's attribute names, for `hf_dir` on this world."""
    hf = read_config(hf_dir)
    args = {
        "hf_checkpoint": str(hf_dir),
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "group_query_attention": True,
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": head_dim(hf),
        "vocab_size": hf["vocab_size"],
        "untie_embeddings_and_output_weights": not hf["tie_word_embeddings"],
        "update_weight_buffer_size": 1 << 20,
        "megatron_to_hf_mode": "raw",
        "vllm_weight_sync_packed": False,
        "rollout_num_gpus_per_engine": 1,
    }
    return SimpleNamespace(**(args | overrides))


@torch.no_grad()
def megatron_forward_logits(chunks: Sequence[torch.nn.Module], tokens: torch.Tensor, *,
                            vocab_size: int) -> torch.Tensor | None:
    """Logits of `tokens` (batch, sequence), int64: float32 (batch, sequence, vocab_size) on the last stage, else None.

    A collective: activations travel stage by stage, the last stage gathers its vocabulary shards. Every rank must call
    it.
    """
    (chunk,) = chunks
    model = inner(chunk)
    batch, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).expand(batch, length)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)  # True: may not be seen
    if not model.pre_process:
        hidden = torch.empty(length, batch, model.config.hidden_size, dtype=model.config.pipeline_dtype,
                             device=tokens.device)
        dist.recv(hidden, mpu.get_pipeline_model_parallel_prev_rank())
        chunk.set_input_tensor([hidden])
    output = chunk(tokens, positions, mask).contiguous()
    if not model.post_process:
        dist.send(output, mpu.get_pipeline_model_parallel_next_rank())
        return None
    shards = [torch.empty_like(output) for _ in range(mpu.get_tensor_model_parallel_world_size())]
    dist.all_gather(shards, output, group=mpu.get_tensor_model_parallel_group())
    return torch.cat(shards, dim=-1)[..., :vocab_size].float()
