"""The folder of a checkpoint: one on this machine, or the cached copy of a Hugging Face hub model.

From the hub come only the files that this package reads, never a pickle (`.bin`, `.pth`).
huggingface_hub keeps the cache (`HF_HOME`), shows progress, goes on after a cut connection, and works
offline on what it has (`HF_HUB_OFFLINE=1` keeps it from asking).
"""

import re
from pathlib import Path

from .untrusted import read_weight_map

CONFIGS = ["config.json", "params.json"]
# What may stand beside the config and the weights: the tokenizer, the chat template, the stop ids.
SETTINGS = (
    "generation_config.json tokenizer.json tokenizer.model tokenizer_config.json special_tokens_map.json "
    "added_tokens.json vocab.json merges.txt chat_template.jinja additional_chat_templates/default.jinja"
).split()
SMALL_FILES = CONFIGS + SETTINGS
INDEX = "model.safetensors.index.json"
META_FILES = ("consolidated.00.safetensors", "consolidated.safetensors")  # Meta's, and Mistral's


def find(folder_or_hub_id: str | Path) -> tuple[Path, str | None]:
    """The folder itself, or the cached copy of a hub model, with its id, for which all but its weights is
    fetched where needed.

    Raises FileNotFoundError for a folder or model that is not there or cannot be reached,
    ValueError for one that may not be read.
    """
    name = str(folder_or_hub_id)
    try:
        path = Path(name).expanduser()
        if name and path.is_dir():
            return path, None
        if path.is_file():
            raise ValueError(f"{name} is a file: name the folder that it is in, {path.parent}")
    except (OSError, RuntimeError) as error:  # no permission, too long, ~ without a home
        raise FileNotFoundError(f"folder {name!r} cannot be opened: {error}") from None
    is_hub_id = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name, re.ASCII)
    if isinstance(folder_or_hub_id, Path) or not is_hub_id:
        hint = "" if "/" in name else " (a model of the Hugging Face hub is named owner/name)"
        raise FileNotFoundError(f"there is no folder {name!r}{hint}")
    return _fetch(name, SMALL_FILES), name


def fetch_weights(hub_id: str, folder: Path) -> None:
    """Fetch the weights beside the files that `find` fetched: `model.safetensors`, else the shards that
    the index names, else one of META_FILES beside a `params.json`.

    Raises ValueError for a model that holds no safetensors weights, and as `find` does.
    """
    commit = folder.name  # what is fetched next belongs to what was fetched first
    meta = (folder / "params.json").is_file() and not (folder / "config.json").is_file()
    for name in ("model.safetensors", INDEX, *(META_FILES if meta else ())):
        _fetch(hub_id, [*SMALL_FILES, name], commit)
        if (folder / name).is_file():
            if name == INDEX:
                shards = sorted(set(read_weight_map(folder / INDEX).values()))
                _fetch(hub_id, SMALL_FILES + shards, commit)
            return
    raise ValueError(
        f"{hub_id} has no weights in safetensors (model.safetensors or {INDEX}); PyTorch pickles "
        "(.bin, .pth) can run code and are not read: convert it with transformers' save_pretrained"
    )


def _fetch(hub_id: str, files: list[str], commit: str | None = None) -> Path:
    """The snapshot folder with those of the files that the model has."""
    from huggingface_hub import constants, errors, snapshot_download

    hub = constants.ENDPOINT
    try:
        return Path(snapshot_download(hub_id, revision=commit, allow_patterns=files))
    except errors.HFValidationError as error:
        raise FileNotFoundError(f"there is no folder {hub_id!r}, and no hub id: {error}") from None
    except errors.GatedRepoError:
        raise ValueError(
            f"{hub_id} asks for its licence to be accepted: do so at {hub}/{hub_id}, "
            "then `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise FileNotFoundError(
            f"there is no folder {hub_id!r} here and no model {hub_id!r} at {hub} "
            "(for a private one: `hf auth login`)"
        ) from None
    except errors.LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set"
        else:
            why = f"{hub} did not answer ({_line(error.__cause__ or error)}): check the network"
        raise FileNotFoundError(
            f"there is no folder {hub_id!r} here, a model of that name is not (all) in the cache, "
            f"and {why}"
        ) from None
    except Exception as error:  # the HTTP library and its errors differ between versions
        raise ValueError(f"fetching {hub_id} from {hub} failed: {_line(error)}") from error


def _line(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
