"""Checkpoint folders damaged at random, each by a number, and what has to come of them."""

import contextlib
import json
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from safetensors.torch import save_file
from torch import Tensor

from llama_mini import Llama, LlamaConfig, load_model, load_tokenizer
from llama_mini.checkpoint import parse_config
from llama_mini.checkpoint.names import HUGGING_FACE, META, inverse, translate
from tests.support.fixtures import BASE_V4, strengthen
from tests.support.tokenizers import write_byte_level, write_llama2_json, write_sentencepiece

SECONDS, BYTES = (
    2.0,
    200e6,
)  # what one damaged folder may take; a machine with other work gets more below
TEXT = "Once upon a time </s><x> <|b|>Größe 日本 😸\x00\n  x"
TOKENS = torch.tensor([[1, 7, 2, 250, 9]])
CONFIG: dict[str, Any] = {
    **BASE_V4,
    "vocab_size": 430,
    "rope_scaling": None,
    "eos_token_id": [2, 3],
    "initializer_range": 0.02,
}
META_CONFIG = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": -1}
META_CONFIG |= {"multiple_of": 4, "ffn_dim_multiplier": 0.56, "norm_eps": 1e-5}
LAYOUTS = ("one file", "shards", "tied", "meta")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**63, 2**64, 10**400, 0.5, 1e-40, 1e308, -0.0),
    *(float("nan"), float("inf"), "", "x", "\ud800", "a\nb", "a" * 5000, "../x", "/etc/passwd"),
    *([], {}, [[]], [None], [0, 0], [1, "2"], {"a": 1}, [[[[[[]]]]]], {"rope_type": "linear"}),
    *("F16", "I8", "float16", "<s>", {"String": "("}, {"Regex": "("}, {"type": "ByteLevel"}),
]
BYTES_IN = [
    b"\0" * 8,
    b"\xff" * 8,
    b"NaN",
    b"-1",
    b"9" * 30,
    b"[" * 3,
    b"\xed\xa0\x80",
    b"null",
    b'"',
]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def write_folder(folder: Path, layout: str) -> Path:
    """A tiny checkpoint in one of LAYOUTS, with a tokenizer of 420 ids or fewer."""
    special, flags = {"special": True}, {"lstrip": True, "rstrip": True}
    if layout == "one file":
        names = {"bos_token": "<|b|>", "eos_token": "<|e|>"}
        write_byte_level(folder, ["<|b|>", "<|e|>"], "<|b|>", **names)
    elif layout == "tied":
        write_llama2_json(folder)
    else:
        kind = {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc", "vocab_size": 340}
        write_sentencepiece(folder, **(kind if layout == "meta" else {}))
        added = {"420": {"content": "<x>", **flags, **special}, "421": {"content": "<y>", **flags}}
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
        (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
        (folder / "added_tokens.json").write_text('{"<y>": 421}')
    table, values = HUGGING_FACE, dict(CONFIG, tie_word_embeddings=layout == "tied")
    if layout == "meta":
        table, values = META, dict(META_CONFIG)
    model = Llama(parse_config(values | {"vocab_size": 430}))
    strengthen(model, seed=0)
    weights = {translate(name, table): weight for name, weight in model.state_dict().items()}
    if layout == "tied":
        del weights["lm_head.weight"]
    (folder / ("params.json" if layout == "meta" else "config.json")).write_text(json.dumps(values))
    (folder / "generation_config.json").write_text('{"eos_token_id": 4}')
    if layout == "shards":
        names = sorted(weights)
        index = {name: f"model-{1 + names.index(name) % 2}.safetensors" for name in names}
        for file in set(index.values()):
            save_file({n: w for n, w in weights.items() if index[n] == file}, folder / file)
        text = json.dumps({"metadata": {"total_size": 1}, "weight_map": index})
        (folder / "model.safetensors.index.json").write_text(text)
    else:
        name = "consolidated.00.safetensors" if layout == "meta" else "model.safetensors"
        save_file(weights, folder / name, {"format": "pt"})
    return folder


# Damage: of bytes, of JSON, of a file as a whole


def damage_bytes(draw: random.Random, data: bytes) -> bytes:
    """Some bytes flipped, cut, doubled, moved or put in, every second time near the beginning."""
    b = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        p = draw.randrange(min(len(b), 2000) if draw.random() < 0.5 else len(b)) if b else 0
        n = draw.randrange(1, 50)
        match draw.randrange(8) if b else 7:
            case 0 | 1:
                b[p] ^= 1 << draw.randrange(8)
            case 2:
                b[p] = draw.randrange(256)
            case 3:
                del b[p:]
            case 4:
                del b[p : p + n]
            case 5:
                b[p:p] = b[p : p + n]
            case 6:
                b[p:p] = draw.choice(BYTES_IN)
            case 7:
                b += draw.randbytes(n)
    return bytes(b)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in list(keys)[:30]:
        yield (*at, key)
        yield from places(value[key], (*at, key))


def damage_json(draw: random.Random, data: bytes) -> bytes:
    """A value replaced by an odd one or by another of the file; a key left out, renamed or there twice."""
    value = json.loads(data)
    at = draw.choice(list(places(value)) or [()])
    if not at:
        return b"[]"
    holder: Any = value
    for key in at[:-1]:
        holder = holder[key]
    key = at[-1]
    match draw.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[draw.choice(["", "x", f"{key}x", "a\nb"])] = holder.pop(key)
        case 2 if isinstance(holder, dict):
            holder["\0twin"] = draw.choice([holder[key], *ODD])
        case 3 if isinstance(holder, dict):
            holder[key] = holder[draw.choice(list(holder))]
        case _:
            holder[key] = draw.choice(ODD)
    text = json.dumps(value)
    return (
        text.replace('"\\u0000twin"', json.dumps(key)) if isinstance(holder, dict) else text
    ).encode()


def damage_header(draw: random.Random, data: bytes) -> bytes:
    """The same for the header of a safetensors file, whose length is put right or is wrong by itself."""
    end = 8 + int.from_bytes(data[:8], "little")
    if draw.random() < 0.2:
        length = draw.choice([0, 1, end, end - 9, 2**20, 10**8, 2**31, 2**63, 2**64 - 1])
        return length.to_bytes(8, "little") + data[8:]
    header = damage_json(draw, data[8:end])
    return len(header).to_bytes(8, "little") + header + data[end:]


def damage(draw: random.Random, folder: Path) -> tuple[Path, str]:
    """Damage one file of the folder; which, and how."""
    files = sorted(folder.iterdir())
    files += [file for file in files if file.name.endswith((".safetensors", "r.json", "g.json"))]
    file = draw.choice(files)
    data = file.read_bytes()
    other = draw.choice(files).read_bytes()
    big = file.name == "tokenizer.json" and draw.random() < 0.5  # most of its places are pieces
    file.unlink()
    if draw.random() < 0.05:
        how = draw.choice(
            ["gone", "a folder", "a link to nothing", "a link to itself", "a link out"]
        )
        if how == "a folder":
            file.mkdir()
        elif how != "gone":
            out = folder.parent / "blob"
            out.write_bytes(data)
            targets = {
                "a link to nothing": "x",
                "a link to itself": file.name,
                "a link out": "../blob",
            }
            file.symlink_to(targets[how])
        return file, how
    ways: list[tuple[str, Callable[[], bytes]]] = [
        ("bytes", lambda: damage_bytes(draw, data)),
        ("bytes", lambda: damage_bytes(draw, data)),
    ]
    if file.name.endswith(".json") and not big:
        ways += [("json", lambda: damage_json(draw, data))] * 3
    if file.name.endswith(".safetensors"):
        ways += [("header", lambda: damage_header(draw, data))] * 3
    wholes = [b"", POINTER, other, b"\0" * len(data), data.decode("latin-1").encode("utf-16")]
    how, way = draw.choice(ways) if draw.random() < 0.95 else ("whole", lambda: draw.choice(wholes))
    file.write_bytes(way())
    return file, how


# What has to come of it


def stored_tensors(folder: Path, layout: str) -> dict[str, Tensor]:
    """What the files say, by our names: read here once more, plainly, from their headers."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:end]).items():
            ours = translate(name, inverse(META if layout == "meta" else HUGGING_FACE))
            if ours is None:  # metadata
                continue
            first, last = entry["data_offsets"]
            part = bytearray(data[end + first : end + last])
            tensor = torch.frombuffer(part, dtype=DTYPES[entry["dtype"]]).reshape(entry["shape"])
            if layout == "meta" and re.search(r"\.[qk]_proj", ours):
                tensor = rearrange(tensor, "(h d pair) m -> (h pair d) m", pair=2, d=4)
            found[ours] = tensor
    return found


def require_values(folder: Path, config: LlamaConfig) -> None:
    """Fail unless the config holds what the file says, key by key."""
    values = json.loads((folder / "config.json").read_text())
    for key in set(CONFIG) - {"architectures", "model_type", "initializer_range"}:
        value = values.get(key)
        if key in ("rope_theta", "rope_scaling") or value is None:
            continue
        if key == "eos_token_id":
            value = value if isinstance(value, list) else [value]
            assert {token for token in value if token >= 0} <= set(config.eos_token_id)
        elif key == "torch_dtype":
            assert value.removeprefix("torch.") == config.dtype
        else:
            held = getattr(config, key)
            assert (held, isinstance(held, bool)) == (value, isinstance(value, bool)), key
    if values.get("rope_theta") is not None:
        assert config.rope.rope_theta == values["rope_theta"]


def read_model(folder: Path, layout: str, file: Path, base: dict[str, Any]) -> str:
    model = load_model(folder)
    logits = model(TOKENS)
    stored, state = stored_tensors(folder, layout), model.state_dict()
    if model.config.tie_word_embeddings:
        stored.setdefault("lm_head.weight", stored["embed.weight"])
    assert state.keys() == stored.keys()
    for name, tensor in state.items():
        expected = stored[name].to(tensor.dtype)
        same = torch.equal(tensor.nan_to_num(), expected.nan_to_num())
        assert same, f"{name} is not what {file.name} says"
    if layout != "meta":
        require_values(folder, model.config)
    if model.config == base["config"] and torch.equal(logits, base["logits"]):
        return "loads, the same"
    if model.config != base["config"]:
        assert file.suffix == ".json", "another config"
        return "loads, with other values in the config"
    assert file.suffix == ".safetensors", "other logits"
    return "loads, with other weights"


def read_tokenizer(folder: Path, file: Path, base: dict[str, Any]) -> str:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.encode(TEXT) == ids
    for encoded in (ids, tokenizer.encode(TEXT, special=True)):
        assert all(0 <= token < tokenizer.vocab_size for token in encoded), "ids out of range"
    every = list(range(min(tokenizer.vocab_size, 500)))
    whole, decoder = tokenizer.decode(every), tokenizer.stream_decoder()
    assert "".join(map(decoder.push, every)) + decoder.flush() == whole
    if (ids, whole) == (base["ids"], base["whole"]):
        return "loads, the same"
    return "loads, with other tokens"


def read_base(folder: Path) -> dict[str, Any]:
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    whole = tokenizer.decode(range(min(tokenizer.vocab_size, 500)))
    ids = tokenizer.encode(TEXT)
    return {"config": model.config, "logits": model(TOKENS), "ids": ids, "whole": whole}


def peak() -> int:
    """The most bytes that this process has held, where the system says so."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) * 1024 if found else 0
    return 0


def require_message(error: Exception, folder: Path, file: Path) -> None:
    """Fail unless the error is of one line and names the file, or the folder of one that is gone."""
    message = str(error)
    assert type(error) in (ValueError, FileNotFoundError), repr(error)
    assert message.isprintable(), repr(message[:500])
    assert len(message) < 20000, message[:500]
    named = file.name in message or (not file.is_file() and str(folder) in message)
    assert named, f"{file.name} is not named: {message[:500]}"


def outcome(folder: Path, layout: str, file: Path, base: dict[str, Any]) -> str:
    """The class of what comes of a damaged folder; AssertionError for what must not come."""
    at, held = time.process_time(), peak()
    with tempfile.TemporaryFile() as log:
        kept = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            if file.name.startswith(("token", "special", "added")):
                result = read_tokenizer(folder, file, base)
            else:
                result = read_model(folder, layout, file, base)
        except (ValueError, FileNotFoundError) as error:
            require_message(error, folder, file)
            result = "refused, and the file named"
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        log.seek(0)
        assert (said := log.read()) == b"", said[:500]
    seconds, grown = time.process_time() - at, peak() - held
    assert seconds < SECONDS, f"it took {seconds:.1f} s"
    assert grown < BYTES, f"it took {grown / 1e6:.0f} MB"
    return result


def try_one(
    whole: Path, work: Path, layout: str, number: int | str, base: dict[str, Any]
) -> tuple[str, str]:
    """Damage a copy of the folder by a number: the class of what came of it, and what is wrong if any."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(whole, work)
    file, how = damage(random.Random(f"{layout} {number}"), work)
    try:
        return outcome(work, layout, file, base), ""
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return "wrong", f"{layout} {number}: {file.name}, {how}: {type(error).__name__}: {error}"
