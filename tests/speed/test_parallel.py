"""Two and four ranks against one process: the same logits and text, a share of the memory, an end."""

import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from llama_mini import KVCache, Llama, generate, load_model
from llama_mini.__main__ import main
from llama_mini.checkpoint import open_checkpoint, parse_config
from llama_mini.checkpoint.names import HUGGING_FACE, META, translate
from llama_mini.cli import peak_memory
from llama_mini.speed.parallel import (
    PLAN,
    SAMPLE,
    SplitEmbedding,
    fingerprint,
    load_parallel,
    require_divisible,
)
from llama_mini.speed.ranks import LEFT, Ranks, _number, join, own_rank, start, who

ROOT = Path(__file__).resolve().parents[2]
STORIES = ROOT.parent / "shared" / "checkpoints" / "stories260K"
PROMPTS = [[1], [1, 40, 41, 42, 43, 44, 45, 46, 47], [7, 99, 3]]  # ragged
LIMIT = 120  # seconds for any set of processes, on a machine that is busy with other things too
PATIENCE = 2  # LLAMA_MINI_TIMEOUT where a rank is made to fail
CPU = torch.device("cpu")

SIZES = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 515,  # no multiple of 2 or 4
    "tie_word_embeddings": True,
}
QWEN = SIZES | {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False}
BIG = SIZES | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
BIG |= {"vocab_size": 32000, "torch_dtype": "bfloat16"}
PARAMS = {"dim": 64, "n_layers": 3, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 256}
PARAMS |= {"multiple_of": 4, "norm_eps": 1e-5}


def write(folder: Path, config: dict, dtype: torch.dtype, shards: int = 1) -> None:
    """A checkpoint of random weights, norms included."""
    folder.mkdir()
    meta = "dim" in config
    table = META if meta else HUGGING_FACE
    (folder / ("params.json" if meta else "config.json")).write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, weight in Llama(parse_config(config)).state_dict().items():
        if "norm" in name:
            weight = torch.empty_like(weight).uniform_(0.5, 1.5, generator=generator)
        else:
            std = 0.02 if name.startswith("embed") else weight.shape[1] ** -0.5
            weight = torch.empty_like(weight).normal_(0, std, generator=generator)
        state[translate(name, table)] = weight.to(dtype)
    if config.get("tie_word_embeddings"):
        del state["lm_head.weight"]
    names = sorted(state)
    if meta:
        save_file(state, folder / "consolidated.00.safetensors")
    elif shards == 1:
        save_file(state, folder / "model.safetensors")
    else:
        files = {name: f"{names.index(name) % shards}.safetensors" for name in names}
        for file in set(files.values()):
            save_file({name: state[name] for name in names if files[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def observe(model: Llama, ranks: Ranks | None) -> dict:
    """What must not depend on the number of ranks, but for what each of them draws alone."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.config.vocab_size, (2, 14), generator=generator)
    cache = KVCache(model.config, batch=2, capacity=14)
    with torch.inference_mode():
        chunks = [model(part, cache=cache) for part in tokens.split([7, 4] + [1] * 3, dim=1)]
        logits = model(tokens)
    seed = 2 + (ranks.rank if ranks else 0)  # the worst case of ranks that draw differently
    draw = {"temperature": 1.0, "top_p": 0.9, "generator": torch.Generator().manual_seed(seed)}
    agree = ranks.in_step if ranks else None
    return {
        "logits": logits,
        "cached": torch.cat(chunks, 1),
        "greedy": generate(model, PROMPTS, 6, stop_ids=(), agree=agree),
        "drawn": generate(model, PROMPTS, 6, stop_ids=(), agree=agree, **draw),
        "gradients": any(p.requires_grad for p in model.parameters()),
        "bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "norm bytes": sum(
            p.numel() * p.element_size() for n, p in model.named_parameters() if "norm" in n
        ),
    }


# What a rank does alone, and what it finds has to be the same on all.
WORKS = [
    lambda rank, size: {"a": 1},
    lambda rank, size: {"a": 1, "b": rank == size - 1, "c": rank == size - 1},
    lambda rank, size: Path(f"/nowhere/{rank}").read_text() if rank else {"a": 1},
    lambda rank, size: {}[rank] if rank > size else {"a": {"nested": [1.5, "x"]}},
]


def together(ranks: Ranks, work: Callable[[int, int], dict]) -> str:
    """How such work ends on this rank."""
    try:
        with ranks.together() as same:
            same |= work(ranks.rank, ranks.size)
    except (ValueError, OSError) as error:
        return str(error)
    except SystemExit as stopped:
        return f"exit {stopped.code}"
    return "well"


def worker(rank: int, size: int, ports: list[int], folders: dict[str, Path], out: Path) -> None:
    """One rank (or the one process) observes every checkpoint; then one rank ends, or stops."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(ports[0]), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["LLAMA_MINI_TIMEOUT"] = str(LIMIT)
    ranks = start(CPU) if size > 1 else None
    load = partial(load_parallel, ranks) if ranks else load_model
    seen = {"agreed": ranks.agree(f"rank {rank}") if ranks else None}
    if ranks:
        seen["everyone"] = ranks.everyone(rank)
        seen["together"] = [together(ranks, work) for work in WORKS]
    for name, folder in folders.items():
        if name != "big":
            seen[name] = observe(load(open_checkpoint(folder), "cpu", torch.float32), ranks)
    if "big" in folders:  # after the others, so that what they brought in does not count
        before = peak_memory(CPU)
        with torch.inference_mode():
            load(open_checkpoint(folders["big"]), "cpu", torch.float32)(torch.tensor([[1, 2, 3]]))
        seen["grown"] = peak_memory(CPU) - before
    torch.save(seen, out / f"{rank}.pt")
    if ranks is None:
        os._exit(0)
    dist.barrier()
    dist.destroy_process_group()

    os.environ |= {"MASTER_PORT": str(ports[1]), "LLAMA_MINI_TIMEOUT": str(PATIENCE)}
    ranks = start(CPU)
    ranks.sum(torch.ones(1))
    if size == 2 and rank == 0:
        os._exit(0)
    if size == 4 and rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    began = time.monotonic()
    try:
        ranks.sum(torch.ones(1))
    except RuntimeError as error:
        seen["error"], seen["waited"] = str(error), time.monotonic() - began
    torch.save(seen, out / f"{rank}.pt")
    os._exit(0)


def keep_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def observe_all(size: int, folders: dict[str, Path], out: Path) -> list[dict]:
    """What each of `size` processes saw."""
    # The stores are kept here, as torchrun keeps one, so that they outlive every rank.
    stores = [keep_store(), keep_store()]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["llama_mini.speed.parallel"])  # torch is imported once
    ports = [store.port for store in stores]
    arguments = [(rank, size, ports, folders, out) for rank in range(size)]
    processes = [context.Process(target=worker, args=each, daemon=True) for each in arguments]
    end = time.monotonic() + LIMIT
    for process in processes:
        process.start()
    if size == 4:
        *processes, stopped = processes
    for process in processes:
        process.join(max(0, end - time.monotonic()))
    if size == 4:
        stopped.kill()
    assert [process.exitcode for process in processes] == [0] * len(processes)
    return [torch.load(out / f"{rank}.pt") for rank in range(size)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    write(root / "tied", SIZES, torch.float32)
    write(root / "qwen", QWEN, torch.bfloat16, shards=3)
    write(root / "meta", PARAMS, torch.float32)
    write(root / "big", BIG, torch.bfloat16)
    folders = {name: root / name for name in ("tied", "qwen", "meta", "big")}
    return folders | ({"stories260K": STORIES} if STORIES.is_dir() else {})


@pytest.fixture(scope="module")
def seen(folders: dict[str, Path], tmp_path_factory) -> dict[int, list[dict]]:
    """What each of one, two and four processes saw."""
    runs = {1: folders, 2: folders, 4: {"tied": folders["tied"]}}
    places = [tmp_path_factory.mktemp("seen") for _ in runs]
    with ThreadPoolExecutor() as pool:  # at once: much of the time they wait for one another
        return dict(zip(runs, pool.map(observe_all, runs, runs.values(), places), strict=True))


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).abs().max() / one.abs().max()).item()


RUNS = [(2, "tied"), (2, "qwen"), (2, "meta"), (2, "stories260K"), (4, "tied")]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "name"), RUNS)
def test_ranks_compute_what_one_process_does(seen: dict, size: int, name: str) -> None:
    if name not in seen[1][0]:
        pytest.skip(f"{STORIES.name} is not in ../shared/checkpoints")
    whole, first = seen[1][0][name], seen[size][0][name]
    for rank in seen[size]:
        # Observed: at most 1e-6 of the largest logit.
        assert distance(whole["logits"], rank[name]["logits"]) < 5e-6
        assert distance(whole["logits"], rank[name]["cached"]) < 5e-6
        assert rank[name]["greedy"] == whole["greedy"]
        # Between ranks it is the same bits, and what they draw with different seeds is rank 0's.
        assert torch.equal(rank[name]["logits"], first["logits"])
        assert rank[name]["drawn"] == first["drawn"]
        assert not rank[name]["gradients"]
    assert first["drawn"] != first["greedy"]


@pytest.mark.parametrize(("size", "name"), RUNS)
def test_every_rank_holds_its_share(seen: dict, size: int, name: str) -> None:
    if name not in seen[1][0]:
        pytest.skip(f"{STORIES.name} is not in ../shared/checkpoints")
    whole, parts = seen[1][0][name], [rank[name]["bytes"] for rank in seen[size]]
    for part in parts:  # observed: 1.0017 to 1.0083 of an equal share
        assert 1 < part * size / whole["bytes"] < 1.02
    # Everything once, and the norms on every rank.
    assert sum(parts) == whole["bytes"] + (size - 1) * whole["norm bytes"]


def test_the_peak_of_a_rank_is_its_share(seen: dict) -> None:
    """Of 160 MB in float32, read from bfloat16; libraries, which every process has, do not count."""
    for rank in seen[2]:  # observed: 0.491
        assert 0.4 < rank["grown"] / seen[1][0]["grown"] < 0.62


@pytest.mark.parametrize("size", [2, 4])
def test_rank_0_speaks_for_all(seen: dict, size: int) -> None:
    assert {rank["agreed"] for rank in seen[size]} == {"rank 0"}


@pytest.mark.parametrize(("size", "failed"), [(2, 0), (4, 3)], ids=["rank 0 ends", "rank 3 stops"])
def test_a_rank_that_ends_or_stops_is_named_in_time(seen: dict, size: int, failed: int) -> None:
    for number, rank in enumerate(seen[size]):
        if number != failed:
            assert rank["error"].startswith(f"rank {failed} of {size} ended, or did not answer")
            assert rank["waited"] < 3 * PATIENCE


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_differ_or_fail_end_together_and_one_says_why(seen: dict, size: int) -> None:
    assert [rank["everyone"] for rank in seen[size]] == [list(range(size))] * size
    same, differ, fail, nested = zip(*(rank["together"] for rank in seen[size]), strict=True)
    assert same == nested == ("well",) * size
    assert differ[1:] == ("exit 1",) * (size - 1)
    assert differ[0].startswith(f"rank {size - 1} has not the same b, c as rank 0")
    assert fail[0] == "exit 1"
    assert "/nowhere/1" in fail[1]
    assert fail[2:] == ("exit 1",) * (size - 2)


def test_where_nobody_reads_any_more_all_ranks_leave_at_one_step() -> None:
    told = []

    class Follower(Ranks):
        def first(self, x: torch.Tensor) -> torch.Tensor:
            told.append(x.tolist())
            return x

    def stepping(ranks: Ranks) -> Iterator[list[int]]:
        for step in range(9):
            yield ranks.in_step(torch.tensor([step, 7]))[1]

    ranks = Follower(0, 2, CPU, 1, dist.HashStore())
    steps = stepping(ranks)
    with pytest.raises(OSError, match="full"), ranks.printing(steps):  # noqa: PT012
        next(steps)
        next(steps)
        raise OSError("the disk is full")
    assert told == [[0, 7], [1, 7], [LEFT, LEFT]]  # the step that the others wait in
    with pytest.raises(BrokenPipeError):
        ranks.in_step(torch.tensor([LEFT]))

    told.clear()
    with pytest.raises(OSError, match="full"), Follower(0, 1, CPU).printing(stepping(ranks)):
        raise OSError("the disk is full")
    assert told == []  # one process has nobody to tell


def test_a_gpu_that_waits_for_a_rank_without_end_is_left_in_time(monkeypatch) -> None:
    """NCCL's calls return at once; events stand in for the GPU."""
    asked = []

    class Event:
        def record(self) -> None:
            pass

        def query(self) -> bool:
            asked.append(1)
            return len(asked) == 3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Ranks, "first", lambda self, x: x)
    ranks = Ranks(0, 2, torch.device("cuda"), 1, dist.HashStore())
    assert ranks.in_step(torch.tensor([5, 7]))[1] == [5, 7]
    assert len(asked) == 3
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 of 2 ended, or did not answer for 1 s"):
        ranks.in_step(torch.tensor([5, 7]))
    assert 1 < time.monotonic() - began < 6


def test_a_process_alone_is_the_first_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "x")  # some other program's
    monkeypatch.setenv("WORLD_SIZE", "2")  # clusters set it for other reasons, too
    assert (own_rank(), who()) == ((0, 1), "")
    ranks = join("cpu")
    assert (ranks.rank, ranks.size, ranks.share()) == (0, 1, 1)
    x = torch.ones(2)
    assert ranks.first(x) is x
    assert (ranks.agree("it"), ranks.everyone("it")) == ("it", ["it"])
    with pytest.raises(ValueError, match="its own"), ranks.together():
        raise ValueError("its own")
    monkeypatch.setenv("RANK", "x")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert own_rank() == (0, 1)
    monkeypatch.setenv("RANK", "1")
    assert (own_rank(), who()) == ((1, 2), "rank 1: ")
    monkeypatch.setenv("RANK", "2")
    assert own_rank() == (0, 1)


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29999")
    for name in ("LOCAL_WORLD_SIZE", "LLAMA_MINI_TIMEOUT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch.setenv


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("MASTER_PORT", ["", "x", "65536", "-1"]),
        ("LOCAL_WORLD_SIZE", ["", "x", "0", "3"]),
        ("LLAMA_MINI_TIMEOUT", ["", "soon", "0", "-1", "1e3"]),
    ],
)
def test_a_variable_that_does_not_serve_is_named(second_of_two, name: str, values: list) -> None:
    for value in values:
        second_of_two(name, value)
        with pytest.raises(ValueError, match=f"^{name} is '{value}'"):
            start(CPU)


def test_a_program_at_the_port_that_says_nothing_is_named(second_of_two, monkeypatch) -> None:
    monkeypatch.setattr("llama_mini.speed.ranks.PATIENCE", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        second_of_two("MASTER_PORT", str(port))
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=rf"127\.0\.0\.1:{port} .* does not answer"):
            start(CPU)
        assert time.monotonic() - began < 60  # LLAMA_MINI_TIMEOUT is 120


def test_the_fingerprint_sees_what_would_make_another_text(checkpoint: Path, tmp_path) -> None:
    def changed(folder: str, spoil: Callable[[Path], object]) -> set[str]:
        shutil.copytree(checkpoint, tmp_path / folder)
        spoil(tmp_path / folder)
        theirs = fingerprint(open_checkpoint(tmp_path / folder))
        return {name for name, value in theirs.items() if value != own[name]}

    def config(**values: object) -> Callable[[Path], object]:
        path = "config.json"
        return lambda folder: (folder / path).write_text(
            json.dumps(json.loads((folder / path).read_text()) | values)
        )

    def weights(change: Callable[[dict], object]) -> Callable[[Path], None]:
        def spoil(folder: Path) -> None:
            state = load_file(folder / "model.safetensors")
            change(state)
            save_file(state, folder / "model.safetensors")

        return spoil

    own = fingerprint(open_checkpoint(checkpoint))
    state = load_file(checkpoint / "model.safetensors")
    largest = max(state, key=lambda name: state[name].nbytes)
    assert state[largest].nbytes > 4 * SAMPLE
    assert changed("same", lambda folder: None) == set()
    assert changed("note", config(transformers_version="4.0")) == set()
    assert changed(
        "theta", config(rope_parameters={"rope_type": "default", "rope_theta": 5.0})
    ) == {"config"}
    assert changed("eps", config(rms_norm_eps=0.1)) == {"config"}
    for name in own_names(checkpoint):
        spoil = weights(lambda state, name=name: state[name].view(-1)[-1:].add_(1))
        assert changed(name, spoil) == {"weights"}, name
    spoil = weights(lambda state: state[largest].view(-1)[state[largest].numel() // 2].add_(1))
    assert changed("middle", spoil) == {"weights"}
    bos = '{"add_bos_token": false}'
    spoil = lambda folder: (folder / "tokenizer_config.json").write_text(bos)  # noqa: E731
    assert changed("bos", spoil) == {"tokenizer"}


def own_names(checkpoint: Path) -> list[str]:
    return sorted(load_file(checkpoint / "model.safetensors"))


def test_the_end_of_the_store_is_one_line() -> None:
    kept = keep_store()
    store = dist.TCPStore("127.0.0.1", kept.port, timeout=timedelta(seconds=PATIENCE))
    del kept
    expected = r"^torchrun, or rank 0 .* has ended$"
    with pytest.raises(RuntimeError, match=expected), Ranks(1, 2, CPU, 1, store)._naming():
        raise RuntimeError("a collective that failed")


def test_the_plan_names_every_parameter() -> None:
    assert PLAN.keys() == {name.split(".")[-1] for name in HUGGING_FACE}


@pytest.mark.parametrize("length", [16, 515, 17])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parts_cover_an_axis_once(length: int, size: int) -> None:
    ranks = [Ranks(rank, size, CPU, 1, dist.HashStore()) for rank in range(size)]
    parts = [list(range(length))[rank.own(length)] for rank in ranks]
    assert [place for part in parts for place in part] == list(range(length))
    assert all(parts)


@pytest.mark.parametrize(
    ("change", "size", "numbers"),
    [
        ({}, 3, "3 ranks cannot have equal shares of 8 heads, 4 key/value heads"),
        ({}, 8, "4 key/value heads and 172 FFN .* 515 tokens .* --nproc-per-node 1 or 2 or 4$"),
        ({"intermediate_size": 174}, 4, "174 FFN channels .* --nproc-per-node 1 or 2$"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}, 2, "3 key/value"),
        ({"vocab_size": 9}, 4, "9 tokens each: use --nproc-per-node 1 or 2$"),  # 3 + 3 + 3 + 0
    ],
)
def test_uneven_shares_are_refused_with_numbers(change: dict, size: int, numbers: str) -> None:
    with pytest.raises(ValueError, match=numbers):
        require_divisible(parse_config(SIZES | change), size)


@pytest.mark.parametrize("vocab_size", range(1, 40))
def test_every_rank_of_an_allowed_number_has_a_token(vocab_size: int) -> None:
    config = parse_config(SIZES | {"vocab_size": vocab_size})
    for size in (1, 2, 4):
        last = Ranks(size - 1, size, CPU, 1, dist.HashStore()).own(vocab_size)
        if last.start < last.stop:
            require_divisible(config, size)
        else:
            with pytest.raises(ValueError, match=f"^{size} ranks"):
                require_divisible(config, size)


def test_uneven_shares_are_refused_on_loading(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"^3 ranks"):
        load_parallel(Ranks(0, 3, CPU, 1, dist.HashStore()), open_checkpoint(folders["tied"]))


def test_what_is_not_cut_and_what_is_missing_are_refused_on_loading(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(folders["tied"], tmp_path / "other")
    config = json.loads((folders["tied"] / "config.json").read_text())
    (tmp_path / "other/config.json").write_text(json.dumps(config | {"model_type": "granite"}))
    shutil.copytree(folders["tied"], tmp_path / "less")
    state = load_file(tmp_path / "less/model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, tmp_path / "less/model.safetensors")
    for folder, why in (
        ("other", "granite is not cut"),
        ("less", r"model\.layers\.1\.mlp\.up_proj"),
    ):
        with pytest.raises(ValueError, match=why):
            load_parallel(Ranks(0, 2, CPU, 1, dist.HashStore()), open_checkpoint(tmp_path / folder))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_token_has_its_row_on_one_rank(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "sum", lambda self, x: x)
    config = parse_config(SIZES | {"vocab_size": 17})
    whole, total = torch.randn(17, config.hidden_size), 0
    for rank in range(size):
        own = Ranks(rank, size, CPU)
        part = SplitEmbedding(config, own)
        part.weight.data = whole[own.own(17)]
        total = total + part(torch.arange(17)[None])
    assert torch.equal(total[0], whole)


def test_a_collective_that_fails_while_all_ranks_answer_keeps_its_own_error() -> None:
    alone = Ranks(0, 1, CPU, 1, dist.HashStore())
    with pytest.raises(RuntimeError, match=r"^its own$"), alone._naming():
        raise RuntimeError("its own")


def test_the_bounds_of_a_variable_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (3, 5):
        monkeypatch.setenv("SOME", str(value))
        assert _number("SOME", None, 3, 5, "a number") == value


def test_the_part_of_a_model_that_a_memory_holds() -> None:
    assert Ranks(0, 4, CPU, local=2).share() == 0.5
    assert Ranks(0, 4, torch.device("cuda", 1), local=2).share() == 0.25


def test_a_dtype_that_is_no_float_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"dtype is torch\.int8"):
        load_parallel(
            Ranks(0, 2, CPU, 1, dist.HashStore()),
            open_checkpoint(folders["tied"]),
            dtype=torch.int8,
        )


def test_a_device_that_ranks_cannot_use_is_refused(second_of_two, monkeypatch) -> None:
    with pytest.raises(ValueError, match="not on mps: use --device cpu"):
        start(torch.device("mps"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    second_of_two("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 ranks need 2 GPUs, and there are 1"):
        start(torch.device("cuda"))


def torchrun(folder: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", str(ROOT / "generate.py"), "--device", "cpu", "--model", str(folder)]
    return subprocess.Popen(
        [*command, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,  # a terminal's Ctrl-C reaches all of a group, but not this one
    )


@pytest.fixture(scope="module")
def endless(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with a long context and no stop id, to be ended from outside."""
    folder = tmp_path_factory.mktemp("endless") / "checkpoint"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"max_position_embeddings": 10**6, "eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


DRAW = ("--temperature", "0.8", "--seed", "5", "--prompt", "The quick", "--max-new-tokens")


DRAWN: list[bytes] = []  # what two ranks printed the first time


@pytest.fixture
def running(endless: Path) -> Iterator[subprocess.Popen]:
    """Two ranks without an end, when they have printed something: the same every time."""
    process = torchrun(endless, *DRAW, "100000")
    try:
        DRAWN.append(process.stdout.read(100))
        assert len(DRAWN[-1]) == 100, process.stderr.read().decode()
        assert DRAWN[-1] == DRAWN[0]
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.slow
def test_torchrun_prints_the_text_of_one_process(
    checkpoint: Path, capsys: pytest.CaptureFixture
) -> None:
    options, prompt = ["--temperature", "0", "--max-new-tokens", "24"], "The quick brown fox"
    # The prompt is read by one rank, from an input that all share.
    process = torchrun(checkpoint, *options, "--prompt", "-")
    stdout, stderr = process.communicate(prompt.encode(), LIMIT)
    assert process.returncode == 0, stderr.decode()
    assert main([*options, "--model", str(checkpoint), "--device", "cpu", "--prompt", prompt]) == 0
    assert stdout.decode() == capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks_and_keeps_the_text(running: subprocess.Popen) -> None:
    os.killpg(running.pid, signal.SIGINT)
    rest, stderr = running.communicate(timeout=LIMIT)
    assert rest.endswith(b"\n")
    assert b"error: rank" not in stderr, stderr.decode()


@pytest.mark.slow
def test_a_closed_pipe_ends_all_ranks_quietly(running: subprocess.Popen) -> None:
    running.stdout.close()
    assert b"rror" not in running.stderr.read()
    assert running.wait(LIMIT) == 0


@pytest.mark.slow
def test_a_killed_rank_ends_the_run(running: subprocess.Popen) -> None:
    children = subprocess.check_output(["pgrep", "-P", str(running.pid)], text=True).split()
    os.kill(min(map(int, children)), signal.SIGKILL)
    _, stderr = running.communicate(timeout=LIMIT)
    assert running.returncode == 1
    cause = stderr.decode().partition("Root Cause")[2]
    assert re.search(r"rank +: 0 .*\n +exitcode +: -9", cause), stderr.decode()


@pytest.mark.slow
def test_the_end_of_the_rank_that_keeps_the_store_is_one_line(endless: Path) -> None:
    """Started by hand: rank 0 keeps the store, of whose end torch itself would tell in 16 lines."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [
        sys.executable,
        str(ROOT / "generate.py"),
        "--device",
        "cpu",
        "--model",
        str(endless),
    ]
    ranks = [
        subprocess.Popen(
            [*command, *DRAW, "100000"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | together | {"RANK": rank, "OMP_NUM_THREADS": "1"},
        )
        for rank in "01"
    ]
    try:
        assert len(ranks[0].stdout.read(100)) == 100
        ranks[0].kill()
        _, stderr = ranks[1].communicate(timeout=LIMIT)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert (ranks[1].returncode, stderr.count(b"\n")) == (1, 1), stderr.decode()
    assert stderr.startswith(b"error: rank 1: ")
