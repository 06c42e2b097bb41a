"""The families that load, by `model_type`."""

from . import (
    bitnet,
    bloom,
    cohere,
    cohere2,
    deepseek_v3,
    diffllama,
    ernie4_5,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    glm,
    glm4,
    gpt1,
    gpt2,
    granite,
    hunyuan,
    minimax,
    nanochat,
    neox,
    olmo,
    olmo2,
    olmo3,
    phi,
    phi3,
    qwen2,
    smollm3,
    youtu,
)
from .family import Family
from .llama import LLAMA, MISTRAL
from .qwen3 import QWEN3

FAMILIES = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN3,
        gpt1.FAMILY,
        gpt2.FAMILY,
        neox.FAMILY,
        phi.FAMILY,
        phi3.FAMILY,
        qwen2.FAMILY,
        gemma.FAMILY,
        gemma2.FAMILY,
        gemma3.FAMILY,
        olmo.FAMILY,
        olmo2.FAMILY,
        olmo3.FAMILY,
        exaone4.FAMILY,
        granite.FAMILY,
        smollm3.FAMILY,
        ernie4_5.FAMILY,
        glm.FAMILY,
        glm4.FAMILY,
        hunyuan.FAMILY,
        nanochat.FAMILY,
        youtu.FAMILY,
        deepseek_v3.FAMILY,
        bitnet.FAMILY,
        diffllama.FAMILY,
        minimax.FAMILY,
        cohere.FAMILY,
        cohere2.FAMILY,
        bloom.FAMILY,
    )
}

__all__ = ["FAMILIES", "Family"]
