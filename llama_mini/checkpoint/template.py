"""A chat template, in a process of its own: chat.py starts this file with a request and reads the answer.

Templates are programs from strangers. They run in jinja2's sandbox (no insides of Python objects, no
changes to what they are given, ranges of at most 100000) with what transformers gives them. The
sandbox bounds neither time nor memory ("x" * 10 ** 10 is one operation): the process does. So
nothing of the package is imported here, which would take longer than any template.

A template sees each message as it is, and the text that it writes knows which of its characters came
from a message, whatever the template did to them (Said). What is not known to keep them apart counts as
the message's whole, or ends the template.
"""

import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, MappingView
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn


class Said(str):
    """A text of which some characters come from a message: those where `_mask` has a 1."""

    _mask: bytes

    def __new__(cls, text: str, mask: bytes | None = None) -> "Said":
        self = super().__new__(cls, text)
        self._mask = b"\1" * len(text) if mask is None else mask
        return self

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return glue((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return glue((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: Any) -> str:
        return Said(super().__mul__(times), self._mask * times)

    __rmul__ = __mul__

    def __getitem__(self, key: Any) -> str:
        mask = self._mask[key] if isinstance(key, slice) else bytes([self._mask[key]])
        return Said(super().__getitem__(key), mask)

    def __iter__(self) -> Iterator[str]:
        return (self[position] for position in range(len(self)))

    def _from(self, start: int, text: str) -> str:
        return self[start : start + len(text)]

    def strip(self, *which: Any) -> str:
        return self.lstrip(*which).rstrip(*which)

    def lstrip(self, *which: Any) -> str:
        text = super().lstrip(*which)
        return self._from(len(self) - len(text), text)

    def rstrip(self, *which: Any) -> str:
        return self._from(0, super().rstrip(*which))

    def removeprefix(self, prefix: str) -> str:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> str:
        return self._from(0, super().removesuffix(suffix))

    def _cut(self, texts: Iterable[str], gap: int | None) -> list[str]:
        """The parts `texts`, which follow each other at a distance of `gap`, or of some spaces."""
        parts, place = [], 0
        for text in texts:
            place = self.find(text, place) if gap is None else place
            parts.append(self._from(place, text))
            place += len(text) + (gap or 0)
        return parts

    def split(self, sep: Any = None, maxsplit: Any = -1) -> list[str]:
        return self._cut(super().split(sep, maxsplit), None if sep is None else len(sep))

    def rsplit(self, sep: Any = None, maxsplit: Any = -1) -> list[str]:
        return self._cut(super().rsplit(sep, maxsplit), None if sep is None else len(sep))

    def splitlines(self, keepends: Any = False) -> list[str]:
        lines = zip(
            self._cut(super().splitlines(True), 0), super().splitlines(keepends), strict=True
        )
        return [line[: len(text)] for line, text in lines]

    def partition(self, sep: str) -> Any:
        return tuple(self._cut(super().partition(sep), 0))

    def rpartition(self, sep: str) -> Any:
        return tuple(self._cut(super().rpartition(sep), 0))

    def replace(self, old: str, new: str, count: Any = -1) -> str:
        if not old:
            return Said(super().replace(old, new, count))
        return join(new, self.split(old, count))

    def join(self, parts: Iterable[str]) -> str:
        return join(self, parts)


def _by_letter(name: str) -> Callable[[Said], str]:
    def method(self: Said) -> str:
        text = getattr(str, name)(self)  # of each letter it makes one or more
        return Said(text, self._mask if len(text) == len(self) else None)

    return functools.wraps(getattr(str, name))(method)


for _name in ("lower", "upper", "casefold", "swapcase", "title", "capitalize"):
    setattr(Said, _name, _by_letter(_name))


def written(value: Any) -> str:
    """A value as text; of what may hold messages all is theirs."""
    if isinstance(value, str):
        return value
    return str(value) if value is None or isinstance(value, int | float) else Said(str(value))


def glue(parts: Iterable[Any]) -> str:
    """The parts as one text, as `"".join`."""
    texts = [*map(written, parts)]
    if not any(isinstance(text, Said) for text in texts):
        return "".join(texts)
    masks = (text._mask if isinstance(text, Said) else bytes(len(text)) for text in texts)
    return Said("".join(texts), b"".join(masks))


def join(between: str, parts: Iterable[str]) -> str:
    """The parts as one text, as `between.join`."""
    first, *others = [*parts] or [""]
    return glue([first, *(piece for part in others for piece in (between, part))])


def indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """jinja2's filter, of whose result it knows the first line only."""
    space = width if isinstance(width, str) else " " * width
    head, *lines = (s + "\n").splitlines()
    others = (part for line in lines for part in ("\n", space if line or blank else "", line))
    return glue([space if first else "", head, *others])


def said_in(value: Any) -> list[Said]:
    """The texts of messages in a value, however deep."""
    found, open_, seen = [], [value], set()
    for item in open_:
        if isinstance(item, Said):
            found.append(item)
        elif id(item) in seen:
            continue
        elif isinstance(item, dict):
            open_ += [*item, *item.values()]
        elif isinstance(item, list | tuple | MappingView):
            open_ += list(item)  # type: ignore[arg-type]
        elif type(item).__name__ == "Namespace":  # shows all that it holds
            found.append(Said(str(item)))
        seen.add(id(item))
    return found


class Keeper:
    """Keeps the characters of messages apart in what Python's own functions make of them."""

    def __init__(self, texts: list[str]) -> None:
        given = set().union(*texts)
        free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in given)
        self._opens, self._closes = next(free, ""), next(free, "")  # around what a message said

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What the function returns, with the characters of messages known in it."""
        result, texts = function(*args, **kwargs), said_in([list(args), kwargs])
        if isinstance(result, bytes) and texts:
            raise ValueError("it makes bytes of a message, which is not supported")
        if not texts or not isinstance(result, str) or isinstance(result, Said):
            return result
        same = [text._mask for text in texts if text == result]
        if same:
            return Said(result, bytes(map(max, *same)) if len(same) > 1 else same[0])
        with suppress(Exception):
            marked = str(function(*self._marked(list(args)), **self._marked(kwargs)))
            marks = self._opens + self._closes
            parts = re.split(f"({self._opens}[^{marks}]*{self._closes})", marked)
            kept = [Said(part[1:-1]) if n % 2 else part for n, part in enumerate(parts)]
            if glue(kept) == result:  # and so no mark is left
                return glue(kept)
        if any(0 in text._mask for text in texts):
            raise ValueError(
                "it makes a text in which a message and its own words cannot be told apart any more"
            )
        return Said(result)

    def _marked(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self._marked(key): self._marked(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self._marked, value))
        if not isinstance(value, Said):
            if said_in(value):  # in what cannot be made anew
                raise TypeError
            return value
        text, runs = str.__str__(value), re.finditer(b"\0+|\1+", value._mask)
        parts = ((text[slice(*run.span())], run[0][0]) for run in runs)
        return "".join(self._opens + p + self._closes if said else p for p, said in parts)


def render(
    template: str, messages: list[dict[str, str]], named: dict[str, str]
) -> tuple[str, list[tuple[int, int]]]:
    """The messages as one text that ends where the reply begins, and which parts of it come from their
    contents; raises whatever the template does.

    `named`: bos_token, eos_token and the like.
    """
    import jinja2.ext
    from jinja2 import nodes
    from jinja2.filters import make_attrgetter
    from jinja2.runtime import LoopContext, Macro
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    keeper = Keeper([template, *named.values(), *(m["content"] for m in messages)])

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks a reply for training; here its body is all that counts."""

        tags = {"generation"}  # noqa: RUF012  the base class says so

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset("%")
        concat = staticmethod(glue)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            return keeper.call(lambda left, right: left % right, (left, right), {})

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
            call = functools.partial(super().call, __context)
            if isinstance(__obj, Macro | LoopContext):  # what they write is kept apart by glue
                return call(__obj, *args, **kwargs)
            owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
            given = [list(args), kwargs]
            if isinstance(owner, str) and not isinstance(owner, Said) and said_in(given):
                if name == "join" and len(args) == 1:
                    return join(owner, args[0])
                if name == "replace":
                    return Said(owner, bytes(len(owner))).replace(*args, **kwargs)
            if isinstance(owner, Said) and name not in vars(Said):  # its own mask matters too
                return keeper.call(
                    lambda owner, *args, **kwargs: call(getattr(owner, name), *args, **kwargs),
                    (owner, *args),
                    kwargs,
                )
            return keeper.call(functools.partial(call, __obj), args, kwargs)

    class Tilde(NodeTransformer):
        """Writes `a ~ b` as a filter, and refuses what writes through other functions of jinja2."""

        def visit_ScopedEvalContextModifier(self, node: nodes.Node) -> nodes.Node:  # noqa: N802
            raise jinja2.TemplateError("autoescape is not supported")

        def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
            self.generic_visit(node)
            parts = nodes.List(node.nodes, lineno=node.lineno)
            return nodes.Filter(parts, "~", [], [], None, None, lineno=node.lineno)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
        """jinja2's own filter escapes `<` and the like, for HTML."""
        return json.dumps(value, ensure_ascii=ensure_ascii, **layout)

    def join_filter(value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
        if attribute is not None:
            value = map(make_attrgetter(environment, attribute), value)
        return join(d, value)

    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
        finalize=written,
    )

    def kept(f: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(f)(lambda *args, **kwargs: keeper.call(f, args, kwargs))

    known = environment.filters | {"tojson": tojson}
    environment.filters = {name: kept(f) for name, f in known.items()}
    environment.filters |= {"~": glue, "join": join_filter, "indent": indent}
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    program = Tilde().visit(environment.parse(template)).set_environment(environment)
    given = [message | {"content": Said(message["content"])} for message in messages]
    limit = most = 1_000_000 + 10 * sum(len(message["content"]) for message in messages)
    parts: list[str] = []
    for part in environment.from_string(program).generate(
        messages=given, tools=None, documents=None, add_generation_prompt=True, **named
    ):
        parts.append(part)
        limit -= len(part)
        if limit < 0:
            raise jinja2.TemplateError(f"it writes more than {most} characters")
    text = glue(parts)
    if not text:
        raise jinja2.TemplateError("it writes nothing")
    mask = text._mask if isinstance(text, Said) else b""
    return str.__str__(text), [part.span() for part in re.finditer(b"\1+", mask)]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """`render`, with whatever went wrong as text."""
    try:
        return dict(zip(("text", "said"), render(**request), strict=True))
    except Exception as error:  # a template can raise anything
        return {"error": " ".join(f"{type(error).__name__}: {error}"[:1000].split())}


def bound(seconds: int, memory: int) -> None:
    """End this process after so much processor time, and refuse it more bytes: where the system can."""
    with suppress(ImportError):  # Windows
        import resource

        limits = {resource.RLIMIT_CPU: seconds, resource.RLIMIT_AS: memory, resource.RLIMIT_CORE: 0}
        for limit, most in limits.items():
            with suppress(ValueError, OSError):  # macOS; a stricter limit is set already
                resource.setrlimit(limit, (most, most))


if __name__ == "__main__":
    request = json.load(sys.stdin)
    sys.path += request.pop("path")
    bound(request.pop("seconds"), request.pop("memory"))
    json.dump(answer(request), sys.stdout)
