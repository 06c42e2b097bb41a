"""Turns that share one cache."""

from collections.abc import Sequence
from typing import Any

from ..cache import KVCache
from ..checkpoint import Checkpoint, chat_prompt
from ..checkpoint.tokenizer_base import Tokenizer
from ..generation import STRIDE
from ..model import Llama
from .answer import Answer
from .prompt import require_size


class Conversation:
    """Turns through a chat template. The cache stays, so that only new tokens are computed."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: Llama,
        tokenizer: Tokenizer,
        system: str | None = None,
    ) -> None:
        self.checkpoint, self.model, self.tokenizer = checkpoint, model, tokenizer
        self.system = system
        self.reset()

    def reset(self) -> None:
        """Forget all turns."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.messages: list[dict[str, str]] = system
        self.cache = KVCache.for_model(self.model, 1, STRIDE)
        self._held: list[int] = []  # the ids whose keys and values the cache holds

    def ask(self, text: str, stop: Sequence[str] = (), **options: Any) -> Answer:
        """The model's answer to one more turn of the user; options as for `stream`.

        The turn and as much of the answer as was taken join `messages` when the answer ends, also
        where it is interrupted; a turn without an answer is forgotten. A ValueError for a
        conversation that no longer fits the context.
        """
        require_size(text, self.model.config, self.tokenizer)
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = chat_prompt(self.checkpoint, self.tokenizer, messages)
        pairs = zip(ids, self._held, strict=False)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(self._held)))
        self.cache.length = min(same, len(ids) - 1)

        def then(answer: Answer) -> None:
            self._held = (ids + answer.ids)[: self.cache.length]
            if answer.ids:
                self.messages = [*messages, {"role": "assistant", "content": answer.text}]

        return Answer(self.model, self.tokenizer, ids, stop, then=then, cache=self.cache, **options)
