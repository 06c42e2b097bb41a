"""Files are whole or not there: what is written half never stands under its name."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file under a temporary name, which becomes `path` when it is whole.

    A link stays, and the file that it leads to is replaced. A `ValueError` for a path that is there and
    is not a file: a folder, a pipe, a device; an `OSError` that names `path` for whatever else fails.
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
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())  # or a power cut could leave the new name with nothing under it
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):  # a read-only folder: there is nothing to take away
            temporary.unlink()
        if not isinstance(error, Exception):
            raise
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise OSError(f"{path} cannot be written: {reason}") from error


def write_bytes(path: Path, data: bytes) -> None:
    replace(path, lambda temporary: temporary.write_bytes(data))


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())
