"""Ctrl-C, SIGTERM, kill -9, full disks and folders that nobody can write to: what stood before stands,
and one line says what happened.

Most commands run in a fork of the tests' process, which has imported torch already.
"""

import hashlib
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from llama_mini import __main__ as cli
from llama_mini import load_model
from llama_mini.checkpoint.files import replace
from llama_mini.cli import Interruptible, on_stop, require_place, run_command, stop
from llama_mini.train import __main__ as train
from llama_mini.train.recipe import Recipe
from llama_mini.train.state import STATE, read_state
from tests.support.fixtures import require
from tests.support.processes import ROOT, Fork, damaged
from tests.support.training import OPTIONS, TINY, documents, stop_at

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PROMPT = "The quick brown fox jumps over the lazy dog. " * 400


@pytest.fixture
def endless(checkpoint, tmp_path) -> Path:
    """The checkpoint with a long context and no stop id, to be interrupted."""
    return damaged(checkpoint, tmp_path, max_position_embeddings=10**6, eos_token_id=None)


def generating(folder: Path, prompt: str = "The") -> Callable[[], int]:
    arguments = ["--model", str(folder), "--prompt", prompt, "--max-new-tokens", "50000"]
    return lambda: cli.main(arguments)


def test_ctrl_c_ends_an_attempt_at_most_once_and_nothing_else():
    """A key that is held down may send it while an earlier one is being cleared away."""
    pressed: list[str] = []

    def press(where: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        pressed.append(where)

    def answer() -> str:
        try:
            press("answering")
        finally:
            press("clearing")
        return "whole"

    with Interruptible() as ctrl_c:
        press("before")
        assert ctrl_c.attempt(answer, "ended") == "ended"
        press("between")
        assert ctrl_c.attempt(lambda: "whole", "ended") == "whole"
        with pytest.raises(ZeroDivisionError):
            ctrl_c.attempt(lambda: 1 / 0, None)
        press("after an error")
        assert ctrl_c.attempt(answer, "ended") == "ended"
        with pytest.raises(KeyboardInterrupt):  # SIGTERM
            ctrl_c.attempt(lambda: stop(signal.SIGTERM), None)
    assert pressed == ["before", "clearing", "between", "after an error", "clearing"]
    with pytest.raises(KeyboardInterrupt):
        press("outside")


@pytest.mark.parametrize("number", SIGNALS)
def test_the_text_so_far_is_kept(endless, number):
    fork = Fork(generating(endless))
    text = os.read(fork.out, 3) + os.read(fork.out, 3) + os.read(fork.out, 3)
    os.kill(fork.pid, number)
    os.kill(fork.pid, number)  # as timeout and torchrun do
    code, rest, err = fork.finish()
    assert (code, err) == (128 + number, "")
    assert text.startswith(b"The")
    assert rest.endswith("\n")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_stop_that_a_library_swallows_comes_with_the_next_token(endless, number, monkeypatch):
    def load(checkpoint, *how):
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), number)
            time.sleep(60)
        return load_model(checkpoint, *how)

    monkeypatch.setattr("llama_mini.__main__.load_model", load)
    code, text, err = Fork(generating(endless)).finish()
    assert (code, err) == (128 + number, "")
    assert len(text) < 50


@pytest.mark.parametrize("number", SIGNALS)
def test_in_prefill_the_prompt_is_what_is_kept(endless, number):
    fork = Fork(generating(endless, PROMPT))
    text = b""
    while len(text) < len(PROMPT):
        text += os.read(fork.out, len(PROMPT) - len(text))
    os.kill(fork.pid, number)
    code, rest, err = fork.finish()
    assert (code, rest, err) == (128 + number, "\n", "")  # prefill takes longer than a signal


@pytest.mark.parametrize("number", SIGNALS)
def test_while_loading_nothing_is_said(endless, number, monkeypatch):
    def load(*_: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    monkeypatch.setattr("llama_mini.__main__.load_model", load)
    assert Fork(generating(endless)).finish() == (128 + number, "", "")


@pytest.mark.slow
def test_at_any_moment(endless):
    """Half of them after the first character, which comes before prefill; half from the start on."""
    moments = random.Random(0)
    for turn in range(16):
        number, text = moments.choice(SIGNALS), b""
        begun, tell = os.pipe()

        def command(tell: int = tell) -> int:
            run = generating(endless)
            return run_command(lambda: os.write(tell, b"x") and run())

        fork = Fork(command)
        os.close(tell)
        os.read(begun, 1)
        os.close(begun)
        if turn % 2:
            text = os.read(fork.out, 1)
        time.sleep(moments.uniform(0, 0.1))
        os.kill(fork.pid, number)
        code, rest, err = fork.finish()
        assert (code, err) == (128 + number, "")
        text += rest.encode()
        assert text == b"" or (text.startswith(b"The") and text.endswith(b"\n"))


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ([str(ROOT / "generate.py"), "--prompt", "x"], "argparse"),
        ([str(ROOT / "generate.py"), "--prompt", "x"], "torch.version"),
        (["-m", "llama_mini.inspect", "compare", "x", "x"], "torch.version"),
    ],
)
@pytest.mark.parametrize("number", SIGNALS)
def test_while_modules_are_imported(command, module, number):
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", *command],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    assert any(line.split()[-1] == module for line in process.stderr)
    process.send_signal(number)
    assert "Traceback" not in process.stderr.read()
    assert process.wait() == 128 + number


def test_a_second_wish_a_second_later_does_what_it_did_before(monkeypatch):
    clock, seen = [100.0], []
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    before = {number: signal.signal(number, lambda n, _: seen.append(-n)) for number in SIGNALS}
    try:
        with on_stop(seen.append):
            for clock[0] in (100.0, 100.9, 101.1):
                for number in SIGNALS:
                    signal.raise_signal(number)
        signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert seen == [2, -2, -15, -2]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_file_being_written_stays_as_it_was(tmp_path, number):
    path = tmp_path / "file"
    path.write_text("before")

    def write(temporary: Path) -> None:
        temporary.write_text("half")
        signal.raise_signal(number)

    with pytest.raises(KeyboardInterrupt), on_stop(stop):
        replace(path, write)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "before"


# Training


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "tales.txt"
    path.write_text("".join(f"{d}\n<|endoftext|>\n" for d in documents(60)), encoding="utf-8")
    return path


def training(text: Path, out: Path, *more: str) -> Callable[[], int]:
    arguments = ["--text", str(text), "--out", str(out), *OPTIONS, "--steps", "2000", *more]
    return lambda: train.main(arguments)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_training_says_how_to_go_on(text, tmp_path, number):
    fork = Fork(training(text, tmp_path))
    while b"step 10/" not in os.read(fork.err, 1000):
        pass
    os.kill(fork.pid, number)
    code, out, err = fork.finish()
    assert (code, out) == (128 + number, "")
    assert err.splitlines()[-1] == "stopped; the same command goes on from here"
    assert torch.load(tmp_path / STATE, weights_only=True)["step"] >= 10
    assert [file.name for file in tmp_path.iterdir()] == [STATE]


def test_a_training_nobody_listens_to_keeps_its_state(text, tmp_path):
    fork = Fork(training(text, tmp_path))
    while b"step 10/" not in os.read(fork.err, 1000):
        pass
    os.close(fork.err)
    fork.err = -1
    assert fork.finish() == (0, "", "")
    assert torch.load(tmp_path / STATE, weights_only=True)["step"] >= 10


@pytest.mark.slow
def test_killed_while_it_writes_the_state_is_the_old_or_the_new_one(text, tmp_path):
    recipe = Recipe(**{**vars(TINY), "steps": 2000})

    def command() -> int:
        train.train(text, tmp_path, recipe, lambda *_: None, save_seconds=0)
        return 0

    moments, steps = random.Random(1), [0]
    state = tmp_path / STATE
    for _ in range(4):
        fork, seen = Fork(command), set()
        while len(seen) < 3:  # what was there, the one at the start, that of a step
            seen.add(state.stat().st_mtime_ns if state.exists() else 0)
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.05))
        os.kill(fork.pid, signal.SIGKILL)
        assert fork.finish() == (-9, "", "")
        steps.append(torch.load(state, weights_only=True)["step"])
        assert len(list(tmp_path.iterdir())) <= 2  # the state, and at most what this one left
    assert steps == sorted(steps)
    assert steps[-1] >= 4


# Disks


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file can grow beyond so many bytes: a disk that is full says it in the same way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def one_line_about(path: Path, result: tuple[int, str, str]) -> None:
    code, out, err = result
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith(f"error: {path} cannot be written: ")
    assert "Traceback" not in err


def test_full_disk_at_once_and_later(text, tmp_path, monkeypatch, capsys):
    with full_disk(2000):
        code = training(text, tmp_path / "new")()
    one_line_about(tmp_path / "new" / STATE, (code, *capsys.readouterr()))
    assert not (tmp_path / "new").exists()  # it would be empty

    train.train(text, tmp_path, TINY, stop_at(10))
    monkeypatch.setattr(train, "show", stop_at(20))
    save = torch.save
    room = iter([10**9, 2000])  # at the start, at the end

    def write(state: object, file: object) -> None:
        save(state, file)
        resource.setrlimit(resource.RLIMIT_FSIZE, (next(room), -1))

    monkeypatch.setattr(torch, "save", write)
    with full_disk(10**9):
        code = train.main(["--text", str(text), "--out", str(tmp_path), *OPTIONS])
    one_line_about(tmp_path / STATE, (code, *capsys.readouterr()))
    assert sorted(file.name for file in tmp_path.iterdir()) == [STATE]
    assert read_state(tmp_path, TINY, hashlib.sha256(text.read_bytes()).hexdigest())


def test_full_disk_while_recording_and_drawing(checkpoint, tmp_path, capsys):
    require("matplotlib")
    from llama_mini.inspect.__main__ import main

    model = ["--model", str(checkpoint), "--prompt", "The fox"]
    for command, option, name in (
        ("record", "--out", "trace.safetensors"),
        ("norms", "--plot", "norms.svg"),
        ("norms", "--plot", "norms.png"),
    ):
        (tmp_path / name).write_text("before")
        with full_disk(2000):
            code = main([command, *model, option, str(tmp_path / name)])
        one_line_about(tmp_path / name, (code, *capsys.readouterr()))
        assert (tmp_path / name).read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 3


def test_the_code_of_a_command_that_has_ended_outlives_its_reader():
    code = "from llama_mini.cli import run_command; exit(run_command(lambda: print('x') or 3))"
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONUNBUFFERED": ""}  # unbuffered, print itself would end it
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, stdout=writer, cwd=ROOT, env=environment, check=False)
    os.close(writer)
    assert done.returncode == 3


def test_full_disk_under_standard_output(tmp_path):
    def command() -> int:
        with full_disk(2000):
            return run_command(lambda: print("x" * 10_000))

    with (tmp_path / "out").open("w") as file:
        code, _, err = Fork(command, file.fileno()).finish()
    assert code == 1
    assert err == "error: standard output cannot be written: File too large\n"


def test_a_folder_that_cannot_be_written_to(text):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tales.txt").write_bytes(text.read_bytes())
        (folder / "trace").write_text("before")
        folder.chmod(0o555)

        def as_nobody(command: Callable[[], int]) -> tuple[int, str, str]:
            def run() -> int:
                if os.getuid() == 0:  # who may write everywhere
                    os.setuid(65534)
                return command()

            return Fork(run).finish()

        code, out, err = as_nobody(training(folder / "tales.txt", folder / "out"))
        assert (code, out) == (1, "")
        last = err.splitlines()[-1]  # behind the first lines of progress
        assert last.startswith("error: ")
        assert str(folder / "out") in last
        assert "Traceback" not in err
        code, out, err = as_nobody(training(folder / "tales.txt", folder))
        assert (code, out) == (1, "")
        assert err.splitlines()[-1].startswith(f"error: {folder} cannot be written to")
        trace = sys.modules["llama_mini.inspect.record"]
        tokens = {"tokens": torch.zeros(1, 1)}
        saved = as_nobody(
            lambda: run_command(lambda: trace.save_trace(folder / "trace", tokens, {}))
        )
        one_line_about(folder / "trace", saved)
        assert (folder / "trace").read_text() == "before"
        for mode in (0o555, 0o600):  # may be read; may not even be looked into
            folder.chmod(mode)
            for path in (folder / "trace", folder / "new"):
                refused = as_nobody(lambda at=path: run_command(lambda: require_place(at, "--out")))
                said = f"error: --out {path}: nothing can be written in {folder}\n"
                assert refused == (1, "", said)
        folder.chmod(0o755)
