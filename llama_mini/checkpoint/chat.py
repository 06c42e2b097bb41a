"""A prompt in the words of a checkpoint's chat template, as ids.

Templates are programs from strangers: template.py runs them, in a process that is given little time and
memory.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from ..config import short
from .opening import Checkpoint, open_checkpoint
from .tokenizer_base import Span, Tokenizer
from .untrusted import is_there, utf8

TEMPLATE_BYTES = 2**20  # real ones have some thousands
SECONDS = 5  # of the processor; real templates take milliseconds
MEMORY = 512 * 2**20
ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")


def chat_prompt(
    source: str | Path | Checkpoint,
    tokenizer: Tokenizer,
    messages: str | Sequence[Mapping[str, str]],
    system: str | None = None,
) -> list[int]:
    """Ids of a conversation up to where the next reply begins.

    `messages`: one user's message, or all so far, each {"role": ..., "content": ...}; `system` goes
    before them. For the next turn, the reply and the next message are appended: what both turns have
    in common are the same ids at the start, unless the template changes earlier turns.
    Starts with exactly one BOS where the tokenizer's own rule puts one, whether or not the template
    writes it (transformers' `apply_chat_template` leaves it to the template). Control tokens are
    those that the template writes: their text inside a message ("<|eot_id|>") stays plain text, so
    that what a user pastes cannot end a turn or begin one (transformers reads it as control tokens).
    Raises ValueError, naming the file, where there is no template or where it fails.
    """
    conversation = require_messages(messages, system)
    path, template = _read_template(open_checkpoint(source))
    text, said = render(path, template, conversation, tokenizer.named)
    ids = tokenizer.encode(text, bos=False, special=True, literal=said)
    prefix = tokenizer.encode("")
    return ids if ids[: len(prefix)] == prefix else prefix + ids


def require_messages(
    messages: str | Sequence[Mapping[str, str]], system: str | None
) -> list[dict[str, str]]:
    """The messages of a conversation; a ValueError for what is none. A role is one of ROLES, since
    templates write it beside their control tokens: it could become one.
    """
    given = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    if system is not None:
        given.insert(0, {"role": "system", "content": system})
    if not given:
        raise ValueError("a conversation needs at least one message")
    for message in given:
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise ValueError(f"a message must be {{role, content}}, not {short(message)}")
        if message["role"] not in ROLES:
            raise ValueError(f"role {short(message['role'])} is none of {', '.join(ROLES)}")
        if not isinstance(message["content"], str):
            raise ValueError(f"a message's content must be a str, not {short(message['content'])}")
    return [dict(message) for message in given]


def _read_template(checkpoint: Checkpoint) -> tuple[Path, str]:
    """The file that holds the chat template, and the template: of several, the one named default."""
    folder = checkpoint.folder
    others = folder / "additional_chat_templates"
    for path in (others / "default.jinja", folder / "chat_template.jinja"):
        if is_there(path):
            return path, _read_jinja(path)
    path = folder / "tokenizer_config.json"
    template = checkpoint.json(path.name).get("chat_template")
    named: dict[str, Any] = {}
    if isinstance(template, list):
        try:
            named = {entry["name"]: entry["template"] for entry in template}
        except (KeyError, TypeError):
            raise ValueError(f"{path}: chat_template lists no names and templates") from None
    elif isinstance(template, dict):
        named = template
    if named:
        template = named.get("default")
    if template is None and not named and others.is_dir():
        path, named = others, {file.stem: "" for file in others.glob("*.jinja")}
    if template is None and named:
        raise ValueError(
            f"{path} has chat templates {sorted(map(str, named))} and none named default"
        )
    if template is None:
        raise ValueError(
            f"{folder} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json): give its model a raw prompt, without --chat"
        )
    if not isinstance(template, str):
        raise ValueError(f"{path}: chat_template is {type(template).__name__}, not text")
    return path, template


def _read_jinja(path: Path) -> str:
    if path.stat().st_size > TEMPLATE_BYTES:
        raise ValueError(f"{path} is longer than {TEMPLATE_BYTES} bytes: it is no chat template")
    return utf8(path, path.read_bytes())


def render(
    path: Path, template: str, messages: list[dict[str, str]], named: dict[str, str]
) -> tuple[str, list[Span]]:
    """The messages as one text that ends where the reply begins, and the parts of it that come from
    their contents; made in a process that may take SECONDS and MEMORY.

    `path`: where the template comes from, for errors. `named`: bos_token, eos_token and the like.
    """
    answer = _apart({"template": template, "messages": messages, "named": named})
    if "error" in answer:
        raise ValueError(f"{path}: the chat template failed ({answer['error']})")
    return answer["text"], [(start, end) for start, end in answer["said"]]


def _apart(request: dict[str, Any]) -> dict[str, Any]:
    """What template.py answers to the request."""
    size = sum(len(message["content"]) for message in request["messages"])
    memory = MEMORY + 64 * size  # a few copies, of up to 4 bytes a character
    bounds = {"seconds": SECONDS, "memory": memory, "path": library_folders()}
    worker = Path(__file__).with_name("template.py")
    try:
        done = subprocess.run(
            # -I -S: the variables and the start-up files of Python's users are no part of it
            [sys.executable, "-I", "-S", str(worker)],
            input=json.dumps(request | bounds).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=10 * SECONDS,  # of the clock, for systems that do not bound the processor's
        )
        return json.loads(done.stdout)
    except OSError as error:
        return {"error": f"its process cannot start: {error.strerror or error}"}
    except subprocess.TimeoutExpired:
        return {"error": f"it takes more than {10 * SECONDS} s"}
    except ValueError:  # no answer
        if done.returncode >= 0:
            return {"error": f"its process ended with code {done.returncode}"}
        return {"error": f"it takes more than {SECONDS} s or {memory >> 20} MiB"}


def library_folders() -> list[str]:
    """Where jinja2 and what it needs are installed: not the working folder, whose files are no part of
    this program, though Python looks there first.
    """
    here = Path.cwd().resolve()
    path = [
        entry
        for entry in sys.path
        if isinstance(entry, str) and entry and Path(entry).resolve() != here
    ]
    folders = []
    for name in ("jinja2", "markupsafe"):
        found = PathFinder.find_spec(name, path)
        if found is None or not found.submodule_search_locations:
            raise ValueError(
                f"{name}, which chat templates need, is not installed: pip install jinja2"
            )
        folders.append(str(Path(next(iter(found.submodule_search_locations))).parent))
    return list(dict.fromkeys(folders))
