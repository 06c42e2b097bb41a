"""The command line: what it prints where, and one line for whatever goes wrong."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import generate as cli
from llama_mini import generate, load_model, load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
GREEDY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, "
    "she saw a big, red ball. She wanted to play with it, but it was too high.\nLily's mom said, \"Lily, "
    "let's go to the park.\" Lily was sad and didn't know what to do"
)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_known_text_of_a_real_checkpoint(stories260k, capsys):
    code, out, err = run(
        capsys,
        *("--prompt", "Once upon a time", "--model", str(stories260k), "--temperature", "0"),
    )
    assert code == 0
    assert out.startswith(GREEDY)
    assert err == ""


def test_prompt_and_continuation_go_to_standard_output(checkpoint, capsys):
    arguments = ("--prompt", "The quick", "--model", str(checkpoint), "--temperature", "0")
    code, out, err = run(capsys, *arguments, "--max-new-tokens", "9")
    assert code == 0
    assert err == ""
    tokenizer = load_tokenizer(checkpoint)
    ids = tokenizer.encode("The quick")
    model = load_model(checkpoint, dtype=torch.float32)
    new = generate(model, [ids], 9, vocab_size=tokenizer.vocab_size)[0]
    assert out == tokenizer.decode(ids + new) + "\n"


def test_seed_decides_the_text(checkpoint, capsys):
    arguments = ("--prompt", "The", "--model", str(checkpoint), "--max-new-tokens", "20", "--seed")
    first, again, other = (run(capsys, *arguments, seed)[1] for seed in ("1", "1", "2"))
    assert first == again != other


def test_new_tokens_fill_what_the_context_leaves(checkpoint, capsys):
    long = "The quick brown fox jumps over the lazy dog. " * 20
    ids = load_tokenizer(checkpoint).encode(long)
    prompt = load_tokenizer(checkpoint).decode(ids[:120])
    code, out, _ = run(capsys, "--prompt", prompt, "--model", str(checkpoint))
    assert code == 0
    code, out, err = run(capsys, "--prompt", long, "--model", str(checkpoint))
    assert code == 1
    assert out == ""
    assert f"prompt of {len(ids)} tokens" in err
    assert "128" in err
    assert err.count("\n") == 1


def test_stats_go_to_standard_error(checkpoint, capsys):
    code, out, err = run(
        capsys, "--prompt", "The", "--model", str(checkpoint), "--max-new-tokens", "4", "--stats"
    )
    assert code == 0
    labels = [line.split("  ")[0].strip() for line in err.splitlines()]
    assert labels == ["parameters", "device", "load", "prefill", "decode", "peak memory"]
    parameters = sum(p.numel() for p in load_model(checkpoint).parameters())
    assert f"{parameters:,}" in err
    assert "float32" in err
    assert "parameters" not in out


def test_dtype_asked_for_is_used(checkpoint, capsys):
    arguments = ("--prompt", "The", "--model", str(checkpoint), "--max-new-tokens", "2", "--stats")
    assert "bfloat16" in run(capsys, *arguments, "--dtype", "bfloat16")[2]


def test_standard_input(checkpoint, capsys, monkeypatch):
    arguments = ("--prompt", "-", "--model", str(checkpoint), "--max-new-tokens", "1")

    def feed(data: bytes) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return run(capsys, *arguments)

    assert feed("The lazy dög\n".encode())[1].startswith("The lazy dög")
    code, out, err = feed(b"The \xff\xfe")
    assert (code, out) == (1, "")
    assert "not UTF-8" in err


def damaged(checkpoint: Path, tmp_path: Path, **changes) -> Path:
    folder = tmp_path / "damaged"
    shutil.copytree(checkpoint, folder)
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_errors_are_one_line_and_exit_code_1(checkpoint, tmp_path, capsys):
    broken = damaged(checkpoint, tmp_path)
    (broken / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    cases = [
        (["--model", str(tmp_path / "nowhere")], "nowhere"),
        (["--model", str(tmp_path)], str(tmp_path)),
        (["--model", str(broken)], "model.safetensors"),
        (["--model", str(checkpoint), "--temperature", "-1"], "temperature is -1"),
        (["--model", str(checkpoint), "--top-k", "0"], "top_k is 0"),
        (["--model", str(checkpoint), "--top-p", "2"], "top_p is 2"),
        (["--model", str(checkpoint), "--max-new-tokens", "-5"], "max_new_tokens is -5"),
        (["--model", str(checkpoint), "--max-new-tokens", "500"], "context of 128"),
    ]
    if not torch.cuda.is_available():
        cases.append((["--model", str(checkpoint), "--device", "cuda"], "--device cuda"))
    for arguments, message in cases:
        code, out, err = run(capsys, "--prompt", "The", *arguments)
        assert code == 1, arguments
        assert message in err
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert "Traceback" not in out + err


def test_without_a_shipped_checkpoint_the_error_says_how_to_name_one(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "WEIGHTS", tmp_path / "none")
    code, _, err = run(capsys, "--prompt", "The")
    assert code == 1
    assert "--model FOLDER" in err


def test_every_stop_id_of_either_file_ends_the_text(checkpoint, tmp_path, capsys):
    arguments = ("--prompt", "The", "--temperature", "0", "--max-new-tokens", "12", "--stats")
    model = load_model(checkpoint, dtype=torch.float32)
    ids = load_tokenizer(checkpoint).encode("The")
    new = generate(model, [ids], 12, stop_ids=(), vocab_size=300)[0]
    first, second = new[3], new[6]
    for config, generation, stop in (
        (first, None, first),
        ([2, second], None, second),
        (None, [first], first),
        (second, first, first),
    ):
        folder = damaged(checkpoint, tmp_path, eos_token_id=config)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
        code, _, err = run(capsys, *arguments, "--model", str(folder))
        assert code == 0
        assert f"decode       {new.index(stop) + 1} tokens" in err
        shutil.rmtree(folder)


def start(checkpoint: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        str(ROOT / "generate.py"),
        "--model",
        str(checkpoint),
        "--prompt",
        "The",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )


@pytest.fixture
def endless(checkpoint, tmp_path) -> Path:
    """The checkpoint with a long context and no stop id, to be interrupted."""
    return damaged(checkpoint, tmp_path, max_position_embeddings=10**6, eos_token_id=None)


def test_ctrl_c_keeps_the_text_so_far(endless):
    process = start(endless, "--max-new-tokens", "100000")
    text = process.stdout.read(40)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (text + rest).endswith(b"\n")
    assert err == b""


def test_a_closed_pipe_ends_quietly(endless):
    process = start(endless, "--max-new-tokens", "100000")
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 0


def test_text_appears_as_it_is_made(endless):
    process = start(endless, "--max-new-tokens", "3000")
    try:
        process.stdout.read(20)
        early = time.perf_counter()
        process.stdout.read()
        assert time.perf_counter() - early > 0.2  # 3,000 tokens take longer than one buffer
    finally:
        process.kill()
        process.communicate()
