"""Text to token ids and back: one interface over `tokenizer.json` and SentencePiece models.

Decoding joins the bytes of the tokens and reads them as UTF-8, so a whole decode and a streamed one
are the same text by construction. Control tokens (BOS, EOS, turn marks) decode to nothing, other
added tokens to their text. A BOS is put where the tokenizer's own rule puts it; an EOS is never
appended, whatever `add_eos_token` or a post-processor says: a closed prompt has no continuation.

Nothing changes in a tokenizer once it is made, so threads can share one.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from ..config import short
from .streaming import StreamDecoder
from .token_settings import BESIDE

Span = tuple[int, int]  # positions of characters, the second one excluded


class Tokenizer:
    """Text to ids and back; the back ends below add how a piece of text and a single id are turned.

    `vocab_size` is one more than the largest id that can be decoded: a model with more embedding
    rows must never sample the rest. `bos_id` and `eos_id` are None where the tokenizer names none.
    `named` gives the text of bos_token, eos_token and the like, `control` the id of every control
    token's text. `strip_space`: the encoder puts a space before a text, and the decoder takes it away.
    """

    path: Path
    vocab_size: int
    named: dict[str, str]
    control: dict[str, int]
    strip_space: bool
    longest: int  # the most bytes of text that one id stands for
    _prefix: list[int]  # what the tokenizer's own rule puts before a text

    def _encode(self, text: str, special: bool) -> tuple[list[int], list[Span]]:
        """Ids without BOS, and what part of the text each stands for: exact for control tokens, and
        possibly empty for others. `special`: the text of a control token is that token."""
        raise NotImplementedError

    def _within(self, text: str) -> list[int]:
        """Ids of plain text as it stands within a longer text, where no space is put before it."""
        raise NotImplementedError

    def text_bytes(self, token_id: int) -> bytes:
        """What one id adds to the text."""
        raise NotImplementedError

    @cached_property
    def bos_id(self) -> int | None:
        return self.control.get(self.named.get("bos_token", ""))

    @cached_property
    def eos_id(self) -> int | None:
        return self.control.get(self.named.get("eos_token", ""))

    @cached_property
    def _control_texts(self) -> dict[int, str]:
        return {token_id: text for text, token_id in self.control.items()}

    @cached_property
    def _unknown(self) -> int | None:
        """The id of what the vocabulary lacks, which any text may hold; not where it ends a text too."""
        text = self.named.get("unk_token", "")
        other = text in (self.named.get("bos_token"), self.named.get("eos_token"))
        return None if other else self.control.get(text)

    def encode(
        self,
        text: str,
        bos: bool | None = None,
        special: bool = False,
        literal: Sequence[Span] = (),
    ) -> list[int]:
        """Turn text into ids.

        `bos`: None puts a BOS exactly where this tokenizer's own rule does, True and False overrule
        it.
        `special`: False reads the text of a control token ("</s>") as plain text; True, for chat
        templates, as the token, except where it reaches into one of the parts of the text in
        `literal`, which are in order and do not overlap.
        Raises ValueError for text that is not valid Unicode, for a BOS that the tokenizer does not
        have, and for plain text that only a control token can write.
        """
        if not isinstance(text, str):
            raise ValueError(f"a text must be a str, not {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"character {error.start} of the text is U+{ord(text[error.start]):04X}, a lone "
                "surrogate (half a character): decode the text's source with the right encoding"
            ) from None
        if bos and not self._prefix and self.bos_id is None:
            raise ValueError(
                "a BOS is asked for, and this tokenizer names no bos_token: pass bos=False"
            )
        prefix = list(self._prefix) if bos is not False else []
        if bos and not prefix and self.bos_id is not None:
            prefix = [self.bos_id]
        return prefix + self._guarded(text, special, literal)

    def _guarded(self, text: str, special: bool, literal: Sequence[Span]) -> list[int]:
        """`_encode`, with plain pieces where a control token comes from plain text, by whatever way:
        a normalizer, a piece of the vocabulary with the same text.
        """
        found, spans = self._encode(text, special)
        if self._control_texts.keys().isdisjoint(found):
            return found
        ids: list[int] = []
        starts = [start for start, _ in literal]
        for token_id, (start, end) in zip(found, spans, strict=True):
            if token_id not in self._control_texts or (not special and token_id == self._unknown):
                ids.append(token_id)
                continue
            # A token that takes in the spaces around it is still the template's, spaces or not.
            core = self._control_texts[token_id]
            first, last = start, end
            while first < last and text[first].isspace() and not core[0].isspace():
                first += 1
            while first < last and text[last - 1].isspace() and not core[-1].isspace():
                last -= 1
            before = bisect_right(starts, last - 1) - 1
            plain = not special or first == last or (before >= 0 and literal[before][1] > first)
            if not plain or (start == end and token_id == self._unknown):
                ids.append(token_id)
            else:
                ids += self._spell(text[start:end] or core)
        return ids

    def _spell(self, text: str) -> list[int]:
        """Plain pieces for the text of a control token."""
        ids: list[int] = []
        control = self._control_texts.keys() - {self._unknown}
        for position in range(len(text)):
            rest = self._within(text[position:])
            if control.isdisjoint(rest):
                return ids + rest
            one = self._within(text[position])  # a piece like others; its parts are not
            if not control.isdisjoint(one):
                break
            ids += one
        raise ValueError(
            f"the text holds {short(text)}, which this tokenizer can only write as a control token, as "
            f"{self.path} and {BESIDE} say: leave it out"
        )

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into text without control tokens; bytes that are not UTF-8 become U+FFFD.

        Raises ValueError for an id outside the vocabulary.
        """
        decoder = self.stream_decoder()
        return "".join([decoder.push(token_id) for token_id in ids]) + decoder.flush()

    def stream_decoder(self, prompt_ids: Iterable[int] = ()) -> StreamDecoder:
        """A decoder for a text that arrives id by id.

        Without `prompt_ids` its pieces join to `decode(ids)`: a text of its own. With them they
        join to what `ids` add to `decode(prompt_ids)`: a continuation, with the space between the
        two where it belongs.
        """
        return StreamDecoder(self, prompt_ids)

    def most_bytes(self, tokens: int) -> int:
        """More bytes of text than this are more than `tokens` ids, and need not be encoded to know it."""
        return tokens * self.longest
