"""Our names of the tensors and those in files."""

import re
from collections.abc import Collection

from ..placements.files import NAMES as HUGGING_FACE

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
# What torch.compile, data parallelism and checkpointing of activations put into the names.
WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
TIED = ("embed.weight", "lm_head.weight")

__all__ = ["HUGGING_FACE", "META", "TIED", "inverse", "translate", "translate_all"]


def translate(name: str, table: dict[str, str]) -> str | None:
    """The name of a parameter by a table from one scheme to another, or None where the table has
    no such name.
    """
    block = re.search(r"\.([0-9]{1,9})\.", name)
    pattern = name.replace(block[0], ".N.", 1) if block else name
    module, _, kind = pattern.rpartition(".")
    # A parameter that is no module's weight or bias has a line of its own.
    there = table.get(pattern)
    if there is None and kind in ("weight", "bias") and module in table:
        there = f"{table[module]}.{kind}"
    if there is None or (".N." in there) != bool(block):
        return None
    return there.replace(".N.", block[0]) if block else there


def in_any_block(name: str) -> str:
    """The name as tables have it, with N for the number of its block."""
    return re.sub(r"\.[0-9]+\.", ".N.", name, count=1)


def inverse(table: dict[str, str]) -> dict[str, str]:
    """The table for `translate` in the other direction."""
    return {theirs: ours for ours, theirs in table.items()}


def translate_all(names: Collection[str], table: dict[str, str]) -> dict[str, str | None]:
    """Our name of every tensor of a checkpoint, None where it has none.

    Names are also known without their first part (a model saved without its head has `layers.0` for
    `model.layers.0`), with parts in front that all of them carry, and with what wrappers add.
    Whichever reading knows the most names is taken, and the names as they are where none knows more.
    """
    plain = {name: translate(name, table) for name in names}
    if None not in plain.values():
        return plain
    bare = {name: WRAPPERS.sub("", name) for name in names}
    first = [path.split(".")[0] for path in table if "." in path]
    front = max(first, key=first.count, default="") + "."  # model. for Llama, none for Meta
    readings = [{name: name for name in names}, bare]
    for _ in range(3):
        starts = {name.partition(".")[0] for name in readings[-1].values()}
        if len(starts) != 1 or not all("." in name for name in readings[-1].values()):
            break
        readings.append({name: short.partition(".")[2] for name, short in readings[-1].items()})
    readings += [
        {
            name: short if translate(short, table) else front + short
            for name, short in reading.items()
        }
        for reading in list(readings)
    ]
    known = [{name: translate(short, table) for name, short in each.items()} for each in readings]
    return max(known, key=lambda each: sum(ours is not None for ours in each.values()))
