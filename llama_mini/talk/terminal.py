"""Answers on a terminal or a pipe: as they come, what stopped them, their rates; turn after turn."""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..cli import Interruptible, peak_memory, read_line, reason, say, show, table
from .answer import Answer
from .conversation import Conversation


def write(answer: Answer, prompt: str = "") -> None:
    """Print the prompt and stream the answer, withheld text too if it is interrupted; end the line."""
    try:
        show(prompt)
        for piece in answer:
            show(piece)
    finally:
        show(f"{answer.rest()}\n")


def report(answer: Answer, loading: float | None, ranks: int = 1) -> None:
    """Say which limit stopped an answer, if one did; and, where the seconds of `loading` are given,
    sizes and rates.
    """
    model, new = answer.model, len(answer.ids)
    asked = len(answer.prompt)
    if not answer.ended and asked + new >= model.config.context():
        say(f"[stopped at the end of the context, after {asked + new} tokens]")
    elif not answer.ended:
        say(f"[stopped after {new} tokens; --max-new-tokens N for more]")
    if loading is None:
        return
    times, weight = answer.times, model.embed.weight
    # A rank holds a part of a Llama; families have parameters that its config does not count.
    own = sum(parameter.numel() for parameter in model.parameters())
    parameters = own if ranks == 1 else model.config.parameter_count()
    prefill = times[1] - times[0] if new else 0.0
    decode = times[-1] - times[1] if new else 0.0
    rows = [
        ("parameters", f"{parameters:,}"),
        ("device", f"{weight.device}, {str(weight.dtype).removeprefix('torch.')}"),
        ("load", f"{loading:.2f} s"),
        (
            "prefill",
            f"{answer.computed} tokens, {answer.computed / prefill if prefill else 0:.1f} tokens/s",
        ),
        ("decode", f"{new} tokens, {(new - 1) / decode if decode else 0:.1f} tokens/s"),
        ("peak memory", f"{peak_memory(weight.device) / 2**20:.0f} MiB{' (rank 0)' * (ranks > 1)}"),
    ]
    say(table(rows, left=2))


def converse(talk: Conversation, loading: float | None, **options: Any) -> None:
    """Answer turn after turn, from a terminal or a line each from standard input, up to its end or
    /exit; options as for `Answer`.
    """

    def reply(turn: str) -> None:
        answer = talk.ask(turn, **options)
        write(answer)
        report(answer, loading)

    if sys.stdin is None or not sys.stdin.isatty():
        turns(talk, read_line, reply)
        return
    with suppress(ImportError):  # not on every system: line editing and earlier lines
        import readline  # noqa: F401
    say("Ctrl-C ends an answer, Ctrl-D or /exit the conversation; /reset begins a new one")

    def reply_or_say(turn: str) -> None:
        try:
            ctrl_c.attempt(lambda: reply(turn), None)
        except ValueError as error:
            say(f"error: {reason(error)}")

    def next_line() -> str | None:
        return ctrl_c.attempt(typed_line, "")

    with Interruptible() as ctrl_c:
        turns(talk, next_line, reply_or_say)


def turns(
    talk: Conversation, next_line: Callable[[], str | None], reply: Callable[[str], None]
) -> None:
    """Reply to each line up to the last, None, or /exit."""
    while (line := next_line()) not in (None, "/exit"):
        if line == "/reset":
            talk.reset()
        elif line:
            reply(line)


def typed_line() -> str | None:
    """The next line from the terminal, None at the end."""
    try:
        return input("> ")
    except EOFError:
        show("\n")
        return None
    except KeyboardInterrupt:
        show("\n")
        raise
