"""Every family that the README says works: transformers' own class writes it, and we read it bit for bit.

Each row of HUB (tests/support/hub_configs.py) is a config.json as the hub has it, with its odd keys, only
with smaller sizes; the ratios of the sizes are kept. It stands for the style of transformers 4;
save_pretrained writes that of 5.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llama_mini import generate, load_model, load_tokenizer
from llama_mini.checkpoint import read_config
from tests.support.fixtures import draw_tokens, require, strengthen
from tests.support.hub_configs import HUB, VOCAB
from tests.support.tokenizers import train_sentencepiece

transformers = require("transformers")

DTYPES = [torch.float32, torch.bfloat16]


class Written:
    """A folder per family, written once by transformers and kept for all tests of this file."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(self, family: str) -> Path:
        folder = self.root / str(list(HUB).index(family))
        if not folder.is_dir():
            config = transformers.AutoConfig.for_model(**HUB[family])
            model = transformers.AutoModelForCausalLM.from_config(config)
            strengthen(model, seed=list(HUB).index(family))
            model.to(getattr(torch, HUB[family]["torch_dtype"])).save_pretrained(folder)
        return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Written:
    return Written(tmp_path_factory.mktemp("families"))


TOKENS = draw_tokens((2, 32), seed=0, vocab_size=VOCAB)


@functools.cache
@torch.inference_mode()
def reference_logits(folder: Path, dtype: torch.dtype) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model(TOKENS).logits


@torch.inference_mode()
def check(folder: Path, reference_folder: Path, dtype: torch.dtype) -> None:
    """Fail unless our logits of `folder` are those of transformers of `reference_folder`, bit for bit."""
    logits = load_model(folder, dtype=dtype)(TOKENS)
    assert logits.dtype is dtype
    assert torch.equal(logits, reference_logits(reference_folder, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", HUB)
def test_family_as_transformers_5_writes_it(written, family, dtype):
    config = json.loads((written(family) / "config.json").read_text())
    assert "rope_parameters" in config
    assert "rope_theta" not in config
    check(written(family), written(family), dtype)


@pytest.mark.parametrize("family", HUB)
def test_family_as_the_hub_has_it(written, family, tmp_path):
    """The config of transformers 4 and its odd keys, in the checkpoint's own dtype."""
    weights = written(family) / "model.safetensors"
    (tmp_path / "model.safetensors").symlink_to(weights)
    (tmp_path / "config.json").write_text(json.dumps(HUB[family]))
    config = read_config(tmp_path)
    assert config.rope == read_config(written(family)).rope
    assert config.tie_word_embeddings == HUB[family].get("tie_word_embeddings", False)
    for dtype in DTYPES:
        check(tmp_path, written(family), dtype)
    model = load_model(tmp_path)
    assert model.embed.weight.dtype is getattr(torch, HUB[family]["torch_dtype"])
    assert (model.lm_head.weight is model.embed.weight) == config.tie_word_embeddings


@pytest.mark.parametrize("family", ["Llama 3", "Qwen3, tied"])
def test_shards_as_transformers_cuts_them(written, family, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(written(family))
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    check(tmp_path, written(family), torch.float32)


def test_rows_can_tell():
    """Weights under which the rows differ from what a loader takes that ignores a key."""
    scaled = [family for family, values in HUB.items() if values.get("rope_scaling")]
    assert len(scaled) == 3
    assert {values["rms_norm_eps"] for values in HUB.values()} == {1e-5, 1e-6}
    assert len({values.get("rope_theta", 10000.0) for values in HUB.values()}) == 6


# Mistral's window


@torch.inference_mode()
def test_beyond_a_window(written):
    """A position beyond the window sees as many keys as it is wide, its own among them."""
    folder = written("Mistral, window")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    unbounded = transformers.AutoModelForCausalLM.from_pretrained(folder, sliding_window=None)
    model = load_model(folder)
    tokens = draw_tokens((1, 70), seed=0, vocab_size=VOCAB)
    assert not torch.equal(reference(tokens).logits, unbounded(tokens).logits)
    assert torch.equal(model(tokens), reference(tokens).logits)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model, prompt = load_model(folder, dtype=torch.float32), tokens[0, :30].tolist()
    ours = generate(model, [prompt, prompt[:7]], max_new_tokens=20, stop_ids=())[0]
    theirs = reference.generate(
        tokens[:, :30],
        attention_mask=torch.ones(1, 30),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    assert ours == theirs[0, 30:].tolist()


# Meta's own layout

META_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
}
LLAMA3_META = {
    "ffn_dim_multiplier": 1.3,
    "multiple_of": 32,
    "n_kv_heads": 2,
    "rope_theta": 500000.0,
}
# Rows of HUB, and the params.json of the same model.
META: dict[str, dict[str, Any]] = {
    "Llama 2": {
        "dim": 64,
        "multiple_of": 4,
        "n_heads": 4,
        "n_layers": 2,
        "norm_eps": 1e-05,
        "vocab_size": -1,
    },
    "Llama 3": {
        "dim": 64,
        "n_heads": 8,
        "n_layers": 2,
        "norm_eps": 1e-05,
        "vocab_size": VOCAB,
        **LLAMA3_META,
    },
    "Llama 3.1": {
        "dim": 128,
        "n_heads": 8,
        "n_layers": 2,
        "norm_eps": 1e-05,
        "vocab_size": VOCAB,
        **LLAMA3_META,
        "use_scaled_rope": True,
        "rope_scale_factor": 8,
    },
}


def write_meta(source: Path, target: Path, params: dict[str, Any]) -> None:
    """Write Meta's layout of a Hugging Face folder, row by row."""
    heads = {"wq": params["n_heads"], "wk": params.get("n_kv_heads", params["n_heads"])}
    weights = {"rope.freqs": torch.ones(4)}
    for name, weight in load_file(source / "model.safetensors").items():
        for theirs, meta in META_NAMES.items():
            name = name.replace(theirs, meta)
        part = name.split(".")[-2]
        if part in heads:
            rows = weight.shape[0] // heads[part]
            # The first half of a head has the first numbers of its pairs, the second half the second.
            order = [
                head * rows + pair + half * rows // 2
                for head in range(heads[part])
                for pair in range(rows // 2)
                for half in (0, 1)
            ]
            weight = weight[order]
        weights[name] = weight
    save_file(weights, target / "consolidated.00.safetensors")
    (target / "params.json").write_text(json.dumps(params))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", META)
def test_metas_layout_is_the_same_model(written, family, dtype, tmp_path):
    write_meta(written(family), tmp_path, META[family])
    check(tmp_path, written(family), dtype)
    ours, theirs = load_model(tmp_path), load_model(written(family))
    assert ours.embed.weight.dtype is theirs.embed.weight.dtype
    weights = theirs.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in ours.state_dict().items())


@pytest.mark.parametrize("family", ["Mistral, no window", "Mistral, window"])
def test_mistrals_own_layout_is_the_same_model(written, family, tmp_path):
    window = 32 if family == "Mistral, window" else None
    params = {
        "dim": 64,
        "n_layers": 2,
        "head_dim": 8,
        "hidden_dim": 224,
        "n_heads": 8,
        "n_kv_heads": 2,
        "norm_eps": 1e-05,
        "vocab_size": VOCAB,
    }  # without a rope_theta: its own code has 1e6, or 1e4 with a window
    write_meta(written(family), tmp_path, params | ({"sliding_window": window} if window else {}))
    (tmp_path / "consolidated.00.safetensors").rename(tmp_path / "consolidated.safetensors")
    check(tmp_path, written(family), torch.float32)
    assert read_config(tmp_path).sliding_window == window
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"tekken\.json.*take tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_mistrals_experts_are_refused_by_name(tmp_path):
    params = {**META["Llama 3"], "hidden_dim": 224, "moe": {"num_experts": 8}}
    (tmp_path / "params.json").write_text(json.dumps(params))
    with pytest.raises(ValueError, match=r"params\.json: moe is "):
        read_config(tmp_path)


def test_metas_layout_has_rows_in_another_order(written, tmp_path):
    """Otherwise the test above could not fail."""
    write_meta(written("Llama 3"), tmp_path, META["Llama 3"])
    meta = load_file(tmp_path / "consolidated.00.safetensors")
    ours = load_model(written("Llama 3")).state_dict()
    for part, name in {"wq": "q_proj", "wk": "k_proj"}.items():
        weight = ours[f"blocks.0.attention.{name}.weight"]
        assert not torch.equal(meta[f"layers.0.attention.{part}.weight"], weight)


def test_metas_folder_from_prompt_to_text(written, tmp_path):
    params = {**META["Llama 2"]}
    write_meta(written("Llama 2"), tmp_path, params)
    train_sentencepiece(tmp_path / "tokenizer.model")
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("The quick")
    assert ids[0] == tokenizer.bos_id == 1
    new = generate(load_model(tmp_path), [ids], max_new_tokens=8, vocab_size=tokenizer.vocab_size)
    assert new == generate(
        load_model(written("Llama 2")), [ids], max_new_tokens=8, vocab_size=tokenizer.vocab_size
    )
    assert isinstance(tokenizer.decode(new[0]), str)


def test_open_vocabulary_is_counted(written, tmp_path):
    write_meta(written("Llama 2"), tmp_path, META["Llama 2"])
    assert read_config(tmp_path).vocab_size == VOCAB
    (tmp_path / "params.json").write_text(json.dumps({**META["Llama 2"], "vocab_size": 300}))
    with pytest.raises(ValueError, match=r"tok_embeddings\.weight \(320, 64\).*\(300, 64\)"):
        load_model(tmp_path)


def test_scaled_rope_without_a_factor_says_what_to_write(written, tmp_path):
    params = {key: value for key, value in META["Llama 3.1"].items() if key != "rope_scale_factor"}
    write_meta(written("Llama 3.1"), tmp_path, params)
    with pytest.raises(
        ValueError, match=r'"rope_scale_factor": 8 for Llama 3\.1 .*32 for Llama 3\.2'
    ):
        load_model(tmp_path)


@pytest.mark.parametrize("vocab_size", [-1, VOCAB])
def test_meta_folder_cut_for_several_devices(written, tmp_path, vocab_size):
    write_meta(written("Llama 2"), tmp_path, {**META["Llama 2"], "vocab_size": vocab_size})
    (tmp_path / "consolidated.01.safetensors").write_bytes(b"not opened")
    with pytest.raises(ValueError, match=r"cut for several devices .*join its consolidated files"):
        load_model(tmp_path)


@pytest.mark.parametrize("vocab_size", [-1, VOCAB])
def test_meta_folder_as_downloaded_with_a_pickle(tmp_path, vocab_size):
    (tmp_path / "params.json").write_text(json.dumps({**META["Llama 2"], "vocab_size": vocab_size}))
    (tmp_path / "consolidated.00.pth").write_bytes(b"not opened")
    with pytest.raises(FileNotFoundError) as error:
        load_model(tmp_path)
    message = str(error.value)
    assert "consolidated.00.pth: loading a pickle can run code" in message
    assert "torch.load('consolidated.00.pth', weights_only=True)" in message
    assert "'consolidated.00.safetensors'" in message
    assert "\n" not in message


def test_the_way_out_of_a_pickle_works(written, tmp_path, monkeypatch):
    """The call that the message shows, made."""
    write_meta(written("Llama 2"), tmp_path, META["Llama 2"])
    weights = load_file(tmp_path / "consolidated.00.safetensors")
    (tmp_path / "consolidated.00.safetensors").unlink()
    torch.save(weights, tmp_path / "consolidated.00.pth")
    with pytest.raises(FileNotFoundError) as error:
        load_model(tmp_path)
    call = re.search(r"safetensors\.torch\.save_file\(.*\)(?= )", str(error.value))
    monkeypatch.chdir(tmp_path)
    exec(call[0], {"safetensors": safetensors, "torch": torch})
    check(tmp_path, written("Llama 2"), torch.float32)
