"""One model over several processes: tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053).

    torchrun --nproc-per-node 2 generate.py --prompt "Once upon a time"

Every rank holds its part of each large matrix and the whole residual stream, and runs
`Llama.forward` as it stands. Heads and FFN channels know nothing of one another until `o_proj` and
`down_proj` add them up, so a rank computes its own with its own rows, and one all-reduce behind
each of the two makes the stream whole again everywhere. A forward has one more all-reduce behind
the embedding and one all-gather of the logits; PLAN says what is cut, and why.
"""

import hashlib
from dataclasses import replace
from math import gcd

import torch
from torch import Tensor, nn

from ..checkpoint.hub import SETTINGS
from ..checkpoint.opening import GENERATION, Checkpoint
from ..checkpoint.weights import NoInit, build, read_state
from ..config import LlamaConfig
from ..model import Llama
from .ranks import Ranks

WHOLE, ROWS, COLUMNS = None, 0, 1  # which axis of a weight (out, in) is cut
PLAN = {
    "embed": ROWS,  # vocabulary: half of a small model; one rank has a token's row, the rest add 0
    "pre_attention_norm": WHOLE,  # its mean is over all of m, and every rank has all of m
    "q_proj": ROWS,  # whole heads: a head's attention needs nothing of another's
    "k_proj": ROWS,  # the key/value heads that the rank's own queries read
    "v_proj": ROWS,  # with k_proj
    "q_norm": WHOLE,  # one weight over d for all heads
    "k_norm": WHOLE,  # with q_norm
    "o_proj": COLUMNS,  # reads the rank's own heads and makes one term of the sum: all-reduce
    "pre_ffn_norm": WHOLE,  # as pre_attention_norm
    "gate_proj": ROWS,  # silu(gate) * up goes channel by channel
    "up_proj": ROWS,  # the channels of gate_proj
    "down_proj": COLUMNS,  # reads the rank's own channels and makes one term: all-reduce
    "final_norm": WHOLE,  # as pre_attention_norm
    "lm_head": ROWS,  # with embed, so that a tied head stays one tensor; the logits are gathered
}


class SplitEmbedding(nn.Embedding):
    """This rank's rows of the embedding: tokens (b, t), on every rank the same, -> (b, t, m)."""

    def __init__(self, config: LlamaConfig, ranks: Ranks) -> None:
        own = ranks.own(config.vocab_size)
        super().__init__(own.stop - own.start, config.hidden_size)
        self.start, self.ranks = own.start, ranks

    def forward(self, tokens: Tensor) -> Tensor:
        row = tokens - self.start
        elsewhere = (row < 0) | (row >= self.num_embeddings)
        x = super().forward(row.masked_fill(elsewhere, 0))
        return self.ranks.sum(x.masked_fill(elsewhere[..., None], 0))


class SplitHead(nn.Linear):
    """This rank's rows of the head: (b, t, m) -> logits (b, t, vocab).

    Each logit is computed on one rank and copied to the others, so all of them see the same bits.
    One seed can draw different tokens even so, as a GPU's cumsum varies in its last bit: where ranks
    generate, pass `agree=ranks.in_step` to `stream`.
    """

    def __init__(self, config: LlamaConfig, ranks: Ranks) -> None:
        own = ranks.own(config.vocab_size)
        super().__init__(config.hidden_size, own.stop - own.start, bias=False)
        self.vocab_size, self.ranks = config.vocab_size, ranks

    def forward(self, x: Tensor) -> Tensor:
        return self.ranks.gather(super().forward(x), self.vocab_size)


class RowParallel(nn.Linear):
    """This rank's columns of a projection: its term of the sum, and the sum.

    Megatron names it for the rows of the transpose: it writes x A where nn.Linear has x W^T.
    """

    def __init__(self, whole: nn.Linear, ranks: Ranks) -> None:
        super().__init__(whole.in_features, whole.out_features, bias=False)
        self.ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        return self.ranks.sum(super().forward(x))


def require_divisible(config: LlamaConfig, size: int) -> None:
    """Raise a ValueError unless `size` ranks can share heads, FFN channels and vocabulary."""
    h, g, width = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    common = gcd(h, g, width)
    # Parts are rounded up, so the last rank starts last: it must have a token too.
    starts = {n: (n - 1) * -(-config.vocab_size // n) for n in range(1, g + 1) if common % n == 0}
    fits = [n for n, last in starts.items() if last < config.vocab_size]
    if size not in fits:
        raise ValueError(
            f"{size} ranks cannot have equal shares of {h} heads, {g} key/value heads and {width} "
            f"FFN channels (intermediate_size), and a part of {config.vocab_size} tokens each: use "
            f"--nproc-per-node {' or '.join(map(str, fits))}"
        )


def split(config: LlamaConfig, ranks: Ranks) -> Llama:
    """This rank's part of a Llama, without memory (on the meta device).

    Its config counts the rank's own heads and channels: so Attention and KVCache are right as they
    are. Everything else in it, `vocab_size` too, is the whole model's.
    """
    own = replace(
        config,
        num_attention_heads=config.num_attention_heads // ranks.size,
        num_key_value_heads=config.num_key_value_heads // ranks.size,
        intermediate_size=config.intermediate_size // ranks.size,
    )
    with torch.device("meta"), NoInit():
        model = Llama(own)
        model.embed = SplitEmbedding(config, ranks)
        for path, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and PLAN[path.split(".")[-1]] == COLUMNS:
                model.set_submodule(path, RowParallel(module, ranks))
        model.lm_head = SplitHead(config, ranks)
    return model


def load_parallel(
    ranks: Ranks,
    checkpoint: Checkpoint,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> Llama:
    """`load_model`, but this rank's part of the model, and nothing else is read from the files."""
    if type(checkpoint.config) is not LlamaConfig:  # of another family, or with a window
        raise ValueError(
            f"{checkpoint.family.model_type} is not cut for several processes, as Llama is: run it in one"
        )
    require_divisible(checkpoint.config, ranks.size)

    def part(name: str, weight: Tensor) -> Tensor:
        axis = PLAN[name.split(".")[-2]]
        if axis is WHOLE:
            return weight[:]
        own = ranks.own(weight.shape[axis])
        # Rows are mapped from the file; columns lie scattered over the whole matrix, so are copied.
        return weight[own] if axis == ROWS else weight[:, own].contiguous()

    model = split(checkpoint.config, ranks)
    build(checkpoint)  # which says what the files lack
    model.load_state_dict(read_state(checkpoint, device, dtype, part), assign=True)
    return model.eval().requires_grad_(False)


SAMPLE = 4096  # bytes


def fingerprint(checkpoint: Checkpoint) -> dict[str, object]:
    """What has to be the same for all ranks that share a checkpoint, by what it is called.

    Of the weights a sample: each tensor's first, middle and last SAMPLE bytes. That costs less than
    loading and sees another version of a model, in which every tensor differs.
    """
    tensors, weights = [], hashlib.sha256()
    for name, stored in sorted(checkpoint.stored.items()):
        begin, end = stored.entry.begin, stored.entry.end
        tensors.append((name, stored.dtype, stored.shape))
        with stored.file.open("rb") as file:
            for place in (begin, (begin + end - SAMPLE) // 2, end - SAMPLE):
                file.seek(max(begin, place))
                weights.update(file.read(SAMPLE))
    settings = [checkpoint.folder / name for name in SETTINGS if name != GENERATION]
    return {
        "config": (checkpoint.family.model_type, checkpoint.config),
        "tensors": tensors,
        "weights": weights.hexdigest(),
        "tokenizer": [path.read_bytes() if path.is_file() else b"" for path in settings],
    }
