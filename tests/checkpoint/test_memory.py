"""A model that does not fit is refused before a weight is read, and memory that runs out is one line."""

import os
import sys
from pathlib import Path

import pytest
import torch

import generate as cli
from llama_mini import KVCache, generate, load_model, load_tokenizer
from llama_mini.cache import cache_bytes
from llama_mini.checkpoint import Checkpoint, memory, open_checkpoint
from llama_mini.checkpoint.memory import bytes_at_hand, require_memory
from llama_mini.cli import run_command
from llama_mini.inspect import __main__ as inspect
from tests.support.processes import Fork, damaged

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def at_hand(monkeypatch: pytest.MonkeyPatch, number: int | None) -> None:
    monkeypatch.setattr(memory, "bytes_at_hand", lambda device: number)


def needed(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments, **options) -> int:
    """The smallest number of bytes at hand that is not refused."""
    checkpoint = open_checkpoint(folder)
    at_hand(monkeypatch, -1)
    with pytest.raises(ValueError, match=r"-1 are at hand") as caught:
        require_memory(checkpoint, *arguments, **options)
    number = int(str(caught.value).split()[3].replace(",", ""))
    at_hand(monkeypatch, number)
    require_memory(checkpoint, *arguments, **options)
    at_hand(monkeypatch, number - 1)
    with pytest.raises(
        ValueError, match=f"needs {number:,} bytes .* and {number - 1:,} are at hand"
    ):
        require_memory(checkpoint, *arguments, **options)
    return number


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_takes_what_is_counted(checkpoint, dtype):
    config = open_checkpoint(checkpoint).config
    cache = KVCache(config, 3, 17, dtype=dtype)
    assert cache_bytes(config, 3, 17, dtype) == sum(t.nbytes for t in cache.keys + cache.values)


def test_weights_cache_and_logits_are_counted(checkpoint, monkeypatch):
    """2 blocks, 2 key/value heads of size 8, FFN of 48 channels, 305 ids; stored in bfloat16."""
    model = load_model(checkpoint)
    parameters = sum(p.numel() for p in model.parameters())
    five, logits = (
        2 * 2 * 2 * 8 * 5 + 3 * 3 * 48,
        4 * 305,
    )  # 5 positions, of which 3 are the prompt's
    for device, dtype, numbers in (
        (CPU, torch.float32, parameters + five),
        (CPU, torch.bfloat16, five),  # mapped
        (CPU, None, five),
        (GPU, torch.bfloat16, parameters + five),
        (GPU, torch.float32, parameters + five),
        (GPU, None, parameters + five),
    ):
        expected = numbers * (dtype or torch.bfloat16).itemsize + logits
        assert needed(monkeypatch, checkpoint, device, dtype, 3, 2) == expected
    share = needed(monkeypatch, checkpoint, CPU, torch.float32, 3, 2, share=0.5)
    assert share == 2 * (parameters + five) + logits
    static = needed(monkeypatch, checkpoint, GPU, torch.float32, 3, 2, graphs=True)
    assert static == 4 * (parameters + five + 2 * 2 * 2 * 8 * (6 + 256 + 16)) + logits
    assert static >= needed(monkeypatch, checkpoint, GPU, torch.float32, 3, 2, graphs=False)
    every = needed(monkeypatch, checkpoint, CPU, torch.float32, 3, 2, all_logits=True)
    assert every == 4 * (parameters + five) + 3 * logits


def test_metas_queries_and_keys_are_put_in_order_and_so_copied(checkpoint, monkeypatch):
    monkeypatch.setattr(Checkpoint, "reorders", True)
    as_metas = open_checkpoint(checkpoint)
    at_hand(monkeypatch, 0)
    with pytest.raises(ValueError, match=f"weights {2 * 2 * (32 * 32 + 16 * 32):,}, "):
        require_memory(as_metas, CPU, torch.bfloat16, 1)


def test_nothing_is_refused_where_nothing_is_known(checkpoint, monkeypatch, tmp_path):
    at_hand(monkeypatch, None)
    require_memory(open_checkpoint(checkpoint), GPU, torch.float32, 10**15)
    assert bytes_at_hand(torch.device("mps")) is None
    monkeypatch.undo()
    assert bytes_at_hand(CPU, tmp_path) is None


@pytest.mark.parametrize("program", ["generate", "record"])
def test_refused_before_a_weight_is_read(checkpoint, monkeypatch, capsys, tmp_path, program):
    at_hand(monkeypatch, 1000)
    monkeypatch.setattr("llama_mini.__main__.load_model", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr(inspect, "load_model", lambda *_: pytest.fail("loaded"))
    model = ["--model", str(checkpoint), "--prompt", "The fox"]
    if program == "generate":
        code = cli.main(model)
    else:
        code = inspect.main(["record", *model, "--out", str(tmp_path / "trace")])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("error: the model needs ")
    assert "and 1,000 are at hand" in err


def test_a_long_text_needs_its_cache(checkpoint, tmp_path, monkeypatch, capsys):
    folder = damaged(checkpoint, tmp_path, max_position_embeddings=2 * 10**9)
    at_hand(monkeypatch, 10**9)
    arguments = ["--model", str(folder), "--prompt", "The", "--max-new-tokens"]
    assert cli.main([*arguments, str(10**9)]) == 1
    positions = len(load_tokenizer(folder).encode("The")) + 10**9
    assert f"keys and values {4 * 64 * positions:,}," in capsys.readouterr().err
    assert cli.main([*arguments, "3"]) == 0


def test_a_config_that_does_not_fit_its_files_is_the_better_reason(checkpoint, tmp_path, capsys):
    folder = damaged(checkpoint, tmp_path, num_hidden_layers=2 * 10**9)
    assert cli.main(["--model", str(folder), "--prompt", "The"]) == 1
    assert "num_hidden_layers is 2000000000, and there are 2 blocks" in capsys.readouterr().err


def system(root: Path, version: int, path: str, files: dict[str, str]) -> Path:
    """The files by which a Linux with 1,000 kB available says it."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 2000 kB\nMemAvailable:    1000 kB\n")
    line = f"0::{path}" if version == 2 else f"4:memory:{path}\n3:cpu,cpuacct:/x\n0::/"
    (root / "proc/self/cgroup").write_text(line + "\n")
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


STAT = "anon 5\nactive_file 30\ninactive_file 400\n"
LEFT = {"memory.max": "90000\n", "memory.current": "50000\n", "memory.stat": STAT}
OLD = {
    "memory.limit_in_bytes": "90000\n",
    "memory.usage_in_bytes": "50000\n",
    "memory.stat": STAT + "total_active_file 3000\ntotal_inactive_file 0\n",
}


@pytest.mark.parametrize(
    ("version", "path", "files", "expected"),
    [
        (2, "/", {}, 1024_000),
        (2, "/", LEFT, 40430),
        (2, "/a/b", {f"a/{name}": text for name, text in LEFT.items()}, 40430),
        (2, "/not/in/here", LEFT, 40430),
        (2, "/a", LEFT | {"a/memory.max": "max\n"}, 40430),
        (2, "/", LEFT | {"memory.max": "max\n"}, 1024_000),
        (2, "/", LEFT | {"memory.current": "99999999\n"}, 0),
        (1, "/a", {f"memory/a/{name}": text for name, text in OLD.items()}, 43000),
        (1, "/", {f"memory/{name}": text for name, text in OLD.items()}, 43000),
        (1, "/", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 1024_000),
    ],
)
def test_what_linux_says(tmp_path, version, path, files, expected):
    assert bytes_at_hand(CPU, system(tmp_path, version, path, files)) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say")
def test_what_this_linux_says():
    available = bytes_at_hand(CPU)
    assert available is not None
    assert 2**20 < available < 2**50


def raises(error: Exception) -> int:
    def command() -> None:
        raise error

    return run_command(command)


def test_memory_that_runs_out_is_one_line(capsys):
    assert run_command(lambda: torch.empty(10**15).numel()) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: out of memory (4000000000000000 bytes more were asked for): ")
    assert err.count("\n") == 1
    gpu = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has\n 1 GiB"
    )
    assert raises(gpu) == 1
    assert capsys.readouterr().err.startswith("error: out of memory (2.50 GiB more were asked for)")
    assert raises(MemoryError()) == 1
    assert capsys.readouterr().err.startswith("error: out of memory: ")


def test_two_processes_load_one_folder_at_once(checkpoint):
    """Each waits for the other before it loads; both write what one alone does."""
    ids = load_tokenizer(checkpoint).encode("The fox")
    go, tell = os.pipe()

    def command() -> int:
        os.read(go, 1)
        print(generate(load_model(checkpoint, dtype=torch.float32), [ids], 20))
        return 0

    both = [Fork(command), Fork(command)]
    os.write(tell, b"xx")
    alone = generate(load_model(checkpoint, dtype=torch.float32), [ids], 20)
    assert [fork.finish() for fork in both] == [(0, f"{alone}\n", "")] * 2
    os.close(go)
    os.close(tell)
