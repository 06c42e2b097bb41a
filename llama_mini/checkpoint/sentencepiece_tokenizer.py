"""Back end for `tokenizer.model`, over the SentencePiece library."""

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from ..config import short
from .token_settings import BESIDE, AddedToken, TokenSettings
from .tokenizer_base import Span, Tokenizer
from .tokenizer_file import read_file
from .untrusted import said

# Later fields of a protobuf overrule earlier ones. Of normalizer_spec (field 3): 2 is the map of
# characters, 3 add_dummy_prefix, 4 remove_extra_whitespaces, 5 escape_whitespaces.
MAPS_ONLY = b"\x1a\x06\x18\x00\x20\x00\x28\x00"
PIECES_ONLY = b"\x1a\x06\x12\x00\x18\x00\x20\x00"


class SentencePieceTokenizer(Tokenizer):
    """A BOS, as Llama was trained, unless `add_bos_token` is false.

    SentencePiece knows whole texts, and added tokens cut a text into parts. So what the model's normalizer
    does at the ends of a text (a space before it, no spaces around it) is done here, and at the ends of
    the text alone: a part keeps the space between it and the token beside it.
    """

    def __init__(self, path: Path, settings: TokenSettings) -> None:
        from sentencepiece import SentencePieceProcessor

        data = read_file(path)
        if re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", data):
            raise ValueError(
                f"{path} is a tiktoken file (base64 and a rank on each line), not SentencePiece: "
                "put the tokenizer.json of the model's Hugging Face repository beside it"
            )
        try:
            model = SentencePieceProcessor(model_proto=data)
            self._maps = SentencePieceProcessor(model_proto=data + MAPS_ONLY)
            self._model = SentencePieceProcessor(model_proto=data + PIECES_ONLY)
            size = model.get_piece_size()
            pieces = [model.id_to_piece(i) for i in range(size)]  # which have to be UTF-8
            own = [("bos", model.bos_id()), ("eos", model.eos_id()), ("unk", model.unk_id())]
            names = {f"{name}_token": pieces[token_id] for name, token_id in own if token_id >= 0}
            one, two = (model.normalize(text).replace("\u2581", " ") for text in ("a", "a  a"))
        except (RuntimeError, IndexError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path} is not a SentencePiece model ({said(error)}): download it again"
            ) from None
        if one not in ("a", " a"):
            raise ValueError(
                f"{path} makes {short(one)} of 'a': spaces behind a word and other settings of its "
                "normalizer are not supported"
            )
        self.path, self._pieces = path, pieces
        self.strip_space = one == " a" if settings.prefix_space is None else settings.prefix_space
        self._single_spaces = two.strip().count(" ") == 1
        self._legacy = bool(settings.legacy)
        self.named = names | settings.named
        ids = {piece: token_id for token_id, piece in enumerate(pieces)}
        self._added = self._place(settings, ids)
        ids |= {text: token_id for token_id, text in self._added.items()}
        self.control = {pieces[i]: i for i in range(size) if model.is_control(i)}
        self.control |= {text: ids[text] for text in [*self.named.values(), *settings.special]}
        self.vocab_size = max([size - 1, *self._added]) + 1
        self._prefix = [] if settings.add_bos is False or self.bos_id is None else [self.bos_id]
        flags = {
            token.content: token for token in (*settings.special.values(), *settings.added.values())
        }
        plain = set(self._added.values()) - self.control.keys()
        self._plain = Finder({text: ids[text] for text in sorted(plain)}, flags)
        self._all = Finder({text: ids[text] for text in sorted(plain | self.control.keys())}, flags)

    def _place(self, settings: TokenSettings, ids: dict[str, int]) -> dict[int, str]:
        """The tokens beside the model's pieces by their id; those without one follow, as in transformers.

        Raises a ValueError for a token that would take the id of a piece, or have two.
        """
        added, pieces = {}, dict(enumerate(self._pieces))
        for token_id, token in settings.added.items():
            text, taken = token.content, pieces.get(token_id)
            if ids.get(text, token_id) != token_id or taken not in (None, text):
                there = short(taken) if taken is not None else f"not the {ids[text]} that it has"
                raise ValueError(
                    f"{self.path}: {BESIDE} give {short(text)} the id {token_id}, which is {there} there: "
                    "take all of them from one place"
                )
            if text not in ids:
                added[token_id] = text
        placed = ids.keys() | added.values()
        for text in [*self.named.values(), *settings.special]:
            if text not in placed:
                added[max([len(self._pieces) - 1, *added]) + 1] = text
                placed = placed | {text}
        return added

    @cached_property
    def longest(self) -> int:  # type: ignore[override]
        return max(len(text.encode()) for text in [*self._pieces, *self._added.values()])

    def _encode(self, text: str, special: bool) -> tuple[list[int], list[Span]]:
        ids: list[int] = []
        spans: list[Span] = []
        for token_id, (start, end) in (self._all if special else self._plain).find(text):
            if token_id is None:
                plain = self._encode_part(text[start:end], start == 0, end == len(text))
                ids += plain
                spans += [(start, start)] * len(plain)
            else:
                ids.append(token_id)
                spans.append((start, end))
        return ids, spans

    def _encode_part(self, text: str, first: bool, last: bool) -> list[int]:
        """The pieces of a part without added tokens; whether a text begins and ends with it."""
        try:
            text = self._maps.normalize(text)
            if self._single_spaces:
                text = re.sub(" +", " ", text)
                text = text.removeprefix(" ") if first else text
                text = text.removesuffix(" ") if last else text
            if self.strip_space and text and (first or (self._legacy and text[0] != " ")):
                text = " " + text
            return self._model.encode(text)
        except (RuntimeError, IndexError) as error:
            raise ValueError(f"{self.path} does not encode this text ({said(error)})") from None

    def _within(self, text: str) -> list[int]:
        return self._encode_part(text, False, False)

    def text_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            text = self._added[token_id]
            return b"" if text in self.control else text.encode()
        if token_id >= len(self._pieces):
            return b""
        piece = self._pieces[token_id]
        if self._model.is_byte(token_id):
            return bytes([int(piece[3:5], 16)])
        return b"" if piece in self.control else piece.replace("\u2581", " ").encode()


class Finder:
    """Finds tokens in a text as transformers does: the first, the longest, in time linear in the text.

    The tokenizers library does it, with a model that makes one token of each part between them.
    """

    def __init__(self, ids: dict[str, int], flags: dict[str, AddedToken]) -> None:
        import tokenizers

        tokens = [vars(flags.get(text, AddedToken(text))) for text in ids]
        self._finder = tokenizers.Tokenizer(tokenizers.models.WordLevel({"": 0}, unk_token=""))
        self._finder.add_tokens(
            [tokenizers.AddedToken(**token | {"normalized": False}) for token in tokens]
        )
        added = self._finder.get_added_tokens_decoder()
        self._ids = {number: ids[token.content] for number, token in added.items()}

    def find(self, text: str) -> Iterator[tuple[int | None, Span]]:
        """The parts of a text in order, each with the id of the token that it is, or None."""
        encoding = self._finder.encode(text, add_special_tokens=False)
        for number, span in zip(encoding.ids, encoding.offsets, strict=True):
            yield self._ids.get(number), span
