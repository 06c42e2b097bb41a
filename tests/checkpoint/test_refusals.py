"""What this decoder does not do is refused by name, in one line, before a weight is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from llama_mini import LlamaConfig, load_model
from llama_mini.checkpoint import open_checkpoint, parse_config, read_config
from llama_mini.checkpoint.configs import read_keys
from llama_mini.checkpoint.hub import SMALL_FILES
from llama_mini.checkpoint.refusals import ALWAYS, DECLARED, ONLY, OTHER_FAMILIES
from llama_mini.placements import FAMILIES
from llama_mini.rope import inverse_frequencies
from tests.support.fixtures import BASE_V4, require

LLAMA = {**BASE_V4, "hidden_act": "silu"}


def refusal(folder: Path, values: dict[str, Any]) -> str:
    """The error for a folder of this config, the same with no weights and with some that would crash."""
    (folder / "config.json").write_text(json.dumps(values))
    messages = []
    for data in (None, b"not opened"):
        if data is not None:
            (folder / "model.safetensors").write_bytes(data)
        with pytest.raises(ValueError) as error:  # noqa: PT011  # each test reads the message
            load_model(folder)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"{folder / 'config.json'}: ")
    assert "\n" not in messages[0]
    return messages[0]


# Families: a config.json as the hub has it, and what the message says of key, value and need.

FAMILY: dict[str, tuple[dict[str, Any], list[str]]] = {
    "DeepSeek-V2": (
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
            "model_type": "deepseek_v2",
            "kv_lora_rank": 512,
            "n_routed_experts": 64,
            "q_lora_rank": None,
        },
        ["model_type is 'deepseek_v2'", "multi-head latent attention and a mixture of experts"],
    ),
    "Mixtral": (
        {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
        ["model_type is 'mixtral'", "a mixture of experts"],
    ),
    "Qwen3 with experts": (
        {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 128},
        ["model_type is 'qwen3_moe'", "a mixture of experts"],
    ),
    "StableLM": (
        {
            "architectures": ["StableLmForCausalLM"],
            "model_type": "stablelm",
            "partial_rotary_factor": 0.25,
        },
        ["model_type is 'stablelm'", "rotating only a part of each head"],
    ),
    "Llama 4": (
        {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"},
        ["model_type is 'llama4'", "a mixture of experts, and blocks without rotary positions"],
    ),
    "Yi, first files": (
        {"architectures": ["YiForCausalLM"], "model_type": "Yi", "auto_map": {}},
        ["model_type is 'Yi'", "the later files of Yi, of model_type llama, work"],
    ),
    "one that nobody knows": (
        {"architectures": ["NovelForCausalLM"], "model_type": "novel"},
        ["model_type is 'novel'", "not known here", "supported: llama, mistral, qwen3"],
    ),
    "a class without a model_type": (
        {"architectures": ["StableLmForCausalLM"], "model_type": None},
        ["architectures is ['StableLmForCausalLM']", "supported: LlamaForCausalLM"],
    ),
    "a Llama that does something else": (
        {"architectures": ["LlamaForSequenceClassification"]},
        ["architectures is ['LlamaForSequenceClassification']", "only LlamaForCausalLM"],
    ),
}


@pytest.mark.parametrize("family", FAMILY)
def test_family_is_refused_by_name(tmp_path, family):
    values, words = FAMILY[family]
    message = refusal(tmp_path, {**LLAMA, **values})
    for word in words:
        assert word in message
    assert "supported" in message


def test_every_other_family_of_transformers_is_refused():
    """By model_type, and by the class where there is none."""
    transformers = require("transformers")
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert len(names) > 100
    for name, model_class in names.items():
        if name not in FAMILIES:
            values = {**LLAMA, "model_type": name, "architectures": [model_class]}
            with pytest.raises(
                ValueError, match=r"model_type is '.*supported: llama, mistral, qwen3, "
            ):
                parse_config(values)
        if model_class not in {family.architecture for family in FAMILIES.values()}:
            values = {**LLAMA, "model_type": None, "architectures": [model_class]}
            with pytest.raises(ValueError, match=r"architectures is \['.*'\]; supported: LlamaFor"):
                parse_config(values)


# Keys


# What a real config has there, of another kind of model than this.
WRONG = {
    "add_cross_attention": True,
    "attention_bias": True,
    "attention_multiplier": 0.015625,
    "attention_out_bias": True,
    "attn_logit_softcapping": 50.0,
    "bias": True,
    "clip_qkv": 8.0,
    "compression_config": {"format": "pack-quantized"},
    "cross_attention_hidden_size": 64,
    "embedding_multiplier": 12.0,
    "final_logit_softcapping": 30.0,
    "hidden_act": "gelu",
    "hidden_activation": "gelu_pytorch_tanh",
    "is_causal": False,
    "is_encoder_decoder": True,
    "kv_lora_rank": 512,
    "logit_scale": 0.0625,
    "logits_scaling": 8.0,
    "mlp_bias": True,
    "n_routed_experts": 64,
    "num_experts": 8,
    "num_local_experts": 8,
    "parallel_attn": True,
    "partial_rotary_factor": 0.25,
    "per_layer_config": {"0": {"num_attention_heads": 2}},
    "pruned_heads": {"0": [1]},
    "q_lora_rank": 1536,
    "qk_layernorm": True,
    "qkv_bias": True,
    "quantization": {"group_size": 64, "bits": 4},
    "quantization_config": {"quant_method": "gptq", "bits": 4},
    "query_pre_attn_scalar": 256,
    "residual_multiplier": 0.22,
    "rope_interleaved": True,
    "slow_but_exact": True,
    "use_bidirectional_attention": True,
    "rotary_pct": 0.25,
    "use_bias": True,
    "use_mrope": True,
    "use_parallel_residual": True,
    "use_qk_norm": True,
}


READ = sorted(ALWAYS | {"hidden_act", "attention_bias", "mlp_bias"})


@pytest.mark.parametrize("key", READ)
def test_a_key_that_asks_for_something_else_is_refused_by_name(tmp_path, key):
    message = refusal(tmp_path, {**LLAMA, key: WRONG[key]})
    only, needs = ONLY[key]
    assert f"{key} is {WRONG[key]!r}: that would take {needs}, which is not supported" in message
    # The value that is built in is taken, and so is null.
    plain = parse_config(LLAMA)
    assert parse_config({**LLAMA, key: only}) == plain
    assert parse_config({**LLAMA, key: None}) == plain


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("key", ["hidden_act", "attention_bias", "mlp_bias"])
def test_what_a_class_of_transformers_reads_is_what_is_refused(key, family):
    """Refused, exactly where the other value changes the model that transformers makes."""
    transformers = require("transformers")
    values = {**LLAMA, "model_type": family, "architectures": None}
    theirs = [
        str(
            transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.for_model(**changed)
            )
        )
        for changed in (values, {**values, key: WRONG[key]})
    ]
    if theirs[0] == theirs[1]:
        assert parse_config({**values, key: WRONG[key]}) == parse_config(values)
    else:
        with pytest.raises(ValueError, match=f"{key} is "):
            parse_config({**values, key: WRONG[key]})


def test_swish_is_silu():
    assert parse_config({**LLAMA, "hidden_act": "swish"}) == parse_config(LLAMA)


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
@pytest.mark.parametrize("value", [True, "false", 1, [], {}])
def test_flags_of_biases(tmp_path, key, value):
    assert f"{key} is {value!r}" in refusal(tmp_path, {**LLAMA, key: value})


def read_with_notes(
    folder: Path, values: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> tuple[LlamaConfig, list[str]]:
    (folder / "config.json").write_text(json.dumps(values))
    caplog.clear()
    config = read_config(folder)
    return config, [record.getMessage() for record in caplog.records]


UNREAD: dict[str, Any] = {
    "_model_name_or_path": "x",
    "use_flash_attention_2": True,
    "custom_pipelines": {"text": 1},
    "neftune_noise_alpha": 5.0,
    "qk_layer_norms": False,
    "use_sdpa": True,
    "loss_type": "ForCausalLM",
    "bf16": True,
    "sliding_window": 2,
    "use_sliding_window": False,
    "layer_types": ["full_attention", "a kind to come"],
    "unsloth_version": "2024.9",
    "mup_scale": 2.0,
} | {key: value for key, value in WRONG.items() if key not in READ}


@pytest.mark.parametrize("key", UNREAD)
def test_a_key_that_transformers_class_does_not_read_is_noted_and_ignored(tmp_path, caplog, key):
    config, notes = read_with_notes(tmp_path, {**LLAMA, key: UNREAD[key]}, caplog)
    assert config == parse_config(LLAMA)
    (note,) = notes
    assert str(tmp_path / "config.json") in note
    assert f"{key} is " in note
    assert note.isprintable()


def test_all_such_keys_are_one_note(tmp_path, caplog):
    config, notes = read_with_notes(tmp_path, {**LLAMA, **UNREAD, "a\nb": "c" * 1000}, caplog)
    assert config == parse_config(LLAMA)
    assert len(notes) == 1
    assert notes[0].isprintable()
    assert len(notes[0]) < 2500
    assert f"and {len(UNREAD) + 1 - 20} more" in notes[0]


def test_an_ordinary_config_has_no_note(tmp_path, caplog):
    values = (
        LLAMA | dict.fromkeys(DECLARED, 1) | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    )
    assert read_with_notes(tmp_path, {**values, "foo": None}, caplog)[1] == []


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"type": "linear", "factor": 4.0, "mscale": 0.7}, ["rope_scaling.mscale is 0.7"]),
        (
            {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 9},
            ["original_max"],
        ),
        (
            {"rope_type": "linear", "factor": 4.0, "low_freq_factor": 1, "finetuned": True},
            ["low_freq", "finetuned"],
        ),
        ({"rope_type": "default", "factor": 4.0}, ["rope_scaling.factor is 4.0"]),
        ({"factor": 4.0}, ["rope_scaling.factor is 4.0"]),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, ["partial_rotary_factor is 0.5"]),
    ],
)
def test_rope_keys_that_the_type_does_not_read_are_noted(tmp_path, caplog, rope, named):
    """And the frequencies are those of transformers."""
    config, notes = read_with_notes(tmp_path, {**LLAMA, "rope_scaling": rope}, caplog)
    assert len(notes) == 1
    for words in named:
        assert words in notes[0]
    transformers = require("transformers")
    theirs = transformers.AutoConfig.for_model(**{**LLAMA, "rope_scaling": dict(rope)})
    embedding = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    assert torch.equal(embedding.inv_freq, inverse_frequencies(config.rope, config.head_dim))


@pytest.mark.parametrize(
    "name",
    ["modeling_x.XForCausalLM", "owner/name--modeling_x.XForCausalLM", ["m.XForCausalLM", None]],
)
def test_a_key_that_code_of_the_folders_own_may_read_is_refused(tmp_path, name):
    values = {**LLAMA, "auto_map": {"AutoModelForCausalLM": name}}
    assert parse_config(values) == parse_config(LLAMA)
    message = refusal(tmp_path, {**values, "qk_layer_norms": False})
    assert "qk_layer_norms is False" in message
    assert "XForCausalLM" in message


@pytest.mark.parametrize(
    "auto_map",
    [{"AutoModelForCausalLM": "modeling_x.LlamaForCausalLM"}, {"AutoTokenizer": "t.T"}, "x", 1],
)
def test_code_for_something_else_does_not_matter(tmp_path, caplog, auto_map):
    values = {**LLAMA, "auto_map": auto_map, "qk_layer_norms": False}
    assert len(read_with_notes(tmp_path, values, caplog)[1]) == 1


def test_a_model_with_its_own_scaling_is_refused_for_that(tmp_path):
    clex = {"type": "clex", "factor": 1, "max_factor": 16, "param_factor": 1, "time_dt": 0.01}
    own = {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}
    values = {
        **LLAMA,
        "rope_scaling": clex,
        "log_scale": True,
        "use_flashattn": True,
        "auto_map": own,
    }
    message = refusal(tmp_path, values)
    assert "'clex'" in message
    assert "flashattn" not in message


@pytest.mark.parametrize(
    "name",
    "FSDPLlamaForCausalLM LlamaForCausalLM LLaMAForCausalLM LlamaModel LlamaForCausalLMWithValueHead "
    "PeftModelForCausalLM OptimizedModule MyOwnForCausalLM".split(),
)
def test_wrappers_names_around_a_known_model_type(name):
    assert parse_config({**LLAMA, "architectures": [name]}) == parse_config(LLAMA)


@pytest.mark.parametrize(
    "name",
    "MistralForCausalLM Qwen2ForCausalLM GemmaForCausalLM LlamaForTokenClassification "
    "LlamaForQuestionAnswering GPTNeoXForCausalLM GPT2LMHeadModel".split(),
)
def test_classes_that_are_known_to_be_others(tmp_path, name):
    assert name in refusal(tmp_path, {**LLAMA, "architectures": [name]})


def test_no_rotary_positions_are_refused_though_llamas_class_reads_no_such_key(tmp_path):
    assert "no_rope_layers" in refusal(tmp_path, {**LLAMA, "no_rope_layers": [1, 0]})
    assert "no_rope_layer_interval" in refusal(tmp_path, {**LLAMA, "no_rope_layer_interval": 4})


def test_a_key_has_one_meaning():
    for family in FAMILIES.values():
        assert not family.keys & DECLARED
    assert not DECLARED & ONLY.keys()
    assert ONLY.keys() >= ALWAYS
    assert not FAMILIES.keys() & OTHER_FAMILIES.keys()
    assert ONLY.keys() == WRONG.keys()


def test_declared_keys_are_those_of_transformers():
    """Fields of its class, of its base, generation's parameters, and what it takes out of old files."""
    transformers = require("transformers")
    fields = set(transformers.LlamaConfig().to_dict())
    fields |= set(transformers.GenerationConfig._get_default_generation_params())
    old = "_commit_hash name_or_path num_labels attn_implementation auto_map transformers.js_config"
    read = FAMILIES["llama"].keys | FAMILIES["llama"].reads | ALWAYS
    assert fields | set(old.split()) == DECLARED | (fields & read)


# For what is refused of a family's own defaults.
OTHER_DEFAULTS = {"minimax": {"layer_types": ["full_attention"] * 32}}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_key_that_transformers_writes_is_unknown(family):
    """Everything that its config classes and their base have, at its default."""
    transformers = require("transformers")
    values = transformers.AutoConfig.for_model(family, **OTHER_DEFAULTS.get(family, {})).to_dict()
    _, config, unread = read_keys(values)
    assert config.num_hidden_layers == values.get("num_hidden_layers", values.get("n_layer"))
    assert unread == {}


# Tensors


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            [f"model.layers.{n}.self_attn.{p}_proj.bias" for n in range(2) for p in "qkv"],
            "model.layers.{0,1}.self_attn.q_proj.bias: biases are not supported",
        ),
        (
            ["model.layers.0.self_attn.qkv_proj.weight"],
            "self_attn.qkv_proj.weight (4, 2), which is no part",
        ),
        (
            ["model.layers.0.mlp.gate_up_proj.weight"],
            "mlp.gate_up_proj.weight (4, 2), which is no part",
        ),
        (
            ["model.layers.0.block_sparse_moe.experts.3.w1.weight"],
            "block_sparse_moe.experts.3.w1.weight (4, 2), which is no part",
        ),
        (
            ["model.layers.0.post_feedforward_layernorm.weight"],
            "post_feedforward_layernorm.weight (4, 2), which is no part",
        ),
        (
            ["model.layers.0.self_attn.k_norm.weight"],
            "self_attn.k_norm.weight (4, 2), which a model of this config does not have",
        ),
        (["gpt_neox.embed_in.weight"], "gpt_neox.embed_in.weight (4, 2), which is no part"),
    ],
)
def test_tensors_of_other_families_under_the_name_of_llama(tmp_path, names, words):
    """Where no flag says so, the tensor is named."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    save_file({name: torch.zeros(4, 2) for name in names}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"does not fit") as error:
        load_model(tmp_path)
    assert f"model.safetensors holds {words}" in str(error.value) or words in str(error.value)
    assert "\n" not in str(error.value)


# Hub names and the command line


def test_what_is_refused_is_not_fetched(tmp_path, monkeypatch):
    asked = []

    def fetch(hub_id: str, files: list[str], commit: str | None = None) -> Path:
        asked.extend(files)
        return tmp_path

    monkeypatch.setattr("llama_mini.checkpoint.hub._fetch", fetch)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **FAMILY["StableLM"][0]}))
    with pytest.raises(ValueError, match=r"model_type is 'stablelm'"):
        load_model("owner/name")
    assert asked == SMALL_FILES
    with pytest.raises(ValueError, match=r"model_type is 'stablelm'"):
        _ = open_checkpoint("owner/name").stored
    assert asked == SMALL_FILES * 2


def test_the_command_says_it_in_one_line(tmp_path, capsys):
    import generate
    from tests.support.tokenizers import train_sentencepiece

    train_sentencepiece(tmp_path / "tokenizer.model")
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **FAMILY["StableLM"][0]}))
    code = generate.main(["--prompt", "a", "--model", str(tmp_path)])
    out, err = capsys.readouterr()
    assert (code, out) == (1, "")
    assert err.startswith(
        f"error: {tmp_path / 'config.json'}: model_type is 'stablelm': that would take LayerNorm"
    )
    assert err.count("\n") == 1
