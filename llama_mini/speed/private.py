"""What torch does not tell by a public name. Each function has a test that runs on every torch admitted."""

from torch import nn

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hooked(module: nn.Module) -> bool:
    """Whether a hook is registered on this very module."""
    return any(getattr(module, name) for name in HOOKS)
