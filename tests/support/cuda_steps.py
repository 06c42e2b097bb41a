"""What the CUDA path does, found on a machine without a GPU: `python -m tests.support.cuda_steps WHAT`.

Each WHAT is a process of its own, as torch is changed for it (`fake_gpu.py`), and prints one JSON.
"""

import gc
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from llama_mini import KVCache, Llama, stream
from llama_mini.bench import gpu_report, ways
from llama_mini.bench.limits import bare_linears
from llama_mini.bench.shapes import SHAPES as KNOWN
from llama_mini.checkpoint import parse_config
from llama_mini.checkpoint.weights import NoInit
from llama_mini.config import LlamaConfig
from llama_mini.generation import padded_mask
from llama_mini.speed import graphs, row
from tests.support import fake_gpu
from tests.support.fixtures import LLAMA3, draw_tokens, random_llama, strengthen

FOLDER = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
TINY = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}


def on_cuda(config: LlamaConfig, dtype: torch.dtype) -> Llama:
    """A model on the GPU that is not there."""
    with torch.device("meta"), NoInit():
        model = Llama(config)
    state: dict[str, nn.Parameter] = {
        name: nn.Parameter(torch.empty(p.shape, dtype=dtype, device="cuda"), requires_grad=False)
        for name, p in model.named_parameters()
    }
    state.setdefault("lm_head.weight", state["embed.weight"])
    model.load_state_dict(state, assign=True)
    return model.eval().requires_grad_(False)


@contextmanager
def uncompiled() -> Iterator[None]:
    """What would be compiled runs as it stands."""

    def step(*inputs: Any) -> Tensor:
        with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
            return row.run_step(*inputs)

    with mock.patch.object(graphs.GraphLlama, "run", return_value=step):
        yield


class Watch(TorchDispatchMode):
    """Counts what waits for the device, by the line that asked for it. Two devices in one operation are an
    error of the fake tensors themselves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, given: tuple[Any, ...] = (), named: Any = None
    ) -> Any:
        named, name = named or {}, function._schema.name
        if function.namespace == "aten" and not name.endswith(
            ("_local_scalar_dense", "scaled_dot_product_attention")
        ):
            with self:
                parts = function.decompose(*given, **named)
            if parts is not NotImplemented:
                return parts
        if name == "aten::_local_scalar_dense":
            self.waits[asked()] += 1
            return 5 if given[0].dtype == torch.long else True
        if name == "aten::equal":
            self.waits[asked()] += 1
            return True
        result = function(*given, **named)
        if name in ("aten::_to_copy", "aten::copy_"):
            places = {each.device.type for each in (*given, result) if isinstance(each, Tensor)}
            at_once = named.get("non_blocking") or given[2:3] == (True,)
            if len(places) > 1 and not at_once:
                self.waits[asked()] += 1
        if name in ("aten::nonzero", "aten::masked_select", "aten::_unique2"):
            self.waits[asked()] += 1
        return result


def asked() -> str:
    """The line of the package that is being run."""
    frames = [f for f in traceback.extract_stack() if "/llama_mini/" in f.filename]
    return f"{Path(frames[-1].filename).name}: {frames[-1].line}"


def waits() -> dict[str, Any]:
    """Of plain and fast generations of several kinds: the waits for ten more tokens, and whether graphs
    were captured; and what faults look like, a wait more and an input on the CPU.
    """
    fake_gpu.allow_tensors()
    fake_gpu.allow_graphs()

    def more(model: Llama, prompts: list[list[int]], **options: Any) -> dict[str, int]:
        counts = []
        for n in (3, 13):
            with Watch() as watch:
                assert len(list(stream(model, prompts, n, stop_ids=(), **options))) == n
            counts.append(watch.waits)
        return dict(counts[1] - counts[0])

    found: dict[str, Any] = {"kinds": []}
    with FakeTensorMode(), uncompiled():
        model = on_cuda(parse_config(TINY), torch.bfloat16)
        for prompts in ([[5, 9, 2]], [[5, 9, 2, 7], [3]]):
            for options in ({}, {"temperature": 0.8, "top_k": 50, "top_p": 0.9}):
                fast = graphs.fast_on_cuda(model)
                for kind, each in (("plain", model), ("fast", fast)):
                    kinds = {"kind": kind, "rows": len(prompts)}
                    found["kinds"].append({**kinds, "waits": more(each, prompts, **options)})
                found["kinds"][-1]["captured"] = sum(len(a.graphs) for a in fast.arenas)
        twice: Any = lambda ids: (ids, [ids.max().item(), ids.min().item()][:1])  # noqa: E731
        found["a fault"] = sum(more(model, [[5, 9, 2]], agree=twice).values())
        try:
            model(torch.zeros(1, 3, dtype=torch.long))
        except RuntimeError as error:
            found["on the CPU"] = str(error).split("\n")[0]
    return found


class Reads(TorchDispatchMode):
    """The storages that are read from or written to, but for those that were made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[int, StorageWeakRef] = {}
        self.made: list[Any] = []  # kept, or their numbers would be given out again

    def __torch_dispatch__(
        self, function: Any, types: Any, given: tuple[Any, ...] = (), named: Any = None
    ) -> Any:
        made = {storage._cdata for storage in self.made}
        for each in torch.utils._pytree.tree_leaves((given, named or {})):
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in made:
                storage = each.untyped_storage()
                self.inputs.setdefault(storage._cdata, StorageWeakRef(storage))
        result = function(*given, **(named or {}))
        before = {*made, *self.inputs}
        for each in torch.utils._pytree.tree_leaves(result):
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in before:
                self.made.append(each.untyped_storage())
        return result


def alive() -> dict[str, dict[str, int]]:
    """How many of the tensors that a graph reads are alive when it is replayed."""
    fake_gpu.allow_tensors()
    fake_gpu.allow_graphs()
    reads: list[Reads] = []

    @contextmanager
    def capturing(*place: Any, **options: Any) -> Iterator[None]:
        with Reads() as seen:
            yield
        reads.append(seen)

    def count(kept: object) -> dict[str, int]:
        gc.collect()
        inputs = [ref for seen in reads for ref in seen.inputs.values()]
        reads.clear()
        return {"read": len(inputs), "alive": sum(not ref.expired() for ref in inputs)}

    def dangling(model: Llama) -> Callable[[], None]:
        x, graph = model.embed.weight.new_ones(1, 48), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.mm(x, model.blocks[0].attention.q_proj.weight.T)
        return graph.replay

    torch.cuda.graph = capturing
    with FakeTensorMode(), uncompiled():
        model = on_cuda(parse_config(TINY), torch.float32)
        found = {"bare linears": count(bare_linears(model, 1)), "a fault": count(dangling(model))}
        fast = graphs.fast_on_cuda(model)
        for batch in (1, 2, 1):
            cache = KVCache(model.config, batch, 300, "cuda")
            token = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
            for cache.length in (1, 255, 256):
                fast(token, cache=cache)
        del cache, token
        found["steps"] = count(fast)
    return found


def compilations() -> dict[str, int]:
    """How many graphs torch's compiler has made: after the first step, after all lengths, capacities and
    modes of one row, and after 2, 3 and 8 rows.
    """
    from torch._dynamo.utils import counters

    fake_gpu.allow_tensors()
    fake_gpu.allow_graphs()
    compile_ = torch.compile
    plainly: Any = lambda f, options, **kw: compile_(f, backend="eager", **kw)  # noqa: E731
    found = {}

    def steps(fast: Llama, batch: int) -> None:
        for inference in (True, False):
            for capacity, lengths in (
                (40, (7, 8, 37, 39)),
                (576, (512, 513, 575)),
                (257, (5, 255, 256)),
                (2048, (5, 300, 1023, 2046)),
                (8192, (8000,)),
            ):
                with torch.inference_mode(inference), torch.no_grad():
                    cache = KVCache(fast.config, batch, capacity, "cuda")
                    token = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
                    for cache.length in lengths:
                        fast(token, cache=cache)

    with FakeTensorMode(), mock.patch.object(torch, "compile", plainly):
        fast = graphs.fast_on_cuda(on_cuda(parse_config(TINY), torch.float32))
        found["first"] = counters["stats"]["unique_graphs"]
        for batch in (1, 2, 3, 8):
            steps(fast, batch)
            found[f"{batch} rows"] = counters["stats"]["unique_graphs"]
    return found


class StepError(Exception):
    """Raised in the place of running a step."""


def compiled(model: Llama, batch: int) -> tuple[Any, list[Any], graphs.GraphLlama, tuple[Any, ...]]:
    """A step made for the GPU that is not there: its code as a function, what that takes in order, the
    fast form and the inputs of `run_step`, of which these are.
    """
    import torch._inductor.output_code as output

    calls: list[tuple[Any, list[Any]]] = []

    def stop(self: Any, inputs: Any) -> None:
        calls.append((self.current_callable, list(inputs)))
        raise StepError

    with mock.patch.object(output.CompiledFxGraph, "__call__", stop):
        with mock.patch.object(graphs.GraphLlama, "prepare"):
            fast = graphs.fast_on_cuda(model)
        cache = KVCache(model.config, batch, graphs.TYPICAL, "cuda", model.embed.weight.dtype)
        inputs = graphs.Arena(cache.keys, batch, graphs.TYPICAL).inputs(graphs.TYPICAL)
        try:
            fast.run()(fast, *inputs)
        except StepError:
            return *calls[-1], fast, inputs
    raise AssertionError("nothing was run")


def named(fast: graphs.GraphLlama, inputs: tuple[Any, ...]) -> dict[str, Tensor]:
    """Every tensor that a step can read, by what it is called."""
    held, *others = inputs
    return {
        **dict(fast.named_parameters(remove_duplicate=False)),
        **{f"held {n}": each for n, each in enumerate(held)},
        **dict(zip(("tokens", "slot", "positions", "mask"), others, strict=True)),
        "frequencies": fast.frequencies,
    }


class Interpreted:
    """A generated step, run on the CPU by Triton's interpreter, for a fast form that lies there."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, batch: int) -> None:
        with FakeTensorMode():
            self.call, given, fast, inputs = compiled(on_cuda(config, dtype), batch)
            self.there = named(fast, inputs)
        names = {id(tensor): name for name, tensor in reversed(self.there.items())}
        # What is no kernel of its own would be called by this name.
        self.others = Path(self.call.__globals__["__file__"]).read_text().count("extern_kernels.")
        self.order = [names[id(x)] if isinstance(x, Tensor) else int(x) for x in given]

    def __call__(self, fast: graphs.GraphLlama, *inputs: Any) -> Tensor:
        here, sizes = named(fast, inputs), {}
        for name, fake in self.there.items():
            real = here[name]
            # What the compiler takes as numbers are sizes and strides of these.
            sizes |= dict(
                zip((*fake.shape, *fake.stride()), (*real.shape, *real.stride()), strict=True)
            )
        return self.call([here[x] if isinstance(x, str) else sizes[x] for x in self.order])[0]


def interpreting() -> Counter[str]:
    """From here on what is generated for the GPU runs on the CPU; the runs of each kernel are counted."""
    import torch._inductor.async_compile as compiling
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    runs: Counter[str] = Counter()

    class Mathematics:
        """libdevice, which is a library for GPUs."""

        def __getattr__(self, name: str) -> Any:
            return lambda *x: getattr(tl, name)(*x)  # which the interpreter puts there, in each run

    class Kernel:
        def __init__(self, name: str, source: str) -> None:
            self.name = name
            plain = re.sub(
                r"@triton_heuristics\.\w+\(.*?\n\)\n(?=@triton)", "", source, flags=re.DOTALL
            )
            # The interpreter reads a function's source from its file.
            path = Path(tempfile.mkstemp(prefix=f"{name[:40]}_", suffix=".py", dir=FOLDER)[1])
            path.write_text(plain)
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            vars(module)["libdevice"] = Mathematics()
            self.kernel = vars(module)[name]
            assert isinstance(self.kernel, InterpretedFunction)
            self.names = list(inspect.signature(self.kernel.fn).parameters)

        def run(self, *given: Any, stream: int) -> None:
            runs[self.name] += 1
            numbers = dict(zip(self.names, given, strict=False))
            x = int(numbers["xnumel"])
            blocks = {"XBLOCK": min(64, 1 << (x - 1).bit_length()), "YBLOCK": 16, "R0_BLOCK": 32}
            blocks = {name: size for name, size in blocks.items() if name in self.names}
            grid = [-(-x // blocks["XBLOCK"])]
            if "YBLOCK" in blocks:
                grid.append(-(-int(numbers["ynumel"]) // blocks["YBLOCK"]))
            self.kernel[tuple(grid)](*given, **blocks)

    compiling.AsyncCompile.triton = lambda self, name, source, device_str="cuda", **options: Kernel(
        name, source
    )
    torch._C._dynamo.guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype
    )
    return runs


MODELS: dict[str, tuple[dict[str, Any], torch.dtype, int]] = {
    "grouped, untied": ({}, torch.float32, 1),
    "every head its own, three blocks": (
        {"num_key_value_heads": 4, "num_hidden_layers": 3},
        torch.float32,
        1,
    ),
    "QK-norm, tied": (
        {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
        torch.float32,
        1,
    ),
    "scaled angles, odd sizes": (
        {
            "vocab_size": 101,
            "hidden_size": 42,
            "intermediate_size": 75,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "rope_parameters": LLAMA3,
        },
        torch.float32,
        1,
    ),
    "three ragged rows": ({}, torch.float32, 3),
    "bfloat16": ({}, torch.bfloat16, 1),
}


# In the text of row.py or graphs.py: what is right, and a fault.
FAULTS = {
    "the slot behind": ("index_copy_(3, self.slot,", "index_copy_(3, self.slot + 1,"),
    "values never written": (".masked_fill(~mask[..., None], 0)", ""),
    "parts that overlap": ("start + part.out_features", "start + part.out_features // 2"),
}


class Poisoned(graphs.Arena):
    """What was never written is NaN."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        for each in self.held:
            each.fill_(torch.nan)


class Again:
    """In the place of a graph: the step, which reads the same tensors again."""

    def __init__(self, step: Callable[[], Tensor], *place: Any) -> None:
        self.step = step

    def __call__(self) -> Tensor:
        return self.step().clone()


def beside_plain(
    values: dict[str, Any], dtype: torch.dtype, batch: int, lengths: tuple[int, ...]
) -> Any:
    """The largest difference of a generated step from the plain model, after prompts of some lengths, in
    the logits and in the caches, each of the largest; and how many products its code leaves to others.
    """
    model = random_llama(**{**TINY, **values})
    strengthen(model, seed=3, embedding_std=1.0)
    model = model.to(dtype)
    step, worst = Interpreted(model.config, dtype, batch), [0.0, 0.0]
    with (
        mock.patch.object(graphs, "Arena", Poisoned),
        mock.patch.object(graphs, "StepGraph", Again),
        mock.patch.object(graphs.GraphLlama, "run", return_value=step),
        mock.patch.object(graphs.GraphLlama, "prepare"),
        torch.inference_mode(),
    ):
        fast = graphs.fast_on_cuda(model)
        for length in lengths:
            tokens = draw_tokens((batch, length + 3), length, 97)
            padding = torch.arange(batch) * 2
            caches = [KVCache(model.config, batch, length + 40, dtype=dtype) for _ in range(2)]
            for t in (slice(0, length), *(slice(length + n, length + n + 1) for n in range(3))):
                columns = torch.arange(t.start, t.stop)
                options: dict[str, Any] = {}
                if batch > 1:
                    options["positions"] = (columns - padding[:, None]).clamp(min=0)
                    options["mask"] = padded_mask(columns, torch.arange(t.stop), padding)
                plain, own = (
                    each(tokens[:, t], cache=cache, **options)
                    for each, cache in zip((model, fast), caches, strict=True)
                )
                worst[0] = max(worst[0], relative(own, plain))
            for theirs, mine in zip(
                caches[0].keys + caches[0].values, caches[1].keys + caches[1].values, strict=True
            ):
                filled = slice(0, caches[0].length)
                worst[1] = max(worst[1], relative(mine[:, :, filled], theirs[:, :, filled]))
    return *worst, step.others


def relative(x: Tensor, reference: Tensor) -> float:
    """The largest difference, of the largest value; infinite where there is NaN."""
    difference = float((x - reference).abs().max() / reference.abs().max())
    return difference if difference == difference else float("inf")


def interpreted(*names: str) -> dict[str, Any]:
    """Each model's generated code beside the plain model, and the kernels of a step in each; for the name
    of a fault, the simplest model with that fault in it.
    """
    fake_gpu.allow_tensors()
    fake_gpu.allow_graphs()
    fake_gpu.allow_compiling()
    runs, found = interpreting(), {}
    sources = {each: Path(each.__file__).read_text() for each in (row, graphs)}
    for name in names:
        torch._dynamo.reset()
        runs.clear()
        right, wrong = FAULTS.get(name, ("", ""))
        assert not right or sum(source.count(right) for source in sources.values()) == 1
        for module, source in sources.items():
            text = source.replace(right, wrong) if right else source
            exec(compile(text, module.__file__, "exec"), vars(module))
        simplest = ({"num_hidden_layers": 1}, torch.float32, 1)
        lengths = (7,) if right else (7, 254)
        logits, held, others = beside_plain(*MODELS.get(name, simplest), lengths)
        steps = 3 * len(lengths)
        found[name] = {"logits": logits, "caches": held, "kernels": runs.total() / steps}
        found[name]["others"] = others
        print(name, found[name], file=sys.stderr)
    return found


def assembled(shape: str, dtype: str) -> dict[str, Any]:
    """The kernels of a step for one row, and of each configuration that torch would try: the target, the
    bytes that are spilled, and the widest load.
    """
    fake_gpu.allow_tensors()
    fake_gpu.allow_compiling()
    import triton
    from torch._inductor.runtime.triton_heuristics import TritonCompileResult

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    kernels: dict[str, list[dict[str, Any]]] = {}

    def tool(name: str, *given: object) -> str:
        done = subprocess.run(
            [tools / name, *map(str, given)], check=True, capture_output=True, text=True
        )
        return done.stdout + done.stderr

    def launcher(self: Any) -> Any:
        """It is there that torch has assembled one configuration, and would load it."""
        paths = {kind: Path(FOLDER, f"kernel.{kind}") for kind in ("ptx", "cubin")}
        code = self.kernel.asm
        paths["ptx"].write_text(code["ptx"])
        paths["cubin"].write_bytes(code["cubin"])
        target, spilled = re.findall(r"\.target (\S+)", code["ptx"])[0], 0
        # A stack is for spilled registers, or for the table by which large angles are reduced.
        if "STACK:0" not in tool("cuobjdump", "-res-usage", paths["cubin"]):
            said = tool("ptxas", "-v", f"--gpu-name={target}", paths["ptx"], "-o", paths["cubin"])
            spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
        loads = re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", code["ptx"])
        widest = max((int(number or 1) * int(bits) // 8 for number, bits in loads), default=0)
        found = {"target": target, "spilled": spilled, "widest": widest}
        kernels.setdefault(self.kernel.metadata.name, []).append(found)
        return mock.MagicMock(n_regs=32, n_spills=0, config=self.config, shared=0, cache_hash=None)

    TritonCompileResult.make_launcher = launcher
    with FakeTensorMode():
        config = parse_config({**KNOWN[shape], "num_hidden_layers": 2})
        compiled(on_cuda(config, getattr(torch, dtype)), 1)
    return kernels


def report() -> dict[str, Any]:
    """The report of a GPU, on fake tensors, but for what starts other programs: that every line runs there,
    and on which device.
    """
    fake_gpu.allow_tensors()
    fake_gpu.allow_graphs()
    modes: list[str] = []
    cuda: Any = torch.cuda
    cuda.get_device_name = lambda: "fake"
    cuda.set_sync_debug_mode, cuda.memory_allocated = modes.append, lambda: 7
    parts = {
        name: (part, 600)  # fake tensors take their time
        for name, (part, _) in gpu_report.PARTS.items()
        if name not in gpu_report.SPEED
    }

    def theirs(*given: Any) -> ways.Pass:
        return ways.Pass(0, 0, torch.full((1, 3), 5))

    with (
        uncompiled(),
        mock.patch.object(gpu_report, "PARTS", parts),
        mock.patch.object(gpu_report, "choose_device", torch.device),
        mock.patch.object(gpu_report, "random_model", lambda c, device, dtype: on_cuda(c, dtype)),
        mock.patch.object(Llama, "to", lambda self, device: self),
        mock.patch.object(gpu_report, "IDS", 3),
        mock.patch.object(gpu_report, "as_transformers"),
        mock.patch.object(gpu_report, "through_transformers", theirs),
        mock.patch.object(gpu_report, "bench_norms", return_value=[]),
        FakeTensorMode(),
        Watch(),
    ):
        gpu_report.write_report(Path(FOLDER, "out.json"), "cuda")
    return json.loads(Path(FOLDER, "out.json").read_text()) | {"modes": modes}


def main() -> None:
    what, *arguments = sys.argv[1:]
    print(json.dumps(globals()[what](*arguments)))


if __name__ == "__main__":
    main()
