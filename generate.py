"""Continue a prompt with a Llama-style checkpoint: python generate.py --prompt "Once upon a time"."""

import os
import signal

if __name__ == "__main__":  # first of all: the other imports take seconds, and nothing is lost yet
    for each in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, lambda number, frame: os._exit(128 + number))

import argparse
import math
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from llama_mini import Llama, LlamaConfig

WEIGHTS = Path(__file__).resolve().parent / "weights" / "stories"
NEW_TOKENS = 128
UNREAD = -2  # in the place of drawn ids, of which -1 is none that can be drawn


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
        "--compile",
        action="store_true",
        help="faster tokens, after half a minute the first time; last bits may differ",
    )
    parser.add_argument(
        "--stats", action="store_true", help="print sizes, seconds and tokens/s to standard error"
    )
    parser.add_argument(
        "--check", action="store_true", help="look for NaN and infinity in the weights first"
    )
    options = parser.parse_args(arguments)
    if not isinstance(options.prompt, str):  # "--prompt=--", which argparse makes an empty list of
        options.prompt = "--"
    if options.system is not None and not options.chat:
        parser.error("--system goes with --chat")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    from llama_mini.cli import run_command  # with torch: --help and a wrong option answer at once

    rank, ranks = own_rank()
    return run_command(lambda: run(options, rank, ranks), who=f"rank {rank}: " if ranks > 1 else "")


def own_rank() -> tuple[int, int]:
    """Which of how many processes this is: torchrun starts several of us, and rank 0 speaks."""
    started = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")]
    if all(started) and all(re.fullmatch("[0-9]{1,6}", number) for number in started[:2]):
        rank, size = map(int, started[:2])
        if rank < size:
            return rank, size
    return 0, 1


def run(options: argparse.Namespace, rank: int, size: int) -> None:
    import torch

    from llama_mini import load_model, load_tokenizer, stream
    from llama_mini.checkpoint import chat_prompt, check_weights, open_checkpoint, require_memory
    from llama_mini.cli import choose_device
    from llama_mini.generation import require_prompts, require_sampling
    from llama_mini.speed import all_cores, fast_model

    sampling = options.temperature, options.top_k, options.top_p
    require_sampling(*sampling)
    if options.seed is not None and not 0 <= options.seed < 2**63:
        raise ValueError(f"--seed {options.seed}: it must lie between 0 and 2^63 - 1")
    source = WEIGHTS if options.model is None else options.model
    if options.model is None and not WEIGHTS.is_dir():
        raise FileNotFoundError(f"no checkpoint is in {WEIGHTS}: name one with --model FOLDER")
    if options.compile and size > 1:
        raise ValueError("--compile runs in one process: leave it out under torchrun")
    prompt = read_prompt(options.prompt) if rank == 0 else ""  # of one standard input, one reads
    seed = torch.seed() if options.seed is None else options.seed
    device, agree = choose_device(options.device), None
    unread: list[BrokenPipeError] = []
    if size > 1:
        from llama_mini.speed.parallel import load_parallel, start

        ranks = start(device)

        def agree_on(ids: torch.Tensor) -> torch.Tensor:
            """What rank 0 drew; where nobody reads it any more, all ranks end at the same step."""
            ids = ranks.first(torch.full_like(ids, UNREAD) if unread else ids)
            if ids[0] == UNREAD:
                raise BrokenPipeError
            return ids

        device, load_model, agree = ranks.device, partial(load_parallel, ranks), agree_on
        prompt, seed = ranks.agree((prompt, seed))
        if rank > 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    checkpoint = open_checkpoint(source)
    config = checkpoint.config
    tokenizer = load_tokenizer(checkpoint)
    if options.chat:
        ids = chat_prompt(checkpoint, tokenizer, prompt, options.system)
    else:
        ids = tokenizer.encode(prompt)
    if not ids:
        raise ValueError("the prompt is empty, and this tokenizer puts no BOS: give it some text")
    new_tokens = options.max_new_tokens
    if new_tokens is None:
        room = min(config.max_position_embeddings, config.sliding_window or math.inf) - len(ids)
        new_tokens = int(max(1, min(NEW_TOKENS, room)))
    require_prompts(config, [ids], new_tokens)  # before the weights of a hub model are fetched
    dtype = choose_dtype(options.dtype, device, config, rank)
    here = 1 if device.type == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", size))
    require_memory(checkpoint, device, dtype, len(ids), new_tokens, share=min(here, size) / size)
    began = time.perf_counter()
    model = load_model(checkpoint, device, dtype)
    if options.check:
        check_weights(model, checkpoint)
    if size == 1 and not options.compile:  # a rank has its own cores
        model = all_cores(model)
    if options.compile:
        model = fast_model(model)
        model.prepare(1)  # compiles, so that tokens come evenly
    loaded = time.perf_counter()

    steps = stream(
        model,
        [ids],
        new_tokens,
        *sampling,
        generator=torch.Generator(device).manual_seed(seed),
        vocab_size=tokenizer.vocab_size,
        agree=agree,
    )
    decoder = tokenizer.stream_decoder([] if options.chat else ids)
    times = [time.perf_counter()]
    try:
        if not options.chat:
            print(prompt, end="", flush=True)
        for (token,) in steps:
            times.append(time.perf_counter())
            if token is not None:
                print(decoder.push(token), end="", flush=True)
    except BrokenPipeError as error:
        unread.append(error)
        next(steps, None)
        raise
    finally:
        print(decoder.flush(), flush=True)
    if options.stats and rank == 0:
        print_stats(model, config, loaded - began, len(ids), times, " (rank 0)" if size > 1 else "")


def read_prompt(text: str) -> str:
    """The prompt itself, or standard input for "-", less the line break that ends it."""
    if text != "-":
        return text
    if sys.stdin is None:
        raise ValueError("--prompt - reads standard input, and that is closed")
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8: {error}") from None


def choose_dtype(
    name: str, device: "torch.device", config: "LlamaConfig", rank: int = 0
) -> "torch.dtype | None":
    """The dtype asked for; for auto float32 on the CPU, and elsewhere None: the checkpoint's own."""
    import torch

    if name == "auto" and device.type == "cpu":
        return torch.float32
    wanted = config.dtype if name == "auto" else name
    if wanted == "bfloat16" and not has_bfloat16(device):
        if rank == 0:
            print(f"note: this {device.type} has no bfloat16; using float16", file=sys.stderr)
        wanted = "float16"
    return getattr(torch, wanted) if wanted else None


def has_bfloat16(device: "torch.device") -> bool:
    import torch

    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" or torch.backends.mps.is_macos_or_newer(14, 0)


def print_stats(
    model: "Llama",
    config: "LlamaConfig",
    load_seconds: float,
    prompt_tokens: int,
    times: list[float],
    whose: str,
) -> None:
    """Sizes and rates, to standard error; `times` are when prefill began and when each token came."""
    from llama_mini.cli import peak_memory

    weight = model.embed.weight
    new_tokens, prefill = len(times) - 1, times[1] - times[0] if len(times) > 1 else 0.0
    decode = times[-1] - times[1] if len(times) > 1 else 0.0
    prefill_rate = prompt_tokens / prefill if prefill else 0.0
    decode_rate = (new_tokens - 1) / decode if decode else 0.0
    rows = [
        ("parameters", f"{config.parameter_count():,}"),
        ("device", f"{weight.device}, {str(weight.dtype).removeprefix('torch.')}"),
        ("load", f"{load_seconds:.2f} s"),
        ("prefill", f"{prompt_tokens} tokens, {prefill_rate:.1f} tokens/s"),
        ("decode", f"{new_tokens} tokens, {decode_rate:.1f} tokens/s"),
        ("peak memory", f"{peak_memory(weight.device) / 2**20:.0f} MiB{whose}"),
    ]
    for name, value in rows:
        print(f"{name:<12} {value}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
