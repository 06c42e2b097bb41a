"""Continue a prompt with a Llama-style checkpoint, or talk with it: python -m llama_mini --prompt TEXT.

The same as `python generate.py` in a clone, and as `llama-mini` where the package is installed.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import torch

from . import __version__
from .checkpoint import (
    Checkpoint,
    check_weights,
    load_model,
    load_tokenizer,
    open_checkpoint,
    require_memory,
)
from .cli import (
    DEVICES,
    DTYPES,
    choose_dtype,
    read_input,
    require_seed,
    run_command,
    say,
    silence,
)
from .generation import STRIDE, require_sampling
from .model import Llama
from .speed import all_cores, fast_model
from .speed.parallel import fingerprint, load_parallel
from .speed.ranks import Ranks, join, who
from .talk import Answer, Conversation, StopStrings, prompt_ids
from .talk.terminal import Pace, converse, say_limit, say_stats, write

WEIGHTS = Path(__file__).resolve().parents[1] / "weights" / "stories"
SAMPLING = {"temperature": 0.8, "top_k": None, "top_p": None}  # where nobody says otherwise


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
        help=f"0 takes the likeliest token (default: the checkpoint's, or {SAMPLING['temperature']})",
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
    given = {name: getattr(options, name) for name in SAMPLING}
    options.sampling = {name: value for name, value in given.items() if value is not None}
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    return run_command(partial(run, options), who())


def run(options: argparse.Namespace) -> None:
    ranks = join(options.device)
    if ranks.rank > 0:  # rank 0 speaks for all
        silence(sys.stdout)
    prompt = ranks.of_first(lambda: read_input() if options.prompt == "-" else options.prompt)
    seed = ranks.agree(torch.seed() if options.seed is None else options.seed)
    new = options.max_new_tokens
    with ranks.together() as same:
        StopStrings(options.stop)  # refuses an empty one before anything is read
        require_seed(options.seed)
        checkpoint = open_checkpoint(shipped() if options.model is None else options.model)
        tokenizer = load_tokenizer(checkpoint)
        ids = prompt_ids(checkpoint, tokenizer, prompt, options.chat, options.system, new)
        settings = SAMPLING | checkpoint.sampling() | options.sampling
        require_sampling(**settings)
        dtype, note = choose_dtype(options.dtype, ranks.device, checkpoint.config.dtype)
        room = STRIDE if new is None else new  # without a limit the cache grows with the text
        form = {"share": ranks.share(), "graphs": options.compile}
        require_memory(checkpoint, ranks.device, dtype, len(ids), room, **form)
        if ranks.size > 1:
            same |= fingerprint(checkpoint)
            same |= {"prompt": ids, "options": (settings, new, dtype, options.stop)}
    if note and ranks.rank == 0:
        say(note)
    began = time.perf_counter()
    with ranks.together():
        model = load(options, ranks, checkpoint, dtype)
    loading = time.perf_counter() - began if options.stats else None
    generator = torch.Generator(ranks.device).manual_seed(seed)
    settings |= {"max_new_tokens": new, "stop": options.stop, "generator": generator}
    if prompt is None:
        talk = Conversation(checkpoint, model, tokenizer, options.system)
        return converse(talk, loading, **settings)
    shown = [] if options.chat else ids
    answer = Answer(model, tokenizer, ids, shown=shown, agree=ranks.in_step, **settings)
    with ranks.printing(answer.steps):
        write(answer, "" if options.chat else prompt)
    if ranks.rank == 0:
        say_limit(answer)
        if loading is not None:
            say_stats(model, loading, Pace().plus(answer), ranks.size)


def shipped() -> Path:
    """The checkpoint that a clone has."""
    if WEIGHTS.is_dir():
        return WEIGHTS
    raise FileNotFoundError(
        "the checkpoint in weights/ comes with a clone, and not with an installed package: name one "
        "with --model FOLDER, or of the hub, as --model HuggingFaceTB/SmolLM2-135M-Instruct"
    )


def load(
    options: argparse.Namespace, ranks: Ranks, checkpoint: Checkpoint, dtype: torch.dtype | None
) -> Llama:
    """The model, or this rank's part of it, in the form that is asked for."""
    if ranks.size > 1:
        if options.compile:
            raise ValueError("--compile runs in one process: leave it out under torchrun")
        if options.prompt is None:
            raise ValueError(
                "a conversation runs in one process: give --prompt TEXT under torchrun"
            )
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
        "getting a compiled step, from the cache or anew: some seconds on a CPU, half a minute on a GPU"
    )
    began = time.perf_counter()
    try:
        fast = fast_model(model)
    except OSError as error:
        raise RuntimeError(
            f"a step cannot be compiled: {error} (TORCHINDUCTOR_CACHE_DIR says where torch keeps it)"
        ) from error
    say(f"ready after {time.perf_counter() - began:.1f} s")
    return fast


if __name__ == "__main__":
    sys.exit(main())
