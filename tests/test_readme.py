"""What the README says of names, files and commands is what the code has."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from llama_mini.__main__ import main
from llama_mini.checkpoint.names import HUGGING_FACE, META
from llama_mini.placements import FAMILIES
from tests.support.fixtures import SHIPPED, require_compiler

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def cells(line: str) -> list[str]:
    return [cell.strip().strip("`") for cell in line.strip("|").split("|")]


def spelled(name: str) -> list[str]:
    """w{q,k} is wq and wk."""
    found = re.fullmatch(r"(.*)\{(.*)\}(.*)", name)
    return [found[1] + part + found[3] for part in found[2].split(",")] if found else [name]


def test_name_table_is_the_loaders():
    start = README.index("| place | here |")
    rows = [cells(line) for line in README[start : README.index("\n\n", start)].splitlines()[2:]]
    ours = [name for row in rows for name in spelled(row[1])]
    assert (
        dict(zip(ours, [n for row in rows for n in spelled(row[2])], strict=True)) == HUGGING_FACE
    )
    metas = [row for row in rows if row[3]]
    ours = [name for row in metas for name in spelled(row[1])]
    assert dict(zip(ours, [n for row in metas for n in spelled(row[3])], strict=True)) == META


def test_it_is_short():
    assert len(README.splitlines()) < 200


def test_links_lead_somewhere():
    links = set(re.findall(r"\]\(([^)]+)\)", README))
    assert len(links) > 8
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_first_command_prints_what_the_readme_quotes(capsys):
    options = re.search(r"^    python generate\.py (.*)$", README, re.MULTILINE)[1]
    quoted = " ".join(line[2:] for line in README.splitlines() if line.startswith("> "))
    assert main([*shlex.split(options), "--device", "cpu"]) == 0
    assert " ".join(capsys.readouterr().out.split()).startswith(quoted)


def test_the_tree_names_every_room_and_every_file_of_the_decoder():
    start = README.index("    llama_mini/\n")
    tree = README[start : README.index("\n\n", start)]
    listed = re.findall(r"^      (\S+) ", tree, re.MULTILINE)
    rooms = {f"{p.name}/" for p in (ROOT / "llama_mini").iterdir() if (p / "__init__.py").is_file()}
    files = {p.name for p in (ROOT / "llama_mini").glob("*.py") if not p.name.startswith("__")}
    assert set(listed) == rooms | files


def test_the_decoder_has_as_many_lines_as_it_says():
    files = ("model.py", "rope.py", "cache.py", "config.py", "generation.py")
    lines = sum(len((ROOT / "llama_mini" / f).read_text().splitlines()) for f in files)
    said = int(re.search(r"five files, about (\d+) lines", README)[1])
    assert abs(lines - said) <= 0.05 * lines, lines


def test_the_numbers_of_the_norms_are_those_of_the_room():
    """Whose own test computes them anew."""
    start = README.index("1. **Pre-norm keeps")
    points = README[start : README.index("| | RMSNorm", start)]
    room = (ROOT / "llama_mini" / "inspect" / "README.md").read_text(encoding="utf-8")
    numbers = set(re.findall(r"\d+\.\d+(?: %)?", points))
    assert len(numbers) >= 16
    assert [number for number in numbers if number not in room] == []


def test_the_rates_are_those_of_the_room():
    start = README.index("| decode | `--compile` |")
    rows = [cells(line) for line in README[start : README.index("\n\n", start)].splitlines()[2:]]
    room = (ROOT / "llama_mini" / "speed" / "README.md").read_text(encoding="utf-8")
    for dtype, *rates in rows:
        assert f"| {dtype}, 512 positions | {' | '.join(rates)} |" in room


PYTHON = {  # each block by its README
    f"{path.relative_to(ROOT).parent.name or 'root'}, {number}": code
    for path in sorted([ROOT / "README.md", *ROOT.glob("llama_mini/*/README.md")])
    for number, code in enumerate(
        re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    )
}


@pytest.mark.parametrize("block", PYTHON)
def test_the_python_of_every_readme_runs(block, monkeypatch, capsys, tmp_path):
    """By itself, so that no import is missing; our own checkpoint stands in for that of the hub."""
    if block.startswith("speed"):
        require_compiler()
    shutil.copytree(SHIPPED, tmp_path / "weights" / "stories")
    hub = tmp_path / "HuggingFaceTB" / "SmolLM2-135M-Instruct"
    shutil.copytree(SHIPPED, hub)
    (hub / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    monkeypatch.chdir(tmp_path)
    exec(PYTHON[block].replace("max_new_tokens=None", "max_new_tokens=4"), {})
    if "print" in PYTHON[block]:
        assert capsys.readouterr().out.strip()


def test_the_blocks_of_python_are_found():
    assert {block.split(", ")[0] for block in PYTHON} == set(
        "root checkpoint inspect speed talk".split()
    )


def test_pictures_are_there():
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert pictures
    assert all((ROOT / picture).is_file() for picture in pictures)


def test_options_of_the_commands_exist():
    sources = {
        "generate.py": ROOT / "llama_mini" / "__main__.py",
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


def test_families_that_it_says_load_do():
    start = README.index("| family | |")
    rows = [cells(line) for line in README[start : README.index("\n\n", start)].splitlines()[2:]]
    assert len(rows) == 10
    words = re.findall(r"[\w-]+", " ".join(row[0] for row in rows if row[1].startswith("yes")))
    named = {word.lower().replace("-", "") for word in words}
    loads = {re.sub("[-_]", "", model_type) for model_type in FAMILIES}
    for name in (
        "llama",
        "mistral",
        "qwen3",
        "qwen2",
        "gemma",
        "olmo",
        "granite",
        "smollm3",
        "phi",
    ):
        assert name in named & loads
