"""A checkpoint is opened once; the model has model.py's own classes, and its files stay as they are."""

import copy
import errno
import json
import mmap
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from llama_mini import Llama, load_model, load_tokenizer, read_config
from llama_mini.checkpoint import open_checkpoint, parse_config
from llama_mini.checkpoint.names import HUGGING_FACE, translate
from tests.support.fixtures import BASE
from tests.support.processes import ROOT

# An audit hook cannot be taken away: a process of its own.
COUNT = """
import os, sys
opened, folder = [], os.path.realpath(sys.argv[-1])

def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if os.path.dirname(path) == folder:
            opened.append(os.path.basename(path))

sys.addaudithook(hook)
import generate
code = generate.main(sys.argv[1:])
print("\\n" + " ".join(opened))
sys.exit(code)
"""


def opens(folder: Path, *options: str) -> Counter[str]:
    """How often one run of generate.py opens each file of the checkpoint."""
    arguments = ["--prompt", "The fox", "--max-new-tokens", "2", *options, "--model", str(folder)]
    done = subprocess.run(
        [sys.executable, "-c", COUNT, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return Counter(done.stdout.splitlines()[-1].split())


def test_one_run_opens_each_file_once(checkpoint):
    """The weights twice: once for the header, once to map them."""
    assert opens(checkpoint, "--check") == {
        "config.json": 1,
        "model.safetensors": 2,
        "tokenizer.model": 1,
    }


@pytest.mark.slow
def test_one_run_with_a_chat_template_opens_each_file_once(checkpoint, tmp_path):
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    found = opens(tmp_path, "--chat")
    assert found.pop("model.safetensors") == 2
    assert found == dict.fromkeys(
        ["config.json", "generation_config.json", "tokenizer.model", "tokenizer_config.json"], 1
    )


def test_an_open_checkpoint_is_handed_on(checkpoint):
    opened = open_checkpoint(checkpoint)
    assert open_checkpoint(opened) is opened
    assert read_config(opened) is opened.config
    assert read_config(opened) == read_config(checkpoint)
    assert load_tokenizer(opened).encode("The fox") == load_tokenizer(checkpoint).encode("The fox")
    state = load_model(checkpoint).state_dict()
    assert all(torch.equal(w, state[name]) for name, w in load_model(opened).state_dict().items())


def test_a_loaded_model_is_made_of_plain_linear_layers(checkpoint):
    linears = [
        module for module in load_model(checkpoint).modules() if hasattr(module, "in_features")
    ]
    assert len(linears) == 2 * 7 + 1
    assert {type(linear) for linear in linears} == {nn.Linear}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tools_that_look_for_linear_layers_find_them(checkpoint):
    model = load_model(checkpoint, dtype=torch.float32)
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert type(quantised.blocks[0].ffn.up_proj) is not nn.Linear
    tokens = torch.tensor([[1, 5, 9]])
    assert quantised(tokens).shape == model(tokens).shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_training_never_writes_to_the_file(checkpoint, tmp_path, dtype):
    """Also where the weights are mapped (bfloat16, as stored)."""
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    before = (tmp_path / "model.safetensors").read_bytes()
    model = load_model(tmp_path, dtype=dtype)
    assert not any(weight.requires_grad for weight in model.parameters())
    model.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logits = model(torch.tensor([[1, 5, 9, 2]]))
    nn.functional.cross_entropy(logits[0, :-1].float(), torch.tensor([5, 9, 2])).backward()
    old = model.blocks[0].ffn.up_proj.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.blocks[0].ffn.up_proj.weight, old)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    again = load_model(tmp_path, dtype=dtype)
    assert torch.equal(again.blocks[0].ffn.up_proj.weight, old)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "top_k": 0, "top_p": 1}, {"temperature": 1.0, "top_p": 1}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}),
        ({"do_sample": None, "temperature": None, "top_k": None, "top_p": None}, {}),
    ],
)
def test_sampling_of_the_generation_config(tmp_path, values, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert open_checkpoint(tmp_path).sampling() == expected


def test_no_generation_config_says_nothing(tmp_path):
    assert open_checkpoint(tmp_path).sampling() == {}


@pytest.mark.parametrize("key", ["do_sample", "temperature", "top_k", "top_p"])
@pytest.mark.parametrize("value", ["0.6", -1, [1], "nan"])
def test_sampling_that_is_none(tmp_path, key, value):
    text = "NaN" if value == "nan" else json.dumps(value)
    (tmp_path / "generation_config.json").write_text(f'{{"{key}": {text}}}')
    with pytest.raises(ValueError, match=rf"generation_config\.json: .*{key}"):
        open_checkpoint(tmp_path).sampling()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_loaded_model_is_saved_pickled_and_copied_as_any_other(checkpoint, tmp_path, dtype):
    """Each tensor has its own bytes, mapped (bfloat16) or not."""
    model = load_model(checkpoint, dtype=dtype)
    state, size = model.state_dict(), sum(weight.nbytes for weight in model.parameters())
    torch.save(state, tmp_path / "model.pt")
    save_file(state, tmp_path / "model.safetensors")
    pickled = pickle.dumps(model)
    copies = (
        torch.load(tmp_path / "model.pt", weights_only=True),
        load_file(tmp_path / "model.safetensors"),
        pickle.loads(pickled).state_dict(),
        copy.deepcopy(model).state_dict(),
    )
    for other in copies:
        assert all(torch.equal(other[name], weight) for name, weight in state.items())
    # Observed beside the weights: 8 kB in model.pt, 12 kB in the pickle.
    assert (tmp_path / "model.pt").stat().st_size < size + 60_000
    assert len(pickled) < size + 60_000
    assert {weight.untyped_storage().nbytes() == weight.nbytes for weight in state.values()} == {
        True
    }


MAPS = """
import os, resource, sys
from llama_mini import load_model
import torch
if len(sys.argv) > 2:
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))
model = load_model(sys.argv[1])
for line in open("/proc/self/maps"):
    if line.rstrip().endswith(".safetensors"):
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        print(end - begin, line.split()[1])
with torch.inference_mode():
    print(sum(weight.view(-1)[:7].sum().item() for weight in model.parameters()))
"""


def mappings(folder: Path, *limit: str) -> list[list[str]]:
    """Size and rights of each mapping of a weights file in a process that has loaded the folder."""
    command = [sys.executable, "-c", MAPS, str(folder), *limit]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()[:-1]]


def test_no_address_space_is_no_fault_of_the_file(checkpoint, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    size = (checkpoint / "model.safetensors").stat().st_size
    monkeypatch.setattr(mmap, "mmap", full)
    with pytest.raises(ValueError, match=rf"model\.safetensors .*{size:,} bytes .*ulimit -v"):
        load_model(checkpoint)


needs_proc = pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="Linux")


@pytest.mark.slow
@needs_proc
def test_a_file_is_mapped_once(checkpoint):
    """However many tensors it holds; private, so that no write reaches it."""
    size = (checkpoint / "model.safetensors").stat().st_size
    assert mappings(checkpoint) == [[str(-(-size // 4096) * 4096), "rw-p"]]


@pytest.mark.slow
@needs_proc
def test_a_file_larger_than_the_memory_is_mapped(tmp_path):
    """A file with a hole of twice the memory, and tensors at both ends of it."""
    words = Path("/proc/meminfo").read_text().split()
    memory = int(words[words.index("MemTotal:") + 1]) * 1024
    hidden = 8192
    vocab = 2 * memory // (2 * hidden)
    values = {
        **BASE,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    with torch.device("meta"):
        shapes = {k: v.shape for k, v in Llama(parse_config(values)).state_dict().items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        if name != "lm_head.weight":
            begin, end = end, end + 2 * shape.numel()
            key = translate(name, HUGGING_FACE)
            header[key] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as the library writes it; else a tensor is copied
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    assert end > 2 * memory
    ((size, _),) = mappings(tmp_path)
    assert int(size) > 2 * memory


def test_the_command_says_what_it_ignores_in_one_line(checkpoint, tmp_path, capsys):
    import generate

    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    values = json.loads((tmp_path / "config.json").read_text())
    arguments = [
        "--prompt",
        "The fox",
        "--max-new-tokens",
        "2",
        "--seed",
        "1",
        "--model",
        str(tmp_path),
    ]
    assert generate.main(arguments) == 0
    plain = capsys.readouterr()
    extra = {"_model_name_or_path": "x", "bf16": True}
    (tmp_path / "config.json").write_text(json.dumps(values | extra))
    assert generate.main(arguments) == 0
    out, err = capsys.readouterr()
    assert out == plain.out
    (note,) = set(err.splitlines()) - set(plain.err.splitlines())
    assert note.startswith(f"note: {tmp_path / 'config.json'}: ")
    assert "_model_name_or_path is 'x', bf16 is True" in note
