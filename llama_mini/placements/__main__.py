"""Where the norms of every family go: a table, and the formulas that each family's own code writes down.

python -m llama_mini.placements
python -m llama_mini.placements gemma3_text olmo2
python -m llama_mini.placements --plot placements.svg
"""

import argparse
import sys
from pathlib import Path

from ..cli import run_command
from . import FAMILIES
from .gallery import lines, markdown, rows


def show(names: list[str]) -> None:
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no family here; there are {', '.join(FAMILIES)}")
    if not names:
        print(markdown(rows()))
    for name in names or FAMILIES:
        print(f"\n{name}\n    " + "\n    ".join(lines(FAMILIES[name])))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m llama_mini.placements",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "families", nargs="*", metavar="FAMILY", help="only these, without the table"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw them: a .png or .svg file")
    options = parser.parse_args(arguments)

    def run() -> None:
        if options.plot:
            from .picture import plot

            plot(Path(options.plot))
            return
        show(options.families)

    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
