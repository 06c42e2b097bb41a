"""Continue a prompt with a Llama-style checkpoint, or talk with it: python -m llama_mini --prompt TEXT.

The same as `python generate.py` in a clone, and as `llama-mini` where the package is installed.
"""

import argparse
import sys
import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import __version__
from .checkpoint import (
    Checkpoint,
    chat_prompt,
    check_weights,
    load_model,
    load_tokenizer,
    open_checkpoint,
    require_memory,
)
from .checkpoint.conversation import Answer, Conversation, StopStrings
from .checkpoint.tokenizer_base import Tokenizer
from .cli import (
    DEVICES,
    DTYPES,
    choose_device,
    choose_dtype,
    heeding_ctrl_c,
    peak_memory,
    read_input,
    read_line,
    reason,
    require_seed,
    run_command,
    say,
    show,
    silence,
    table,
)
from .generation import STRIDE, require_prompts, require_sampling, stream
from .model import Llama
from .speed import all_cores, fast_model
from .speed.parallel import fingerprint, load_parallel
from .speed.ranks import Ranks, join, who

WEIGHTS = Path(__file__).resolve().parents[1] / "weights" / "stories"
TEMPERATURE = 0.8
MEGABYTE = 2**20


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    program = "python -m llama_mini" if Path(sys.argv[0]).stem == "__main__" else None
    parser = argparse.ArgumentParser(
        prog=program, description=(__doc__ or "").split("\n")[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("--prompt", metavar="TEXT", help="the text to continue; - reads standard input")
    add("--model", metavar="FOLDER", help="folder or hub name (default: the one in weights/)")
    add(
        "--chat",
        action="store_true",
        help="put the prompt through the checkpoint's chat template; without --prompt, a conversation",
    )
    add("--system", metavar="TEXT", help="system message, with --chat")
    add(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="default: to the end of the text, or of the context",
    )
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; repeatable",
    )
    add(
        "--temperature",
        type=float,
        metavar="T",
        help=f"0 takes the likeliest token (default: the checkpoint's, or {TEMPERATURE})",
    )
    add("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens only")
    add("--top-p", type=float, metavar="P", help="draw from the fewest tokens of probability P")
    add("--seed", type=int, metavar="N", help="same seed, device and version: same text")
    add("--device", default="auto", choices=DEVICES)
    add(
        "--dtype",
        default="auto",
        choices=DTYPES,
        help="auto: the checkpoint's own on a GPU, float32 on the CPU",
    )
    add(
        "--compile",
        action="store_true",
        help="faster tokens, once a step is compiled; the last bits may differ",
    )
    add("--stats", action="store_true", help="sizes, seconds and tokens/s to standard error")
    add("--check", action="store_true", help="look for NaN and infinity in the weights first")
    version = f"llama-mini {__version__} (torch {torch.__version__})"
    add("--version", action="version", version=version)
    options = parser.parse_args(arguments)
    if isinstance(options.prompt, list):  # "--prompt=--", of which argparse makes an empty list
        options.prompt = "--"
    if options.prompt is None and not options.chat:
        parser.error("give --prompt TEXT, or --chat for a conversation")
    if options.system is not None and not options.chat:
        parser.error("--system goes with --chat")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    return run_command(partial(run, options), who())


def run(options: argparse.Namespace) -> None:
    ranks = join(choose_device(options.device))
    if ranks.rank > 0:  # rank 0 speaks for all
        silence(sys.stdout)
    with ranks.together():
        require_options(options, ranks.size)
        prompt = read_input() if options.prompt == "-" and ranks.rank == 0 else options.prompt
    prompt, seed = ranks.agree((prompt, torch.seed() if options.seed is None else options.seed))
    with ranks.together() as same:
        checkpoint = open_checkpoint(source(options.model))
        tokenizer = load_tokenizer(checkpoint)
        ids = encode(prompt, options, checkpoint, tokenizer)
        settings = sampling(options, checkpoint) | {"max_new_tokens": options.max_new_tokens}
        dtype, note = choose_dtype(options.dtype, ranks.device, checkpoint.config.dtype)
        require_room(options, ranks, checkpoint, dtype, ids)
        if ranks.size > 1:
            same |= fingerprint(checkpoint)
            same |= {"prompt": ids, "options": (settings, dtype, options.stop)}
    if note and ranks.rank == 0:
        say(note)
    with ranks.together():
        began = time.perf_counter()
        model = load(options, ranks, checkpoint, dtype)
        seconds = time.perf_counter() - began
    settings |= {"generator": torch.Generator(ranks.device).manual_seed(seed)}
    if prompt is None:
        talk = Conversation(checkpoint, model, tokenizer, options.system)
        return converse(talk, options, seconds, settings)
    vocab_size, stop_ids = tokenizer.vocab_size, checkpoint.config.eos_token_id
    steps = stream(model, [ids], vocab_size=vocab_size, agree=ranks.in_step, **settings)
    decoder = tokenizer.stream_decoder([] if options.chat else ids)
    answer = Answer(steps, decoder, stop_ids, options.stop)
    with ranks.printing(steps):
        write(answer, "" if options.chat else prompt)
    if ranks.rank == 0:
        report(answer, len(ids), len(ids), model, options, seconds, ranks.size)


def require_options(options: argparse.Namespace, ranks: int) -> None:
    """Raise a ValueError for what can be seen to be wrong before anything is read."""
    require_sampling(options.temperature or 0.0, options.top_k, options.top_p)
    require_seed(options.seed)
    StopStrings(options.stop)
    if options.compile and ranks > 1:
        raise ValueError("--compile runs in one process: leave it out under torchrun")
    if options.prompt is None and ranks > 1:
        raise ValueError("a conversation runs in one process: give --prompt TEXT under torchrun")


def source(model: str | None) -> str | Path:
    """The checkpoint asked for, or the one that a clone has."""
    if model is None and not WEIGHTS.is_dir():
        raise FileNotFoundError(
            "the checkpoint in weights/ comes with a clone, and not with an installed package: name one "
            "with --model FOLDER, or of the hub, as --model HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    return WEIGHTS if model is None else model


def encode(
    prompt: str | None, options: argparse.Namespace, checkpoint: Checkpoint, tokenizer: Tokenizer
) -> list[int]:
    """The prompt's ids, through the chat template where that is asked for; [] for a conversation."""
    if prompt is None:
        chat_prompt(checkpoint, tokenizer, "Hi", options.system)  # or each turn would fail
        return []
    positions, size = checkpoint.config.context(), len(prompt.encode("utf-8", "replace"))
    # A smaller prompt is soon encoded, and its tokens say it better.
    if size > max(MEGABYTE, tokenizer.most_bytes(positions)):
        raise ValueError(
            f"a prompt of {size:,} bytes does not fit the model's context of {positions:,} positions"
        )
    if options.chat:
        return chat_prompt(checkpoint, tokenizer, prompt, options.system)
    ids = tokenizer.encode(prompt)
    if not ids:
        raise ValueError("the prompt is empty, and this tokenizer puts no BOS: give it some text")
    return ids


def sampling(options: argparse.Namespace, checkpoint: Checkpoint) -> dict[str, Any]:
    """Each as the options say, else as the checkpoint does, else TEMPERATURE and all tokens."""
    own = {"temperature": TEMPERATURE, "top_k": None, "top_p": None} | checkpoint.sampling()
    given = {name: getattr(options, name) for name in own}
    return own | {name: value for name, value in given.items() if value is not None}


def require_room(
    options: argparse.Namespace,
    ranks: Ranks,
    checkpoint: Checkpoint,
    dtype: torch.dtype | None,
    ids: list[int],
) -> None:
    """Raise a ValueError unless context and memory have room for the text, before a weight is read."""
    new = options.max_new_tokens
    require_prompts(checkpoint.config, [ids] if ids else [], 1 if new is None else new)
    new = STRIDE if new is None else new  # the cache grows with the text
    require_memory(checkpoint, ranks.device, dtype, len(ids), new, share=ranks.share())


def load(
    options: argparse.Namespace, ranks: Ranks, checkpoint: Checkpoint, dtype: torch.dtype | None
) -> Llama:
    """The model, or this rank's part of it, in the form that is asked for."""
    if ranks.size > 1:
        model = load_parallel(ranks, checkpoint, ranks.device, dtype)
    else:
        model = load_model(checkpoint, ranks.device, dtype)
    if options.check:
        check_weights(model, checkpoint)
    if ranks.size > 1:
        return model
    if not options.compile:
        return all_cores(model)
    say(
        "compiling one step: some seconds on a CPU, half a minute on a GPU, and less once it is cached"
    )
    began = time.perf_counter()
    try:
        fast = fast_model(model)
    except OSError as error:
        raise RuntimeError(
            f"a step cannot be compiled: {error} (TORCHINDUCTOR_CACHE_DIR says where torch keeps it)"
        ) from error
    say(f"compiled in {time.perf_counter() - began:.1f} s")
    return fast


def write(answer: Answer, prompt: str = "") -> None:
    """Show a prompt and an answer as it comes; when interrupted what it held back; and end the line."""
    try:
        show(prompt)
        for piece in answer:
            show(piece)
    finally:
        show(f"{answer.rest()}\n")


def report(
    answer: Answer,
    prompt: int,
    computed: int,
    model: Llama,
    options: argparse.Namespace,
    seconds: float,
    ranks: int = 1,
) -> None:
    """Say which limit stopped an answer to `prompt` tokens, if one did, and the sizes and rates asked
    for, `computed` tokens of the prompt and `seconds` of loading.
    """
    config, new = model.config, len(answer.ids)
    if not answer.ended and prompt + new >= config.context():
        say(f"[stopped at the end of the context, after {prompt + new} tokens]")
    elif not answer.ended:
        say(f"[stopped after {new} tokens; --max-new-tokens N for more]")
    if not options.stats:
        return
    times, weight = answer.times, model.embed.weight
    # A rank holds a part of a Llama; families have parameters that its config does not count.
    own = sum(parameter.numel() for parameter in model.parameters())
    parameters = own if ranks == 1 else config.parameter_count()
    prefill = times[1] - times[0] if new else 0.0
    decode = times[-1] - times[1] if new else 0.0
    rows = [
        ("parameters", f"{parameters:,}"),
        ("device", f"{weight.device}, {str(weight.dtype).removeprefix('torch.')}"),
        ("load", f"{seconds:.2f} s"),
        ("prefill", f"{computed} tokens, {computed / prefill if prefill else 0:.1f} tokens/s"),
        ("decode", f"{new} tokens, {(new - 1) / decode if decode else 0:.1f} tokens/s"),
        ("peak memory", f"{peak_memory(weight.device) / 2**20:.0f} MiB{' (rank 0)' * (ranks > 1)}"),
    ]
    say(table(rows, left=2))


def converse(
    talk: Conversation, options: argparse.Namespace, seconds: float, settings: dict[str, Any]
) -> None:
    """Answer turn after turn, from a terminal or a line each from standard input, up to its end or
    /exit.
    """
    typed = sys.stdin is not None and sys.stdin.isatty()
    if typed:
        with suppress(ImportError):  # not on every system: line editing and earlier lines
            import readline  # noqa: F401
        say("Ctrl-C ends an answer, Ctrl-D or /exit the conversation; /reset begins a new one")
    with heeding_ctrl_c() if typed else nullcontext():
        while (turn := next_turn(typed)) not in (None, "/exit"):
            try:
                if turn == "/reset":
                    talk.reset()
                elif turn:
                    answer = talk.ask(turn, options.stop, **settings)
                    write(answer)
                    report(answer, talk.asked, talk.computed, talk.model, options, seconds)
            except KeyboardInterrupt as stopped:
                if not typed or stopped.args:  # SIGTERM, with its number
                    raise
            except ValueError as error:
                if not typed:
                    raise
                say(f"error: {reason(error)}")


def next_turn(typed: bool) -> str | None:
    """The next line, "" for one that Ctrl-C took back, None at the end."""
    if not typed:
        return read_line()
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt) as stopped:
        if stopped.args:
            raise
        show("\n")
        return None if isinstance(stopped, EOFError) else ""


if __name__ == "__main__":
    sys.exit(main())
