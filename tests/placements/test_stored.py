"""Every place in every family against activations that transformers stored, which need not be installed."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from llama_mini import Llama, compare, load_model, record
from llama_mini.placements import FAMILIES
from tests.support.placements import FAMILIES_FOLDER

# Relative to the largest value under a name. Observed: 0 with the kernels that wrote the files; as in
# tests/support/fixtures.py, 1.3e-6 with others.
TOLERANCE = 5e-6
FILES = sorted(FAMILIES_FOLDER.glob("*.safetensors"))


def load_stored(file: Path, folder: Path) -> tuple[Llama, Tensor, dict[str, Tensor]]:
    """The model of a stored family, its tokens, and what transformers makes of them."""
    with safe_open(file, framework="pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        (folder / "config.json").write_text(stored.metadata()["config"])
    parts: dict[str, dict[str, Tensor]] = {"weights": {}, "activations": {}, "tokens": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        parts[part][rest] = tensor
    save_file(parts["weights"], folder / "model.safetensors")
    return load_model(folder), parts["tokens"][""], parts["activations"]


def test_every_family_is_stored():
    assert {file.stem for file in FILES} == FAMILIES.keys() - {
        "llama"
    }  # which has files of its own


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_place_is_what_transformers_stored(file, tmp_path):
    model, tokens, reference = load_stored(file, tmp_path)
    ours = record(model, tokens)
    differences = compare(reference, ours)
    # Gemma's embedding is scaled in transformers' module already; GPT has no norm at the end.
    assert ours.keys() - reference.keys() <= {"embed", "final_norm", "positions"}
    assert reference.keys() <= ours.keys()
    assert "lm_head" in differences
    for name, (_, relative) in differences.items():
        assert relative <= TOLERANCE, f"{name} differs by {relative:.2g} of its largest value"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_files_are_small(file):
    assert file.stat().st_size < 60_000
    with safe_open(file, framework="pt") as stored:
        assert json.loads(stored.metadata()["config"])["model_type"] == file.stem
