"""The files of a tokenizer as bytes and JSON: what is read, what is refused, and no panic on stderr.

`tokenizer.json` is a program for the tokenizers library. Steps that no tokenizer of this family has, and
texts that make a page of a letter, could end it in a panic or take all memory: they are refused here.
"""

import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from ..config import short
from .untrusted import lfs_pointer, said, unambiguous

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


def read_file(path: Path) -> bytes:
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


def read_values(path: Path) -> dict[str, Any]:
    """The object in a tokenizer file that is JSON."""
    try:
        values = json.loads(read_file(path), object_pairs_hook=unambiguous)
    except (ValueError, RecursionError) as error:
        if str(path) in str(error):
            raise
        raise ValueError(
            f"{path} is not a {path.name} ({said(error)}): download it again"
        ) from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a {path.name}: download it again")
    return values


def require_supported(path: Path, values: dict[str, Any]) -> None:
    """Raise a ValueError for steps of a tokenizer.json that are not supported, and for two pieces with
    one id, of which a decoder would take either.
    """
    model = values.get("model")
    model = model if isinstance(model, dict) else {}
    if model.get("continuing_subword_prefix"):
        raise ValueError(f"{path} has a continuing_subword_prefix, which is not supported")
    vocab = model.get("vocab")
    if isinstance(vocab, dict) and all(isinstance(i, int) for i in vocab.values()):
        pieces = {token_id: piece for piece, token_id in vocab.items()}
        if len(pieces) != len(vocab):
            one, i = next((piece, i) for piece, i in vocab.items() if pieces[i] != piece)
            raise ValueError(f"{path} gives {short(one)} and {short(pieces[i])} one id, {i}")
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        growth = 1
        for step in steps_of(values, part):
            kind = step.get("type")
            if part in STEPS and kind not in STEPS[part]:
                raise ValueError(f"{path}: {part} step {short(kind)} is not supported")
            for text in (step.get("content"), step.get("prepend")):
                growth *= max(1, len(text)) if isinstance(text, str) else 1
            if growth > GROWTH:
                raise ValueError(
                    f"{path}: {part} makes {growth} characters of one, at most {GROWTH}"
                )


def steps_of(values: dict[str, Any], part: str) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre_tokenizer or decoder, however they are nested."""
    steps = [values.get(part)]
    for step in steps:
        inner = step.get(part.replace("_", "") + "s") if isinstance(step, dict) else None
        steps += inner if isinstance(inner, list) else []
    return [step for step in steps if isinstance(step, dict)]


def require_processor(path: Path, processor: dict[str, Any]) -> None:
    """Raise a ValueError for a post-processor, as the library has read it, that puts a token which it
    does not define: the library would panic.
    """
    steps = [processor]
    for step in steps:
        steps += step.get("processors", [])
        for piece in step.get("single", []):
            name = piece.get("SpecialToken", {}).get("id")
            if name is None:
                continue
            tokens = step["special_tokens"].get(name, {"ids": [], "tokens": None})
            if tokens["tokens"] is None or len(tokens["ids"]) != len(tokens["tokens"]):
                raise ValueError(f"{path}: its post_processor does not define {short(name)}")


def can_panic(values: dict[str, Any]) -> bool:
    """Whether a text can end the library in a panic: an expression of the file's own gives up on some
    texts, and one that matches nothing breaks the places of the characters.
    """
    steps = steps_of(values, "normalizer") + steps_of(values, "pre_tokenizer")
    patterns = [step.get("pattern") for step in steps]
    return any(isinstance(p, dict) and ("Regex" in p or p.get("String") == "") for p in patterns)


_stderr = threading.Lock()


@contextmanager
def panics(
    path: Path, what: str, expected: bool = True, way_out: str = "download it again"
) -> Iterator[None]:
    """Make a ValueError of whatever the tokenizers library raises: there is no narrower class, and its
    panics are not even an Exception.

    `expected`: keep what a panic writes to standard error, which the library itself does, from there.
    """
    try:
        with _stderr_kept() if expected else nullcontext():
            yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"{path} {what} ({said(error)}): {way_out}") from None
        raise


@contextmanager
def _stderr_kept() -> Iterator[None]:
    """Hold back what is written to the file of standard error; after a panic it goes nowhere, else where
    it belongs (another thread may have written it).
    """
    with _stderr, tempfile.TemporaryFile() as kept:
        try:
            sys.stderr.flush()
            stderr = os.dup(2)
        except (AttributeError, OSError, ValueError):  # closed: nothing can reach it
            yield
            return
        panicked = True
        try:
            os.dup2(kept.fileno(), 2)
            yield
            panicked = False
        finally:
            os.dup2(stderr, 2)
            if not panicked:
                kept.seek(0)
                with suppress(OSError):
                    os.write(2, kept.read())
            os.close(stderr)
