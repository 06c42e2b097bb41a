"""Continue a prompt with a Llama-style checkpoint: python generate.py --prompt "Once upon a time"."""

import argparse
import math
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from llama_mini import LlamaConfig

WEIGHTS = Path(__file__).resolve().parent / "weights" / "stories"
NEW_TOKENS = 128
RANKS = int(os.environ.get("WORLD_SIZE", 1))  # torchrun starts several of us, and rank 0 speaks
RANK = int(os.environ.get("RANK", 0)) if RANKS > 1 else 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--prompt",
        required=True,
        metavar="TEXT",
        help="the text to continue; - reads standard input",
    )
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="checkpoint folder or hub name (default: the one in weights/)",
    )
    parser.add_argument(
        "--chat", action="store_true", help="put the prompt through the checkpoint's chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=f"default {NEW_TOKENS}, or what the context leaves",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)"
    )
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="draw from the K likeliest tokens only"
    )
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="draw from the fewest tokens of probability P"
    )
    parser.add_argument("--seed", type=int, help="same seed, device and version: same text")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="auto: the checkpoint's own on a GPU, float32 on the CPU",
    )
    parser.add_argument(
        "--stats", action="store_true", help="print sizes, seconds and tokens/s to standard error"
    )
    options = parser.parse_args(arguments)
    if options.system is not None and not options.chat:
        parser.error("--system goes with --chat")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has gone; nothing more can be written, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError, RuntimeError, OverflowError) as error:
        sys.stdout.flush()
        rank = f"rank {RANK}: " if RANKS > 1 else ""
        print(f"error: {rank}{' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def run(options: argparse.Namespace) -> None:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows another
    prompt = read_prompt(options.prompt) if RANK == 0 else ""  # of one standard input, one reads
    source = options.model or WEIGHTS
    if options.model is None and not WEIGHTS.is_dir():
        raise FileNotFoundError(f"no checkpoint is in {WEIGHTS}: name one with --model FOLDER")

    # Imported here, so that --help and a wrong option answer at once.
    import torch

    from llama_mini import LlamaConfig, load_model, load_tokenizer, stream
    from llama_mini.chat import chat_prompt
    from llama_mini.generation import require_prompts, require_sampling
    from llama_mini.hub import resolve

    device = choose_device(options.device)
    if RANKS > 1:
        from llama_mini.parallel import load_parallel, start

        ranks = start(device)
        device, load_model = ranks.device, partial(load_parallel, ranks)
        seed = torch.seed() if options.seed is None else options.seed
        prompt, options.seed = ranks.agree((prompt, seed))
        if RANK > 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sampling = options.temperature, options.top_k, options.top_p
    require_sampling(*sampling)
    folder = resolve(source, weights=False)  # what is refused need not be fetched
    config = LlamaConfig.from_checkpoint(folder)
    tokenizer = load_tokenizer(folder)
    if options.chat:
        ids = chat_prompt(folder, tokenizer, prompt, options.system)
    else:
        ids = tokenizer.encode(prompt)
    if not ids:
        raise ValueError("the prompt is empty, and this tokenizer puts no BOS: give it some text")
    new_tokens = options.max_new_tokens
    if new_tokens is None:
        room = min(config.max_position_embeddings, config.sliding_window or math.inf) - len(ids)
        new_tokens = int(max(1, min(NEW_TOKENS, room)))
    require_prompts(config, [ids], new_tokens)
    began = time.perf_counter()
    model = load_model(source, device, choose_dtype(options.dtype, device, config))
    loaded = time.perf_counter()
    generator = torch.Generator(device)
    if options.seed is None:
        generator.seed()
    else:
        generator.manual_seed(options.seed)
    steps = stream(
        model, [ids], new_tokens, *sampling, generator=generator, vocab_size=tokenizer.vocab_size
    )
    decoder = tokenizer.stream_decoder([] if options.chat else ids)
    if not options.chat:
        print(prompt, end="", flush=True)
    times = [time.perf_counter()]
    try:
        for (token,) in steps:
            times.append(time.perf_counter())
            print(decoder.push(token), end="", flush=True)
    finally:
        print(decoder.flush(), flush=True)
    if options.stats and RANK == 0:
        print_stats(model, loaded - began, len(ids), times)


def read_prompt(text: str) -> str:
    """The prompt itself, or standard input for "-", less the line break that ends it."""
    if text != "-":
        return text
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8: {error}") from None


def choose_device(name: str) -> "torch.device":
    """The device asked for, or for auto the best that is there."""
    import torch

    there = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if name == "auto":
        name = next(device for device in ("cuda", "mps", "cpu") if there[device])
    if not there[name]:
        raise ValueError(f"--device {name}: torch finds no such device here; use --device auto")
    return torch.device(name)


def choose_dtype(name: str, device: "torch.device", config: "LlamaConfig") -> "torch.dtype | None":
    """The dtype asked for; for auto float32 on the CPU, and elsewhere None: the checkpoint's own."""
    import torch

    if name == "auto" and device.type == "cpu":
        return torch.float32
    wanted = config.dtype if name == "auto" else name
    if (
        wanted == "bfloat16"
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        print("note: this GPU has no bfloat16; using float16", file=sys.stderr)
        wanted = "float16"
    return getattr(torch, wanted) if wanted else None


def print_stats(
    model: "torch.nn.Module", load_seconds: float, prompt_tokens: int, times: list[float]
) -> None:
    """Sizes and rates, to standard error; `times` are when prefill began and when each new token
    was there.
    """
    import resource

    import torch

    weight = next(model.parameters())
    new_tokens, prefill = len(times) - 1, times[1] - times[0] if len(times) > 1 else 0.0
    decode = times[-1] - times[1] if len(times) > 1 else 0.0
    if weight.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )
    rows = [
        ("parameters", f"{sum(p.numel() for p in model.parameters()):,}"),
        ("device", f"{weight.device}, {str(weight.dtype).removeprefix('torch.')}"),
        ("load", f"{load_seconds:.2f} s"),
        (
            "prefill",
            f"{prompt_tokens} tokens, {prompt_tokens / prefill if prefill else 0:.1f} tokens/s",
        ),
        (
            "decode",
            f"{new_tokens} tokens, {(new_tokens - 1) / decode if decode else 0:.1f} tokens/s",
        ),
        ("peak memory", f"{peak / 2**20:.0f} MiB"),
    ]
    for name, value in rows:
        print(f"{name:<12} {value}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
