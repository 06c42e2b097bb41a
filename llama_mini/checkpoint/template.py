"""A chat template, in a process of its own: chat.py starts this file with a request and reads the answer.

Templates are programs from strangers. They run in jinja2's sandbox (no insides of Python objects, no
changes to what they are given, ranges of at most 100000) with what transformers gives them. The
sandbox bounds neither time nor memory ("x" * 10 ** 10 is one operation): the process does. So
nothing of the package is imported here, which would take longer than any template.
"""

import json
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn


def render(template: str, messages: list[dict[str, str]], named: dict[str, str]) -> str:
    """The messages as one text that ends where the reply begins; raises whatever the template does.

    `named`: bos_token, eos_token and the like.
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
    for part in environment.from_string(template).generate(
        messages=messages, tools=None, documents=None, add_generation_prompt=True, **named
    ):
        text += part
        if len(text) > limit:
            raise jinja2.TemplateError(f"it writes more than {limit} characters")
    if not text:
        raise jinja2.TemplateError("it writes nothing")
    return text


def answer(request: dict[str, Any]) -> dict[str, str]:
    """`render`, with whatever went wrong as text."""
    try:
        return {"text": render(**request)}
    except Exception as error:  # a template can raise anything
        return {"error": " ".join(f"{type(error).__name__}: {error}"[:1000].split())}


def bound(seconds: int, memory: int) -> None:
    """End this process after so much processor time, and refuse it more bytes: where the system can."""
    with suppress(ImportError):  # Windows
        import resource

        for limit, most in (
            (resource.RLIMIT_CPU, seconds),
            (resource.RLIMIT_AS, memory),
            (resource.RLIMIT_CORE, 0),
        ):
            with suppress(ValueError, OSError):  # macOS; a stricter limit is set already
                resource.setrlimit(limit, (most, most))


if __name__ == "__main__":
    request = json.load(sys.stdin)
    sys.path[:] = request.pop("path")
    bound(request.pop("seconds"), request.pop("memory"))
    json.dump(answer(request), sys.stdout)
