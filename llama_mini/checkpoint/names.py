"""Our names of the tensors and those in files."""

import re

from ..placements.llama import NAMES as HUGGING_FACE

META = {
    "embed": "tok_embeddings",
    "blocks.N.pre_attention_norm": "layers.N.attention_norm",
    "blocks.N.attention.q_proj": "layers.N.attention.wq",
    "blocks.N.attention.k_proj": "layers.N.attention.wk",
    "blocks.N.attention.v_proj": "layers.N.attention.wv",
    "blocks.N.attention.o_proj": "layers.N.attention.wo",
    "blocks.N.pre_ffn_norm": "layers.N.ffn_norm",
    "blocks.N.ffn.gate_proj": "layers.N.feed_forward.w1",
    "blocks.N.ffn.up_proj": "layers.N.feed_forward.w3",
    "blocks.N.ffn.down_proj": "layers.N.feed_forward.w2",
    "final_norm": "norm",
    "lm_head": "output",
}
TIED = ("embed.weight", "lm_head.weight")

__all__ = ["HUGGING_FACE", "META", "TIED", "inverse", "translate"]


def translate(name: str, table: dict[str, str]) -> str | None:
    """The name of a parameter by a table from one scheme to another, or None where the table has
    no such name.
    """
    block = re.search(r"\.([0-9]{1,9})\.", name)
    pattern = name.replace(block[0], ".N.", 1) if block else name
    module, _, kind = pattern.rpartition(".")
    there = table.get(module)
    if there is None or kind not in ("weight", "bias") or (".N." in there) != bool(block):
        return None
    return f"{there.replace('.N.', block[0]) if block else there}.{kind}"


def inverse(table: dict[str, str]) -> dict[str, str]:
    """The table for `translate` in the other direction."""
    return {theirs: ours for ours, theirs in table.items()}
