"""step.cpp as a library: compiled for this processor the first time, in two seconds, and kept on disk."""

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

LOG = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("step.cpp")
FLAGS = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-std=c++17"]


def folder() -> Path:
    """Where compiled libraries are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "llama-mini"


@functools.cache
def library() -> ctypes.CDLL:
    """The functions of step.cpp. A `ValueError` where this machine has no C++ compiler that makes them."""
    asked = os.environ.get("CXX", "")
    names = [*([asked] if asked else []), "g++", "c++", "clang++"]
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise ValueError(
            f"the fast form is compiled, and there is no C++ compiler ({', '.join(names)}): install one, "
            "name one in the environment as CXX, or use the plain model"
        )
    if asked and not shutil.which(asked):
        LOG.warning("CXX is %r, and there is no such compiler; taking %s", asked, compiler)
    try:
        # What the processor can do is among the compiler's macros: a home folder can serve several kinds.
        macros = run([compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull])
        flags = [*FLAGS, *width(macros)]
        key = hashlib.sha256("\0".join([*flags, macros, SOURCE.read_text()]).encode()).hexdigest()
        path = folder() / f"step-{key[:16]}.so"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            # Made under another name: what stands under its own is whole, whoever else compiles now.
            with tempfile.TemporaryDirectory(dir=path.parent) as making:
                made = Path(making) / path.name
                run([compiler, *flags, str(SOURCE), "-o", str(made)])
                made.replace(path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().split("\n")[0]
        raise ValueError(
            f"{compiler} cannot compile {SOURCE.name} here: use the plain model ({said})"
        ) from None


def width(macros: str) -> list[str]:
    """The flag for the width of vectors, given the compiler's macros for this processor.

    Measured: 512 bits are a tenth slower than 256 on a Zen 4, and 4 % faster on a Sapphire Rapids, which
    was the first with AVX512-FP16.
    """
    if "__AVX512F__" not in macros:
        return []
    return [f"-mprefer-vector-width={512 if '__AVX512FP16__' in macros else 256}"]


def run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
