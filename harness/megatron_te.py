"""A layer spec whose parameter NAMES are those of Megatron's Transformer Engine spec, made of modules that run on a CPU.

Bridges find parameters by those names, and Megatron-Bridge tells how a linear is cut by the name of its class. Layer norms are
fused into the linear that follows (`layer_norm_weight`); experts are grouped (`linear_fc1.weight0`, `weight1`, …).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


def layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Of every layer of `config`'s model: all dense, or all mixtures of experts."""
    experts = config.num_moe_experts is not None
    mlp = ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=ModuleSpec(module=GroupedExperts))) if experts else \
        ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=TELayerNormColumnParallelLinear, linear_fc2=RowParallelLinear))
    head_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=SelfAttentionSubmodules(
            linear_qkv=TELayerNormColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear,
            q_layernorm=head_norm, k_layernorm=head_norm))
    return ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(
        input_layernorm=IdentityOp, self_attention=attention, self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=RMSNorm if experts else IdentityOp, mlp=mlp, mlp_bda=get_bias_dropout_add))


class RMSNorm(torch.nn.Module):
    """A norm of its own, in the model's dtype, as Transformer Engine's."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """A linear that normalises its input first."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self._eps = config.layernorm_epsilon

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(F.rms_norm(x, (x.shape[-1],), self.layer_norm_weight, self._eps), *args, **kwargs)


class TEColumnParallelGroupedLinear(torch.nn.Module):
    """Holds `weight0`, `weight1`, …: the name of the class is all that Megatron-Bridge looks at."""


class TERowParallelGroupedLinear(torch.nn.Module):
    """The same, cut along the columns."""


class GroupedExperts(torch.nn.Module):
    """The parameters of TEGroupedMLP, and a forward that goes from expert to expert."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, submodules: Any = None, pg_collection: Any = None,
                 **kwargs: Any) -> None:
        super().__init__()
        hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size // mpu.get_expert_tensor_parallel_world_size()
        self.linear_fc1, self.linear_fc2 = TEColumnParallelGroupedLinear(), TERowParallelGroupedLinear()
        self._count = num_local_experts
        for i in range(num_local_experts):
            self.linear_fc1.register_parameter(f"weight{i}", _weight(config, (2 * ffn, hidden), dim=0))
            self.linear_fc2.register_parameter(f"weight{i}", _weight(config, (hidden, ffn), dim=1))

    def forward(self, x: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = []
        tokens = zip(x.split(tokens_per_expert.tolist()), probs.split(tokens_per_expert.tolist()), strict=True)
        for i, (mine, weight) in enumerate(tokens):
            gate, up = F.linear(mine, getattr(self.linear_fc1, f"weight{i}")).chunk(2, -1)
            parts.append(F.linear(F.silu(gate) * up * weight[:, None].to(gate.dtype), getattr(self.linear_fc2, f"weight{i}")))
        return torch.cat(parts), None


def _weight(config: TransformerConfig, shape: tuple[int, int], *, dim: int) -> torch.nn.Parameter:
    """Marked as Megatron marks an expert's weight."""
    weight: Any = torch.nn.Parameter(torch.zeros(shape, dtype=config.params_dtype))
    weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, dim, 1
    weight.allreduce = mpu.get_expert_model_parallel_world_size() == 1
    return weight
