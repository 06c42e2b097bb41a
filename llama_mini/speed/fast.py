"""The fast form of a model, for the device that it is on."""

from ..model import Llama


def fast_model(model: Llama) -> Llama:
    """The model in its fast form, on the same weights; the model given stays as it is.

    On a CPU its steps of one token are written in C++, compiled the first time; on a CUDA GPU they are
    compiled by torch and replayed as CUDA graphs. Logits of such steps come without gradients. A
    `ValueError` for what is no Llama, for another device, and where this machine cannot compile.
    """
    if not isinstance(model, Llama):
        raise ValueError(f"fast_model takes a Llama, not a {type(model).__name__}")
    device = model.embed.weight.device
    if device.type == "cpu":
        from .cpu import fast_on_cpu

        return fast_on_cpu(model)
    if device.type == "cuda":
        from .graphs import fast_on_cuda  # with torch's compiler, which takes seconds to import

        return fast_on_cuda(model)
    raise ValueError(f"the fast form runs on cpu and cuda, and the model is on {device}")
