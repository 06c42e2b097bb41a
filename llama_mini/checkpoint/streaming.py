"""Ids to text, one id at a time."""

import codecs
from collections.abc import Iterable
from operator import index
from typing import Protocol

from ..config import short


class Decodable(Protocol):
    """What a decoder needs of a tokenizer; `text_bytes` is what one id adds to a text."""

    vocab_size: int
    strip_space: bool

    def text_bytes(self, token_id: int) -> bytes: ...


class StreamDecoder:
    """Decodes id by id, constant work each; holds the bytes of a character until it is complete."""

    def __init__(self, tokenizer: Decodable, prompt_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_space = tokenizer.strip_space
        for token_id in prompt_ids:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """The text that this id completes, "" if none."""
        size = self._tokenizer.vocab_size
        try:
            token_id = index(token_id)
        except TypeError:
            raise ValueError(f"a token id must be an integer, not {short(token_id)}") from None
        if not 0 <= token_id < size:
            raise ValueError(f"token id {token_id} is outside the tokenizer's vocabulary of {size}")
        data = self._tokenizer.text_bytes(token_id)
        if data and self._strip_space:
            self._strip_space, data = False, data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What a text that was cut inside a character still holds: U+FFFD, once."""
        return self._utf8.decode(b"", final=True)
