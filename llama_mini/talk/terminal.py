"""Answers on a terminal or a pipe: as they come, what stopped them, their rates; turn after turn."""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from ..cli import Interruptible, heed, peak_memory, read_line, reason, say, show, table
from ..model import Llama
from .answer import Answer
from .conversation import Conversation


def write(answer: Answer, prompt: str = "") -> None:
    """Print the prompt and stream the answer, withheld text too if it is interrupted; end the line."""
    try:
        show(prompt)
        for piece in answer:
            heed()
            show(piece)
    finally:
        show(f"{answer.rest()}\n")


class Pace(NamedTuple):
    """Tokens and seconds of one answer, or of several together."""

    prompt: int = 0  # tokens that no cache held
    prefill: float = 0.0
    new: int = 0
    steps: int = 0  # one fewer than new tokens in each answer: the first comes from the prefill
    decode: float = 0.0

    def plus(self, answer: Answer) -> "Pace":
        """This and an answer's."""
        new, times = len(answer.ids), answer.times
        seconds = (times[1] - times[0], times[-1] - times[1]) if new else (0.0, 0.0)
        return Pace(
            self.prompt + answer.computed,
            self.prefill + seconds[0],
            self.new + new,
            self.steps + max(0, new - 1),
            self.decode + seconds[1],
        )


def say_limit(answer: Answer) -> None:
    """Say which limit stopped an answer, if one did."""
    new, asked = len(answer.ids), len(answer.prompt)
    if not answer.ended and asked + new >= answer.model.config.context():
        say(f"[stopped at the end of the context, after {asked + new} tokens]")
    elif not answer.ended:
        say(f"[stopped after {new} tokens; --max-new-tokens N for more]")


def say_stats(model: Llama, loading: float, pace: Pace, ranks: int = 1) -> None:
    """Say sizes and rates, and the seconds of `loading`."""
    weight = model.embed.weight
    # A rank holds a part of a Llama; families have parameters that its config does not count.
    own = sum(parameter.numel() for parameter in model.parameters())
    parameters = own if ranks == 1 else model.config.parameter_count()
    prefill = pace.prompt / pace.prefill if pace.prefill else 0
    decode = pace.steps / pace.decode if pace.decode else 0
    rows = [
        ("parameters", f"{parameters:,}"),
        ("device", f"{weight.device}, {str(weight.dtype).removeprefix('torch.')}"),
        ("load", f"{loading:.2f} s"),
        ("prefill", f"{pace.prompt} tokens, {prefill:.1f} tokens/s"),
        ("decode", f"{pace.new} tokens, {decode:.1f} tokens/s"),
        ("peak memory", f"{peak_memory(weight.device) / 2**20:.0f} MiB{' (rank 0)' * (ranks > 1)}"),
    ]
    say(table(rows, left=2))


def converse(talk: Conversation, loading: float | None, **options: Any) -> None:
    """Answer turn after turn, from a terminal or a line each from standard input, up to its end or
    /exit; options as for `Answer`. Where the seconds of `loading` are given, sizes and rates follow each
    turn on a terminal, and all turns together elsewhere.
    """

    def reply(turn: str) -> Answer:
        answer = talk.ask(turn, **options)
        write(answer)
        say_limit(answer)
        return answer

    if sys.stdin is None or not sys.stdin.isatty():
        pace = Pace()

        def count(turn: str) -> None:
            nonlocal pace
            pace = pace.plus(reply(turn))

        turns(talk, read_line, count)
        if loading is not None:
            say_stats(talk.model, loading, pace)
        return
    with suppress(ImportError):  # not on every system: line editing and earlier lines
        import readline  # noqa: F401
    say("Ctrl-C ends an answer, Ctrl-D or /exit the conversation; /reset begins a new one")

    def reply_or_say(turn: str) -> None:
        try:
            answer = ctrl_c.attempt(lambda: reply(turn), None)
            if answer is not None and loading is not None:
                say_stats(talk.model, loading, Pace().plus(answer))
        except ValueError as error:
            say(f"error: {reason(error)}")

    def next_line() -> str | None:
        return ctrl_c.attempt(typed_line, "")

    with Interruptible() as ctrl_c:
        turns(talk, next_line, reply_or_say)


def turns(
    talk: Conversation, next_line: Callable[[], str | None], reply: Callable[[str], object]
) -> None:
    """Reply to each line up to the last, None, or /exit."""
    while (line := next_line()) not in (None, "/exit"):
        if line == "/reset":
            talk.reset()
        elif line.strip():  # blanks alone are no turn
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
