"""Which files hold the weights and which of their tensors count: shards, names, what is refused."""

import json

import pytest
import torch

from llama_mini import load_model
from tests.support.checkpoints import Q, check, complaint, halves, tensors, write, write_shards
from tests.support.fixtures import BASE

# Shards


def test_shards(tmp_path):
    weights = tensors()
    write_shards(tmp_path, *halves(weights))
    check(load_model(tmp_path), weights)


def test_a_shard_that_is_gone(tmp_path):
    first, second = halves(tensors())
    names = write_shards(
        tmp_path, first, dict(list(second.items())[:2]), dict(list(second.items())[2:])
    )
    (tmp_path / names[0]).unlink()
    (tmp_path / names[2]).unlink()
    message = complaint(tmp_path, FileNotFoundError)
    assert f"names files that are not there: {names[0]}, {names[2]}" in message


def test_an_index_that_names_a_tensor_its_file_lacks(tmp_path):
    weights = tensors()
    second, first = halves(weights)
    moved = second.pop(Q)
    names = write_shards(tmp_path, first, second, **{Q: "model-00002-of-00002.safetensors"})
    message = complaint(tmp_path)
    assert f"{names[1]} lacks {Q}, which the index names" in message
    assert "is missing" not in message
    # In the other file than the index says: what is wrong is said of both.
    write_shards(tmp_path, {**first, Q: moved}, second, **{Q: "model-00002-of-00002.safetensors"})
    message = complaint(tmp_path)
    assert f"{names[1]} lacks {Q}, which the index names" in message
    assert f"{names[0]} holds {Q}, which the index does not name there" in message


def test_a_tensor_in_two_shards_is_not_chosen_from(tmp_path):
    second, first = halves(tensors())
    names = write_shards(tmp_path, {**first, Q: torch.zeros(32, 32)}, second)
    message = complaint(tmp_path)
    assert f"{names[0]} holds {Q}, which the index does not name there" in message
    assert "lacks" not in message


def test_a_tensor_that_the_index_leaves_out(tmp_path):
    weights = tensors()
    names = write_shards(tmp_path, *reversed(halves(weights)))
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"][Q]
    path.write_text(json.dumps(index))
    message = complaint(tmp_path)
    assert f"{names[1]} holds {Q}, which the index does not name there" in message
    assert "is missing" not in message


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{}", "has no weight_map"),
        ('{"weight_map": null}', "has no weight_map"),
        ('{"weight_map": []}', "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "names 1, which is not"),
        ('{"weight_map": {}}', "has no weight_map"),
        ("[]", "must hold a JSON object"),
        ("", "cannot be read as JSON"),
        (
            '{"weight_map": {"a": "../model.safetensors"}}',
            "names '../model.safetensors', which is not",
        ),
        ('{"weight_map": {"a": "/etc/passwd"}}', "names '/etc/passwd', which is not"),
        ('{"weight_map": {"a": "a\\\\b"}}', "which is not a safetensors file beside it"),
        ('{"weight_map": {"a": ".."}}', "names '..', which is not"),
        ('{"weight_map": {"a": ""}}', "names '', which is not"),
        ('{"weight_map": {"a": "a\\u0000"}}', "which is not a safetensors file beside it"),
    ],
)
def test_a_damaged_index(tmp_path, index, words):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert words in complaint(tmp_path)


def test_one_file_wins_over_an_index(tmp_path):
    """As in transformers."""
    weights = tensors()
    write_shards(tmp_path, *halves(tensors(vocab_size=65)))
    check(load_model(write(tmp_path, weights)), weights)


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize(
    "name", ["consolidated.safetensors", "consolidated.00.safetensors", "extra.safetensors"]
)
def test_files_that_the_index_does_not_name_are_not_opened(tmp_path, name, one):
    weights = tensors()
    if one:
        write(tmp_path, weights)
    else:
        write_shards(tmp_path, *halves(weights))
    (tmp_path / name).write_bytes(b"not opened")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not opened")
    check(load_model(tmp_path), weights)


# What other loaders would take for weights


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32]
)
def test_quantised_weights_are_refused_by_name(tmp_path, dtype):
    weights = tensors()
    weights[Q] = weights[Q].to(dtype)
    message = complaint(write(tmp_path, weights))
    assert f"model.safetensors holds {Q} as " in message
    assert "quantised weights are not supported, their scales would be lost" in message
    assert "is missing" not in message


@pytest.mark.parametrize(
    "quantisation", [{"quant_method": "gptq", "bits": 4}, {"quant_method": "fp8"}, {}, {"bits": 8}]
)
@pytest.mark.parametrize("key", ["quantization_config", "quantization", "compression_config"])
def test_quantisation_in_the_config_is_refused_by_name(tmp_path, key, quantisation):
    message = complaint(write(tmp_path, tensors(), **{key: quantisation}))
    assert f"{key} is {quantisation}: that would take dequantising" in message


# Tensors that are no weights of this decoder


def test_stored_frequencies_are_ignored(tmp_path):
    weights = tensors()
    old = {
        f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.full((4,), 9.0) for n in range(2)
    }
    check(load_model(write(tmp_path, {**weights, **old})), weights)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.cos_cached",
        "model.layers.1.self_attn.rotary_emb.sin_cached",
        "model.rotary_emb.inv_freq",
        "model.rotary_emb.max_seq_len_cached",
        "model.rotary_emb.original_inv_freq",
        "rotary_emb.inv_freq",
        "rope.freqs",
        "freqs_cis",
        "model.causal_mask",
        "model.layers.0.self_attn.masked_bias",
        "model.embed_tokens.position_ids",
    ],
)
@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "model."])
def test_what_is_computed_anew_is_ignored(tmp_path, name, prefix):
    """Whatever its dtype, and whatever stands in front of all names."""
    weights = tensors()
    more = {**weights, name: torch.ones(4, 4, dtype=torch.int64)}
    check(load_model(write(tmp_path, {prefix + key: w for key, w in more.items()})), weights)


def without_model(name: str) -> str:
    return name.removeprefix("model.")


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    "rename",
    [
        without_model,
        lambda name: f"model.{name}",
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: f"base_model.model.{name}",
        lambda name: f"any.{name}",
        lambda name: f"module.{without_model(name)}",
        lambda name: f"language_model.{without_model(name)}",
        lambda name: name.replace("self_attn.", "_fsdp_wrapped_module.self_attn."),
        lambda name: name.replace("layers.1.", "layers.1._orig_mod."),
        lambda name: name.replace("mlp.", "_checkpoint_wrapped_module.mlp."),
    ],
)
def test_names_that_wrappers_change(tmp_path, rename, sharded):
    weights = tensors()
    if sharded:
        shards = [{rename(name): w for name, w in shard.items()} for shard in halves(weights)]
        write_shards(tmp_path, *shards)
    else:
        write(tmp_path, {rename(name): weight for name, weight in weights.items()})
    check(load_model(tmp_path), weights)


def test_a_tied_model_that_was_saved_without_its_head(tmp_path):
    weights = tensors(tie_word_embeddings=True)
    bare = {without_model(name): weight for name, weight in weights.items()}
    check(load_model(write(tmp_path, bare, tie_word_embeddings=True)), weights)


def test_two_names_of_one_tensor(tmp_path):
    message = complaint(write(tmp_path, {**tensors(), f"module.{Q}": torch.ones(32, 32)}))
    assert f"module.{Q}" in message
    assert "same tensor" in message


def test_errors_name_the_tensors_as_the_file_does(tmp_path):
    weights = {f"_orig_mod.{name}": weight for name, weight in tensors().items()}
    weights[f"_orig_mod.{Q}"] = torch.ones(3, 32)
    message = complaint(write(tmp_path, weights))
    assert f"model.safetensors holds _orig_mod.{Q} (3, 32), and the config says (32, 32)" in message
    assert ";" not in message


def test_stored_frequencies_in_shards_are_ignored(tmp_path):
    """Whether the index and the file agree on them or not."""
    weights = tensors()
    first, second = halves(weights)
    name = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    first[name.format(0)] = torch.ones(4)
    write_shards(tmp_path, first, second, **{name.format(1): "model-00001-of-00002.safetensors"})
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"][name.format(0)]
    path.write_text(json.dumps(index))
    check(load_model(tmp_path), weights)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.post_feedforward_layernorm.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.self_attn.q_proj.weight_scale",
        "model.layers.2.self_attn.q_proj.weight",
        "model.layers.00.self_attn.q_proj.weight",
        "model.layers.N.self_attn.q_proj.weight",
        "model.layers.self_attn.q_proj.weight",
        "model.norm.0.weight",
        "model.norm",
        "score.weight",
        "weight",
        "blocks.x.weight",
        "",
    ],
)
def test_any_other_tensor_is_an_error(tmp_path, name):
    message = complaint(write(tmp_path, {**tensors(), name: torch.ones(3, 2)}))
    assert f"model.safetensors holds {name} (3, 2), which " in message


@pytest.mark.parametrize(
    "name", ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "input_layernorm"]
)
def test_a_bias_without_a_flag_is_refused_by_name(tmp_path, name):
    weights = {**tensors(), f"model.layers.1.{name}.bias": torch.zeros(32)}
    message = complaint(write(tmp_path, weights))
    assert (
        f"model.safetensors holds model.layers.1.{name}.bias: biases are not supported" in message
    )


# Files that are no checkpoint


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cannot be read as safetensors"),
        (b"\x00" * 4, "cannot be read as safetensors"),
        (b"\xff" * 100, "cannot be read as safetensors"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
            "it is a Git LFS pointer",
        ),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00{}", "holds no tensors"),
    ],
    ids=["empty", "short", "noise", "git lfs", "no tensors"],
)
def test_a_file_that_holds_no_weights(tmp_path, data, words):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "model.safetensors").write_bytes(data)
    message = complaint(tmp_path)
    assert words in message
    assert "model.safetensors" in message


def test_a_file_that_is_cut_short(tmp_path):
    write(tmp_path, tensors())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    assert "model.safetensors cannot be read as safetensors" in complaint(tmp_path)


@pytest.mark.parametrize("shift", range(4))
def test_data_that_is_not_aligned(tmp_path, shift):
    """Old files have headers of any length."""
    weights = tensors()
    write(tmp_path, weights)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].rstrip()
    text += b" " * (-len(text) % 4 + shift)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    model = load_model(tmp_path)
    check(model, weights)
    assert {p.data_ptr() % p.element_size() for p in model.parameters()} == {0}


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt"]
)
def test_pickles_are_refused_with_the_reason_and_a_way_out(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / name).write_bytes(b"not opened")
    (tmp_path / "optimizer.pt").write_bytes(b"not opened")
    message = complaint(tmp_path, FileNotFoundError)
    assert f"holds its weights as {name}: loading a pickle can run code" in message
    assert "transformers' from_pretrained and save_pretrained convert it" in message


@pytest.mark.parametrize(
    "there", [[], ["training_args.bin", "optimizer.pt"], ["consolidated.safetensors"]]
)
def test_no_weights_at_all(tmp_path, there):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    for name in there:
        (tmp_path / name).write_bytes(b"not opened")
    message = complaint(tmp_path, FileNotFoundError)
    assert "holds no weights: neither model.safetensors nor model.safetensors.index.json" in message
    assert ("consolidated.safetensors" in message) == ("consolidated.safetensors" in there)


def test_an_adapter_is_not_a_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"not opened")
    assert "no config.json (Hugging Face)" in complaint(tmp_path, FileNotFoundError)
