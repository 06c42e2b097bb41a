"""Commands in processes of their own, and folders that are damaged on purpose."""

import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


class Fork:
    """A command in a process of its own, which has its own standard output and error."""

    def __init__(self, command: Callable[[], int], out: int | None = None) -> None:
        self.out, own_out = os.pipe() if out is None else (-1, os.dup(out))
        self.err, own_err = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.dup2(own_out, 1)
                os.dup2(own_err, 2)
                for file in (own_out, own_err, self.out, self.err):
                    if file >= 0:
                        os.close(file)
                sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
                sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
                torch.set_num_threads(1)
                code = command()
                sys.stdout.flush()
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(code)
        os.close(own_out)
        os.close(own_err)

    def finish(self) -> tuple[int, str, str]:
        """Exit code, minus the signal where one ended it, and what is left of output and errors."""
        texts = []
        for file in (self.out, self.err):
            data = b""
            while file >= 0 and (more := os.read(file, 1 << 16)):
                data += more
            if file >= 0:
                os.close(file)
            texts.append(data.decode(errors="replace"))  # who read before may have cut a character
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), texts[0], texts[1]


def damaged(checkpoint: Path, tmp_path: Path, **changes) -> Path:
    folder = tmp_path / "damaged"
    shutil.copytree(checkpoint, folder)
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(values))
    return folder
