"""The gallery page and the command say the same, and what they say is what the code does."""

import re
from pathlib import Path

import pytest

from llama_mini.placements import FAMILIES, __main__, gallery
from llama_mini.placements.gallery import Symbol, by_place, formulas, lines, markdown, rows

ROOM = Path(gallery.__file__).parent
README = (ROOM / "README.md").read_text(encoding="utf-8")
WRITTEN = dict(re.findall(r"<!-- (.+?) -->\n\n(.*?)\n\n<!-- end -->", README, flags=re.S))
QUOTED = [name.removeprefix("formulas: ") for name in WRITTEN if name.startswith("formulas: ")]


@pytest.mark.parametrize("name", QUOTED)
def test_formulas_of_the_page_are_those_of_the_code(name):
    assert WRITTEN[f"formulas: {name}"].split("\n") == [
        f"    {line}" for line in lines(FAMILIES[name])
    ]


def test_every_place_is_on_the_page():
    """By the formula of one of its families."""
    places = {gallery.place(formulas(family)) for family in FAMILIES.values()}
    assert {gallery.place(formulas(FAMILIES[name])) for name in QUOTED} == places


def test_tables_of_the_page_are_those_of_the_code():
    assert WRITTEN["table"] == markdown(rows())
    assert WRITTEN["short"] == markdown(by_place())


def test_the_first_page_shows_every_place():
    page = (ROOM.parents[1] / "README.md").read_text(encoding="utf-8")
    table = page[page.index("| placement | block |") :].split("\n\n")[0]
    shown = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert {*shown} == {gallery.place(formulas(family)) for family in FAMILIES.values()}


def test_lines_are_counted_right():
    """Within a tenth, so that a comment more is no new table."""
    found = re.findall(r"^\| \S+ +\| (\w+\.py) +\| (\d+) ", WRITTEN["lines"], flags=re.M)
    assert len(found) == len(FAMILIES) - 3  # less Llama, Mistral and Qwen 3
    for file, count in found:
        lines = len((ROOM / file).read_text(encoding="utf-8").splitlines())
        assert abs(int(count) - lines) <= lines / 10


@pytest.mark.parametrize("file", sorted({*re.findall(r"\w+\.py(?= +\|)", WRITTEN["lines"])}))
def test_a_family_is_a_short_file(file):
    assert len((ROOM / file).read_text(encoding="utf-8").splitlines()) <= 60


def test_the_command_prints_table_and_formulas(capsys):
    assert __main__.main([]) == 0
    printed = capsys.readouterr().out
    assert markdown(rows()) in printed
    for name, family in FAMILIES.items():
        assert "\n    ".join([name, *lines(family)]) in printed


def test_one_family_alone_and_one_that_is_none(capsys):
    assert __main__.main(["olmo2"]) == 0
    assert "x = x + post_attention_norm(attention(x))" in capsys.readouterr().out
    assert __main__.main(["nothing\n"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "olmo2" in err


def test_a_moved_norm_moves_the_formula(monkeypatch):
    block = gallery.tiny(FAMILIES["olmo2"]).get_submodule("blocks.0")

    def pre_norm(self, x, *how):
        x = x + self.attention(self.post_attention_norm(x), *how)
        return x + self.ffn(self.post_ffn_norm(x))

    right = formulas(FAMILIES["olmo2"]).block
    monkeypatch.setattr(type(block), "forward", pre_norm)
    assert formulas(FAMILIES["olmo2"]).block != right


def test_symbols_write_down_sums_products_and_brackets():
    x, y = Symbol("x"), Symbol("y")
    assert str((x + y) * 2.0) == "(x + y) * 2"
    assert str(x * y + 1.0) == "x * y + 1"
    assert str(1 - x) == "1 - x"


def test_the_picture_is_the_one_that_is_shipped(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "places.svg"
    assert __main__.main(["--plot", str(path)]) == 0
    shipped = ROOM.parents[1] / "weights" / "pictures" / "norm-places.svg"
    texts = [
        re.findall(r"<!-- (.+?) -->", file.read_text(encoding="utf-8")) for file in (path, shipped)
    ]
    assert texts[0] == texts[1]
    assert {"norm", "attention", "ffn"} <= set(texts[0])
    assert __main__.main(["--plot", str(tmp_path / "places.gif")]) == 1
    assert __main__.main(["--plot", str(tmp_path / "no" / "places.svg")]) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["places.svg"]
