"""The measurements of a model: what they count and compare. How fast this machine is, no test can say."""

import dataclasses
import json
import sys
import time
import types
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from llama_mini.bench import __main__ as bench
from llama_mini.bench import limits, ways
from llama_mini.bench import model as bench_model
from llama_mini.bench.shapes import SHAPES, random_model
from llama_mini.bench.table import COLUMNS, PHASES, WAYS
from llama_mini.bench.ways import Pass, middle
from llama_mini.checkpoint import open_checkpoint, parse_config
from llama_mini.train.recipe import Recipe
from tests.support.fixtures import BASE, SHIPPED, random_llama, require

NEW = 5  # tokens
PROMPT = 7
BATCH = 2


# The report of a model


@pytest.fixture
def small(monkeypatch):
    """Limits measured on next to nothing."""
    monkeypatch.setattr(limits, "BUFFER_BYTES", {"cpu": 2**16})
    monkeypatch.setattr(limits, "MATRIX", {"cpu": 16})
    monkeypatch.setattr(ways, "rate", partial(limits.rate, seconds=0.001))


def arguments(*more: str) -> list[str]:
    sizes = {"--batch": BATCH, "--prompt-tokens": PROMPT, "--new-tokens": NEW, "--runs": 1}
    device = ["--device", "cpu"]
    return [*device, *(str(word) for item in sizes.items() for word in item), *more]


def report_of(capsys, *more: str) -> dict:
    assert bench.main(arguments(*more, "--json")) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_report_of_a_checkpoint(small, checkpoint, capsys):
    transformers = require("transformers")
    report = report_of(capsys, "--model", str(checkpoint), "--against", "transformers")
    assert report["machine"]["transformers"] == transformers.__version__
    model, ways = report["model"], report["ways"]
    names = ["plain", "all cores", "all cores, stream", "transformers"]
    assert [way["way"] for way in ways] == names
    assert [way["same_tokens"] for way in ways] == [NEW] * 4
    assert model["dtype"] == "float32"
    assert model["weight_bytes"] == 4 * model["parameters"]
    for way in ways:
        prefill, decode = (
            {key: value["median"] for key, value in way[phase].items()}
            for phase in ("prefill", "decode")
        )
        near = partial(pytest.approx, rel=1e-9)
        assert prefill["tokens_per_second"] * prefill["seconds"] == near(BATCH * PROMPT)
        assert decode["tokens_per_second"] * decode["seconds"] == near(BATCH)
        operations = prefill["operations_per_second"] * prefill["seconds"]
        assert operations == near(model["prefill_operations"])
        assert decode["bytes_per_second"] * decode["seconds"] == near(model["step_bytes"])
        for numbers, other in ((prefill, ways[3]["prefill"]), (decode, ways[3]["decode"])):
            theirs = other["tokens_per_second"]["median"]
            assert numbers["to_transformers"] == near(numbers["tokens_per_second"] / theirs)
    load = report["load"]
    size = (checkpoint / "model.safetensors").stat().st_size
    assert load["bytes_per_second"]["median"] * load["seconds"]["median"] == pytest.approx(size)
    memory = report["memory"]
    assert 0 < memory["before"] <= memory["peak"]


def test_report_of_a_shape_in_bfloat16(small, capsys):
    require("transformers")
    more = ("--shape", "stories", "--dtype", "bfloat16", "--against", "transformers")
    report = report_of(capsys, *more)
    assert report["load"] is None
    assert report["model"]["weight_bytes"] == 2 * report["model"]["parameters"]
    assert [way["same_tokens"] for way in report["ways"]] == [NEW] * 4


@pytest.fixture
def fake_fast(monkeypatch):
    """A compiled form whose first step takes 1,000 ticks of a clock; all else that looks at it takes 1."""
    ticks = 0

    def tick() -> int:
        nonlocal ticks
        ticks += 1
        return ticks

    class Fast:
        sign = 1

        def __init__(self, model):
            self.model, self.config, self.embed = model, model.config, model.embed
            self.compiled = False

        def __call__(self, tokens, **options):
            nonlocal ticks
            if tokens.shape[1] == 1 and not self.compiled:
                self.compiled = True
                ticks += 1000
            return self.sign * self.model(tokens, **options)

    monkeypatch.setattr(bench_model, "fast_model", Fast)
    monkeypatch.setattr(ways, "time", types.SimpleNamespace(perf_counter=tick))
    return Fast


@pytest.mark.parametrize(("sign", "same"), [(1, NEW), (-1, 0)])
def test_compiled_way_with_the_seconds_of_its_first_step(
    small, checkpoint, fake_fast, capsys, sign, same
):
    fake_fast.sign = sign
    found = report_of(capsys, "--model", str(checkpoint), "--compile")["ways"]
    names = ["plain", "all cores", "all cores, stream", "compiled", "compiled, stream"]
    assert [way["way"] for way in found] == names
    assert [way["same_tokens"] for way in found] == [NEW, NEW, NEW, same, same]
    assert [way["first_step_seconds"] for way in found] == [None, None, None, 1001, None]
    assert all(way["decode"]["seconds"]["median"] <= 1 for way in found)
    assert "to_transformers" not in found[0]["decode"]


def test_table_explains_what_it_shows(small, checkpoint, fake_fast, capsys):
    require("transformers")
    more = ("--model", str(checkpoint), "--compile", "--against", "transformers")
    assert bench.main(arguments(*more)) == 0
    parts = capsys.readouterr().out.rstrip("\n").split("\n\n")
    machine, _, _, prefill, decode, explained = (part.splitlines() for part in parts)
    assert machine[0].startswith(f"torch {torch.__version__}, threads {torch.get_num_threads()}")
    names = ["plain", "all cores", "all cores, stream", "compiled", "compiled, stream"]
    for phase, lines in (("prefill", prefill), ("decode", decode)):
        columns = [
            phase,
            "tokens/s",
            "+-",
            *PHASES[phase],
            *["same", "first, s"] * (lines is decode),
        ]
        assert " ".join(lines[0].split()) == " ".join(" ".join(columns).split())
        assert {*columns} <= {phase, "tokens/s", *COLUMNS}
        assert [line.split("  ")[0] for line in lines[1:]] == [*names, "transformers"]
    everything = [*WAYS, *COLUMNS]
    everything.remove("... static")  # on a GPU
    assert [line.split("  ")[0] for line in explained] == everything


def test_the_legend_explains_no_row_and_no_column_that_is_not_there(small, capsys):
    assert bench.main(arguments("--shape", "stories", "--device", "cpu")) == 0
    *_, decode, explained = (part.splitlines() for part in capsys.readouterr().out.split("\n\n"))
    absent = {"compiled", "transformers", "... static", "of reading", "to transf.", "first, s"}
    names = [line.split("  ")[0] for line in explained]
    assert names == [name for name in [*WAYS, *COLUMNS] if name not in absent]
    assert not any(name in decode[0] for name in absent)


def test_shares_are_taken_within_a_run(monkeypatch):
    """A neighbour that halves everything in one run changes no share."""
    speed = 8.0

    def way(prefill: float, step: float):
        return lambda: Pass(prefill / speed, step / speed, torch.zeros(1, 1))

    def busy(function, amount):
        return speed * amount

    def next_run() -> Pass:
        nonlocal speed
        speed = {8.0: 4.0, 4.0: 2.0}.get(speed, 8.0)
        return way(1, 2)()

    monkeypatch.setattr(ways, "rate", busy)
    every = {
        "plain": next_run,
        "transformers": way(3, 6),
        "transformers, static": way(9, 9),
    }
    yardsticks = {name: (lambda: None, 1) for name in ("copy", "read", "matmul", "linears")}
    work = {"prefill": ("operations", 4, 16), "decode": ("bytes", 1, 6)}
    found = ways.measure(every, yardsticks, work, 3)
    steady = partial(dict, spread=0.0)
    plain = found["plain"]
    assert plain["prefill"]["of_matmul"] == steady(median=16)
    assert plain["decode"]["of_copy"] == plain["decode"]["of_read"] == steady(median=3)
    assert plain["decode"]["of_linears"] == steady(median=0.5)
    assert plain["prefill"]["to_transformers"] == plain["decode"]["to_transformers"]
    assert plain["decode"]["to_transformers"] == steady(median=3)
    assert plain["prefill"]["tokens_per_second"] == {"median": 16, "spread": 6}
    assert found["limits"]["copy"] == {"median": 4, "spread": 3}
    assert found["transformers, static"]["decode"]["to_transformers"] == steady(median=6 / 9)


def test_ways_and_limits_take_turns(monkeypatch):
    log = []

    def way(name):
        log.append(name)
        return Pass(1, 1, torch.zeros(1, 1))

    def rate(function, amount):
        function()
        return 1.0

    monkeypatch.setattr(ways, "rate", rate)
    monkeypatch.setattr(ways, "LIMITS", {"bytes": ("copy",)})
    work = {"prefill": ("bytes", 1, 1), "decode": ("bytes", 1, 1)}
    yardsticks = {"copy": (lambda: log.append("copy"), 1)}
    ways.measure({name: partial(way, name) for name in "ab"}, yardsticks, work, 2)
    assert log == ["copy", *["a", "copy", "b", "copy"] * 2]


def test_rate_is_the_amount_over_the_time_of_a_call(monkeypatch):
    """By a clock that goes on in the function alone."""
    now = 0.0

    def function():
        nonlocal now
        now += 0.25

    monkeypatch.setattr(limits, "Timer", partial(limits.Timer, timer=lambda: now))
    assert limits.rate(function, 3.0) == 12


def test_middle_is_the_median_and_half_the_interquartile_range():
    assert middle([5, 1, 2, 4, 3]) == {"median": 3, "spread": 1}
    assert middle([7]) == {"median": 7, "spread": 0}


@pytest.mark.parametrize("way", ["model", "stream", "transformers"])
def test_prefill_and_steps_are_timed_apart(monkeypatch, way):
    """By a clock that goes on in the model alone: 8 ticks for a prompt and 1 for a token."""
    ticks = 0

    def tick(module, inputs):
        nonlocal ticks
        ticks += 8 if inputs[0].shape[1] > 1 else 1

    model = random_llama()
    prompt = torch.ones(BATCH, PROMPT, dtype=torch.long)
    clock = types.SimpleNamespace(perf_counter=lambda: ticks)
    if way == "transformers":
        require("transformers")
        reference = ways.as_transformers(BASE, model)
        reference.model.embed_tokens.register_forward_pre_hook(tick)
        measure = partial(ways.through_transformers, reference, prompt, NEW, None)
    else:
        model.embed.register_forward_pre_hook(tick)
        measure = partial(getattr(ways, f"through_{way}"), model, prompt, NEW)
    monkeypatch.setattr(ways, "time", clock)
    passed = measure()
    assert (passed.prefill, passed.step) == (8, 1)
    assert passed.ids.shape == (BATCH, NEW)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"head_dim": 12}])
def test_operations_and_bytes_are_those_of_the_formulas(changes):
    """As the config gives them: each weight of a linear layer once for a token, the head once for a
    prompt, each pair of a query and a key before it twice; every weight of a step but the embedding.
    """
    model = random_llama(**changes)
    work = limits.Work(model)
    prompt = torch.ones(BATCH, PROMPT, dtype=torch.long)
    ways.through_model(work.model, prompt, NEW)
    c, pairs = model.config, PROMPT * (PROMPT + 1) // 2
    linears = sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2)
    attention = c.num_hidden_layers * c.num_attention_heads * c.head_dim * 2 * pairs
    head = c.vocab_size * c.hidden_size
    assert work.operations[0] == 2 * BATCH * (PROMPT * linears + head + attention)
    weights = 4 * (c.parameter_count() - head * (not c.tie_word_embeddings))
    cached = 4 * BATCH * 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
    steps = range(PROMPT + 1, PROMPT + NEW)
    assert work.bytes[1:] == [weights + cached * filled for filled in steps]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_mask_leaves_pairs_out():
    model = random_llama()
    work = limits.Work(model)
    tokens = torch.ones(BATCH, PROMPT, dtype=torch.long)
    causal = torch.ones(PROMPT, PROMPT, dtype=torch.bool).tril()
    for mask in (None, causal, causal.triu(-1), causal.expand(BATCH, -1, -1)):
        work.model(tokens, mask=mask, last_only=True)
    none, whole, window, expanded = work.operations
    c = model.config
    hidden = PROMPT * (PROMPT + 1) // 2 - (2 * PROMPT - 1)
    assert none == whole == expanded
    a_pair = 2 * BATCH * c.num_hidden_layers * c.num_attention_heads * c.head_dim * 2
    assert none - window == a_pair * hidden


def test_bare_linears_are_all_of_the_model_on_one_token(monkeypatch):
    model = random_llama(tie_word_embeddings=True)
    calls = []
    monkeypatch.setattr(limits.F, "linear", lambda x, w: calls.append((x.shape, w)))
    limits.bare_linears(model, BATCH)()
    weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    assert len(calls) == len(weights) == 2 * 7 + 1
    assert all(w is there for (_, w), there in zip(calls, weights, strict=True))
    assert all(shape == (BATCH, 1, w.shape[1]) for shape, w in calls)


@pytest.mark.slow
def test_load_is_measured_with_one_model_in_memory(checkpoint, monkeypatch):
    models, real = [], bench_model.load_model

    def load_model(*arguments):
        assert all(model() is None for model in models)
        model = real(*arguments)
        models.append(weakref.ref(model))
        time.sleep(0.1)
        return model

    monkeypatch.setattr(bench_model, "load_model", load_model)
    measure = partial(
        bench_model.measure_load, open_checkpoint(checkpoint), torch.device("cpu"), torch.float32
    )
    model, _ = measure(3)
    assert models[-1]() is model
    assert len(models) == 3
    del model
    _, load = measure(1)
    seconds = load["seconds"]["median"]
    assert seconds >= 0.1
    size = (checkpoint / "model.safetensors").stat().st_size
    assert load["bytes_per_second"]["median"] == pytest.approx(size / seconds)


# Named shapes


def test_shapes_are_those_of_the_models():
    counts = {  # as published
        "stories": Recipe().config().parameter_count(),
        "smollm2-135m": 134_515_008,
        "tinyllama-1.1b": 1_100_048_384,
        "llama-3.2-1b": 1_235_814_400,
        "llama-3.1-8b": 8_030_261_248,
    }
    found = {name: parse_config(values) for name, values in SHAPES.items()}
    assert {name: config.parameter_count() for name, config in found.items()} == counts
    ours, recipe = parse_config(SHAPES["stories"]), Recipe().config()
    assert dataclasses.replace(ours, dtype="bfloat16", eos_token_id=(2,)) == recipe


@torch.no_grad()
@pytest.mark.parametrize("name", SHAPES)
def test_random_weights_are_shared_with_transformers(name):
    require("transformers")
    values = {**SHAPES[name], "num_hidden_layers": 2, "vocab_size": 96, "intermediate_size": 64}
    values["hidden_size"] = 16 * values["num_attention_heads"]
    model = random_model(parse_config(values), torch.device("cpu"), torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    tied = model.lm_head.weight is model.embed.weight
    assert tied == values["tie_word_embeddings"]
    assert sum(p.numel() for p in model.parameters()) == model.config.parameter_count()
    reference = ways.as_transformers(values, model)
    ours = {p.data_ptr() for p in model.parameters()}
    assert {p.data_ptr() for p in reference.parameters()} == ours
    tokens = torch.arange(90)[None]
    assert torch.equal(reference(tokens).logits, model(tokens))


def test_a_shape_has_no_end_of_context(small, monkeypatch, capsys):
    monkeypatch.setitem(SHAPES, "stories", {**SHAPES["stories"], "max_position_embeddings": 4})
    report = report_of(capsys, "--shape", "stories")
    assert report["model"]["prompt_tokens"] == PROMPT > 4


# Errors


@pytest.mark.parametrize(
    ("more", "values"),
    [
        (["--shape", "gpt-2"], ["--shape gpt-2", *SHAPES]),
        (["--shape", "stories", "--batch", "0"], ["--batch 0", "1"]),
        (["--shape", "stories", "--prompt-tokens", "0"], ["--prompt-tokens 0", "1"]),
        (["--shape", "stories", "--new-tokens", "1"], ["--new-tokens 1", "2"]),
        (["--shape", "stories", "--runs", "0"], ["--runs 0", "1"]),
        (["--model", "no/such/folder"], ["'no/such/folder'"]),
    ],
)
def test_errors_in_one_line(more, values, capsys):
    assert bench.main(arguments(*more)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert all(value in err for value in values)
    assert err.count("\n") == 1


def test_prompt_and_new_tokens_beyond_the_context(checkpoint, capsys):
    given = ["--prompt-tokens", "120", "--new-tokens", "9"]
    assert bench.main(["--model", str(checkpoint), "--device", "cpu", *given]) == 1
    err = capsys.readouterr().err
    assert [number in err for number in (" 120 ", " 9 ", " 128 ")] == [True] * 3
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("context", "window", "given", "expected"),
    [
        (8192, None, (None, None), (512, 64)),
        (512, None, (None, None), (448, 64)),
        (576, None, (None, None), (512, 64)),
        (100, None, (None, None), (50, 50)),
        (8192, 100, (None, None), (50, 50)),
        (512, None, (500, None), (500, 12)),
        (512, None, (None, 500), (12, 500)),
        (512, None, (7, 9), (7, 9)),
        (512, None, (511, None), (511, 2)),  # which is refused
    ],
)
def test_lengths_shrink_to_the_context(context, window, given, expected):
    config = parse_config({**BASE, "max_position_embeddings": context})
    config = dataclasses.replace(config, sliding_window=window)
    assert bench_model.lengths(config, *given) == expected


@pytest.mark.slow
def test_the_shipped_model_is_measured_as_the_readme_says(small, capsys):
    assert bench.main(["--model", str(SHIPPED), "--device", "cpu", "--runs", "1"]) == 0
    assert "448 prompt tokens, 64 new, 1 runs" in capsys.readouterr().out


def test_without_transformers(monkeypatch, checkpoint, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    more = ("--model", str(checkpoint), "--against", "transformers")
    assert bench.main(arguments(*more)) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: --against transformers: ")
    assert "pip install transformers" in err
    assert err.count("\n") == 1


def test_transformers_reads_no_meta_folder(checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        ways.load_transformers(open_checkpoint(tmp_path), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "--model FOLDER, --shape NAME, --norm or --gpu-report OUT"),
        (["--norm", "--batch", "2", "--compile"], "--compile, --batch: not with --norm"),
        (["--gpu-report", "x", "--runs", "2"], "--runs: not with --gpu-report"),
        (["--norm", "--shape", "stories"], "not allowed with argument --norm"),
    ],
)
def test_options_that_do_not_go_together(given, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench.main(given)
    assert message in capsys.readouterr().err


def test_a_gpu_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for what in (["--norm"], ["--shape", "stories"]):
        assert bench.main([*what, "--device", "cuda"]) == 1
        err = capsys.readouterr().err
        assert err == "error: --device cuda: torch finds no such device here; use --device auto\n"


def test_the_gpu_report_needs_a_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["--gpu-report", str(tmp_path / "out.json")]) == 1
    err = capsys.readouterr().err
    assert (err.startswith("error: --device cuda: "), err.count("\n")) == (True, 1)
    assert not list(tmp_path.iterdir())
