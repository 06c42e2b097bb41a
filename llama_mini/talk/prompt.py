"""A prompt as the ids that a model reads."""

from ..checkpoint import Checkpoint, chat_prompt
from ..checkpoint.tokenizer_base import Tokenizer
from ..config import LlamaConfig
from ..generation import require_prompts

MEGABYTE = 2**20


def prompt_ids(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    prompt: str | None,
    chat: bool = False,
    system: str | None = None,
    max_new_tokens: int | None = None,
) -> list[int]:
    """The ids of a prompt, through the chat template where `chat` asks for it; [] for None, a
    conversation that is still to begin.

    A ValueError for a prompt that does not fit the model's context, with `max_new_tokens` behind it, and
    for a template that does not serve.
    """
    config, new = checkpoint.config, 1 if max_new_tokens is None else max_new_tokens
    if prompt is None:
        chat_prompt(checkpoint, tokenizer, "Hi", system)  # or each turn would fail
        require_prompts(config, [], new)
        return []
    require_size(prompt, config, tokenizer)
    ids = chat_prompt(checkpoint, tokenizer, prompt, system) if chat else tokenizer.encode(prompt)
    if not ids:
        raise ValueError("the prompt is empty, and this tokenizer adds no BOS: give some text")
    require_prompts(config, [ids], new)
    return ids


def require_size(prompt: str, config: LlamaConfig, tokenizer: Tokenizer) -> None:
    """Raise a ValueError for a text whose bytes alone say that it does not fit the context."""
    positions, size = config.context(), len(prompt.encode("utf-8", "replace"))
    # Smaller prompts are cheap to encode, and the error can then give the token count.
    if size > max(MEGABYTE, tokenizer.most_bytes(positions)):
        raise ValueError(
            f"a prompt of {size:,} bytes does not fit the model's context of {positions:,} positions"
        )
