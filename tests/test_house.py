"""The house keeps its order: imports point one way, files stay short, the decoder needs no room."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fixtures import require

PACKAGE = Path(__file__).resolve().parents[1] / "llama_mini"
# From top to bottom. A module imports from its own room, and from those below it.
ROOMS = ("bench", "train", "speed", "talk", "inspect", "checkpoint", "placements")
DECODER = ("generation", "model", "rope", "cache", "config")
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(file): file for file in FILES}


def imported(file: Path) -> Iterator[str]:
    """Modules of the package that a file imports, inside functions too."""
    package = list(file.relative_to(PACKAGE.parent).parts[:-1])
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("llama_mini"))
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            if module.split(".")[0] == "llama_mini":
                for alias in node.names:
                    inner = f"{module}.{alias.name}"
                    yield inner if inner in NAMES else module


IMPORTS = {name: sorted(set(imported(file))) for name, file in NAMES.items()}


def level(name: str) -> int:
    """How high a module stands; cli and the decoder are at the bottom."""
    parts = name.split(".")
    if len(parts) == 1 or parts[1] == "__main__":
        return len(ROOMS) + 1  # the package's own names, and the command
    return len(ROOMS) - ROOMS.index(parts[1]) if parts[1] in ROOMS else 0


@pytest.mark.parametrize("name", IMPORTS)
def test_imports_point_downwards(name):
    upward = [other for other in IMPORTS[name] if level(other) > level(name)]
    assert not upward


@pytest.mark.parametrize("name", DECODER)
def test_the_decoder_imports_nothing_but_itself(name):
    assert {*IMPORTS[f"llama_mini.{name}"]} <= {f"llama_mini.{other}" for other in DECODER}


def test_the_shared_command_line_imports_nothing_of_the_package():
    assert IMPORTS["llama_mini.cli"] == []


def test_no_circle():
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in IMPORTS.get(name, []):
                if other != name:
                    walk(other, (*path, name))
            done.add(name)

    for name in IMPORTS:
        walk(name, ())


def test_the_package_has_the_rooms_and_five_files():
    top = {file.stem for file in PACKAGE.glob("*.py")}
    assert top == {*DECODER, "cli", "__init__", "__main__"}
    rooms = {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").is_file()}
    assert rooms == {*ROOMS}


@pytest.mark.parametrize("name", NAMES)
def test_no_file_is_long(name):
    lines = len(NAMES[name].read_text(encoding="utf-8").splitlines())
    assert lines <= (230 if name == "llama_mini.model" else 350)


def test_this_test_sees_upward_arrows_and_circles(tmp_path, monkeypatch):
    """Its own reading of imports finds what the rules forbid, in functions and relative ones too."""
    file = PACKAGE / "checkpoint" / "made_up.py"
    lines = ["from ..bench import model", "from .. import train", "import llama_mini.speed"]
    text = "\n    ".join(["def f():", *lines])
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    found = set(imported(file))
    assert found == {"llama_mini.bench.model", "llama_mini.train", "llama_mini.speed"}
    assert all(level(name) > level("llama_mini.checkpoint.made_up") for name in found)


@pytest.mark.parametrize("name", ["make_activations", "make_families", "support.smollm2"])
def test_what_is_run_by_hand_starts(name):
    """As `python -m tests.NAME`: a script's own folder comes first on the path, and tests/inspect would be
    the standard library's inspect.
    """
    if name != "support.smollm2":
        require("transformers")
    module = importlib.import_module(f"tests.{name}")
    assert f"python -m tests.{name}" in module.__doc__
