"""A checkpoint, opened once: its name, its config, its settings files and the headers of its weights."""

import dataclasses
import logging
from functools import cached_property
from pathlib import Path
from typing import Any

from ..config import LlamaConfig, short
from ..generation import require_sampling
from ..placements.family import Family
from ..placements.keys import token_ids
from .configs import read_keys
from .headers import Stored, read_headers
from .hub import fetch_weights, find
from .meta import META_LLAMA
from .names import META, TIED, inverse
from .untrusted import is_there, listed, read_json

GENERATION = "generation_config.json"
LOG = logging.getLogger(__name__)


class Checkpoint:
    """A folder or a hub model of which no weight is read yet.

    Everything is read when it is first asked for, and kept: config.json, each settings file, each
    header. The weights of a hub model are fetched when `stored` is first asked for, which is after its
    config has been accepted.
    """

    def __init__(self, folder_or_hub_id: str | Path) -> None:
        self.folder, self._hub_id = find(folder_or_hub_id)
        self._json: dict[str, dict[str, Any]] = {}

    def json(self, file_name: str) -> dict[str, Any]:
        """The JSON object in a settings file, {} where the file is not there."""
        if file_name not in self._json:
            path = self.folder / file_name
            self._json[file_name] = read_json(path) if is_there(path) else {}
        return self._json[file_name]

    @cached_property
    def config_path(self) -> Path:
        """The file that describes the model: config.json, or Meta's params.json."""
        for name in ("config.json", "params.json"):
            if is_there(self.folder / name):
                return self.folder / name
        raise FileNotFoundError(
            f"{self.folder} holds no config.json (Hugging Face) and no params.json (Meta)"
        )

    @cached_property
    def _read(self) -> tuple[Family, LlamaConfig]:
        path = self.config_path
        values = self.json(path.name)
        if path.name == "params.json" and values.get("vocab_size") == -1:
            values = values | {"vocab_size": self._rows_of_metas_embedding()}
        try:
            family, config, unread = read_keys(values)
        except ValueError as error:
            raise ValueError(error if str(path) in str(error) else f"{path}: {error}") from None
        if unread:
            names = listed(unread, sorted(unread))
            says = f"{path}: {family.architecture} does not read these, so they change nothing"
            LOG.warning("%s: %s", says, names)
        try:
            stops = token_ids("eos_token_id", self.json(GENERATION).get("eos_token_id"))
        except ValueError as error:
            raise ValueError(f"{self.folder / GENERATION}: {error}") from None
        eos = tuple(dict.fromkeys(stops + config.eos_token_id))
        return family, dataclasses.replace(config, eos_token_id=eos)

    @property
    def family(self) -> Family:
        return self._read[0]

    @property
    def config(self) -> LlamaConfig:
        """The config, with the stop ids of generation_config.json in front of its own."""
        return self._read[1]

    def sampling(self) -> dict[str, Any]:
        """What generation_config.json says of `temperature`, `top_k` and `top_p`, as `sample` takes them;
        what it leaves open is not there.

        `do_sample: false` is temperature 0, whatever else it says, and true is 1 where no temperature is
        given; a top_k of 0 is none. Raises ValueError for values out of range.
        """
        given = {key: value for key, value in self.json(GENERATION).items() if value is not None}
        asked = given.get("do_sample")
        own = {key: given[key] for key in ("temperature", "top_k", "top_p") if key in given}
        if own.get("top_k") == 0:  # transformers' word for all tokens
            del own["top_k"]
        try:
            if not isinstance(asked, bool | None):
                raise ValueError(f"do_sample must be true or false, not {short(asked)}")
            require_sampling(own.get("temperature", 1.0), own.get("top_k"), own.get("top_p"))
        except ValueError as error:
            raise ValueError(f"{self.folder / GENERATION}: {error}") from None
        if asked is False:
            return {"temperature": 0.0}
        return ({"temperature": 1.0} if asked else {}) | own

    @cached_property
    def stored(self) -> dict[str, Stored]:
        """Every tensor by our name, as the headers describe it."""
        if self.config_path.name == "config.json":
            family = self.family  # what is refused is not fetched
            names, constant = family.names, family.constant
        else:
            names, constant = META, ""
        if self._hub_id is not None:
            fetch_weights(self._hub_id, self.folder)
        return read_headers(self.folder, inverse(names), constant)

    def _rows_of_metas_embedding(self) -> int:
        """The vocabulary's size, which Meta's config may leave open."""
        embed = self.stored.get(TIED[0])
        if embed is None or not embed.shape:
            raise ValueError(
                f"{self.folder} holds no {META['embed']}.weight, and its vocab_size is -1"
            )
        return embed.shape[0]

    @property
    def reorders(self) -> bool:
        """Whether q and k are copied to put their rows in order."""
        return self.family is META_LLAMA


def open_checkpoint(source: "str | Path | Checkpoint") -> Checkpoint:
    """The checkpoint in a folder or of a hub name; one that is open already is returned as it is.

    Raises FileNotFoundError for a folder or model that is not there or cannot be reached.
    """
    return source if isinstance(source, Checkpoint) else Checkpoint(source)


def read_config(source: "str | Path | Checkpoint") -> LlamaConfig:
    """The config of a checkpoint: `config.json` (Hugging Face) or `params.json` (Meta), with the stop ids
    of `generation_config.json`. Of a hub model no weights are fetched.

    Raises FileNotFoundError where there is none, ValueError for what is wrong or not supported.
    """
    return open_checkpoint(source).config
