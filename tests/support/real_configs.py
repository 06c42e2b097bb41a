"""What the config.json of public Llama-style models says, less its words: keys and numbers alone.

A row: its name, vocab_size, hidden_size, intermediate_size, blocks, query heads, key/value heads (-: not in
the file), rms_norm_eps, max_position_embeddings, and the parameters that the model has, a tied head once.
Below it further keys as the file has them.
"""

import json
from typing import Any

SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads rms_norm_eps max_position_embeddings"
).split()
ALWAYS = {"initializer_range": 0.02, "use_cache": True, "hidden_act": "silu"}
SHORT: dict[str, dict[str, Any]] = {  # what many files have
    "v4": {"attention_bias": False, "attention_dropout": 0.0, "pretraining_tp": 1},
    "linear": {"type": "linear"},
    "llama3": {
        "rope_type": "llama3",
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
MISTRALS = ("mistral", "codestral", "zephyr")
TABLE = """
llama-7b 32000 4096 11008 32 32 - 1e-06 2048 6738415616
    pad_token_id=0 max_sequence_length=2048
llama-13b 32000 5120 13824 40 40 - 1e-06 2048 13015864320
    pad_token_id=-1 max_sequence_length=2048
alpaca-7b 32001 4096 11008 32 32 - 1e-06 2048 6738423808
    bos_token_id=0 eos_token_id=1
vicuna-7b-v1.5 32000 4096 11008 32 32 32 1e-05 4096 6738415616
    pretraining_tp=1 rope_scaling=null
vicuna-7b-v1.5-16k 32000 4096 11008 32 32 32 1e-05 4096 6738415616
    max_sequence_length=16384 linear=4.0
longchat-7b-32k 32000 4096 11008 32 32 32 1e-05 4096 6738415616
    max_sequence_length=32768 linear=8.0
open_llama_3b 32000 3200 8640 26 32 - 1e-06 2048 3426473600
open_llama_7b_v2 32000 4096 11008 32 32 - 1e-06 2048 6738415616
llama-68m 32000 768 3072 2 12 - 1e-06 2048 68030208
    pad_token_id=1 bos_token_id=0
sheared-llama-1.3b 32000 2048 5504 24 16 16 1e-05 4096 1345423360
    pad_token_id=0 pretraining_tp=1
llama-2-7b 32000 4096 11008 32 32 32 1e-05 4096 6738415616
    pretraining_tp=1 rope_scaling=null
llama-2-13b 32000 5120 13824 40 40 40 1e-05 4096 13015864320
    pretraining_tp=1
llama-2-70b 32000 8192 28672 80 64 8 1e-05 4096 68976648192
    pretraining_tp=1
llama-2-7b-32k 32000 4096 11008 32 32 32 1e-05 32768 6738415616
    max_sequence_length=32768 linear=8.0
codellama-7b 32016 4096 11008 32 32 32 1e-05 16384 6738546688
    rope_theta=1000000 rope_scaling=null
codellama-34b 32000 8192 22016 48 64 8 1e-05 16384 33743970304
    rope_theta=1000000
tinyllama-1.1b 32000 2048 5632 22 32 4 1e-05 2048 1100048384
    v4 rope_theta=10000.0
yi-6b 64000 4096 11008 32 32 4 1e-05 4096 6061035520
    rope_theta=5000000.0 pad_token_id=0
yi-34b-200k 64000 7168 20480 60 56 8 1e-05 200000 34388917248
    rope_theta=5000000.0
solar-10.7b 32000 4096 14336 48 32 8 1e-05 4096 10731524096
    pad_token_id=2
deepseek-llm-7b 102400 4096 11008 30 32 32 1e-06 4096 6910365696
    v4 rope_theta=10000.0
deepseek-coder-1.3b 32256 2048 5504 24 16 16 1e-06 16384 1346471936
    linear=4.0 rope_theta=100000
deepseek-coder-6.7b 32256 4096 11008 32 32 32 1e-06 16384 6740512768
    linear=4.0 rope_theta=100000
amber 32000 4096 11008 32 32 32 1e-06 2048 6738415616
    max_sequence_length=2048
smollm-135m 49152 576 1536 30 9 3 1e-05 2048 134515008
    v4 rope_theta=10000.0 tie_word_embeddings=true
smollm2-135m 49152 576 1536 30 9 3 1e-05 8192 134515008
    v4 rope_interleaved=false rope_theta=100000 is_llama_config=true tie_word_embeddings=true
smollm2-360m 49152 960 2560 32 15 5 1e-05 8192 361821120
    v4 rope_interleaved=false rope_theta=100000 is_llama_config=true tie_word_embeddings=true
smollm2-1.7b 49152 2048 8192 24 32 32 1e-05 8192 1711376384
    v4 rope_theta=130000 tie_word_embeddings=true transformers.js_config={"dtype":"q4"}
llama-3-8b 128256 4096 14336 32 32 8 1e-05 8192 8030261248
    v4 rope_theta=500000.0 eos_token_id=128001
llama-3-70b 128256 8192 28672 80 64 8 1e-05 8192 70553706496
    v4 rope_theta=500000.0
llama-3-8b-1048k 128256 4096 14336 32 32 8 1e-05 1048576 8030261248
    v4 rope_theta=3580165449.0
llama-3.1-8b 128256 4096 14336 32 32 8 1e-05 131072 8030261248
    v4 llama3=8.0 mlp_bias=false rope_theta=500000.0 eos_token_id=[128001,128008,128009]
llama-3.1-405b 128256 16384 53248 126 128 8 1e-05 131072 405853388800
    v4 llama3=8.0 mlp_bias=false rope_theta=500000.0
llama-3.2-1b 128256 2048 8192 16 32 8 1e-05 131072 1235814400
    v4 llama3=32.0 head_dim=64 mlp_bias=false rope_theta=500000.0 tie_word_embeddings=true
llama-3.2-3b 128256 3072 8192 28 24 8 1e-05 131072 3212749824
    v4 llama3=32.0 head_dim=128 mlp_bias=false rope_theta=500000.0 tie_word_embeddings=true
falcon3-1b 131072 2048 8192 18 8 4 1e-06 4096 1669408768
    head_dim=256 mlp_bias=false rope_theta=1000042 rope_scaling=null
falcon3-7b 131072 3072 23040 28 12 4 1e-06 32768 7455550464
    head_dim=256 mlp_bias=false rope_theta=1000042
smollm2-135m-v5 49152 576 1536 30 9 3 1e-05 8192 134515008
    head_dim=64 rope_parameters={"rope_theta":100000,"rope_type":"default"} dtype="bfloat16"
    tie_word_embeddings=true
from-gguf 32000 2048 5632 22 32 4 1e-05 2048 1100048384
    _model_name_or_path="x" rope_theta=10000.0
from-a-trainer 32000 2048 5632 22 32 4 1e-05 2048 1100048384
    use_flash_attention_2=true neftune_noise_alpha=5.0 sliding_window=4096 use_sliding_window=false
mistral-7b-v0.1 32000 4096 14336 32 32 8 1e-05 32768 7241732096
    rope_theta=10000.0 sliding_window=4096
mistral-7b-v0.3 32768 4096 14336 32 32 8 1e-05 32768 7248023552
    rope_theta=1000000.0 sliding_window=null
mistral-nemo 131072 5120 14336 40 32 8 1e-05 1024000 12247782400
    head_dim=128 rope_theta=1000000.0 sliding_window=null
codestral-22b 32768 6144 16384 56 48 8 1e-05 32768 22247282688
    rope_theta=1000000.0 sliding_window=null
zephyr-7b 32000 4096 14336 32 32 8 1e-05 32768 7241732096
    rope_theta=10000.0 sliding_window=4096 pad_token_id=2
qwen3-0.6b 151936 1024 3072 28 16 8 1e-06 40960 596049920
    head_dim=128 max_window_layers=28 rope_theta=1000000 sliding_window=null use_sliding_window=false
    tie_word_embeddings=true
qwen3-4b 151936 2560 9728 36 32 8 1e-06 40960 4022468096
    head_dim=128 max_window_layers=36 rope_theta=1000000 sliding_window=null use_sliding_window=false
    tie_word_embeddings=true
qwen3-8b 151936 4096 12288 36 32 8 1e-06 40960 8190735360
    head_dim=128 max_window_layers=36 rope_theta=1000000 sliding_window=null use_sliding_window=false
"""


def read() -> dict[str, tuple[dict[str, Any], int]]:
    """Name -> the config, and the number of parameters."""
    found: dict[str, tuple[dict[str, Any], int]] = {}
    values: dict[str, Any] = {}
    for line in TABLE.strip().splitlines():
        if line.startswith(" "):
            for key, _, value in (word.partition("=") for word in line.split()):
                if key == "v4":
                    values |= SHORT["v4"]
                elif key in SHORT:
                    values["rope_scaling"] = SHORT[key] | {"factor": float(value)}
                else:
                    values[key] = json.loads(value)
            continue
        name, *sizes, parameters = line.split()
        first = name.partition("-")[0]
        kind = {"qwen3": "qwen3"}.get(first, "mistral" if first in MISTRALS else "llama")
        values = {"model_type": kind, **ALWAYS}
        values |= {key: json.loads(n) for key, n in zip(SIZES, sizes, strict=True) if n != "-"}
        found[name] = (values, int(parameters))
    return found


REAL = read()
