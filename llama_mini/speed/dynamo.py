"""What of torch's compiler has no public name. Importing it takes seconds."""

import itertools
import types
from typing import Any

from torch._dynamo import mark_dynamic
from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError

CompilerFailed = (BackendCompilerFailed, TorchRuntimeError)
NUMBERS = itertools.count()

__all__ = ["CompilerFailed", "mark_dynamic", "of_its_own"]


def of_its_own(function: Any) -> Any:
    """The function under a name that was never compiled.

    Under one name for all models, torch sees which of their numbers differ, such as eps, and makes them
    inputs, which blocks that share their code cannot take.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(NUMBERS)}")
    return types.FunctionType(code, function.__globals__)
