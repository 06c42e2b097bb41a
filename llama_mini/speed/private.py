"""What torch does not tell by a public name, and when it has to be asked again."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.utils.hooks import RemovableHandle

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hooked(module: nn.Module) -> bool:
    """Whether a hook is registered on this very module."""
    return any(getattr(module, name) for name in HOOKS)


def hooked_anywhere(module: nn.Module) -> bool:
    """Whether a hook is registered on the module, on one below it, or on all there are; or a function
    stands on one of them in the place of its `forward`.
    """
    return modules._has_any_global_hook() or any(
        hooked(each) or "forward" in vars(each) for each in module.modules()
    )


class Registered:
    """Counts the parameters, buffers and modules that are registered anywhere in this process."""

    count = 0

    def __call__(self, module: nn.Module, name: str, value: object) -> None:
        Registered.count += 1


modules.register_module_parameter_registration_hook(Registered())
modules.register_module_buffer_registration_hook(Registered())
modules.register_module_module_registration_hook(Registered())


class Held:
    """Whether a module is still what it was: its layers, weights and settings, without a hook.

    It is asked before every step, so it counts what is registered in the process and looks at addresses
    and numbers, in a tenth of a millisecond. A `forward` that is put on a layer later is not seen.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.counts = module, self.now()
        self.free = not hooked_anywhere(module)
        self.modules = list(module.modules())
        self.weights = [*module.parameters(), *module.buffers()]
        self.addresses = addresses(self.weights)
        # To take one out of a list registers nothing.
        self.lists = [
            (vars(each), each._modules) for each in self.modules if isinstance(each, nn.ModuleList)
        ]
        # The numbers of the layers below, but for those that only describe a weight.
        described = (nn.Linear, nn.Embedding)
        layers = [m for m in self.modules if m is not module and not isinstance(m, described)]
        self.settings = [
            (vars(layer), name, value)
            for layer in layers
            for name, value in vars(layer).items()
            if isinstance(value, (int, float, str, type(None))) and not name.startswith("_")
        ]

    @staticmethod
    def now() -> tuple[int, int]:
        return Registered.count, RemovableHandle.next_id

    def registered(self) -> bool:
        """Whether anything was registered in this very module since."""
        now = self.now()
        if self.counts == now:
            return False
        self.counts = now
        modules, module = list(self.module.modules()), self.module
        weights = [*module.parameters(), *module.buffers()]
        same = list(map(id, modules)) == list(map(id, self.modules))
        return (
            not same
            or list(map(id, weights)) != list(map(id, self.weights))
            or hooked_anywhere(module)
        )

    def __bool__(self) -> bool:
        if self.registered():
            self.free = False
        return (
            self.free
            and self.addresses == addresses(self.weights)
            and all(map(Tensor.is_contiguous, self.weights))
            and all(each["_modules"] is layers for each, layers in self.lists)
            and all(layer.get(name) == value for layer, name, value in self.settings)
        )


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))
