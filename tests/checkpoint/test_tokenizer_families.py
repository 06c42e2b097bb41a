"""Tokenizers as other families lay them out, against transformers' own class for each."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from llama_mini.checkpoint.tokenizer import load_tokenizer
from tests.support.fixtures import require
from tests.support.tokenizers import TEXT, write_byte_level, write_json

TEXTS = (
    *TEXT,
    "a  b    c\n\n  d\t e",
    "1234567 Größe e\u0301 \u2009x",
    "<|endoftext|> a<|endoftext|>",
    "",
)
BYTES = pre_tokenizers.ByteLevel.alphabet()
END = "<|endoftext|>"


def trained(special: list[str], normalizer: Any, cut: Any, alphabet: list[str]) -> Any:
    model = tokenizers.Tokenizer(models.BPE())
    model.normalizer, model.pre_tokenizer = normalizer, cut
    trainer = trainers.BpeTrainer(
        vocab_size=380, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    model.train_from_iterator(TEXT * 2, trainer)
    return model


def write_neox(folder: Path) -> dict[str, Any]:
    """GPT-NeoX, Pythia, OLMo: runs of spaces are added tokens, and one token is BOS, EOS and unknown."""
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model = trained([END, "<|padding|>"], normalizers.NFC(), cut, BYTES)
    model.decoder = decoders.ByteLevel()
    model.add_tokens([tokenizers.AddedToken(" " * n, normalized=True) for n in range(8, 1, -1)])
    model.add_tokens(["|||EMAIL|||"])
    model.save(str(folder / "tokenizer.json"))
    return {f"{name}_token": END for name in ("bos", "eos", "unk")}


def write_cohere(folder: Path) -> dict[str, Any]:
    cut = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    names = ["<PAD>", "<UNK>", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>"]
    model = trained(names, normalizers.NFC(), cut, BYTES)
    model.decoder = decoders.ByteLevel()
    model.post_processor = processors.TemplateProcessing(
        single="<BOS_TOKEN> $A", special_tokens=[("<BOS_TOKEN>", 2)]
    )
    model.save(str(folder / "tokenizer.json"))
    return {"bos_token": names[2], "eos_token": names[3], "unk_token": names[1]}


def write_gemma(folder: Path) -> dict[str, Any]:
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    every = names + [f"<0x{byte:02X}>" for byte in range(256)]
    cut = pre_tokenizers.Split(" ", "merged_with_previous")
    model = trained(every, normalizers.Replace(" ", "▁"), cut, [])
    values = json.loads(model.to_str())
    values["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    values["added_tokens"] = values["added_tokens"][: len(names)]
    model = tokenizers.Tokenizer.from_str(json.dumps(values))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    model.decoder = decoders.Sequence(steps)
    model.add_tokens([f"<unused{number}>" for number in range(3000)])
    model.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 2)]
    )
    model.save(str(folder / "tokenizer.json"))
    return {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}


def write_gpt2(folder: Path) -> dict[str, Any]:
    """The two files of GPT-2 itself, and no tokenizer.json."""
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model = json.loads(trained([END], None, cut, BYTES).to_str())["model"]
    write_json(folder / "vocab.json", **model["vocab"])
    merges = "\n".join(" ".join(merge) for merge in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    return {}


FAMILIES = {
    "GPTNeoXTokenizer": (write_neox, "gpt_neox"),
    "CohereTokenizer": (write_cohere, "cohere"),
    "GemmaTokenizer": (write_gemma, "gemma"),
    "GPT2Tokenizer": (write_gpt2, "gpt2"),
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_same_ids_as_transformers(tmp_path: Path, kind: str) -> None:
    transformers = require("transformers")
    write, model_type = FAMILIES[kind]
    config = write(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", tokenizer_class=kind, **config)
    write_json(tmp_path / "config.json", model_type=model_type)
    ours = load_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.eos_id is not None
    for text in TEXTS:
        ids = ours.encode(text, special=True)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
        plain = ours.encode(text)
        assert not set(plain[1:]) & set(ours.control.values()), text
        assert ours.decode(plain) == theirs.decode(plain, skip_special_tokens=True), text


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "RobertaTokenizer", None])
def test_other_tokenizers_with_gpt2s_files_are_named(tmp_path: Path, kind: str | None) -> None:
    """Qwen cuts numbers and words otherwise, which these files do not say."""
    write_gpt2(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", tokenizer_class=kind)
    with pytest.raises(ValueError, match=rf"vocab\.json.*{kind}.*save_pretrained"):
        load_tokenizer(tmp_path)


def test_gpt2s_space_before_a_text(tmp_path: Path) -> None:
    """As transformers: OPT's files ask for none, and some of GPT-2's kin for one."""
    write_gpt2(tmp_path)
    for space in (False, True):
        config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": space}
        write_json(tmp_path / "tokenizer_config.json", **config)
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer.decode(tokenizer.encode("She said")) == " " * space + "She said"


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[1]", b"a b c d\n", b'{"a": 0, "b": 0}'])
def test_damaged_files_of_gpt2(tmp_path: Path, name: str, data: bytes) -> None:
    write_gpt2(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=name) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_settings_of_a_speech_model(tmp_path: Path) -> None:
    """65,536 added tokens make a tokenizer_config.json of 11.6 MB. Observed 2 s."""
    write_byte_level(tmp_path, [], None)
    first = load_tokenizer(tmp_path).vocab_size
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        str(first + n): {"content": f"<custom_token_{n}>", **flags, "special": True}
        for n in range(65_536)
    }
    text = json.dumps({"added_tokens_decoder": added}, indent=2)
    (tmp_path / "tokenizer_config.json").write_text(text)
    assert len(text) > 11_600_000
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == first + 65_536
    assert tokenizer.encode("<custom_token_65535>", special=True) == [first + 65_535]
