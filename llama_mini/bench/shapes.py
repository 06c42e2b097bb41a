"""Models of known shapes with random weights, which are as fast as trained ones."""

from typing import Any

import torch
from torch import nn

from ..checkpoint import parse_config
from ..checkpoint.weights import NoInit
from ..config import LlamaConfig
from ..model import Llama

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
KEYS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads max_position_embeddings rope_theta tie_word_embeddings"
).split()
# What `config.json` says of each.
SHAPES: dict[str, dict[str, Any]] = {
    name: {
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        **dict(zip(KEYS, values, strict=True)),
        **more,
    }
    for name, values, more in (
        ("stories", (4096, 256, 704, 6, 8, 4, 512, 1e4, True), {}),  # train.py's own
        ("smollm2-135m", (49152, 576, 1536, 30, 9, 3, 8192, 1e5, True), {}),
        ("tinyllama-1.1b", (32000, 2048, 5632, 22, 32, 4, 2048, 1e4, False), {}),
        (
            "llama-3.2-1b",
            (128256, 2048, 8192, 16, 32, 8, 131072, 5e5, True),
            {"rope_scaling": {**LLAMA3, "factor": 32.0}},
        ),
        (
            "llama-3.1-8b",
            (128256, 4096, 14336, 32, 32, 8, 131072, 5e5, False),
            {"rope_scaling": LLAMA3},
        ),
    )
}


def shape_config(name: str, positions: int) -> LlamaConfig:
    """The config of a known shape, with room for so many positions: untrained, it knows no end of context.

    A `ValueError` for a name that SHAPES lacks.
    """
    if name not in SHAPES:
        raise ValueError(f"--shape {name}: it must be one of {', '.join(SHAPES)}")
    room = max(SHAPES[name]["max_position_embeddings"], positions)
    return parse_config({**SHAPES[name], "max_position_embeddings": room})


def random_model(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> Llama:
    """A `Llama` with random weights, drawn in `dtype` on `device`."""
    with torch.device("meta"), NoInit():
        model = Llama(config)
    generator = torch.Generator(device).manual_seed(0)
    state: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():  # a tied head comes once, as the embedding
        weight = torch.ones(parameter.shape, device=device, dtype=dtype)
        if weight.dim() == 2:
            std = 0.02 if name == "embed.weight" else weight.shape[1] ** -0.5
            weight.normal_(0, std, generator=generator)
        state[name] = nn.Parameter(weight, requires_grad=False)
    state.setdefault("lm_head.weight", state["embed.weight"])
    model.load_state_dict(state, assign=True)
    return model.eval()
