"""What decides the weights of a training, beside its text."""

import dataclasses
from dataclasses import dataclass

from ..config import LlamaConfig
from .corpus import EOS

PRECISIONS = ("bfloat16", "float32")
LEAST = {"seed": 0, "decay": 0, "weight_decay": 0.0, "learning_rate": 1e-9, "context": 2}
MOST = {
    "threads": 1024,  # far more end the process inside torch
    "num_hidden_layers": 500,  # the header of one file with more tensors is too long to be read
    "learning_rate": 1e30,  # float32 ends at 3e38, and both are multiplied before they are used
    "weight_decay": 1e6,
}


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, beside the text; each field is an option.

    `precision` is the dtype of the matrix products in the forward and backward pass and in Muon; the
    weights, their gradients and every sum over the batch stay in float32.
    """

    vocab_size: int = 4096
    context: int = 512
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    held_out: int = 500  # documents at the end of the text
    steps: int = 4800
    warmup: int = 100  # steps
    decay: int = 1600  # steps
    batch_tokens: int = 4096
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    precision: str = "bfloat16"
    seed: int = 0
    threads: int = 2

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if name == "precision":
                if value not in PRECISIONS:
                    raise ValueError(
                        f"--precision {value}: it must be one of {', '.join(PRECISIONS)}"
                    )
                continue
            if type(value) not in (int, type(field.default)):
                raise ValueError(f"{option(name)} {value!r}: it must be a number")
            low, high = LEAST.get(name, 1), MOST.get(name, 2**31 - 1)
            if not low <= value <= high:  # which NaN is not
                raise ValueError(f"{option(name)} {value}: it must be from {low} to {high}")
        if self.warmup + self.decay > self.steps:
            raise ValueError(
                f"--warmup {self.warmup} and --decay {self.decay} do not fit into --steps {self.steps}"
            )

    def config(self) -> LlamaConfig:
        """The model's shape."""
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            max_position_embeddings=self.context,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            eos_token_id=(EOS,),
            dtype="bfloat16",
        )

    def factor(self, step: int) -> float:
        """Of the learning rate: up over the warm-up, level, down to zero over the decay."""
        rising, falling = (step + 1) / self.warmup, (self.steps - step) / max(self.decay, 1)
        return min(rising, 1.0, falling)


def option(field: str) -> str:
    return "--" + field.replace("_", "-")
