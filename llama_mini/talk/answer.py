"""One answer as text, piece by piece, up to where it ends."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..checkpoint.tokenizer_base import Tokenizer
from ..generation import stream
from ..model import Llama


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
    """The text that the model writes after `prompt`, piece by piece; options as for `stream`.

    It ends at a stop id, at a string in `stop` (not part of the text), or at a limit; `ended` is true
    unless a limit ended it. `ids` are the new ids so far, `text` their text, `times` when the answer
    began and when each id came; `computed` is how many tokens of the prompt no cache held. `shown` are
    the ids already printed, which the text continues. `then` is called at the end, even of an answer
    that is interrupted. Raises ValueError, before any work, for what `stream` refuses.
    """

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        shown: Sequence[int] = (),
        then: Callable[["Answer"], None] = lambda answer: None,
        **options: Any,
    ) -> None:
        self.model, self.prompt, self.computed = model, prompt, len(prompt)
        if options.get("cache") is not None:
            self.computed -= options["cache"].length
        self.ids: list[int] = []
        self.text = ""
        self.times = [time.perf_counter()]
        self.ended = False
        self._stop, self._stop_ids = StopStrings(stop), model.config.eos_token_id
        self._decoder, self._then = tokenizer.stream_decoder(shown), then
        options = {"vocab_size": tokenizer.vocab_size} | options
        self.steps = stream(model, [prompt], **options)

    def __iter__(self) -> Iterator[str]:
        try:
            for (token,) in self.steps:
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
