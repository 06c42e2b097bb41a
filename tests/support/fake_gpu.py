"""An H200 that is not there: fake tensors on it, and torch's compiler making code for it.

It changes torch for good, so it is used in processes of their own (`cuda_steps.py`), on the one version of
torch that its private names belong to.
"""

import ctypes
import importlib
import os
import subprocess
import tempfile
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
static c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, new Guard());
"""
H200 = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    total_memory=150 * 10**9,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    warp_size=32,
    L2_cache_size=60 * 2**20,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    is_integrated=0,
    is_multi_gpu_board=0,
    gcnArchName="",
)


def allow_tensors() -> None:
    """Fake tensors on "cuda": a build for the CPU lacks the guard that would switch devices."""
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(GUARD)
        flags = ["-shared", "-fPIC", "-std=c++20", f"-I{root / 'include'}", f"-L{root / 'lib'}"]
        compiler = os.environ.get("CXX", "g++")
        subprocess.run([compiler, *flags, str(source), "-lc10", "-o", str(library)], check=True)
        ctypes.CDLL(str(library))


class Graph:
    """In the place of torch.cuda.CUDAGraph."""

    def replay(self) -> None:
        pass


def allow_graphs() -> None:
    """What is captured runs once, and a replay does nothing."""
    cuda: Any = torch.cuda
    cuda.CUDAGraph, cuda.graph_pool_handle = Graph, object
    cuda.Stream = lambda: types.SimpleNamespace(wait_stream=lambda other: None)
    # The compiler knows each of these by itself.
    cuda.current_stream = lambda: cuda.Stream()
    cuda.graph = lambda *place, **options: nullcontext()
    cuda.stream = lambda stream: nullcontext()
    cuda.synchronize = lambda *place: None
    torch.accelerator.synchronize = lambda *place: None


def put(path: str, value: object) -> None:
    module, name = path.rsplit(".", 1)
    target: Any = importlib.import_module("torch")
    for part in module.split(".")[1:]:
        target = getattr(target, part)
    setattr(target, name, value)


def allow_compiling() -> None:
    """Inductor finds an H200, and makes Triton code for it."""
    import torch._dynamo.device_interface as interface
    import torch._inductor.config as config
    import torch._inductor.fx_passes.fuse_attention as attention
    import torch._inductor.fx_passes.joint_graph as joint
    import torch._inductor.fx_passes.post_grad as post
    import torch._inductor.runtime.triton_helpers as helpers
    import torch._subclasses.fake_tensor as fake
    import triton
    from triton.backends.compiler import GPUTarget

    class Driver:
        utils: Any = types.SimpleNamespace(
            get_device_properties=lambda device: {
                "max_shared_mem": 232448,
                "max_num_regs": 65536,
                "multiprocessor_count": 132,
                "warpSize": 32,
            },
            load_binary=lambda name, kernel, shared, device: (1, 1, 32, 0, 1024),
        )
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_current_device = staticmethod(lambda: 0)
        get_active_torch_device = staticmethod(lambda: torch.device("cuda", 0))
        get_device_interface = staticmethod(lambda: torch.cuda)
        is_active = staticmethod(lambda: True)

    triton.runtime.driver.set_active(Driver())
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: H200,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: H200.name,
        "set_device": lambda device: None,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "_DeviceGuard": lambda device: nullcontext(),
        "random._lazy_init": lambda: None,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
    }.items():
        put(f"torch.cuda.{name}", value)
    put("torch._C._cuda_getCurrentRawStream", lambda device: 0)
    for cls in (interface.CudaInterface, interface.CudaInterface.Worker):
        for name, value in {
            "get_device_properties": lambda device=None: H200,
            "current_device": lambda: 0,
            "device_count": lambda: 1,
            "is_available": lambda: True,
            "get_compute_capability": lambda device=None: 90,
            "set_device": lambda device: None,
        }.items():
            if hasattr(cls, name):
                setattr(cls, name, staticmethod(value))
    interface.caching_worker_device_properties["cuda"] = [H200]
    interface.DeviceGuard.__enter__ = lambda self: None
    interface.DeviceGuard.__exit__ = lambda self, *error: False
    fake.init_gpu_context = lambda *device: None
    helpers.set_driver_to_gpu = helpers.set_driver_to_cpu = lambda: None
    # The patterns that these look for are made by computing, on the GPU where there is one.
    for module, name in (
        (attention, "_get_sfdp_patterns"),
        (joint, "lazy_init"),
        (post, "lazy_init"),
    ):
        setattr(module, name, on_the_cpu(getattr(module, name)))
    config.joint_graph_constant_folding = False  # it computes, too
    config.shape_padding = False  # it measures
    config.force_disable_caches = True
    config.compile_threads = 1
    config.use_static_triton_launcher = config.use_static_cuda_launcher = False


def on_the_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*device: object, **named: object) -> Any:
        there, torch.cuda.is_available = torch.cuda.is_available, lambda: False
        try:
            return function()
        finally:
            torch.cuda.is_available = there

    return call
