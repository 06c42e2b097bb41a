"""A model of faster layers, constructed on the weights of another model, which stays as it is."""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from .private import hooked
from .threaded import ThreadedLinear

Model = TypeVar("Model", bound=nn.Module)


def rebuilt(model: Model, layer: Callable[[nn.Module], nn.Module | None]) -> Model:
    """A copy of `model` on the same parameters and buffers, with `layer(module)` in the place of every
    module for which that is not None.

    A `ValueError` for such a module that has a hook, which would be lost.
    """
    shared: dict[int, Any] = {
        id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]
    }
    new = copy.deepcopy(model, shared)
    # Children first: what is made of a block is made of its new layers.
    for name, module in reversed(list(new.named_modules(remove_duplicate=False))):
        if (own := layer(module)) is None:
            continue
        if hooked(module):
            raise ValueError(
                f"{name} has a hook: remove it, and add it to the faster model if need be"
            )
        new.set_submodule(name, own.train(module.training))
    return new


def all_cores(model: Model) -> Model:
    """The model with the product of one token and each large weight on all cores of the CPU, bit for bit
    the same (`ThreadedLinear`); on the same weights, and the model given stays as it is. Layers on another
    device are left alone.
    """

    def layer(module: nn.Module) -> nn.Module | None:
        if type(module) is not nn.Linear or module.bias is not None or not module.weight.is_cpu:
            return None
        return ThreadedLinear(module)

    return rebuilt(model, layer)
