"""Model families by the `model_type` of a HF checkpoint's config.json. Adding one: docs/adding-a-model-family.md."""

from __future__ import annotations

from staged_sync.megatron.families import deepseek_v3, glm4_moe, llama, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe
from staged_sync.megatron.families.common import Family

MODULES = (llama, qwen2, qwen3, qwen3_moe, qwen2_moe, mixtral, glm4_moe, deepseek_v3)

FAMILIES = {model_type: module.FAMILY for module in MODULES for model_type in module.FAMILY.model_types}


class UnknownFamily(LookupError):
    """No family module knows this `model_type`."""


def find_family(model_type: str | None) -> Family:
    """The family of a HF checkpoint. Raises `UnknownFamily`, which lists the known types."""
    family = FAMILIES.get(model_type or "")
    if family is None:
        raise UnknownFamily(f"no model family for model_type {model_type!r} in config.json; known: "
                            f"{', '.join(sorted(FAMILIES))}. See docs/adding-a-model-family.md")
    return family
