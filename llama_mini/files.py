"""Files are whole or not there: what is written half never stands under its name."""

import os
from collections.abc import Callable
from pathlib import Path


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file under a temporary name, which becomes `path` when it is whole.

    A link stays, and the file that it leads to is replaced. A `ValueError` for a path that is there and
    is not a file: a folder, a pipe, a device.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is there and is not a file: name another path")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # some libraries make files that only their owner can read
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
