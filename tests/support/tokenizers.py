"""Small tokenizers trained here, in the styles of Llama 2, Llama 3 and Qwen."""

import io
import json
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park.",
    "One day she saw a big, red ball. It was too high, and her mom said no to it.",
    'The quick brown fox jumps over the lazy dog; 0123456789 ("it\'s" done!) [INST] <s> </s> <|>',
    "def main():\n    return {'a': 1}\n",
    "Größe, naïve, 日本語, 😸",
)


KINDS = ["sentencepiece", "llama2", "llama3", "qwen"]  # the fixtures of checkpoint/conftest.py
LLAMA3_TOKENS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|eot_id|>"]


def write_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(values), encoding="utf-8")


def write_sentencepiece(
    folder: Path, sentences: tuple[str, ...] = TEXT * 3, **options: object
) -> Path:
    """A tokenizer.model with Llama's settings: BPE, byte fallback, spaces kept as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    model = io.BytesIO()
    chosen = {
        "vocab_size": 420,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "character_coverage": 0.99,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, **(chosen | options)
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return folder


def write_byte_level(folder: Path, special: list[str], bos: str | None, **config: object) -> Path:
    """A tokenizer.json as Llama 3, Qwen and SmolLM2 have it: BPE over bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    model.train_from_iterator(TEXT, trainer)
    model.add_special_tokens(special)
    model.add_tokens(["<think>"])
    if bos is not None:
        model.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, model.token_to_id(bos))]
        )
    model.save(str(folder / "tokenizer.json"))
    if config:
        write_json(folder / "tokenizer_config.json", **config)
    return folder


def write_llama2_json(folder: Path) -> Path:
    """A tokenizer.json as Llama 2 has it: BPE over characters with byte fallback."""
    folder.mkdir(parents=True, exist_ok=True)
    model = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    model.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    model.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>"]
    pieces = special + [f"<0x{byte:02X}>" for byte in range(256)]
    ascii_text = [line for line in TEXT if line.isascii()]
    model.train_from_iterator(
        ascii_text, trainers.BpeTrainer(vocab_size=400, special_tokens=pieces, show_progress=False)
    )
    model.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    file = json.loads(model.to_str())
    file["added_tokens"] = [token for token in file["added_tokens"] if token["content"] in special]
    (folder / "tokenizer.json").write_text(json.dumps(file), encoding="utf-8")
    write_json(
        folder / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    return folder


def train_sentencepiece(path: Path, vocab_size: int = 300) -> None:
    """A small SentencePiece model with byte fallback, as Llama's."""
    text = "The quick brown fox jumps over the lazy dog. Once upon a time there was a little girl. "
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text] * 20),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())
