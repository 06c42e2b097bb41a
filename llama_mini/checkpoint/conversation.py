"""Text as it comes from a model: one answer up to where it ends, and turns that share one cache."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..cache import KVCache
from ..generation import STRIDE, stream
from ..model import Llama
from .chat import chat_prompt
from .opening import Checkpoint
from .streaming import StreamDecoder
from .tokenizer_base import Tokenizer


class StopStrings:
    """Text up to the first of these strings to be complete, which is left out.

    `push` returns the text that is certain, and holds back what may be the beginning of one.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if "" in strings:
            raise ValueError("a stop string is empty: it would stop every text at once")
        self.strings, self.reached, self._held = strings, False, ""

    def push(self, text: str) -> str:
        text = self._held + text
        found = [(text.find(s) + len(s), text.find(s)) for s in self.strings if s in text]
        if found:
            self.reached, certain = True, min(found)[1]
        else:
            begun = [n for s in self.strings for n in range(1, len(s)) if text.endswith(s[:n])]
            certain = len(text) - max(begun, default=0)
        self._held = "" if self.reached else text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


class Answer:
    """The text of new ids, one prompt's `steps` of `stream`, piece by piece.

    It ends with the steps, or with a stop string, which is left out. Then `ended` says whether that,
    or one of `stop_ids`, was the end, and not a limit. `ids` are the ids so far, `times` when the
    answer began and when each of them came, `text` the text so far; `then` is called at the end, also
    of an answer that is interrupted.
    """

    def __init__(
        self,
        steps: Iterable[list[int | None]],
        decoder: StreamDecoder,
        stop_ids: Sequence[int],
        stop: Sequence[str] = (),
        then: Callable[["Answer"], None] = lambda answer: None,
    ) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.times = [time.perf_counter()]
        self.ended = False
        self._steps, self._decoder, self._stop_ids = steps, decoder, stop_ids
        self._stop, self._then = StopStrings(stop), then

    def __iter__(self) -> Iterator[str]:
        try:
            for (token,) in self._steps:
                assert token is not None
                self.times.append(time.perf_counter())
                self.ids.append(token)
                yield self._more(self._stop.push(self._decoder.push(token)))
                if self._stop.reached or token in self._stop_ids:
                    self.ended = True
                    break
            yield self.rest()
        finally:
            self._then(self)

    def rest(self) -> str:
        """What is held back of an answer that was interrupted, or has ended: once."""
        if self._stop.reached:  # what follows the stop string is no part of it
            return ""
        return self._more(self._stop.push(self._decoder.flush()) + self._stop.flush())

    def _more(self, text: str) -> str:
        self.text += text
        return text


class Conversation:
    """Turns through a chat template. The cache stays, so that only new tokens are computed.

    Of the last turn, `asked` is how many tokens the conversation had up to it, `computed` how many of
    these were new.
    """

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
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = chat_prompt(self.checkpoint, self.tokenizer, messages)
        pairs = zip(ids, self._held, strict=False)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(self._held)))
        self.cache.length = min(same, len(ids) - 1)
        self.asked, self.computed = len(ids), len(ids) - self.cache.length
        options = {"vocab_size": self.tokenizer.vocab_size} | options
        steps = stream(self.model, [ids], cache=self.cache, **options)

        def then(answer: Answer) -> None:
            self._held = (ids + answer.ids)[: self.cache.length]
            if answer.ids:
                self.messages = [*messages, {"role": "assistant", "content": answer.text}]

        decoder, stop_ids = self.tokenizer.stream_decoder(), self.model.config.eos_token_id
        return Answer(steps, decoder, stop_ids, stop, then)
