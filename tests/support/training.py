"""A recipe and a text that train in a second, and reports of a training."""

import os
import random
import signal
from collections.abc import Callable

from llama_mini.train.recipe import Recipe

TINY = Recipe(
    vocab_size=340,
    context=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    held_out=8,
    steps=20,
    warmup=2,
    decay=8,
    batch_tokens=128,
    threads=1,
)
OPTIONS = [
    word
    for name, value in vars(TINY).items()
    for word in ("--" + name.replace("_", "-"), str(value))
]


def documents(number: int) -> list[str]:
    words = random.Random(0)
    names, things = ["Tim", "Lily", "Sam", "Mia"], ["ball", "cat", "tree", "cake", "boat"]
    return [
        f"{words.choice(names)} saw {words.randint(1, 99)} {words.choice(things)}s.\n"
        f'"Look, a {words.choice(things)}!" said {words.choice(names)}.'
        + " They ran home."
        * words.randint(0, 4)
        for _ in range(number)
    ]


def quiet(line: str, keep: bool) -> None:
    pass


def stop_at(step: int) -> Callable[[str, bool], None]:
    """A report that sends the process a Ctrl-C when a step has been reported."""

    def report(line: str, keep: bool) -> None:
        if f"step {step}/" in line:
            os.kill(os.getpid(), signal.SIGINT)

    return report
