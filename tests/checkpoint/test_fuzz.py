"""Whatever a stranger hands over: the right answer, or a ValueError or FileNotFoundError of one line that
names the file. `pytest tests/test_fuzz.py --fuzz 10000 -s` tries more folders and prints what came of them.
"""

import io
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import generate as cli
from llama_mini import Llama, generate, load_model, load_tokenizer, stream
from llama_mini.checkpoint import check_weights, open_checkpoint, read_config
from llama_mini.checkpoint.untrusted import JSON_BYTES
from tests.support.fuzzing import (
    CONFIG,
    LAYOUTS,
    ODD,
    outcome,
    peak,
    read_base,
    require_message,
    require_values,
    try_one,
    write_folder,
)

LOADED = cache(load_tokenizer)
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("whole")
    return {layout: write_folder(root / layout.replace(" ", "_"), layout) for layout in LAYOUTS}


@pytest.fixture
def folder(folders: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders["one file"], tmp_path / "folder"))


@pytest.fixture
def shards(folders: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders["shards"], tmp_path / "shards"))


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_header(path: Path, old: str, new: str) -> None:
    """Replace text in the header of a safetensors file, and put its length right."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = data[8:end].replace(old.encode(), new.encode())
    assert header != data[8:end]
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])


# Folders damaged at random


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damaged_folders(
    folders: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest, layout: str
) -> None:
    count = request.config.getoption("--fuzz") // len(LAYOUTS)
    base = read_base(folders[layout])
    classes: Counter[str] = Counter()
    wrong = []
    for number in range(count):
        result, problem = try_one(folders[layout], tmp_path / "folder", layout, number, base)
        classes[result] += 1
        wrong += [problem] * bool(problem)
    print(f"\n{layout}: {count} damaged folders: {dict(classes.most_common())}")
    assert not wrong, "\n".join([f"{len(wrong)} of {count}", *wrong[:5]])
    assert classes["refused, and the file named"] > count // 2  # the damage does damage
    assert classes["loads, the same"] > 0 or count < 30


def test_the_fuzz_can_fail(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees wrong weights, a log line, an error of another kind, and one that does not name the file."""
    whole, base, file = (
        folders["one file"],
        read_base(folders["one file"]),
        Path("model.safetensors"),
    )

    def load_wrong(folder: Path) -> Llama:
        model = load_model(folder)
        model.final_norm.weight.data[3] += 1
        return model

    def log(folder: Path) -> Llama:
        os.write(2, b"panicked")
        return load_model(folder)

    def fail(error: Exception) -> Any:
        def load(folder: Path) -> Llama:
            raise error

        return load

    for load, words in (
        (load_wrong, "is not what model.safetensors says"),
        (log, "panicked"),
        (fail(ValueError("unreadable")), "is not named"),
        (fail(UnicodeDecodeError("utf-8", b"x", 0, 1, "model.safetensors")), "UnicodeDecodeError"),
    ):
        monkeypatch.setattr("tests.support.fuzzing.load_model", load)
        with pytest.raises(AssertionError, match=words):
            outcome(whole, "one file", whole / file.name, base)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(ODD),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(key=st.sampled_from(sorted(CONFIG)), value=JSON)
def test_any_value_in_a_config(folders: dict[str, Path], key: str, value: object) -> None:
    """It is in the config that comes of it, or refused."""
    path = folders["shards"].parent / "any" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**CONFIG, key: value}))
    try:
        config = read_config(path.parent)
    except ValueError as error:
        require_message(error, path.parent, path)
    else:
        require_values(path.parent, config)


# What it found


def refusal(folder: Path, *words: str, kind: Any = ValueError) -> None:
    with pytest.raises(kind) as error:
        (load_model(folder), load_tokenizer(folder))
    message = str(error.value)
    assert message.isprintable()
    assert len(message) < 20000
    for word in words:
        assert word in message


@pytest.mark.parametrize("length", [2**20 + 1, 99_000_000, 2**40, 2**64 - 1])
def test_a_header_takes_no_memory_before_it_is_refused(folder: Path, length: int) -> None:
    """The library would read up to 100 MB, and hold some gigabytes of it."""
    entry = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
    header = b"{" + b"".join(entry % n for n in range(20_000))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(length.to_bytes(8, "little") + header)
        file.truncate(100_000_000)
    before, began = peak(), time.process_time()
    refusal(folder, "model.safetensors", "its header would be longer than 1048576 bytes")
    assert peak() - before < 30e6
    assert time.process_time() - began < 1


def test_a_long_json_file_is_not_read(folder: Path) -> None:
    (folder / "config.json").write_text("[" + "[]," * (JSON_BYTES // 3) + "[]]")
    refusal(folder, "config.json", "it is longer than")


def test_a_name_that_is_there_twice(folder: Path) -> None:
    """The last would count; twice the same is harmless."""
    path = folder / "config.json"
    text = path.read_text()
    path.write_text(text.replace('"hidden_size": 32', '"hidden_size": 32, "hidden_size": 32'))
    load_model(folder)
    path.write_text(text.replace('"rms_norm_eps"', '"rms_norm_eps": 0.5, "rms_norm_eps"'))
    refusal(folder, str(path), "'rms_norm_eps' is there twice, as 0.5 and as 1e-05")
    path.write_text(text)
    twin = (
        '"model.norm.weight":{"dtype":"I32","shape":[2],"data_offsets":[0,8]},"model.norm.weight"'
    )
    change_header(folder / "model.safetensors", '"model.norm.weight"', twin)
    refusal(folder, "model.safetensors", "'model.norm.weight' is there twice")


def test_a_name_that_counts_blocks_nobody_stored(folder: Path) -> None:
    change_header(
        folder / "model.safetensors", "layers.1.self_attn.q", "layers.399999999.self_attn.q"
    )
    change(folder / "config.json", num_hidden_layers=400000000)
    refusal(folder, "model.safetensors holds 21 tensors, and their names count 400000000 blocks")


def test_a_name_with_line_breaks_or_without_end(folder: Path) -> None:
    path = folder / "model.safetensors"
    change_header(path, "model.norm.weight", "a\\u001b[2J\\nb" + "c" * 3000)
    refusal(folder, "model.safetensors holds 'a\\x1b[2J\\nbccc")
    change_header(path, '"dtype":"F32"', '"dtype":"F\\n2"')
    refusal(folder, str(path))


def test_more_problems_than_anyone_reads(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    extra = {f"w{n}": torch.zeros(1) for n in range(300)}
    save_file(weights | extra, folder / "model.safetensors")
    refusal(folder, "w0 (1,), which is no part of this decoder", " and 200 more")
    own = {"AutoModelForCausalLM": "modeling_x.X"}
    change(folder / "config.json", auto_map=own, **{f"k{n}": n for n in range(300)})
    refusal(folder, "k0 is 0", "and 280 more")


@pytest.mark.parametrize("name", ["x" * 5000, "a\nb", "\ud800", "gone"])
def test_an_index_that_names_no_file(shards: Path, name: str) -> None:
    path = shards / "model.safetensors.index.json"
    change(path, weight_map=json.loads(path.read_text())["weight_map"] | {Q: name})
    refusal(shards, str(path), kind=(ValueError, FileNotFoundError))
    path.write_text('{"weight_map": {}}')
    refusal(shards, f"{path} has no weight_map")


def test_links(shards: Path, tmp_path: Path) -> None:
    """A hub cache is made of links out of its folder; one that leads nowhere is not a file left out."""
    base = load_model(shards).state_dict()
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0"
    shutil.copytree(shards, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    loaded = load_model(snapshot).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in base.items())
    names = [
        "generation_config.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "model-1.safetensors",
    ]
    for name in [*names, "config.json"]:
        (blobs / name).rename(blobs / "moved")
        refusal(snapshot, f"{snapshot / name} is a link that leads to no file")
        (blobs / "moved").rename(blobs / name)
    (snapshot / "added_tokens.json").unlink()
    os.mkfifo(snapshot / "added_tokens.json")  # to read from it would never end
    refusal(snapshot, f"{snapshot / 'added_tokens.json'} is a pipe")


def test_what_the_tokenizers_library_panics_at(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = folder / "tokenizer.json"
    before = path.read_text()
    values = json.loads(before)
    values["post_processor"]["special_tokens"] = {}
    path.write_text(json.dumps(values))
    refusal(folder, f"{path}: its post_processor does not define '<|b|>'")
    template = json.loads(before)["post_processor"]["special_tokens"]
    template["<|b|>"]["ids"] = [1, 1, 1]
    values["post_processor"]["special_tokens"] = template
    path.write_text(json.dumps(values))
    refusal(folder, f"{path}: its post_processor does not define '<|b|>'")
    values["post_processor"] = None
    values["model"]["continuing_subword_prefix"] = "aaaaaaaa"
    path.write_text(json.dumps(values).replace("subword_prefix", "subword_pre\\u0066ix"))
    refusal(folder, f"{path} has a continuing_subword_prefix")
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    for part, step, what in (
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "/////w=="}, "Precompiled"),
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}, "FixedLength"),
        ("normalizer", {"type": "Sequence", "normalizers": [double] * 3}, "1000 characters of one"),
        ("decoder", {"type": "Sequence", "decoders": [double] * 4}, "1000 characters of one"),
    ):
        path.write_text(json.dumps({**json.loads(before), part: step}))
        refusal(folder, str(path), what)
    assert capfd.readouterr().err == ""


def test_a_bos_that_is_no_token(folder: Path) -> None:
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    values["post_processor"]["special_tokens"]["<|b|>"]["ids"] = [999]
    path.write_text(json.dumps(values))
    refusal(folder, f"{path} puts [999] before a text")


def test_a_piece_that_is_not_text(shards: Path) -> None:
    path = shards / "tokenizer.model"
    path.write_bytes(path.read_bytes().replace("日".encode(), b"\xff\xff\xff"))
    refusal(shards, f"{path} is not a SentencePiece model")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tokenizer_config.json", {"add_bos_token": "false"}),
        ("tokenizer_config.json", {"legacy": 1}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1_0": {"content": "<z>"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": {"content": ""}}}),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"9": {"content": "z", "special": "no"}}},
        ),
        ("added_tokens.json", {"<z>": 1.9}),
        ("added_tokens.json", {"<z>": True}),
        ("added_tokens.json", {"<z>": math.inf}),
    ],
)
def test_settings_that_are_almost_right(shards: Path, name: str, changes: dict[str, Any]) -> None:
    change(shards / name, **changes)
    refusal(shards, name)


# Values: weights and logits that are NaN or infinite


@pytest.mark.parametrize("layout", LAYOUTS)
def test_check_names_the_tensor(folders: dict[str, Path], tmp_path: Path, layout: str) -> None:
    whole = shutil.copytree(folders[layout], tmp_path / "folder")
    check_weights(load_model(whole), open_checkpoint(whole))
    files = sorted(whole.glob("*.safetensors"))
    for file in files:
        weights = load_file(file)
        name = next(name for name in weights if name.endswith(("v_proj.weight", "wv.weight")))
        weights[name].view(-1)[:3] = torch.tensor([math.nan, math.inf, -math.inf])
        save_file(weights, file)
    with pytest.raises(ValueError, match=r"1 NaN and 2 inf") as error:
        check_weights(load_model(whole), open_checkpoint(whole))
    for file in files:
        assert f"{file.name} holds " in str(error.value)
    assert "with 1 NaN and 2 infinite" in str(error.value)
    assert str(error.value).count("infinite") == len(files)


def test_check_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(folder), "--prompt", "a", "--max-new-tokens", "1", "--check"]
    assert cli.main([*arguments, "--device", "cpu"]) == 0
    weights = load_file(folder / "model.safetensors")
    weights[Q][0, 0] = 1e30
    save_file(weights, folder / "model.safetensors")
    assert cli.main([*arguments, "--device", "cpu"]) == 0
    capsys.readouterr()
    assert cli.main([*arguments, "--dtype", "float16"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"torch.float16: model.safetensors holds {Q} with 0 NaN and 1 inf" in err


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_is_named_at_its_step_and_nothing_is_drawn_from_it(
    folder: Path, temperature: float
) -> None:
    model = load_model(folder)
    options: dict[str, Any] = {"stop_ids": (), "temperature": temperature}

    def draw() -> torch.Generator:
        return torch.Generator().manual_seed(0)

    ids = generate(model, [[5]], 3, generator=draw(), **options)[0]
    assert ids[1] not in (5, ids[0])
    model.embed.weight[ids[1]] = math.nan  # which is read after it was drawn
    steps = stream(model, [[5]], 9, generator=draw(), **options)
    assert [next(steps)[0], next(steps)[0]] == ids[:2]
    with pytest.raises(ValueError, match="at new token 3 the logits hold NaN"):
        next(steps)


@pytest.mark.parametrize(
    ("prompts", "options"),
    [
        (5, {}),
        (None, {}),
        ([1, 2], {}),
        (torch.tensor([1, 2]), {}),
        ([[1.0, 2.0]], {}),
        (["ab"], {}),
        ([[]], {}),
        ([[430]], {}),
        ([[-1]], {}),
        ([[2**70]], {}),
        ([[1]], {"max_new_tokens": 1.5}),
        ([[1]], {"stop_ids": 2}),
        ([[1]], {"temperature": "hot"}),
        ([[1]], {"top_k": 1.5}),
        ([[1]], {"top_p": "1"}),
    ],
)
def test_odd_arguments(folder: Path, prompts: Any, options: dict[str, Any]) -> None:
    model = load_model(folder)
    with pytest.raises(ValueError, match=r"prompt|token|temperature|top_"):
        generate(model, prompts, **options)
    assert len(generate(model, iter([[1], [2]]), 1)) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [[1.0], ["a"], [None], [-1], [10**9]])
def test_odd_ids(folder: Path, ids: list[Any]) -> None:
    with pytest.raises(ValueError, match="token id"):
        load_tokenizer(folder).decode(ids)
    with pytest.raises(ValueError, match="a text must be a str, not bytes"):
        load_tokenizer(folder).encode(b"a")  # type: ignore[arg-type]


# Prompts


@pytest.mark.parametrize(
    "prompt", [" ", "\t\r\n", "\x1b[2J\x07\x00", "\u202e\ufeff\u2028", "a" * 40]
)
def test_prompts_that_are_odd_and_right(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(prompt.encode() + b"\n")))
    options = ["--max-new-tokens", "3", "--temperature", "0"]  # drawn, one in 50 is a stop id
    code = cli.main(["--model", str(folder), "--prompt", "-", *options])
    out, err = capsys.readouterr()
    assert (code, err.count("\n")) == (0, 1)  # the note that the text was cut
    assert out.startswith(prompt)


@pytest.mark.parametrize("character", ["a", " ", "😸", "\n", "<x>"])
@pytest.mark.parametrize("layout", ["one file", "shards"])
def test_a_prompt_beyond_the_context_is_refused_before_any_work(
    folders: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    character: str,
) -> None:
    def open_nothing(*_: object) -> None:
        raise AssertionError("weights were opened")

    monkeypatch.setattr("llama_mini.checkpoint.opening.read_headers", open_nothing)
    prompt = (character * 100_000)[:100_000]
    length = len(load_tokenizer(folders[layout]).encode(prompt))
    began = time.process_time()
    assert cli.main(["--model", str(folders[layout]), "--prompt", prompt]) == 1
    assert (
        time.process_time() - began < 4
    )  # observed: 0.1 to 0.9; with a pattern in quadratic time minutes
    out, err = capsys.readouterr()
    assert out == ""
    assert f"a prompt of {length} tokens" in err
    assert f"context of {CONFIG['max_position_embeddings']} positions" in err
    assert err.count("\n") == 1


def test_a_prompt_that_is_not_unicode(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["--model", str(folder), "--prompt", "ab\udcff"]) == 1
    )  # a byte 0xff as an argument
    assert "character 2 of the text is U+DCFF" in capsys.readouterr().err


@pytest.mark.slow
def test_a_terminal_that_lacks_a_character(folder: Path) -> None:
    """It shows another in its place, and the text goes on."""
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "generate.py"), "--model", str(folder), "--device", "cpu"]
    command += ["--prompt", "Größe 😸 日本", "--max-new-tokens", "40", "--seed", "0"]
    done = subprocess.run(
        command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}, check=False
    )
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) <= 1  # which limit stopped the text, if one did
    assert b"Traceback" not in done.stderr
    assert done.stdout.startswith(b"Gr??e ? ??")
    assert len(done.stdout) > 20


# Text


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40) | st.text(" <s>/|ｱﬁ\u2581\u0301e\n\x00", max_size=20))
def test_the_text_that_the_normaliser_keeps_comes_back(
    folders: dict[str, Path], layout: str, text: str
) -> None:
    """All of it with byte-level BPE and identity; less doubled spaces and compatibility forms with NFKC. On
    SentencePiece's way to write a space, U+2581, no tokenizer of that kind can tell it from one.
    """
    folder, tokenizer, kept = folders[layout], LOADED(folders[layout]), text
    if (folder / "tokenizer.model").is_file():
        model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        kept = model.normalize(text).removeprefix("\u2581")
    if layout != "one file":
        kept = kept.replace("\u2581", " ")
    assert tokenizer.decode(tokenizer.encode(text)) == kept
