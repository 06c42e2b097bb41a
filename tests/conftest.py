"""What several test files share: a checkpoint folder with random weights and a real tokenizer."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from tests.support.fixtures import BASE
from tests.support.tokenizers import train_sentencepiece

torch.set_num_threads(1)  # the models are tiny: threads that wait for each other only cost time

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background; tests send Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

IN_CI = bool(os.environ.get("CI"))
SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow", action="store_true", help="run the tests marked slow too, as CI does"
    )
    parser.addoption(
        "--oldest", action="store_true", help="run what shows whether this version of torch serves"
    )
    parser.addoption("--endurance", type=int, default=100, help="generations in one process")
    parser.addoption(
        "--fuzz",
        type=int,
        default=400 if IN_CI else 120,
        help="damaged folders that test_fuzz.py tries",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the slow tests to CI and to those who ask for them, or name one."""
    if config.getoption("--oldest"):
        other = [item for item in items if not item.get_closest_marker("oldest")]
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if item.get_closest_marker("oldest")]
        return
    if config.getoption("--slow") or IN_CI or any("::" in a for a in config.args):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


@pytest.fixture(scope="session")
def stories260k() -> Path:
    """A real public checkpoint, which is not part of the project."""
    folder = SHARED / "checkpoints" / "stories260K"
    if not folder.is_dir():
        pytest.skip("the public checkpoint stories260K is not beside the project")
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny Hugging Face folder: random weights, untied, 305 embedding rows for 300 tokens."""
    from safetensors.torch import save_file

    from llama_mini import Llama
    from llama_mini.checkpoint import parse_config
    from llama_mini.checkpoint.names import HUGGING_FACE, translate

    folder = tmp_path_factory.mktemp("checkpoint")
    values = {
        **BASE,
        "vocab_size": 305,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(values))
    train_sentencepiece(folder / "tokenizer.model")
    torch.manual_seed(0)
    weights = Llama(parse_config(values)).state_dict()
    save_file(
        {translate(name, HUGGING_FACE): weight.bfloat16() for name, weight in weights.items()},
        folder / "model.safetensors",
    )
    return folder
