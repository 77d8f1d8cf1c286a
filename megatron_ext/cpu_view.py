"""megatron-core without CUDA: each `megatron.*` module sees a `torch` whose current device is the CPU.

megatron-core names the CUDA device in some forty places. Instead of patching them one by one, an import
hook swaps the global name `torch` inside every `megatron.*` module, right after the module was executed,
for a view in which

* ``torch.cuda.current_device()`` is the CPU, streams and events do nothing, RNG state is the CPU's;
* tensor factories read ``device="cuda"`` as the CPU.

What a view of the name cannot reach (methods of tensors, names imported from `torch.cuda`, `torch.compile`)
is listed in ``_TENSOR_METHOD_SITES`` and `_adapt`. The real `torch` stays as it is: nobody outside
`megatron.*` sees a difference. Where CUDA exists `install` does nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")

_FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace"),
    *("ones", "ones_like", "rand", "randint", "randn", "tensor", "zeros", "zeros_like"),
)

# Functions that call Tensor.cuda(), or compare Tensor.type() with the name of a CUDA type.
_TENSOR_METHOD_SITES = {
    "megatron.core.models.common.language_module.language_module": (
        "LanguageModule.setup_embeddings_and_output_layer",
    ),
    "megatron.core.optimizer.clip_grads": ("clip_grad_by_total_norm_fp32",),
    "megatron.core.optimizer.distrib_optimizer": (
        "DistributedOptimizer.__init__",
        "DistributedOptimizer.get_parameter_state_dp_zero",
    ),
    "megatron.core.optimizer.optimizer": ("Float16OptimizerWithFloat16Params.__init__",),
}


def install() -> None:
    """Adapt every `megatron.*` module imported from now on; idempotent, and nothing where CUDA exists.

    Raises:
        RuntimeError: megatron was imported before, so that it holds the real `torch`.
    """
    if torch.cuda.is_available() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core was imported before megatron_ext; import megatron_ext first")
    sys.meta_path.insert(0, _Finder(_TorchView()))


class _Stream:
    """The one stream of the CPU: everything on it is done when the call returns."""

    device = CPU

    def wait_stream(self, stream: _Stream) -> None:
        pass

    def wait_event(self, event: _Event) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class _Event:
    """An event that has always happened."""

    def __init__(self, **_options: bool) -> None:
        pass

    def record(self, stream: _Stream | None = None) -> None:
        pass

    def wait(self, stream: _Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _CudaView(types.ModuleType):
    """`torch.cuda` with the CPU as the one device; what is not defined here is the real one's."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self._stream = _Stream()
        self.Event = _Event

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return CPU

    def device_count(self) -> int:
        return 1

    def set_device(self, device: object) -> None:
        pass

    def synchronize(self, device: object = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def current_stream(self, device: object = None) -> _Stream:
        return self._stream

    def default_stream(self, device: object = None) -> _Stream:
        return self._stream

    def Stream(self, **_options: object) -> _Stream:
        return self._stream

    def stream(self, stream: _Stream | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)


class _TorchView(types.ModuleType):
    """`torch` with `_CudaView` in place of `torch.cuda` and factories that make CPU tensors."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _CudaView()
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


class _TensorMethods(TorchFunctionMode):
    """Tensor.cuda() is the identity, and Tensor.type() names the CUDA type of the same dtype."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _with_tensor_methods(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _TensorMethods():
            return function(*args, **kwargs)

    return call


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `megatron.*` modules as everybody else does, and adapts each after it was executed."""

    def __init__(self, view: _TorchView) -> None:
        self._view = view

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("megatron."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self._view)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, view: _TorchView) -> None:
        super().__init__(fullname, path)
        self._view = view

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        if vars(module).get("torch") is torch:
            vars(module)["torch"] = self._view
        _adapt(module)


def _adapt(module: Any) -> None:
    """Change what the view cannot reach, by module name."""
    name = module.__name__
    if name == "megatron.core.jit":
        module.disable_jit_fuser()  # torch.compile of small functions costs minutes on a CPU
    if name == "megatron.core.tensor_parallel.random":
        module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: (
            torch.get_rng_state()
        )
        module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    for site in _TENSOR_METHOD_SITES.get(name, ()):
        *scope, attribute = site.split(".")
        owner = functools.reduce(getattr, scope, module)
        setattr(owner, attribute, _with_tensor_methods(getattr(owner, attribute)))
