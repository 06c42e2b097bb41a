"""Recording, comparing, and the command line for both."""

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from llama_mini import Llama, LlamaConfig, compare, load_model, load_tokenizer, record
from llama_mini.checkpoint import parse_config
from llama_mini.inspect.__main__ import main
from llama_mini.inspect.record import load_trace, names_of, save_trace
from llama_mini.model import Attention, SwiGLU
from tests.support.fixtures import BASE, draw_tokens, strengthen

TOKENS = draw_tokens((2, 7), seed=0)


@pytest.fixture
def model() -> Llama:
    model = Llama(parse_config({**BASE, "head_dim": 12}))
    strengthen(model, seed=0)
    return model.eval()


@pytest.fixture
def activations(model: Llama) -> dict[str, Tensor]:
    return record(model, TOKENS)


def hooks(model: Llama) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["inspect", *map(str, arguments)])
    return main()


# record


def test_names_and_shapes_in_forward_order(activations: dict[str, Tensor]) -> None:
    block = {
        ".pre_attention_norm": (2, 7, 32),
        ".attention.q": (2, 4, 7, 12),
        ".attention.k": (2, 2, 7, 12),
        ".attention.v": (2, 2, 7, 12),
        ".attention": (2, 7, 32),
        ".pre_ffn_norm": (2, 7, 32),
        ".ffn": (2, 7, 32),
        "": (2, 7, 32),
    }
    expected = {"embed": (2, 7, 32)}
    expected |= {f"blocks.{n}{part}": shape for n in (0, 1) for part, shape in block.items()}
    expected |= {"final_norm": (2, 7, 32), "lm_head": (2, 7, 64)}
    assert [(name, tuple(t.shape)) for name, t in activations.items()] == list(expected.items())
    assert all(t.device.type == "cpu" and t.is_contiguous() for t in activations.values())


def test_values_are_those_of_the_forward_pass(model: Llama, activations: dict[str, Tensor]) -> None:
    with torch.no_grad():
        assert torch.equal(activations["lm_head"], model(TOKENS))
    x, delta = activations["embed"], activations["blocks.0.attention"]
    assert torch.equal(x + delta + activations["blocks.0.ffn"], activations["blocks.0"])
    assert torch.equal(model.final_norm(activations["blocks.1"]), activations["final_norm"])
    assert not any(t.requires_grad for t in activations.values())


def test_patterns_choose(model: Llama, activations: dict[str, Tensor]) -> None:
    chosen = record(model, TOKENS, ["blocks.*.pre_ffn_norm", "embed", "blocks.1.attention.?"])
    assert list(chosen) == [
        "embed",
        "blocks.0.pre_ffn_norm",
        "blocks.1.attention.q",
        "blocks.1.attention.k",
        "blocks.1.attention.v",
        "blocks.1.pre_ffn_norm",
    ]
    assert all(torch.equal(t, activations[name]) for name, t in chosen.items())
    logits = record(model, TOKENS, ["lm_head"])["lm_head"]
    assert torch.equal(logits, activations["lm_head"])


def test_logits_that_nobody_asked_for_are_those_of_one_position(model: Llama) -> None:
    seen = []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    for names in (["blocks.*"], ["lm_head"], ["final_norm", "embed"]):
        record(model, TOKENS, names)
    assert seen == [1, 7, 7]


@pytest.mark.parametrize("pattern", ["blocks.2.ffn", "model.norm", "blocks.?.q", ""])
def test_a_pattern_that_matches_nothing(model: Llama, pattern: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{pattern!r}") + ".* embed, "):
        record(model, TOKENS, ["embed", pattern])
    assert hooks(model) == 0


def test_hooks_are_gone_afterwards(model: Llama) -> None:
    seen = []
    model.embed.register_forward_hook(lambda *_: seen.append(1))  # somebody's own stays
    record(model, TOKENS)
    assert hooks(model) == 1
    with pytest.raises(IndexError):
        record(model, torch.tensor([[0, 64]]))  # 64 ids: 0 to 63
    assert hooks(model) == 1
    assert seen


def test_an_edit_of_the_result_does_not_reach_the_model(model: Llama) -> None:
    before = model.embed.weight.clone()
    for tensor in record(model, TOKENS).values():
        tensor.zero_()
    assert torch.equal(model.embed.weight, before)


class Behind(nn.Module):
    """A block with its norms behind the sublayers, as OLMo 2 has it, and a part that is none of ours."""

    def __init__(self, config: LlamaConfig, norm: type[nn.Module]) -> None:
        super().__init__()
        self.post_ffn_norm = norm(config.hidden_size, config.rms_norm_eps)
        self.gate = nn.Identity()
        self.post_attention_norm = norm(config.hidden_size, config.rms_norm_eps)
        self.ffn = SwiGLU(config)
        self.attention = Attention(config, norm)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        x = x + self.post_attention_norm(self.attention(x, *rest))
        x = x + self.post_ffn_norm(self.ffn(x))
        return self.gate(x)


def test_other_families_have_names_of_their_own(tmp_path: Path) -> None:
    model = Llama(parse_config(BASE), block=Behind).eval()
    parts = (
        "attention.q attention.k attention.v attention post_attention_norm ffn post_ffn_norm gate"
    )
    inside = [f"blocks.{n}.{part}".rstrip(".") for n in (0, 1) for part in (*parts.split(), "")]
    recorded = record(model, TOKENS)
    assert list(recorded) == ["embed", *inside, "final_norm", "lm_head"] == names_of(model)
    assert torch.equal(recorded["blocks.0.gate"], recorded["blocks.0"])
    save_trace(tmp_path / "trace", recorded, {})  # which refuses tensors that share their memory
    assert list(compare(recorded, load_trace(tmp_path / "trace"))) == list(recorded)


def test_one_name_per_part_of_the_model(model: Llama, activations: dict[str, Tensor]) -> None:
    assert names_of(model) == list(activations)


# compare


def test_equal_activations(activations: dict[str, Tensor]) -> None:
    differences = compare(activations, activations)
    assert list(differences) == list(activations)
    assert set(differences.values()) == {(0.0, 0.0)}


def test_the_first_injected_difference_shows(activations: dict[str, Tensor]) -> None:
    other = {name: t.clone() for name, t in reversed(activations.items())}
    other["blocks.0.ffn"][1, 3, 5] += 0.25
    other["final_norm"] += 0.5
    differences = compare(activations, other)
    assert list(differences) == list(activations)
    assert [name for name, d in differences.items() if d.absolute] == ["blocks.0.ffn", "final_norm"]
    largest = activations["blocks.0.ffn"].abs().max().item()
    assert differences["blocks.0.ffn"].absolute == pytest.approx(0.25, rel=1e-5)
    assert differences["blocks.0.ffn"].relative == pytest.approx(0.25 / largest, rel=1e-5)


def test_blocks_are_ordered_by_number() -> None:
    names = ["embed", "blocks.2.attention.q", "blocks.2", "blocks.10.ffn", "final_norm", "mine"]
    trace = dict.fromkeys(sorted(names), torch.ones(1))
    assert list(compare(trace, trace)) == names


def test_names_of_one_side_alone_and_tokens_are_left_out(activations: dict[str, Tensor]) -> None:
    by_hand = {"lm_head": activations["lm_head"], "embed": activations["embed"], "own": TOKENS}
    assert list(compare({**activations, "tokens": TOKENS}, {**by_hand, "tokens": TOKENS})) == [
        "embed",
        "lm_head",
    ]


def test_nothing_in_common() -> None:
    with pytest.raises(ValueError, match="name"):
        compare({"embed": TOKENS, "tokens": TOKENS}, {"model.embed": TOKENS, "tokens": TOKENS})


def test_shapes_that_differ_are_named() -> None:
    with pytest.raises(ValueError, match=r"embed .*\(2, 7\).*\(7, 2\)"):
        compare({"embed": TOKENS}, {"embed": TOKENS.T})


@pytest.mark.parametrize(
    ("reference", "other", "absolute", "relative"),
    [
        ([1.0, math.nan], [1.0, math.nan], 0.0, 0.0),
        ([1.0, 2.0], [1.0, math.nan], math.inf, math.inf),
        ([1.0, math.nan], [1.0, 2.0], math.inf, math.inf),
        ([1.0, math.inf], [1.0, math.inf], 0.0, 0.0),
        ([2.0, math.inf], [1.0, math.inf], 1.0, 0.5),
        ([1.0, math.inf], [1.0, -math.inf], math.inf, math.inf),
        ([1.0, math.inf], [1.0, 2.0], math.inf, math.inf),
        ([1.0, 2.0], [1.0, math.inf], math.inf, math.inf),
        ([0.0, 0.0], [0.0, 0.0], 0.0, 0.0),
        ([0.0, 0.0], [0.0, 1.0], 1.0, math.inf),
        ([-4.0, 2.0], [-4.0, 1.0], 1.0, 0.25),
        ([], [], 0.0, 0.0),
    ],
)
def test_values_that_are_not_numbers(
    reference: list[float], other: list[float], absolute: float, relative: float
) -> None:
    found = compare({"embed": torch.tensor(reference)}, {"embed": torch.tensor(other)})
    assert found["embed"] == (absolute, relative)


@pytest.mark.parametrize(
    ("reference", "other", "absolute"),
    [
        ([2**53], [2**53 + 1], 1.0),
        ([2**53 + 1, 5], [2**53 + 1, 7], 2.0),
        ([-(2**63)], [2**63 - 1], 2.0**64),
        ([2**62 + 1], [2**62 + 1], 0.0),
        ([3], [5], 2.0),
    ],
)
def test_integers_are_compared_exactly(
    reference: list[int], other: list[int], absolute: float
) -> None:
    found = compare({"mine": torch.tensor(reference)}, {"mine": torch.tensor(other)})
    assert found["mine"].absolute == absolute
    scale = max(map(abs, reference))
    assert found["mine"].relative == pytest.approx(absolute / scale, rel=1e-12)


def test_wide_integers_beside_floats_are_refused() -> None:
    wide, narrow = torch.tensor([2**53 + 1]), torch.tensor([7])
    for a, b in ((wide, wide.double()), (wide.double(), wide)):
        with pytest.raises(ValueError, match=r"^mine .*2\^53"):
            compare({"mine": a}, {"mine": b})
    assert compare({"mine": narrow}, {"mine": narrow.double()})["mine"] == (0.0, 0.0)
    huge = torch.tensor([2**63 + 1], dtype=torch.uint64)
    assert compare({"mine": huge}, {"mine": huge})["mine"].absolute == 0.0
    assert compare({"mine": huge}, {"mine": torch.tensor([1])})["mine"].absolute == 2.0**63


def test_other_dtypes_are_compared_by_value() -> None:
    a = torch.tensor([1.0, 0.1])
    rounded = a.bfloat16()
    found = compare({"embed": a}, {"embed": rounded})["embed"].absolute
    assert found == abs(a[1].item() - rounded[1].item()) > 0
    assert compare({"embed": a.double()}, {"embed": a})["embed"].absolute == 0.0


# Files


def test_a_trace_file_holds_what_was_recorded(
    tmp_path: Path, activations: dict[str, Tensor]
) -> None:
    path = tmp_path / "trace.safetensors"
    save_trace(path, {"tokens": TOKENS, **activations}, {"prompt": "x"})
    loaded = load_trace(path)
    assert torch.equal(loaded.pop("tokens"), TOKENS)
    assert loaded.keys() == activations.keys()
    assert set(compare(activations, loaded).values()) == {(0.0, 0.0)}
    assert os.listdir(tmp_path) == ["trace.safetensors"]


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, activations: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.safetensors"
    path.write_bytes(b"old")

    def fail(tensors: object, filename: Path, metadata: object) -> None:
        Path(filename).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match=r"trace\.safetensors .*no space left"):
        save_trace(path, activations, {})
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["trace.safetensors"]


# The command line


def test_recording_a_checkpoint(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "trace.safetensors"
    options = ("record", "--model", checkpoint, "--prompt", "Once upon a time", "--out", out)
    assert run(monkeypatch, *options) == 0
    tokens = torch.tensor([load_tokenizer(checkpoint).encode("Once upon a time")])
    expected = record(load_model(checkpoint, dtype=torch.float32), tokens)
    trace = load_file(out)
    assert torch.equal(trace.pop("tokens"), tokens)
    assert trace.keys() == expected.keys()
    assert all(torch.equal(trace[name], tensor) for name, tensor in expected.items())
    with safe_open(out, framework="pt") as file:
        assert file.metadata()["prompt"] == "Once upon a time"
    assert str(out) in capsys.readouterr().out

    assert run(monkeypatch, *options, "--names", "embed", "--dtype", "bfloat16") == 0
    trace = load_file(out)
    assert trace.keys() == {"tokens", "embed"}
    assert trace["embed"].dtype == torch.bfloat16


@pytest.fixture
def files(tmp_path: Path, activations: dict[str, Tensor]) -> tuple[Path, Path]:
    """A reference, and a trace that differs from blocks.1.attention on."""
    other = {name: t.clone() for name, t in activations.items()}
    for name in ("blocks.1.attention", "blocks.1", "lm_head"):
        other[name] += 0.5
    paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for path, tensors in zip(paths, (activations, other), strict=True):
        save_file({"tokens": TOKENS, **tensors}, path)
    return paths


def test_comparing_files(
    files: tuple[Path, Path],
    activations: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, "compare", *files) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == list(activations)
    marked = [line.split()[0] for line in lines if "<-" in line]
    assert marked == ["blocks.1.attention"]
    assert lines[-1].startswith("first to differ: blocks.1.attention, by 0.5 ")


def test_comparing_equal_files(
    files: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, "compare", files[0], files[0]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert [word in last.split() for word in ("19", "1e-05")] == [True] * 2


@pytest.mark.parametrize(
    ("share", "options", "code"),
    [
        (0.9e-5, [], 0),
        (1.1e-5, [], 1),
        (0.9e-5, ["--tolerance", "0"], 1),
        (0.1, ["--tolerance", "0.2"], 0),
    ],
)
def test_a_tolerance_is_relative_to_the_largest_value(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    share: float,
    options: list[str],
    code: int,
) -> None:
    a = torch.tensor([[[1.0, -400.0]]], dtype=torch.float64)
    paths = tmp_path / "a", tmp_path / "b"
    for path, tensor in zip(paths, (a, a + torch.tensor([400 * share, 0.0])), strict=True):
        save_file({"embed": tensor}, path)
    assert run(monkeypatch, "compare", *paths, *options) == code
    assert ("first to differ: embed" in capsys.readouterr().out) == bool(code)


def test_names_that_one_file_lacks_are_no_agreement(
    files: tuple[Path, Path],
    activations: dict[str, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = tmp_path / "few"
    save_file({"embed": activations["embed"], "lm_head": activations["lm_head"]}, few)
    for pair in ((files[0], few), (few, files[0])):
        assert run(monkeypatch, "compare", *pair) == 1
        out = capsys.readouterr().out
        assert "17" in out.splitlines()[-1].split()
        assert f"only in {files[0]}: blocks.0.pre_attention_norm, " in out
    chosen = ("--names", "embed", "--names", "lm_*")
    assert run(monkeypatch, "compare", files[0], few, *chosen) == 0
    assert run(monkeypatch, "compare", files[0], few, *chosen, "--names", "final_norm") == 1


def test_the_exit_code_does_not_hang_on_the_reader(files: tuple[Path, Path]) -> None:
    command = [sys.executable, "-m", "llama_mini.inspect", "compare", *map(str, files)]
    reader, writer = os.pipe()
    os.close(reader)  # nobody reads a line
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("name", "positions", "says"),
    [
        ("blocks.0.attention.q", [1, 5], "rotation?"),
        ("blocks.1.attention.k", [2], "rotation?"),
        ("blocks.0.attention", [1, 2, 3, 4, 5, 6], "rotation, or the mask?"),
        ("blocks.0.attention.q", [0, 1], None),
        ("blocks.1.ffn", [0], None),
        ("blocks.0.attention.v", [0, 1, 2, 3, 4, 5, 6], None),
    ],
)
def test_a_first_position_that_agrees_is_a_hint(
    activations: dict[str, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    positions: list[int],
    says: str | None,
) -> None:
    other = {key: tensor.clone() for key, tensor in activations.items()}
    other[name][..., positions, :] += 0.5
    paths = tmp_path / "a", tmp_path / "b"
    for path, tensors in zip(paths, (activations, other), strict=True):
        save_file(tensors, path)
    assert run(monkeypatch, "compare", *paths) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split()[3] == f"{name},"
    assert last.endswith(says) if says else "?" not in last


def test_a_model_that_rotates_wrongly_is_found(
    model: Llama, tmp_path: Path, monkeypatch, capsys
) -> None:
    save_trace(tmp_path / "a", record(model, TOKENS), {})
    model.config = dataclasses.replace(
        model.config, rope=dataclasses.replace(model.config.rope, rope_theta=500.0)
    )
    save_trace(tmp_path / "b", record(model, TOKENS), {})
    assert run(monkeypatch, "compare", tmp_path / "a", tmp_path / "b") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert (last.split()[3], last.split()[-1]) == ("blocks.0.attention.q,", "rotation?")


def test_a_trace_written_by_hand(
    files: tuple[Path, Path],
    activations: dict[str, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    by_hand = tmp_path / "by_hand.safetensors"
    wrong = activations["final_norm"] + 1
    save_file({"final_norm": wrong, "embed": activations["embed"], "mine": TOKENS}, by_hand)
    assert run(monkeypatch, "compare", files[0], by_hand) == 1
    out = capsys.readouterr().out
    table = out[out.index("absolute") :].splitlines()[1:3]
    assert [line.split()[0] for line in table] == ["embed", "final_norm"]
    assert "first to differ: final_norm, by 1 " in out
    assert f"only in {by_hand}: mine\n" in out
    assert f"only in {files[0]}: blocks.0.pre_attention_norm, blocks.0.attention.q, " in out


def test_wrong_input_is_one_line_and_exit_code_1(
    files: tuple[Path, Path],
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def trace(name: str, tensors: dict[str, Tensor]) -> Path:
        save_file(tensors, tmp_path / name)
        return tmp_path / name

    a, _ = files
    text = tmp_path / "text.safetensors"
    text.write_text("not safetensors")
    recording = ("--prompt", "Once", "--out", tmp_path / "out.safetensors")
    gone, shaped = tmp_path / "gone", trace("s", {"embed": TOKENS})
    others = trace("t", {"tokens": TOKENS + 1, "embed": TOKENS})
    a_model = ("record", "--model", checkpoint)
    cases: list[tuple[list[object], tuple[object, ...]]] = [
        ([gone], ("compare", a, gone)),
        ([f"{tmp_path} is a folder"], ("compare", a, tmp_path)),
        ([f"{text} is no trace file", "safetensors"], ("compare", text, a)),
        (["/dev/null is a device"], ("compare", "/dev/null", a)),
        ([a, others, "tokens"], ("compare", a, others)),
        (["embed", (2, 7, 32), (2, 7)], ("compare", a, shaped)),
        (["name"], ("compare", a, trace("n", {"model.norm": TOKENS}))),
        (["'mlp'", "embed"], ("compare", a, a, "--names", "mlp")),
        (["--tolerance", "nan"], ("compare", a, a, "--tolerance", "nan")),
        (["--tolerance", "-1"], ("compare", a, a, "--tolerance", "-1")),
        ([gone], ("record", "--model", gone, *recording)),
        (["'mlp'", "embed"], (*a_model, *recording, "--names", "mlp")),
        *(
            ([f"--out {out}", what], ("record", "--model", gone, "--prompt", "a", "--out", out))
            for out, what in (
                (tmp_path / "no" / "x", f"no folder {tmp_path / 'no'}"),
                (tmp_path, "is a folder"),
                (text / "x", f"no folder {text}"),
                ("/dev/null", "a device"),
            )
        ),
    ]
    if not torch.cuda.is_available():
        cases.append((["--device cuda"], (*a_model, *recording, "--device", "cuda")))
    for values, arguments in cases:
        assert run(monkeypatch, *arguments) == 1, values
        out, err = capsys.readouterr()
        assert err.startswith("error: "), values
        assert err.count("\n") == 1, err
        assert all(str(value) in err for value in values), err
        assert out == "", values
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    "out", ["model.safetensors", "config.json", "tokenizer.model", "link", "hard"]
)
def test_a_trace_does_not_take_the_place_of_the_checkpoint(
    checkpoint: Path, tmp_path: Path, monkeypatch, capsys, out: str
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder)
    (tmp_path / "link").symlink_to(folder / "model.safetensors")
    (tmp_path / "hard").hardlink_to(folder / "model.safetensors")
    path = folder / out if (folder / out).exists() else tmp_path / out
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    options = ("record", "--model", folder, "--prompt", "The", "--names", "embed", "--out")
    assert run(monkeypatch, *options, path) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: --out {path}: ")
    assert str(folder) in err
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert run(monkeypatch, *options, folder / "trace.safetensors") == 0
    assert run(monkeypatch, *options, folder / "trace.safetensors") == 0  # its own may be replaced


def test_a_trace_does_not_take_the_place_of_shards(
    checkpoint: Path, tmp_path: Path, monkeypatch
) -> None:
    folder = tmp_path / "sharded"
    shutil.copytree(checkpoint, folder)
    shard = folder / "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(shard)
    index = {"weight_map": dict.fromkeys(load_file(shard), shard.name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    options = ("record", "--model", folder, "--prompt", "The", "--names", "embed", "--out")
    read_first = ("model.safetensors", "consolidated.safetensors", "consolidated.00.safetensors")
    for name in (shard.name, *read_first):  # before the shards, or beside a params.json
        assert run(monkeypatch, *options, folder / name) == 1
    assert not any((folder / name).exists() for name in read_first)


@pytest.mark.parametrize(
    ("module", "now"),
    [
        ("record", "record"),
        ("norm_report", "norms"),
        ("inspect.record", "record"),
        ("inspect.norm_report", "norms"),
    ],
)
def test_old_commands_say_where_they_are(module: str, now: str) -> None:
    command = [sys.executable, "-m", f"llama_mini.{module}", "--model", "x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"error: llama_mini.{module} ")
    assert f"python -m llama_mini.inspect {now}" in done.stderr


def test_a_trace_is_read_as_carefully_as_a_checkpoint(tmp_path, capsys) -> None:
    good, long = tmp_path / "good.safetensors", tmp_path / "long.safetensors"
    save_file({"embed": torch.ones(2), "odd\x1b[31m\nname": torch.ones(2)}, good)
    entries = b",".join(
        b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % n for n in range(40_000)
    )
    long.write_bytes((len(entries) + 2).to_bytes(8, "little") + b"{" + entries + b"}")
    assert main(["compare", str(good), str(long)]) == 1
    assert str(long) in capsys.readouterr().err
    assert main(["compare", str(good), str(good)]) == 0
    assert "\x1b" not in capsys.readouterr().out
