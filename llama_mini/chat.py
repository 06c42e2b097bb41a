"""A prompt in the words of a checkpoint's chat template, as ids.

Templates are programs from strangers. They run in jinja2's sandbox (no insides of Python objects,
no changes to what they are given, ranges of at most 100000) with what transformers gives them, and
an output far longer than the prompt is an error. A template can still waste time: Ctrl-C stops it.
"""

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from .config import read_json
from .hub import resolve
from .tokenizer import Tokenizer


def chat_prompt(
    folder_or_hub_id: str | Path, tokenizer: Tokenizer, prompt: str, system: str | None = None
) -> list[int]:
    """Ids of one user message, after `system` if given, up to where the reply begins.

    Starts with exactly one BOS where the tokenizer's own rule puts one, whether or not the template
    writes it (transformers' `apply_chat_template` leaves it to the template). Control tokens are
    those that the template writes: their text inside `prompt` and `system` ("<|eot_id|>") stays
    plain text, so that what a user pastes cannot end a turn or begin one (transformers would read
    them as control tokens).
    Raises ValueError, naming the file, where there is no template or where it fails.
    """
    path, template = _read_template(resolve(folder_or_hub_id, weights=False))
    # A mark before each control token of the user's; a private character that is not in use.
    given = template + prompt + (system or "")
    mark = next(chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in given)
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


def _read_template(folder: Path) -> tuple[Path, str]:
    """The file that holds the chat template, and the template."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not text in UTF-8 ({error})") from None
    path = folder / "tokenizer_config.json"
    template = read_json(path).get("chat_template") if path.is_file() else None
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
    """The messages as one text that ends where the reply begins.

    `path`: where the template comes from, for errors. `named`: bos_token, eos_token and the like.
    """
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks a reply for training; here its body is all that counts."""

        tags = {"generation"}  # noqa: RUF012  the base class says so

        def parse(self, parser: Any) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
        """jinja2's own filter escapes `<` and the like, for HTML."""
        return json.dumps(value, ensure_ascii=ensure_ascii, **layout)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    limit = 1_000_000 + 10 * sum(len(message["content"]) for message in messages)
    text = ""
    try:
        for part in environment.from_string(template).generate(
            messages=messages, tools=None, documents=None, add_generation_prompt=True, **named
        ):
            text += part
            if len(text) > limit:
                raise jinja2.TemplateError(f"it writes more than {limit} characters")
    except Exception as error:  # a template can raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{path}: the chat template failed ({reason})") from None
    if not text:
        raise ValueError(f"{path}: the chat template writes nothing")
    return text
