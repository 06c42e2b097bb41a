"""What the JSON files beside a tokenizer say about named, special and added tokens."""

import re
from dataclasses import dataclass
from typing import Any

from ..config import short
from .opening import Checkpoint
from .untrusted import said

NAMED = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
BESIDE = f"the files beside it ({', '.join(FILES)})"


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in a text before anything else is done with it.

    `lstrip` and `rstrip` take in the spaces on that side, `single_word` leaves it alone inside a word,
    `normalized` finds it in the text that the normalizer has prepared.
    """

    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = True
    special: bool = False


class TokenSettings:
    """The settings of a checkpoint's tokenizer, from FILES.

    Where transformers' rules for them differ between files, they are followed: `added_tokens_decoder`
    makes the two smaller files unnecessary, and without it special_tokens_map.json comes first.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        config, token_map, added = files = [checkpoint.json(name) for name in FILES]
        self.named: dict[str, str] = {}  # "bos_token" -> "<s>"
        self.special: dict[str, AddedToken] = {}  # in transformers' order
        self.decoder: dict[int, AddedToken] = {}  # of added_tokens_decoder
        self.added: dict[int, AddedToken] = {}  # with those of added_tokens.json
        try:
            # Who puts a BOS; None: the tokenizer file decides.
            self.add_bos = _flag(config, "add_bos_token")
            # SentencePiece: a space before every part of a text, not only before the first.
            self.legacy = _flag(config, "legacy")
            # SentencePiece and GPT-2: a space before a text; None: the tokenizer file decides.
            self.prefix_space = _flag(config, "add_prefix_space")
            self.tokenizer_class = config.get("tokenizer_class")
            for key, token in (config.get("added_tokens_decoder") or {}).items():
                if not re.fullmatch("[0-9]{1,9}", key):
                    raise ValueError(f"{short(key)} is not a token id")
                if not isinstance(token, dict):
                    raise TypeError(f"{short(token)} is not an object")
                self.decoder[int(key)] = _token(token, special=False)
            for file in (config, token_map) if self.decoder else (token_map, config):
                self._read_named(file)
            self.added.update(self.decoder)
            for text, token_id in added.items():
                if type(token_id) is not int or not 0 <= token_id < 10**9:
                    raise ValueError(f"{short(token_id)} is not a token id")
                special = text in self.special
                self.added.setdefault(
                    token_id,
                    _token({"content": text, "special": special, "normalized": not special}),
                )
            ids: dict[str, int] = {}
            for token_id, token in self.added.items():
                if token_id != ids.setdefault(token.content, token_id):
                    raise ValueError(
                        f"{short(token.content)} has the ids {ids[token.content]} and {token_id}"
                    )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            there = " or ".join(name for name, file in zip(FILES, files, strict=True) if file)
            raise ValueError(
                f"{checkpoint.folder}: the special or added tokens in {there} are not readable "
                f"({said(repr(error))})"
            ) from None
        self.special |= {t.content: t for t in self.decoder.values() if t.special}

    def name_gpt2(self) -> None:
        """Name what GPT-2's own class names where no file does."""
        for key in ("bos_token", "eos_token", "unk_token"):
            text = self.named.setdefault(key, "<|endoftext|>")
            self.special.setdefault(text, AddedToken(text, normalized=False, special=True))

    def _read_named(self, file: dict[str, Any]) -> None:
        """Add what a file names and no file before it did."""
        found: dict[str, AddedToken] = {}
        own = [key for key in file if key.endswith("_token") and isinstance(file[key], str | dict)]
        for key in dict.fromkeys(NAMED + own):
            value = file.get(key)
            text = value.get("content", value) if isinstance(value, dict) else value
            if text not in (None, ""):  # Llama's first conversions have empty names
                token = _token(value)
                if self.named.setdefault(key, token.content) == token.content:
                    found[token.content] = token  # of two with the same text the later one's flags
        for key in ("additional_special_tokens", "extra_special_tokens"):
            extra = file.get(key) or []
            extra = extra.values() if isinstance(extra, dict) else extra
            found |= {token.content: token for token in map(_token, extra)}
        for text, token in found.items():
            self.special.setdefault(text, token)


def _flag(values: dict[str, Any], name: str) -> bool | None:
    """A setting that is true, false, or null and left out."""
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {short(value)}")
    return value


def _token(token: Any, special: bool = True) -> AddedToken:
    """A token, which files write as its text or as an object; `special` unless that says so."""
    values = token if isinstance(token, dict) else {"content": token}
    content = values["content"]
    if not isinstance(content, str) or not content:
        raise TypeError(f"{short(token)} is not a token")
    if any("\ud800" <= character <= "\udfff" for character in content):
        raise TypeError(f"{short(content)} is not valid Unicode")
    own, normalized = _flag(values, "special"), _flag(values, "normalized")
    special = special if own is None else own
    return AddedToken(
        content,
        lstrip=bool(_flag(values, "lstrip")),
        rstrip=bool(_flag(values, "rstrip")),
        single_word=bool(_flag(values, "single_word")),
        normalized=not special if normalized is None else normalized,
        special=special,
    )
