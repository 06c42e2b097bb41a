"""Back end for `tokenizer.json`, over the tokenizers library."""

import json
import re
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import short
from .token_settings import BESIDE, AddedToken, TokenSettings
from .tokenizer_base import Span, Tokenizer
from .tokenizer_file import can_panic, panics, require_processor, require_supported

if TYPE_CHECKING:
    import tokenizers

# GPT-2's table: bytes that print are themselves, the others in order U+0100 and up.
_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
BYTE_OF = {chr(byte): byte for byte in _SHOWN} | {chr(256 + n): b for n, b in enumerate(_HIDDEN)}
# The steps of a decoder in the orders whose effect on the whole text is one on each piece; the space that
# a Strip takes away is the first one only where all pieces are one by then.
DECODER = (
    "ByteLevel (Fuse )?|(Replace )*(ByteFallback )?(Metaspace (Fuse )?|Fuse (Strip )?)?|(Fuse )?"
)


class JsonTokenizer(Tokenizer):
    """`add_bos_token`, or else the post-processor of the file, puts a BOS.

    transformers 4 does this for Llama tokenizers; transformers 5 lets the post-processor decide alone,
    and DeepSeek-LLM, whose file has none, loses its BOS there.
    `values`: the object in the file at `path`, which errors name.
    """

    def __init__(self, path: Path, values: dict[str, Any], settings: TokenSettings) -> None:
        import tokenizers

        require_supported(path, values)
        self.path, self._expect_panics = path, can_panic(values)
        with panics(path, "cannot be read as a tokenizer"):
            model = tokenizers.Tokenizer.from_str(json.dumps(values))
        model.no_truncation()
        model.no_padding()
        if isinstance(model.model, tokenizers.models.BPE):
            model.model.dropout = None  # for training: each encoding would be another
        own = {token["content"]: token["id"] for token in values.get("added_tokens") or []}
        self._require_ids(model, own, "its added_tokens")
        special = {t.content for t in model.get_added_tokens_decoder().values() if t.special}
        special |= settings.special.keys()
        self._add_tokens(model, settings)
        beside = {token.content: token_id for token_id, token in settings.added.items()}
        self._require_ids(model, beside, BESIDE)
        added = model.get_added_tokens_decoder()
        self.named = dict(settings.named)
        self.control = {
            token.content: token_id
            for token_id, token in added.items()
            if token.special or token.content in special
        }
        control = self.control.keys()
        self._added = {
            i: b"" if t.content in control else t.content.encode() for i, t in added.items()
        }
        self.vocab_size = max(model.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        # One finds the control tokens of a text, the other reads them as text. Nothing is set in either
        # from here on, so threads can share them.
        self._finding, self._plain = model, self._without_control(model)
        require_processor(path, _state(model.post_processor))
        self._read_prefix(settings)
        self._read_decoder(_state(model.decoder))

    @cached_property
    def longest(self) -> int:  # type: ignore[override]
        return max(map(len, map(str.encode, self._finding.get_vocab())), default=1)

    def _add_tokens(self, model: "tokenizers.Tokenizer", settings: TokenSettings) -> None:
        """Add what only the files beside it define, each with its flags: as transformers does, which
        takes the flags of `added_tokens_decoder` before the file's own, and those before all others.
        """
        there = {t.content: _flags(t) for t in model.get_added_tokens_decoder().values()}
        new = [
            token
            for token_id, token in sorted(settings.added.items())
            if token_id in settings.decoder or token.content not in there
        ]
        there |= {token.content: token for token in new}
        new += [token for text, token in settings.special.items() if text not in there]
        model.add_tokens([_library_token(token) for token in new])

    def _require_ids(self, model: "tokenizers.Tokenizer", ids: dict[str, int], who: str) -> None:
        """Raise a ValueError for an added token whose id the library cannot give: another piece has it,
        or the ids before it are not all there.
        """
        added = model.get_added_tokens_decoder()
        for text, token_id in ids.items():
            found, there = model.token_to_id(text), added.get(token_id)
            # The library names an added token as its normalizer would write it.
            taken = there.content if there is not None else model.id_to_token(token_id)
            if found != token_id or taken != text:
                other = f", which is {short(taken)} there" if taken not in (None, text) else ""
                raise ValueError(
                    f"{self.path} gives {short(text)} the id {found}, {who} give {token_id}{other}: "
                    "take all of them from one place"
                )

    def _without_control(self, model: "tokenizers.Tokenizer") -> "tokenizers.Tokenizer":
        """A tokenizer over the same pieces, in the same memory, that finds no control token."""
        import tokenizers

        plain = tokenizers.Tokenizer(model.model)
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(model, part) is not None:
                setattr(plain, part, getattr(model, part))
        added = sorted(model.get_added_tokens_decoder().items())
        flags = [replace(_flags(t), special=t.content in self.control) for _, t in added]
        plain.add_tokens([_library_token(token) for token in flags])
        plain.encode_special_tokens = True  # which means: as any other text
        return plain

    def _read_prefix(self, settings: TokenSettings) -> None:
        """What stands before a text, and so may be its BOS, whose name no file has to give."""
        model, path = self._finding, self.path
        with panics(path, "does not encode a text"):
            probe = model.encode("a")
        mask = probe.special_tokens_mask
        self._prefix = probe.ids[: mask.index(0)] if 0 in mask else []
        if len(self._prefix) == 1:
            bos = self._control_texts.get(self._prefix[0], str(model.id_to_token(self._prefix[0])))
            self.named.setdefault("bos_token", bos)
        if settings.add_bos is not None:
            self._prefix = [self.bos_id] if settings.add_bos and self.bos_id is not None else []
        if unknown := [i for i in self._prefix if model.id_to_token(i) is None]:
            raise ValueError(f"{path} puts {unknown} before a text, which are no tokens of it")

    def _read_decoder(self, decoder: dict[str, Any]) -> None:
        """Take from the file's decoder how a piece becomes bytes."""
        steps = decoder.get("decoders", [decoder] if decoder else [])
        self._byte_level = self._byte_fallback = self.strip_space = False
        self._replace: list[tuple[str, str]] = []
        for step in steps:
            match step:
                case {"type": "ByteLevel"}:
                    self._byte_level = True
                case {"type": "ByteFallback"}:
                    self._byte_fallback = True
                case {"type": "Fuse"}:
                    pass
                case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                    self._replace.append((old, new))
                case {"type": "Metaspace", "replacement": old, "prepend_scheme": scheme}:
                    self._replace.append((old, " "))
                    self.strip_space = scheme != "never"
                case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                    self.strip_space = True
                case _:
                    raise ValueError(
                        f"{self.path}: decoder step {short(step)} is not supported; ByteLevel, "
                        "Metaspace, ByteFallback, Fuse, Replace and a Strip of one leading space are"
                    )
        order = "".join(f"{step['type']} " for step in steps)
        if not re.fullmatch(DECODER, order):
            raise ValueError(
                f"{self.path}: the decoder's steps {short(order.strip())} are not supported in that "
                "order; Replace, ByteFallback, Fuse, Strip are"
            )

    def _encode(self, text: str, special: bool) -> tuple[list[int], list[Span]]:
        model = self._finding if special else self._plain
        way_out = "take another text"  # the file has encoded one
        with panics(self.path, "does not encode this text", self._expect_panics, way_out):
            encoding = model.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def _within(self, text: str) -> list[int]:
        # After a line break no space is put before a text.
        newline, ids = self._encode("\n", False)[0], self._encode("\n" + text, False)[0]
        if ids[: len(newline)] == newline:
            return ids[len(newline) :]
        return self._encode(text, False)[0]

    def text_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        text = self._finding.id_to_token(token_id) or ""
        if self._byte_level and all(character in BYTE_OF for character in text):
            return bytes(BYTE_OF[character] for character in text)
        if self._byte_fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
            return bytes([int(text[3:5], 16)])
        for old, new in self._replace:
            text = text.replace(old, new)
        return text.encode()


def _state(part: Any) -> dict[str, Any]:
    """A part of a tokenizer as the library has read it, {} where the file has none."""
    return {} if part is None else json.loads(part.__getstate__())


def _flags(token: "tokenizers.AddedToken") -> AddedToken:
    """A token of the library, with its own flags."""
    return AddedToken(**{field.name: getattr(token, field.name) for field in fields(AddedToken)})


def _library_token(token: AddedToken) -> "tokenizers.AddedToken":
    import tokenizers

    return tokenizers.AddedToken(**vars(token))
