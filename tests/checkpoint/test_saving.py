"""save_model: what it writes loads here and in transformers with equal logits, or nothing is written."""

import dataclasses
import json
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors import safe_open

from llama_mini import Llama, LlamaConfig, RopeConfig, load_model, load_tokenizer, save_model
from llama_mini.checkpoint import files, parse_config, saving
from llama_mini.model import Block
from tests.support.fixtures import SHIPPED, draw_tokens, require, strengthen
from tests.support.fuzzing import write_folder
from tests.support.models import CONFIG
from tests.support.placements import VARIANTS, reference_logits, write

LLAMA3 = RopeConfig(500.0, "llama3", 8.0, 0.5, 2.0, 16)
CONFIGS = {
    "llama": CONFIG,
    "tied, scaled": dataclasses.replace(CONFIG, tie_word_embeddings=True, rope=LLAMA3),
    "linear scaling": dataclasses.replace(CONFIG, rope=RopeConfig(1000.0, "linear", 4.0)),
    "qwen3": dataclasses.replace(CONFIG, qk_norm=True, eos_token_id=(2, 7)),
}
FEW = ("gpt2", "gpt_neox", "gemma2", "olmo2", "phi3")  # the others with --slow
TOKENS = torch.arange(24)[None] % 61


def made(config: LlamaConfig) -> Llama:
    config = dataclasses.replace(config, vocab_size=320)
    model = Llama(config).eval()
    strengthen(model, seed=0)
    return model


def their_logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    transformers = require("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    assert theirs.dtype == dtype
    with torch.no_grad():
        return theirs(TOKENS).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_made_here(name, dtype, checkpoint, tmp_path):
    model = made(CONFIGS[name]).to(dtype)
    save_model(model, tmp_path / "saved", tokenizer_from=checkpoint)
    again = load_model(tmp_path / "saved")
    assert saving.same(again.config, model.config)
    assert {p.dtype for p in again.parameters()} == {dtype}
    assert not list(tmp_path.glob(".*"))
    with torch.no_grad():
        logits = model(TOKENS)
    assert torch.equal(again(TOKENS), logits)
    if dtype != torch.float16:
        assert torch.equal(their_logits(tmp_path / "saved", dtype), logits)
    ends = model.config.eos_token_id or (2,)
    assert again.config.eos_token_id == ends


@pytest.mark.parametrize(("ends", "written"), [((), 2), ((7,), 7), ((2, 7), [2, 7])])
def test_what_ends_a_text_is_written_as_a_number_or_a_list(ends, written, checkpoint, tmp_path):
    """Where the config names none it is the tokenizer's."""
    model = made(dataclasses.replace(CONFIG, eos_token_id=ends))
    save_model(model, tmp_path / "saved", checkpoint)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((tmp_path / "saved" / name).read_text())
        assert (values["bos_token_id"], values["eos_token_id"]) == (1, written)


def test_the_shipped_model_fine_tuned(tmp_path):
    transformers = require("transformers")
    model = load_model(SHIPPED).requires_grad_(True)
    before = (SHIPPED / "model.safetensors").read_bytes()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.25)
    save_model(model, tmp_path / "mine", SHIPPED)
    assert (SHIPPED / "model.safetensors").read_bytes() == before
    with torch.no_grad():
        logits = model(TOKENS)
    assert torch.equal(load_model(tmp_path / "mine")(TOKENS), logits)
    assert torch.equal(their_logits(tmp_path / "mine", torch.bfloat16), logits)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "mine")
    text = "Once upon a time"
    assert theirs(text)["input_ids"] == load_tokenizer(tmp_path / "mine").encode(text)
    same = {path.name for path in SHIPPED.iterdir()} - {"README.md", "model.safetensors"}
    for name in same - {"config.json"}:
        assert (tmp_path / "mine" / name).read_bytes() == (SHIPPED / name).read_bytes()
    assert {path.name for path in (tmp_path / "mine").iterdir()} == same | {"model.safetensors"}


def test_another_dtype_is_said_in_the_copied_config(tmp_path):
    save_model(load_model(SHIPPED, dtype=torch.float32), tmp_path / "wide", SHIPPED)
    values, own = (
        json.loads((f / "config.json").read_text()) for f in (tmp_path / "wide", SHIPPED)
    )
    assert values == own | {"torch_dtype": "float32"}
    assert {p.dtype for p in load_model(tmp_path / "wide").parameters()} == {torch.float32}


def test_tokenizer_json_template_and_generation_settings_come_along(checkpoint, tmp_path):
    source = tmp_path / "source"
    save_model(made(CONFIG), source, checkpoint)
    for name in ("tokenizer.model", "tokenizer_config.json"):
        (source / name).unlink(missing_ok=True)
    (source / "tokenizer.json").write_bytes((SHIPPED / "tokenizer.json").read_bytes())
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 9], "temperature": 0.7}')
    first = "additional_chat_templates/default.jinja"  # which is read before chat_template.jinja
    (source / first).parent.mkdir()
    (source / first).write_text("{{ messages[0].content }}!")
    big = made(dataclasses.replace(CONFIG)).config
    model = Llama(dataclasses.replace(big, vocab_size=4096, eos_token_id=(2, 9)))
    save_model(model, tmp_path / "saved", source)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", first):
        assert (tmp_path / "saved" / name).read_bytes() == (source / name).read_bytes()
    assert not (tmp_path / "saved" / "tokenizer.model").exists()
    assert load_model(tmp_path / "saved").config.eos_token_id == (2, 9)
    assert load_tokenizer(tmp_path / "saved").vocab_size == 4096


@pytest.mark.parametrize("shard_bytes", [20_000, 40_000])
def test_shards(shard_bytes, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "SHARD_BYTES", shard_bytes)
    model = made(CONFIG)
    save_model(model, tmp_path / "saved", checkpoint)
    shards = sorted((tmp_path / "saved").glob("model-*.safetensors"))
    assert len(shards) > 2
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            sizes = [file.get_tensor(name).nbytes for name in file.keys()]  # noqa: SIM118
        assert len(sizes) == 1 or sum(sizes) <= shard_bytes
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    with torch.no_grad():
        logits = model(TOKENS)
    assert torch.equal(load_model(tmp_path / "saved")(TOKENS), logits)
    assert torch.equal(their_logits(tmp_path / "saved", torch.float32), logits)


def test_plan_keeps_the_order_and_both_limits(monkeypatch):
    monkeypatch.setattr(saving, "SHARD_TENSORS", 3)
    sizes = [10, 10, 50, 10, 30, 10, 1, 1, 1, 1]
    tensors = [(str(n), torch.empty(size, dtype=torch.int8)) for n, size in enumerate(sizes)]
    shards = [[tensor.nbytes for tensor in shard.values()] for shard in saving.plan(tensors, 40)]
    assert shards == [[10, 10], [50], [10, 30], [10, 1, 1], [1, 1]]
    assert saving.SHARD_BYTES == 5 * 10**9


class Other(Block):
    pass


def refused(case: str, checkpoint: Path, tmp_path: Path) -> tuple[Llama, Path, str]:
    target = tmp_path / "saved"
    match case:
        case "a file in the way":
            target.write_text("mine")
            return made(CONFIG), target, str(target)
        case "a folder that holds something":
            target.mkdir()
            (target / "notes.txt").write_text("mine")
            return made(CONFIG), target, str(target)
        case "two dtypes":
            model = made(CONFIG)
            model.final_norm.bfloat16()
            return model, target, "bfloat16, float32"
        case "no weights":
            with torch.device("meta"):
                return Llama(dataclasses.replace(CONFIG, vocab_size=320)), target, "meta"
        case "fewer rows than ids":
            return Llama(CONFIG), target, "300 ids, and the model 61"
        case "a window":
            config = dataclasses.replace(CONFIG, vocab_size=320, sliding_window=64)
            return Llama(config), target, "sliding_window=64"
        case "another block":
            return Llama(dataclasses.replace(CONFIG, vocab_size=320), block=Other), target, "Llama"
        case "another norm":
            config = dataclasses.replace(CONFIG, vocab_size=320)
            return Llama(config, norm=torch.nn.LayerNorm), target, "Llama"
        case "quantised":
            model = torch.ao.quantization.quantize_dynamic(made(CONFIG), {torch.nn.Linear})
            return model, target, "blocks.0.attention.q_proj is a torch.ao.nn.quantized.dynamic"
        case "a parameter too many":
            model = made(CONFIG)
            model.blocks[0].ffn.up_proj.bias = torch.nn.Parameter(
                torch.zeros(CONFIG.intermediate_size)
            )
            return model, target, "Llama"
    raise AssertionError(case)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "case",
    [
        "a file in the way",
        "a folder that holds something",
        "two dtypes",
        "no weights",
        "fewer rows than ids",
        "a window",
        "another block",
        "another norm",
        "quantised",
        "a parameter too many",
    ],
)
def test_refused_before_anything_is_written(case, checkpoint, tmp_path):
    model, target, says = refused(case, checkpoint, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"model|folder|parameters|config") as error:
        save_model(model, target, checkpoint)
    assert says in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_within_a_file(checkpoint, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(
        OSError, match=f"{tmp_path / 'file' / 'saved'} cannot be written: Not a dir"
    ):
        save_model(made(CONFIG), tmp_path / "file" / "saved", checkpoint)


def test_a_source_without_a_tokenizer(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty"):
        save_model(made(CONFIG), tmp_path / "saved", tmp_path / "empty")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


@pytest.mark.parametrize("last", [1, 3, 5])
def test_whole_or_not_at_all(last, checkpoint, tmp_path, monkeypatch):
    """The disk is full, or Ctrl-C comes, at any file."""
    monkeypatch.setattr(saving, "SHARD_BYTES", 40_000)
    replace, calls = files.replace, []

    def full(path, write):
        calls.append(path)
        if len(calls) == last:
            raise OSError(28, "No space left on device", str(path))
        replace(path, write)

    monkeypatch.setattr(saving, "replace", full)
    monkeypatch.setattr(files, "replace", full)
    (tmp_path / "saved").mkdir()  # empty: it may be there
    with pytest.raises(OSError, match="No space left") as error:
        save_model(made(CONFIG), tmp_path / "saved", checkpoint)
    assert str(tmp_path / "saved") in str(error.value)
    assert ".tmp" not in str(error.value)
    assert len(calls) == last
    assert [path.name for path in tmp_path.rglob("*")] == ["saved"]
    monkeypatch.undo()
    save_model(made(CONFIG), tmp_path / "saved", checkpoint)
    assert load_model(tmp_path / "saved").config.vocab_size == 320


def test_ctrl_c_while_it_writes_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    def stop(path, write):
        raise KeyboardInterrupt

    monkeypatch.setattr(saving, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        save_model(made(CONFIG), tmp_path / "new" / "folder" / "saved", checkpoint)
    assert not list(tmp_path.iterdir())


def test_the_config_is_written_last(checkpoint, tmp_path, monkeypatch):
    written, replace = [], files.replace

    def note(path, write):
        written.append(path.name)
        replace(path, write)

    monkeypatch.setattr(saving, "replace", note)
    monkeypatch.setattr(files, "replace", note)
    save_model(made(CONFIG), tmp_path / "saved", checkpoint)
    assert written[-1] == "config.json"
    assert "model.safetensors" in written


def test_a_config_made_here_says_all(checkpoint):
    for config in CONFIGS.values():
        values = saving.config_values(config, "float16", 1, 2)
        assert saving.same(parse_config(values), config)
        assert parse_config(values).dtype == "float16"
    assert not saving.same(CONFIG, dataclasses.replace(CONFIG, rms_norm_eps=1e-6))


def test_metas_layout_becomes_hugging_faces(tmp_path):
    (tmp_path / "meta").mkdir()
    source = write_folder(tmp_path / "meta", "meta")
    model = load_model(source)
    save_model(model, tmp_path / "saved", source)
    with torch.no_grad():
        logits = model(TOKENS)
    assert torch.equal(load_model(tmp_path / "saved")(TOKENS), logits)
    assert torch.equal(their_logits(tmp_path / "saved", torch.float32), logits)
    text = "Once upon a time"
    ids = load_tokenizer(source).encode(text)
    assert load_tokenizer(tmp_path / "saved").encode(text) == ids
    assert not (tmp_path / "saved" / "params.json").exists()


FAMILY_CASES = [
    pytest.param(name, n, id=f"{name}-{n}", marks=[pytest.mark.slow] * (n > 0 or name not in FEW))
    for name, variants in VARIANTS.items()
    for n in range(len(variants))
]


@pytest.mark.parametrize(("name", "variant"), FAMILY_CASES)
def test_every_family(name, variant, tmp_path):
    """Fused, transposed, one by one: the file's own layout, and logits that are equal, here and there."""
    source = tmp_path / "source"
    write(name, VARIANTS[name][variant], source, seed=variant)
    letters = {chr(33 + n): n for n in range(90)}
    small = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    small.decoder = tokenizers.decoders.Fuse()
    small.save(str(source / "tokenizer.json"))
    tokens = draw_tokens((2, 24), 0, 90)
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(source, dtype=dtype)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.125)  # as if it had been trained
            logits = model(tokens)
        target = tmp_path / str(dtype)
        save_model(model, target, source)
        again = load_model(target)
        assert again.config.dtype == str(dtype).removeprefix("torch.")
        with torch.no_grad():
            assert torch.equal(again(tokens), logits)
        assert torch.equal(reference_logits(target, tokens, dtype), logits)
        assert names_and_shapes(target) == names_and_shapes(source)


def names_and_shapes(folder: Path) -> dict[str, list[int]]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
