"""Train a tokenizer and a small Llama on a text file; the result is a Hugging Face style folder.

python -m llama_mini.train --text stories.txt --out weights/stories
python -m llama_mini.train --text stories.txt --evaluate weights/stories
python -m llama_mini.train --text stories.txt --out comparison --compare-norms
python -m llama_mini.train --text stories.txt --out comparison --compare-placements
python -m llama_mini.train --out comparison --gradients
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from ..cli import run_command, say
from . import gradients
from .compare_norms import NORMS
from .compare_placements import PLACEMENTS
from .corpus import read_documents
from .evaluation import evaluate_folder
from .loop import train
from .recipe import PRECISIONS, Recipe, option
from .side_by_side import compare
from .state import STATE


def show(line: str, keep: bool) -> None:
    """A line of progress to standard error; on a terminal the next one takes its place."""
    if sys.stderr.isatty():
        line = f"\r\033[K{line}"
    print(line, end="\n" if keep or not sys.stderr.isatty() else "", file=sys.stderr, flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m llama_mini.train",
        description=(__doc__ or "").split("\n")[0],  # python -OO leaves it out
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--text", type=Path, help="UTF-8, a line <|endoftext|> after each document")
    add("--out", type=Path, help="folder of the checkpoint, and of the state until it is finished")
    add("--data-note", default="Not described.", help="source and licence of the text")
    other = parser.add_mutually_exclusive_group()
    other.add_argument(
        "--evaluate", type=Path, metavar="FOLDER", help="only measure a checkpoint's held-out loss"
    )
    for comparison, what in ((NORMS, "other norms"), (PLACEMENTS, "norms in other places")):
        other.add_argument(
            f"--compare-{comparison.name}",
            dest="comparison",
            action="store_const",
            const=comparison,
            help=f"{what}, smaller by default; a table and a picture",
        )
    other.add_argument(
        "--gradients",
        action="store_true",
        help="what reaches each block in the first step; no text",
    )
    for field in dataclasses.fields(Recipe):
        choices = PRECISIONS if field.name == "precision" else None
        add(
            option(field.name),
            type=type(field.default),
            choices=choices,
            metavar=None if choices else "N",
            help=f"default {field.default}",
        )
    options = parser.parse_args(arguments)
    if (options.out is None) == (options.evaluate is None):
        parser.error("give --out FOLDER or --evaluate FOLDER")
    if (options.text is None) != options.gradients:
        parser.error("give --text FILE, except with --gradients")
    return options


def run(options: argparse.Namespace) -> int:
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(Recipe)}
    given = {name: value for name, value in given.items() if value is not None}
    if options.gradients:
        if unused := given.keys() - {"seed"}:
            raise ValueError(f"{option(unused.pop())} does nothing with --gradients: leave it out")
        gradients.write(options.out, given.get("seed", 0), show)
        return 0
    if options.evaluate:
        _, held = read_documents(options.text, given.get("held_out", Recipe.held_out))
        per_character, per_token = evaluate_folder(options.evaluate, held)
        print(f"held-out loss {per_character:.4f} nats per character, {per_token:.4f} per token")
        return 0
    if options.comparison:
        recipe = dataclasses.replace(options.comparison.recipe, **given)
        compare(options.comparison, options.text, options.out, recipe, show)
        return 0
    asked: list[int] = []
    try:
        done = train(
            options.text, options.out, Recipe(**given), show, options.data_note, asked=asked
        )
        if not done:
            raise KeyboardInterrupt(*asked)
    except KeyboardInterrupt:
        kept = (options.out / STATE).exists()
        say("stopped; the same command goes on from here" if kept else "stopped; nothing was kept")
        raise
    print(f"{options.out} holds the checkpoint and its card")
    return 0


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    return run_command(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
