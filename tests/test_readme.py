"""What the README says of names, files and commands is what the code has."""

import re
from pathlib import Path

from llama_mini.checkpoint.names import HUGGING_FACE, META

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_name_table_is_the_loaders():
    rows = re.findall(
        r"^\| [^|]+ \| `([^`]+)` \| `([^`]+)` \| (?:`([^`]+)` )?\|$", README, re.MULTILINE
    )
    assert {ours: theirs for ours, theirs, _ in rows} == HUGGING_FACE
    assert {ours: theirs for ours, _, theirs in rows if theirs} == META


def test_pictures_are_there():
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert pictures
    assert all((ROOT / picture).is_file() for picture in pictures)


def test_options_of_the_commands_exist():
    sources = {
        "generate.py": ROOT / "generate.py",
        **{
            ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__"): p
            for p in (ROOT / "llama_mini").rglob("*.py")
        },
        "llama_mini.train": ROOT / "llama_mini" / "train" / "__main__.py",
    }
    commands = re.findall(r"python (?:-m (llama_mini[.\w]+)|(generate\.py))([^\n#`]*)", README)
    assert commands
    for module, script, rest in commands:
        source = sources[module or script].read_text()
        for option in set(re.findall(r"--[a-z][a-z-]*", rest)) - {"--help"}:
            assert f'"{option}"' in source, f"{module or script} has no {option}"
