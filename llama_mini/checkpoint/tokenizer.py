"""Text to token ids and back: one interface over `tokenizer.json` and SentencePiece models.

Decoding joins the bytes of the tokens and reads them as UTF-8, so a whole decode and a streamed one
are the same text by construction. Control tokens (BOS, EOS, turn marks) decode to nothing, other
added tokens to their text. A BOS is put where the tokenizer's own rule puts it; an EOS is never
appended, whatever `add_eos_token` or a post-processor says: a closed prompt has no continuation.
"""

import codecs
import json
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any

from ..config import short
from .opening import Checkpoint, open_checkpoint
from .untrusted import is_there, lfs_pointer, said

NAMED_TOKENS = [f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")]
# What may prepare a text; and what all steps may make of one character.
STEPS = {
    "normalizer": "Sequence Prepend Replace NFC NFD NFKC NFKD Lowercase Strip StripAccents".split(),
    "pre_tokenizer": (
        "Sequence ByteLevel Split Metaspace Digits Punctuation Whitespace WhitespaceSplit "
        "CharDelimiterSplit UnicodeScripts BertPreTokenizer"
    ).split(),
}
GROWTH = 64
FILE_BYTES = 64 * 2**20  # of a tokenizer file; the largest known has 33 MB


class Tokenizer:
    """Text to ids and back; the back ends below add how a piece of text and a single id are turned.

    `vocab_size` is one more than the largest id that can be decoded: a model with more embedding
    rows must never sample the rest. `bos_id` and `eos_id` are None where the tokenizer names none.
    `named` gives the text of bos_token, eos_token and the like, `control` the id of every control
    token's text.
    """

    vocab_size: int
    named: dict[str, str]
    control: dict[str, int]
    _prefix: list[int]  # what the tokenizer's own rule puts before a text
    _strip_space: bool  # the encoder puts a space before a text, and the decoder takes it away

    def _encode(self, text: str, special: bool) -> list[tuple[int, int, int]]:
        """Ids without BOS, each with the start and the end of its text (exact for control
        tokens)."""
        raise NotImplementedError

    def _bytes(self, token_id: int) -> bytes:
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
        """Control tokens that plain text must not become; any text may be unknown."""
        unknown = self.named.get("unk_token")
        return {token_id: text for text, token_id in self.control.items() if text != unknown}

    def encode(
        self,
        text: str,
        bos: bool | None = None,
        special: bool = False,
        literal: Collection[int] = (),
    ) -> list[int]:
        """Turn text into ids.

        `bos`: None puts a BOS exactly where this tokenizer's own rule does, True and False overrule
        it.
        `special`: False reads the text of a control token ("</s>") as plain text; True, for chat
        templates, as the token, except where it covers one of the character positions in `literal`.
        Raises ValueError for text that is not valid Unicode and for a BOS that the tokenizer does
        not have.
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
        ids = list(self._prefix) if bos is not False else []
        if bos and not ids and self.bos_id is not None:
            ids = [self.bos_id]
        for token_id, start, end in self._encode(text, special):
            plain = not special or any(start <= position < end for position in literal)
            if plain and token_id in self._control_texts:
                ids += self._spell(self._control_texts[token_id])
            else:
                ids.append(token_id)
        return ids

    def _spell(self, text: str) -> list[int]:
        """Plain ids for the text of a control token, as in the middle of a longer text."""
        # After a line break no back end adds the space that it puts before a text.
        newline, ids = ([i for i, *_ in self._encode(part, False)] for part in ("\n", "\n" + text))
        if ids[: len(newline)] == newline:
            ids = ids[len(newline) :]
        else:
            ids = [i for i, *_ in self._encode(text, False)]
        if (
            self.control.get(text) in ids and len(text) > 1
        ):  # a piece like others; its halves are not
            return self._spell(text[0]) + self._spell(text[1:])
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into text without control tokens; bytes that are not UTF-8 become U+FFFD.

        Raises ValueError for an id outside the vocabulary.
        """
        decoder = self.stream_decoder()
        return "".join([decoder.push(token_id) for token_id in ids]) + decoder.flush()

    def stream_decoder(self, prompt_ids: Iterable[int] = ()) -> "StreamDecoder":
        """A decoder for a text that arrives id by id.

        Without `prompt_ids` its pieces join to `decode(ids)`: a text of its own. With them they
        join to what `ids` add to `decode(prompt_ids)`: a continuation, with the space between the
        two where it belongs.
        """
        return StreamDecoder(self, prompt_ids)


class StreamDecoder:
    """Decodes id by id, constant work each; holds the bytes of a character until it is complete."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_space = tokenizer._strip_space
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
        data = self._tokenizer._bytes(token_id)
        if data and self._strip_space:
            self._strip_space, data = False, data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What a text that was cut inside a character still holds: U+FFFD, once."""
        return self._utf8.decode(b"", final=True)


class TokenSettings:
    """What the JSON files beside a tokenizer say about named, special and added tokens."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        names = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
        config, token_map, added = files = [checkpoint.json(name) for name in names]
        self.named: dict[str, str] = {}  # "bos_token" -> "<s>"
        self.special: set[str] = set()
        self.added: dict[int, dict[str, Any]] = {}  # id -> content, lstrip, rstrip
        try:
            # Who puts a BOS; None: the tokenizer file decides.
            self.add_bos = _flag(config, "add_bos_token")
            # SentencePiece: a space after every control token.
            self.legacy = _flag(config, "legacy")
            for key, token in (config.get("added_tokens_decoder") or {}).items():
                if not re.fullmatch("[0-9]{1,9}", key):
                    raise ValueError(f"{short(key)} is not a token id")
                self.added[int(key)] = token
                special, *_ = [_flag(token, name) for name in ("special", "lstrip", "rstrip")]
                if special:
                    self.special.add(token["content"])
            for text, token_id in added.items():
                if type(token_id) is not int or not 0 <= token_id < 10**9:
                    raise ValueError(f"{short(token_id)} is not a token id")
                self.added.setdefault(token_id, {"content": text})
            for file in (config, token_map):
                for key in NAMED_TOKENS:
                    if file.get(key) is not None:
                        self.named.setdefault(key, _content(file[key]))
                for key in ("additional_special_tokens", "extra_special_tokens"):
                    extra = file.get(key) or []
                    extra = extra.values() if isinstance(extra, dict) else extra
                    self.special.update(_content(token) for token in extra)
            if not all(_content(token) for token in self.added.values()):
                raise ValueError("an added token has no text")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            there = " or ".join(name for name, file in zip(names, files, strict=True) if file)
            raise ValueError(
                f"{checkpoint.folder}: the special or added tokens in {there} are not readable "
                f"({said(repr(error))})"
            ) from None
        self.special.update(self.named.values())


def _flag(values: dict[str, Any], name: str) -> bool | None:
    """A setting that is true, false, or null and left out."""
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {short(value)}")
    return value


def _content(token: Any) -> str:
    """A token's text, which files write plainly or in an object."""
    content = token["content"] if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise TypeError(f"{short(token)} is not a token")
    if any("\ud800" <= character <= "\udfff" for character in content):
        raise TypeError(f"{short(content)} is not valid Unicode")
    return content


class SentencePieceTokenizer(Tokenizer):
    """Back end for `tokenizer.model`: a BOS, as Llama was trained, unless `add_bos_token` is
    false."""

    def __init__(self, path: Path, settings: TokenSettings) -> None:
        from sentencepiece import SentencePieceProcessor

        data = _read(path)
        if re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", data):
            raise ValueError(
                f"{path} is a tiktoken file (base64 and a rank on each line), not SentencePiece: "
                "put the tokenizer.json of the model's Hugging Face repository beside it"
            )
        try:
            model = SentencePieceProcessor(model_proto=data)
            # Later fields of a protobuf overrule earlier: normalizer_spec.add_dummy_prefix = false.
            bare = SentencePieceProcessor(model_proto=data + b"\x1a\x02\x18\x00")
            size = model.get_piece_size()
            pieces = [model.id_to_piece(i) for i in range(size)]  # which have to be UTF-8
            own = [("bos", model.bos_id()), ("eos", model.eos_id()), ("unk", model.unk_id())]
            names = {f"{name}_token": pieces[token_id] for name, token_id in own if token_id >= 0}
        except (RuntimeError, IndexError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path} is not a SentencePiece model ({said(error)}): download it again"
            ) from None
        self._path, self._pieces = path, pieces
        self._model, self._after_token = model, model if settings.legacy else bare
        self.named = names | settings.named
        self._added = {token_id: token["content"] for token_id, token in settings.added.items()}
        self._ids = {pieces[i]: i for i in range(size) if model.is_control(i)}
        for text in settings.special | set(self.named.values()):
            token_id = model.piece_to_id(text)
            if 0 <= token_id < size and pieces[token_id] == text:
                self._ids[text] = token_id
        self.control = dict(self._ids)
        for token_id, text in self._added.items():
            self._ids[text] = token_id
            if text in settings.special:
                self.control[text] = token_id
        self.vocab_size = max(size, *(token_id + 1 for token_id in self._added), 0)
        self._prefix = [] if settings.add_bos is False or self.bos_id is None else [self.bos_id]
        self._strip_space = model.decode(["\u2581"]) == ""
        flags = {token["content"]: token for token in settings.added.values()}

        def pattern(texts: Iterable[str]) -> re.Pattern[str]:
            """Matches the longest text, with the spaces that a token takes in on either side."""
            choices = []
            for text in sorted(texts, key=len, reverse=True):
                token = flags.get(text, {})
                # Tried where spaces begin, not at each of them: a page of spaces would take minutes.
                left = r"(?:(?<!\s)\s*)?" if token.get("lstrip") else ""
                right = r"\s*" if token.get("rstrip") else ""
                choices.append(f"{left}({re.escape(text)}){right}")
            return re.compile("|".join(choices) or "(?!)")

        self._patterns = pattern(self._ids.keys() - self.control.keys()), pattern(self._ids)

    def _encode(self, text: str, special: bool) -> list[tuple[int, int, int]]:
        ids, position = [], 0
        for match in [*self._patterns[special].finditer(text), None]:
            start, end = match.span() if match else (len(text), len(text))
            model = self._after_token if position else self._model
            try:
                plain = model.encode(text[position:start])
            except (RuntimeError, IndexError) as error:
                raise ValueError(
                    f"{self._path} does not encode this text ({said(error)})"
                ) from None
            ids += [(i, position, position) for i in plain]
            if match and match.lastindex:
                ids.append((self._ids[match[match.lastindex]], start, end))
            position = end
        return ids

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            text = self._added[token_id]
            return b"" if text in self.control else text.encode()
        if token_id >= len(self._pieces):
            return b""
        piece = self._pieces[token_id]
        if self._model.is_byte(token_id):
            return bytes([int(piece[3:5], 16)])
        return b"" if piece in self.control else piece.replace("\u2581", " ").encode()


class JsonTokenizer(Tokenizer):
    """Back end for `tokenizer.json`: `add_bos_token`, or else its post-processor, puts a BOS.

    transformers 4 does this for Llama tokenizers; transformers 5 lets the post-processor decide alone,
    and DeepSeek-LLM, whose file has none, loses its BOS there.
    """

    def __init__(self, path: Path, settings: TokenSettings) -> None:
        import tokenizers

        data, self._path = _read(path), path
        _require_steps(path, data)
        with _panics(path, "is not a tokenizer.json"):
            self._model = model = tokenizers.Tokenizer.from_buffer(data)
        model.no_truncation()
        model.no_padding()
        known = {token.content for token in model.get_added_tokens_decoder().values()}
        for token_id, token in sorted(settings.added.items()):
            text = token["content"]
            if text not in known:
                (model.add_special_tokens if text in settings.special else model.add_tokens)([text])
            if model.token_to_id(text) != token_id:
                raise ValueError(
                    f"{path} gives {short(text)} the id {model.token_to_id(text)}, the files beside it "
                    f"give {token_id}: take all of them from one place"
                )
        model.add_special_tokens([t for t in settings.special if model.token_to_id(t) is not None])
        added = model.get_added_tokens_decoder()
        self.named = settings.named
        self.control = {token.content: i for i, token in added.items() if token.special}
        self._added = {i: b"" if t.special else t.content.encode() for i, t in added.items()}
        self.vocab_size = max(model.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._require_processor(path)
        with _panics(path, "does not encode a text"):
            probe = model.encode("a")
        mask = probe.special_tokens_mask
        self._prefix = probe.ids[: mask.index(0)] if 0 in mask else []
        if len(self._prefix) == 1:
            self.named.setdefault("bos_token", str(model.id_to_token(self._prefix[0])))
        if settings.add_bos is not None:
            self._prefix = [self.bos_id] if settings.add_bos and self.bos_id is not None else []
        if unknown := [i for i in self._prefix if model.id_to_token(i) is None]:
            raise ValueError(f"{path} puts {unknown} before a text, which are no tokens of it")
        self._read_decoder(path)

    def _require_processor(self, path: Path) -> None:
        """Raise a ValueError for a template of tokens that it does not define: the library would panic."""
        if self._model.post_processor is None:
            return
        steps = [json.loads(self._model.post_processor.__getstate__())]
        for step in steps:
            steps += step.get("processors", [])
            for piece in step.get("single", []):
                name = piece.get("SpecialToken", {}).get("id")
                if name is None:
                    continue
                tokens = step["special_tokens"].get(name, {"ids": [], "tokens": None})
                if tokens["tokens"] is None or len(tokens["ids"]) != len(tokens["tokens"]):
                    raise ValueError(f"{path}: its post_processor does not define {short(name)}")

    def _read_decoder(self, path: Path) -> None:
        """Take from the file's decoder how a piece becomes bytes."""
        decoder: dict[str, Any] = {"type": None}
        if self._model.decoder is not None:
            decoder = json.loads(self._model.decoder.__getstate__())
        self._strip_space = self._byte_level = self._byte_fallback = False
        self._replace: list[tuple[str, str]] = []
        for step in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
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
                    self._strip_space = scheme != "never"
                case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                    self._strip_space = True
                case _:
                    raise ValueError(
                        f"{path}: decoder step {short(step)} is not supported; ByteLevel, Metaspace, "
                        "ByteFallback, Fuse, Replace and a Strip of one leading space are"
                    )
        # GPT-2's table: bytes that print are themselves, the others in order U+0100 and up.
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [byte for byte in range(256) if byte not in shown]
        self._table = {chr(byte): byte for byte in shown}
        self._table |= {chr(256 + n): byte for n, byte in enumerate(hidden)}

    def _encode(self, text: str, special: bool) -> list[tuple[int, int, int]]:
        self._model.encode_special_tokens = not special
        with _panics(self._path, "does not encode this text"):
            encoding = self._model.encode(text, add_special_tokens=False)
        return [(i, *span) for i, span in zip(encoding.ids, encoding.offsets, strict=True)]

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        text = self._model.id_to_token(token_id) or ""
        if self._byte_level and all(character in self._table for character in text):
            return bytes(self._table[character] for character in text)
        if self._byte_fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
            return bytes([int(text[3:5], 16)])
        for old, new in self._replace:
            text = text.replace(old, new)
        return text.encode()


def _require_steps(path: Path, data: bytes) -> None:
    """Raise a ValueError for what could end the library in a panic or all memory: steps that no tokenizer
    of this family has, and texts put in the place of others that make a page of a letter.
    """
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a tokenizer.json ({said(error)}): download it again"
        ) from None
    values = values if isinstance(values, dict) else {}
    model = values.get("model")
    if isinstance(model, dict) and model.get("continuing_subword_prefix"):
        raise ValueError(f"{path} has a continuing_subword_prefix, which is not supported")
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        steps, growth = [values.get(part)], 1
        for step in steps:
            if not isinstance(step, dict):
                continue
            inner = step.get(part.replace("_", "") + "s")
            steps += inner if isinstance(inner, list) else []
            kind = step.get("type")
            if part in STEPS and kind not in STEPS[part]:
                raise ValueError(f"{path}: {part} step {short(kind)} is not supported")
            for text in (step.get("content"), step.get("prepend")):
                growth *= max(1, len(text)) if isinstance(text, str) else 1
            if growth > GROWTH:
                raise ValueError(
                    f"{path}: {part} makes {growth} characters of one, at most {GROWTH}"
                )


@contextmanager
def _panics(path: Path, what: str) -> Iterator[None]:
    """Make a ValueError of whatever the tokenizers library raises: there is no narrower class, and its
    panics are not even an Exception.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"{path} {what} ({said(error)}): download it again") from None
        raise


def _read(path: Path) -> bytes:
    """The bytes of a tokenizer file. Raises ValueError where it is empty, a Git LFS pointer or too long."""
    try:
        if path.stat().st_size > FILE_BYTES:
            raise ValueError(f"{path} is longer than {FILE_BYTES} bytes: it is no tokenizer")
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not data or (pointer := lfs_pointer(data)):
        raise ValueError(f"{path}: {pointer if data else 'it is empty: download it again'}")
    return data


def load_tokenizer(source: str | Path | Checkpoint) -> Tokenizer:
    """The tokenizer of a checkpoint: `tokenizer.json` where there is one, else `tokenizer.model`.

    Raises FileNotFoundError where there is neither, ValueError for a damaged file.
    """
    checkpoint = open_checkpoint(source)
    folder, settings = checkpoint.folder, TokenSettings(checkpoint)
    if is_there(folder / "tokenizer.json"):
        return JsonTokenizer(folder / "tokenizer.json", settings)
    if is_there(folder / "tokenizer.model"):
        return SentencePieceTokenizer(folder / "tokenizer.model", settings)
    raise FileNotFoundError(
        f"{folder} holds no tokenizer: neither tokenizer.json nor tokenizer.model (transformers' "
        "AutoTokenizer and save_pretrained make a tokenizer.json of a vocab.json with merges.txt)"
    )
