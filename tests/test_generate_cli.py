"""The command line: what it prints where, and one line for whatever goes wrong."""

import fcntl
import importlib
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

import llama_mini
from llama_mini import __main__ as cli
from llama_mini import generate, load_model, load_tokenizer
from llama_mini.checkpoint import chat_prompt
from tests.support.fixtures import STORIES260K_TEXT
from tests.support.processes import ROOT, damaged


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def stopped_after(tokens: int) -> str:
    return f"[stopped after {tokens} tokens; --max-new-tokens N for more]\n"


def test_known_text_of_a_real_checkpoint(stories260k, capsys):
    code, out, err = run(
        capsys,
        *("--prompt", "Once upon a time", "--model", str(stories260k), "--temperature", "0"),
        *("--max-new-tokens", "128"),
    )
    assert code == 0, err
    assert out.startswith(STORIES260K_TEXT)
    assert err == stopped_after(128)


def test_prompt_and_continuation_go_to_standard_output(checkpoint, capsys):
    arguments = ("--prompt", "The quick", "--model", str(checkpoint), "--temperature", "0")
    code, out, err = run(capsys, *arguments, "--max-new-tokens", "9")
    assert code == 0, err
    assert err == stopped_after(9)
    tokenizer = load_tokenizer(checkpoint)
    ids = tokenizer.encode("The quick")
    model = load_model(checkpoint, dtype=torch.float32)
    new = generate(model, [ids], 9, vocab_size=tokenizer.vocab_size)[0]
    assert out == tokenizer.decode(ids + new) + "\n"


def test_seed_decides_the_text(checkpoint, capsys):
    arguments = ("--prompt", "The", "--model", str(checkpoint), "--max-new-tokens", "20", "--seed")
    first, again, other = (run(capsys, *arguments, seed)[1] for seed in ("1", "1", "2"))
    assert first == again != other


def test_new_tokens_fill_what_the_context_leaves(checkpoint, tmp_path, capsys):
    long = "The quick brown fox jumps over the lazy dog. " * 20
    ids = load_tokenizer(checkpoint).encode(long)
    prompt = load_tokenizer(checkpoint).decode(ids[:120])
    used = len(load_tokenizer(checkpoint).encode(prompt))
    folder = damaged(checkpoint, tmp_path, eos_token_id=None)
    code, _, err = run(capsys, "--prompt", prompt, "--model", str(folder), "--stats")
    assert code == 0, err
    assert err.startswith("[stopped at the end of the context, after 128 tokens]\n")
    assert f"decode       {128 - used} tokens" in err
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
    assert code == 0, err
    note, *lines = err.splitlines(keepends=True)
    assert note == stopped_after(4)
    labels = [line.split("  ")[0].strip() for line in lines]
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


TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_chat_prints_the_reply_only(checkpoint, tmp_path, capsys):
    folder = damaged(checkpoint, tmp_path)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    arguments = ("--prompt", "The fox", "--model", str(folder), "--temperature", "0", "--chat")
    tokenizer, model = load_tokenizer(folder), load_model(folder, dtype=torch.float32)
    for system, text in (
        ((), "[user] The fox\n[assistant]"),
        (("--system", "Once"), "[system] Once\n[user] The fox\n[assistant]"),
    ):
        ids = tokenizer.encode(text)
        assert ids.count(tokenizer.bos_id) == 1
        new = generate(model, [ids], 20, vocab_size=tokenizer.vocab_size)[0]
        code, out, err = run(capsys, *arguments, *system, "--max-new-tokens", "20")
        assert (code, out, err) == (0, tokenizer.decode(new) + "\n", stopped_after(20))


def test_a_raw_prompt_stays_raw_beside_a_chat_template(checkpoint, tmp_path, capsys):
    folder = damaged(checkpoint, tmp_path)
    arguments = ("--prompt", "The fox", "--temperature", "0", "--max-new-tokens", "5", "--model")
    plain = run(capsys, *arguments, str(checkpoint))[1]
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    assert run(capsys, *arguments, str(folder))[1] == plain


def test_chat_needs_a_template(checkpoint, capsys):
    code, out, err = run(capsys, "--prompt", "The", "--model", str(checkpoint), "--chat")
    assert (code, out) == (1, "")
    assert "chat_template.jinja" in err
    with pytest.raises(SystemExit):
        cli.main(["--prompt", "The", "--system", "Be brief"])
    assert "--system goes with --chat" in capsys.readouterr().err


def test_an_empty_prompt_is_the_bos_or_an_error(checkpoint, tmp_path, capsys):
    arguments = ("--prompt", "", "--max-new-tokens", "3", "--model")
    assert run(capsys, *arguments, str(checkpoint))[0] == 0
    folder = damaged(checkpoint, tmp_path)
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    code, out, err = run(capsys, *arguments, str(folder))
    assert (code, out) == (1, "")
    assert "the prompt is empty" in err


def rewrite(change) -> object:
    def spoil(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return spoil


def with_config(**changes) -> object:
    def spoil(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(values))

    return spoil


def with_file(name: str, content: str) -> object:
    return lambda folder: (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (with_config(tie_word_embeddings=True), "tie_word_embeddings is true"),
        (rewrite(lambda w: w.pop("lm_head.weight")), "lm_head.weight"),
        (rewrite(lambda w: w.update({"x.weight": torch.ones(1)})), "x.weight"),
        (
            rewrite(lambda w: w.update({"model.norm.weight": w["model.norm.weight"][:5].clone()})),
            "(5,)",
        ),
        (
            rewrite(lambda w: w.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)})),
            "I8",
        ),
        (
            rewrite(lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)})),
            "model.layers.0.self_attn.q_proj.bias",
        ),
        (rewrite(lambda w: w["model.norm.weight"].fill_(float("nan"))), "NaN"),
        (with_config(quantization_config={"bits": 4}), "quantization_config"),
        (with_config(attention_bias=True), "attention_bias"),
        (with_config(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "yarn"),
        (with_config(model_type="mixtral"), "mixtral"),
        (with_config(num_hidden_layers=3), "num_hidden_layers"),
        (with_file("config.json", "{"), "config.json"),
        (with_file("tokenizer.model", "SGVsbG8= 0\nV29ybGQ= 1\n"), "tiktoken"),
        (with_file("tokenizer.json", "{}"), "tokenizer.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "pickle",
        ),
        (lambda folder: (folder / "tokenizer.model").unlink(), "tokenizer"),
    ],
)
def test_a_folder_that_does_not_fit_is_one_line(checkpoint, tmp_path, capsys, spoil, message):
    folder = damaged(checkpoint, tmp_path)
    spoil(folder)
    code, out, err = run(capsys, "--prompt", "The", "--model", str(folder))
    assert code == 1
    assert message in err
    assert err.count("\n") == 1
    assert "Traceback" not in out + err


def test_device_and_dtype_are_chosen_by_what_is_there(monkeypatch):
    from llama_mini.cli import choose_device, choose_dtype

    there = {"cuda": False, "mps": False}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there["cuda"])
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: there["mps"])
    assert choose_device("auto").type == "cpu"
    with pytest.raises(ValueError, match="--device cuda"):
        choose_device("cuda")
    there["mps"] = True
    assert choose_device("auto").type == "mps"
    there["cuda"] = True
    assert choose_device("auto").type == "cuda"
    assert choose_device("cpu").type == "cpu"

    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert choose_dtype("auto", cpu, "bfloat16") == (torch.float32, "")
    assert choose_dtype("bfloat16", cpu, None) == (torch.bfloat16, "")
    assert choose_dtype("auto", gpu, None) == (None, "")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    assert choose_dtype("auto", gpu, "bfloat16") == (torch.bfloat16, "")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    dtype, note = choose_dtype("auto", gpu, "bfloat16")
    assert dtype == torch.float16
    assert "cuda" in note
    assert "float16" in note


def test_tiny_sampling_values_are_greedy(checkpoint, capsys):
    arguments = ("--prompt", "The", "--model", str(checkpoint), "--max-new-tokens", "8")
    greedy = run(capsys, *arguments, "--temperature", "0")
    for options in (("--temperature", "1e-320"), ("--top-p", "1e-320"), ("--top-p", "1e-46")):
        assert run(capsys, *arguments, *options) == greedy


def test_odd_command_lines(checkpoint, capsys, monkeypatch):
    code, out, _ = run(capsys, "--prompt=--", "--model", str(checkpoint), "--max-new-tokens", "1")
    assert code == 0
    assert out.startswith("--")
    code, _, err = run(capsys, "--prompt", "The", "--model", "")
    assert code == 1
    assert "there is no folder ''" in err
    monkeypatch.setattr(sys, "stdin", None)
    code, _, err = run(capsys, "--prompt", "-", "--model", str(checkpoint))
    assert code == 1
    assert "standard input" in err


def test_what_a_file_says_cannot_drive_the_terminal(checkpoint, tmp_path, capsys):
    folder = damaged(checkpoint, tmp_path, hidden_act="\x1b[2Jkey" + "x" * 9000)
    code, _, err = run(capsys, "--prompt", "The", "--model", str(folder))
    assert code == 1
    assert "\x1b" not in err
    assert len(err) < 4100


@pytest.mark.parametrize("seed", ["-1", str(2**63), "9" * 40])
def test_a_seed_out_of_range_is_named(checkpoint, capsys, seed):
    code, _, err = run(capsys, "--prompt", "The", "--model", str(checkpoint), "--seed", seed)
    assert code == 1
    assert f"--seed {seed}" in err


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
    # A shell that starts the tests in the background has them, and so their children, ignore Ctrl-C.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        preexec_fn=heed,
    )


@pytest.fixture
def endless(checkpoint, tmp_path) -> Path:
    """The checkpoint with a long context and no stop id, to be interrupted."""
    return damaged(checkpoint, tmp_path, max_position_embeddings=10**6, eos_token_id=None)


def text_of(checkpoint: Path, prompt: str, new: int) -> str:
    """What the greedy text adds to the prompt."""
    tokenizer, model = load_tokenizer(checkpoint), load_model(checkpoint, dtype=torch.float32)
    ids = tokenizer.encode(prompt)
    return tokenizer.decode(ids + generate(model, [ids], new, vocab_size=300)[0])[len(prompt) :]


def test_a_stop_string_ends_the_text_and_is_left_out(checkpoint, capsys):
    arguments = ("--prompt", "The", "--model", str(checkpoint), "--temperature", "0", "--stats")
    whole = text_of(checkpoint, "The", 30)
    for stop in (whole[4:9], whole[6:8]):
        code, out, err = run(capsys, *arguments, "--stop", "not there", "--stop", stop)
        assert (code, out) == (0, f"The{whole[: whole.index(stop)]}\n")
        assert err.startswith("parameters")  # and no limit is named
    never = run(capsys, *arguments, "--max-new-tokens", "30", "--stop", whole[-1] + "never")
    assert (never[0], never[1]) == (0, f"The{whole}\n")  # what was held back is shown at the end
    code, out, err = run(capsys, *arguments, "--stop", "")
    assert (code, out, err.count("\n")) == (1, "", 1)


def test_the_checkpoints_own_sampling_is_the_default(checkpoint, tmp_path, capsys):
    folder = damaged(checkpoint, tmp_path)
    arguments = ("--prompt", "The", "--max-new-tokens", "20", "--seed", "3", "--model")
    plain = run(capsys, *arguments, str(checkpoint))
    assert run(capsys, *arguments, str(checkpoint), "--temperature", "0.8") == plain
    settings = folder / "generation_config.json"
    own = {"do_sample": True, "temperature": 1.7, "top_k": 20, "top_p": 0.9}
    settings.write_text(json.dumps(own))
    options = ("--temperature", "1.7", "--top-k", "20", "--top-p", "0.9")
    as_asked = run(capsys, *arguments, str(checkpoint), *options)
    assert run(capsys, *arguments, str(folder)) == as_asked != plain
    greedy = run(capsys, *arguments, str(checkpoint), "--temperature", "0")
    assert run(capsys, *arguments, str(folder), "--temperature", "0") == greedy
    settings.write_text(json.dumps(own | {"do_sample": False}))
    assert run(capsys, *arguments, str(folder)) == greedy
    settings.write_text(json.dumps({"do_sample": True, "top_k": 0}))
    one = run(capsys, *arguments, str(checkpoint), "--temperature", "1")
    assert run(capsys, *arguments, str(folder)) == one
    for values in ({"temperature": "hot"}, {"top_p": 2}, {"top_k": -1}):
        settings.write_text(json.dumps({"do_sample": True} | values))
        code, out, err = run(capsys, *arguments, str(folder))
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert str(settings) in err
        assert next(iter(values)) in err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_are_shown_on_a_terminal_and_passed_to_a_pipe(monkeypatch):
    from llama_mini.cli import show

    text = "\x1b]0;title\x07 tab\t line\n back\r \x7f \x9b2J \x00 é 😀"
    for stream, shown in (
        (Terminal(), "\\x1b]0;title\\x07 tab\t line\n back\\x0d \\x7f \\x9b2J \\x00 é 😀"),
        (io.StringIO(), text),
    ):
        monkeypatch.setattr(sys, "stdout", stream)
        show(text)
        assert stream.getvalue() == shown


def test_what_a_prompt_and_a_model_say_goes_through_show(checkpoint, monkeypatch):
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    assert (
        cli.main(["--prompt", "The\x1b[2J", "--model", str(checkpoint), "--max-new-tokens", "3"])
        == 0
    )
    assert out.getvalue().startswith("The\\x1b[2J")
    assert "\x1b" not in out.getvalue()


@pytest.mark.slow
def test_every_way_to_start_it_is_the_same_command(checkpoint, capsys):
    import generate as script

    assert script.main is cli.main
    arguments = ["--prompt", "The", "--model", str(checkpoint), "--seed", "1"]
    arguments += ["--max-new-tokens", "5"]

    def started(*program: str) -> tuple[int, str, str]:
        command = [sys.executable, *program]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    assert started("generate.py", *arguments) == run(capsys, *arguments)
    code, out, err = started("-m", "llama_mini", "--version")
    assert (code, err) == (0, "")
    assert out.startswith(f"llama-mini {llama_mini.__version__} ")


def test_the_installed_command_is_the_same_function():
    module, name = re.search(
        r'^llama-mini = "([\w.]+):(\w+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    ).groups()
    assert getattr(importlib.import_module(module), name) is cli.main


def test_neither_prompt_nor_chat_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([])
    assert stopped.value.code == 2
    assert "--prompt TEXT" in capsys.readouterr().err


def test_a_package_that_cannot_be_imported_is_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libgomp.so.1: not\\nfound')")
    for program in (["generate.py"], ["-m", "llama_mini"], ["-m", "llama_mini.train"]):
        done = subprocess.run(
            [sys.executable, *program, "--prompt", "x"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert "libgomp.so.1: not found" in done.stderr
        assert "torch" in done.stderr
    code = "try:\n import llama_mini\nexcept OSError: print('raised')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "raised\n"  # who imports the package gets the error itself


def test_compiling_says_what_it_does_and_how_long_it_took(checkpoint, capsys, monkeypatch):
    class Fast:
        def __init__(self, model):
            assert "compiled step" in capsys.readouterr().err
            self.model = model

        def __getattr__(self, name):
            return getattr(self.model, name)

        def __call__(self, *arguments, **options):
            return self.model(*arguments, **options)

    monkeypatch.setattr(cli, "fast_model", Fast)
    arguments = ("--prompt", "The", "--model", str(checkpoint), "--max-new-tokens", "2")
    code, out, err = run(capsys, *arguments, "--compile", "--temperature", "0")
    assert (code, out) == (0, f"The{text_of(checkpoint, 'The', 2)}\n")
    assert re.match(r"ready after \d+\.\d s\n", err)

    def broken(*_):
        raise FileExistsError(17, "File exists", "/some/cache")

    monkeypatch.setattr(cli, "fast_model", broken)
    code, out, err = run(capsys, *arguments, "--compile")
    assert (code, out) == (1, "")
    for word in ("/some/cache", "TORCHINDUCTOR_CACHE_DIR"):
        assert word in err.splitlines()[-1]


@pytest.fixture
def talkative(checkpoint, tmp_path) -> Path:
    """The checkpoint with a chat template and no stop id."""
    folder = damaged(checkpoint, tmp_path, max_position_embeddings=10**6, eos_token_id=None)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_a_conversation_without_a_terminal_reads_a_turn_a_line(talkative, capsys, monkeypatch):
    arguments = ("--chat", "--model", str(talkative), "--temperature", "0", "--system", "Once")
    arguments += ("--max-new-tokens", "6")
    tokenizer, model = load_tokenizer(talkative), load_model(talkative, dtype=torch.float32)

    def answers(*turns: str) -> list[str]:
        messages, said = [{"role": "system", "content": "Once"}], []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            ids = chat_prompt(talkative, tokenizer, messages)
            said.append(tokenizer.decode(generate(model, [ids], 6, vocab_size=300)[0]))
            messages.append({"role": "assistant", "content": said[-1]})
        return said

    def feed(text: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        return run(capsys, *arguments)

    said = answers("The fox", "The dög")
    expected = "".join(f"{text}\n" for text in said)
    assert feed("The fox\n\n \t\r\nThe dög") == (0, expected, stopped_after(6) * 2)
    assert feed("The fox\r\nThe dög\n/exit\nnot this\n") == (0, expected, stopped_after(6) * 2)
    again = "".join(f"{text}\n" for text in [said[0], *answers("The dög")])
    assert feed("The fox\n/reset\nThe dög\n") == (0, again, stopped_after(6) * 2)
    assert feed("") == (0, "", "")
    code, out, err = feed("The fox\n" + "The quick brown fox. " * 10**5)
    assert (code, out) == (1, said[0] + "\n")
    assert "context of 1000000" in err


def test_the_stats_of_a_conversation_without_a_terminal_come_once(talkative, capsys, monkeypatch):
    arguments = ("--chat", "--model", str(talkative), "--max-new-tokens", "6", "--stats")
    decoded = []
    for text in (b"The fox\n", b"The fox\nThe dog\n"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        code, _, err = run(capsys, *arguments)
        turns = text.count(b"\n")
        assert code == 0
        assert err.startswith(stopped_after(6) * turns + "parameters ")
        assert err.count("parameters") == 1
        decoded.append(int(re.search(r"decode +(\d+) tokens", err)[1]))
    assert decoded == [6, 12]


def test_a_conversation_needs_a_template_before_the_first_turn(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"The fox")))
    code, out, err = run(capsys, "--chat", "--model", str(checkpoint))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "chat_template.jinja" in err
    assert sys.stdin.read() == "The fox"


def test_a_conversation_on_a_terminal(talkative):
    """Ctrl-C ends an answer, takes a line back, and never ends the program; Ctrl-D does."""
    main, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "generate.py", "--chat", "--model", str(talkative), "--seed", "1"],
        cwd=ROOT,
        stdin=side,
        stdout=side,
        stderr=side,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(side)
    seen = ""

    def until(done: Callable[[str], bool], key: bytes = b"") -> None:
        """Read up to there, and press `key` every half second: between two reads Python keeps a signal
        for the next key."""
        nonlocal seen
        end = time.monotonic() + 120
        while not done(seen) and time.monotonic() < end:
            os.write(main, key)
            pause = time.monotonic() + 0.5
            while not done(seen) and time.monotonic() < pause:
                if select.select([main], [], [], 0.1)[0]:
                    with suppress(OSError):  # the program has ended
                        seen += os.read(main, 4096).decode(errors="replace")
        assert done(seen), seen

    try:
        until(lambda text: "/reset" in text and text.endswith("> "))
        for turn in (b"The fox\n", b"The dog\n"):
            before = len(seen)
            os.write(main, turn)
            until(lambda text, before=before: len(text) > before + 60)  # an answer that has no end
            until(lambda text, before=before: text[before:].endswith("\n> "), b"\x03" * 5)
        os.write(main, b"half a line")
        until(lambda text: text.endswith("half a line"))
        until(lambda text: text.count("> ") >= 4, b"\x03" * 5)  # as a key that is held down
        assert process.poll() is None
        until(lambda text: process.poll() is not None, b"\x04")
        assert process.wait() == 0
        assert "rror" not in seen
    finally:
        process.kill()
        os.close(main)


@pytest.mark.slow
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


@pytest.mark.slow
def test_text_appears_as_it_is_made(endless):
    process = start(endless, "--max-new-tokens", "1000")
    try:
        process.stdout.read(20)
        early = time.perf_counter()
        process.stdout.read()
        assert time.perf_counter() - early > 0.1  # 1,000 tokens take longer than one buffer
    finally:
        process.kill()
        process.communicate()
