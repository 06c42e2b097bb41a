"""A text, and a checkpoint trained on it."""

from pathlib import Path

import pytest

from llama_mini.train.__main__ import main
from tests.support.training import OPTIONS, documents


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "tales.txt"
    path.write_text("".join(f"{d}\n<|endoftext|>\n" for d in documents(120)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def trained(text, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "tales"
    assert (
        main(["--text", str(text), "--out", str(out), "--data-note", "Made up; CC0.", *OPTIONS])
        == 0
    )
    return out
