"""A prompt in the words of a checkpoint's chat template, as ids.

Templates are programs from strangers: template.py runs them, in a process that is given little time and
memory.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from .opening import Checkpoint, open_checkpoint
from .tokenizer import Tokenizer
from .untrusted import is_there

TEMPLATE_BYTES = 2**20  # real ones have some thousands
SECONDS = 5  # of the processor; real templates take milliseconds
MEMORY = 512 * 2**20


def chat_prompt(
    source: str | Path | Checkpoint, tokenizer: Tokenizer, prompt: str, system: str | None = None
) -> list[int]:
    """Ids of one user message, after `system` if given, up to where the reply begins.

    Starts with exactly one BOS where the tokenizer's own rule puts one, whether or not the template
    writes it (transformers' `apply_chat_template` leaves it to the template). Control tokens are
    those that the template writes: their text inside `prompt` and `system` ("<|eot_id|>") stays
    plain text, so that what a user pastes cannot end a turn or begin one (transformers would read
    them as control tokens).
    Raises ValueError, naming the file, where there is no template or where it fails.
    """
    path, template = _read_template(open_checkpoint(source))
    # A mark before each control token of the user's; a private character that is not in use.
    given = template + prompt + (system or "")
    free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in given)
    mark = next(free, None)
    if mark is None:
        raise ValueError("the prompt holds every private character: leave out at least one")
    texts = "|".join(re.escape(text) for text in sorted(tokenizer.control, key=len, reverse=True))
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    for message in messages if texts else []:
        message["content"] = re.sub(texts, lambda match: mark + match[0], message["content"])
    first, *marked = render(path, template, messages, tokenizer.named).split(mark)
    text, literal = first, set()
    for part in marked:
        literal.add(len(text))
        text += part
    ids = tokenizer.encode(text, bos=False, special=True, literal=literal)
    prefix = tokenizer.encode("")
    return ids if ids[: len(prefix)] == prefix else prefix + ids


def _read_template(checkpoint: Checkpoint) -> tuple[Path, str]:
    """The file that holds the chat template, and the template."""
    folder = checkpoint.folder
    path = folder / "chat_template.jinja"
    if is_there(path):
        if path.stat().st_size > TEMPLATE_BYTES:
            raise ValueError(
                f"{path} is longer than {TEMPLATE_BYTES} bytes: it is no chat template"
            )
        try:
            return path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not text in UTF-8 ({error})") from None
    path = folder / "tokenizer_config.json"
    template = checkpoint.json(path.name).get("chat_template")
    if isinstance(template, list):  # several, by name
        try:
            named = {entry["name"]: entry["template"] for entry in template}
        except (KeyError, TypeError):
            raise ValueError(f"{path}: chat_template lists no names and templates") from None
        template = named.get("default")
        if template is None:
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


def render(path: Path, template: str, messages: list[dict[str, str]], named: dict[str, str]) -> str:
    """The messages as one text that ends where the reply begins, made in a process that may take
    SECONDS and MEMORY.

    `path`: where the template comes from, for errors. `named`: bos_token, eos_token and the like.
    """
    answer = _apart({"template": template, "messages": messages, "named": named})
    if "error" in answer:
        raise ValueError(f"{path}: the chat template failed ({answer['error']})")
    return answer["text"]


def _apart(request: dict[str, Any]) -> dict[str, str]:
    """What template.py answers to the request."""
    size = sum(len(message["content"]) for message in request["messages"])
    memory = MEMORY + 64 * size  # a few copies, of up to 4 bytes a character
    bounds = {"seconds": SECONDS, "memory": memory, "path": sys.path}
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
    except subprocess.TimeoutExpired:
        return {"error": f"it takes more than {10 * SECONDS} s"}
    except ValueError:  # no answer
        if done.returncode >= 0:
            return {"error": f"its process ended with code {done.returncode}"}
        return {"error": f"it takes more than {SECONDS} s or {memory >> 20} MiB"}
