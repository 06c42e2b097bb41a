"""The tokenizer of a checkpoint: which of its files is read."""

from pathlib import Path
from typing import Any

from ..config import short
from .json_tokenizer import JsonTokenizer
from .opening import Checkpoint, open_checkpoint
from .sentencepiece_tokenizer import SentencePieceTokenizer
from .token_settings import TokenSettings
from .tokenizer_base import Tokenizer
from .tokenizer_file import read_file, read_values
from .untrusted import is_there, utf8

# Tokenizers of Mistral, of Qwen before tokenizer.json, of BERT and T5.
OTHERS = "tek*.json tokenizer.model.v* *.tiktoken tiktoken.model vocab.txt spiece.model".split()

__all__ = ["Tokenizer", "load_tokenizer"]


def load_tokenizer(source: str | Path | Checkpoint) -> Tokenizer:
    """The tokenizer of a checkpoint: `tokenizer.json` where there is one, else `tokenizer.model`, else
    GPT-2's `vocab.json` with `merges.txt`.

    Raises FileNotFoundError where there is none of them, ValueError for a damaged file and for one that
    is not supported.
    """
    checkpoint = open_checkpoint(source)
    folder, settings = checkpoint.folder, TokenSettings(checkpoint)
    if is_there(folder / "tokenizer.json"):
        path = folder / "tokenizer.json"
        return JsonTokenizer(path, read_values(path), settings)
    if is_there(folder / "tokenizer.model"):
        return SentencePieceTokenizer(folder / "tokenizer.model", settings)
    if is_there(folder / "vocab.json") and is_there(folder / "merges.txt"):
        return _gpt2(folder, settings)
    others = sorted(path.name for pattern in OTHERS for path in folder.glob(pattern))
    raise FileNotFoundError(
        f"{folder} holds no tokenizer: neither tokenizer.json nor tokenizer.model"
        f"{'; ' + others[0] + ' is not read' if others else ''}: take tokenizer.json from the same Hugging "
        "Face repository or its -hf sibling, or let transformers' AutoTokenizer and save_pretrained make it"
    )


def _gpt2(folder: Path, settings: TokenSettings) -> Tokenizer:
    """GPT-2's byte-level BPE from its two files. Other tokenizers with such files cut a text into words
    otherwise, which no file of theirs says.
    """
    path, kind = folder / "vocab.json", settings.tokenizer_class
    if kind not in ("GPT2Tokenizer", "GPT2TokenizerFast"):
        raise ValueError(
            f"{folder} holds vocab.json and merges.txt for tokenizer_class {short(kind)}, and only "
            "GPT2Tokenizer is read from them: put the model's tokenizer.json beside them, or make it with "
            "transformers' AutoTokenizer and save_pretrained"
        )
    lines = utf8(folder / "merges.txt", read_file(folder / "merges.txt")).splitlines()
    merges = [line for line in lines if line.strip() and not line.startswith("#version")]
    bytes_of_words: dict[str, Any] = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    bytes_of_words["add_prefix_space"] = bool(settings.prefix_space)
    model = {"type": "BPE", "vocab": read_values(path), "merges": merges}
    steps = {"pre_tokenizer": bytes_of_words, "decoder": bytes_of_words}
    settings.name_gpt2()
    both = Path(f"{path} with merges.txt")  # which errors name
    return JsonTokenizer(both, {"version": "1.0", "model": model, **steps}, settings)
