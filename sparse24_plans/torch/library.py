"""How ops are put into PyTorch's dispatcher: device kernels, fakes, autograd, autocast, and no vmap.

``torch.library``'s define and impl with the gradient registered apart: calls cost several microseconds less
than through ``custom_op``. Where no gradient is wanted and no mode or subclass is in the way, the kernel is
called from the autograd key itself, which saves the second trip through the dispatcher.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import _C
from torch.autograd import forward_ad

from ..device.log import COMPILE
from ..errors import UnsupportedError

NAMESPACE = "sparse24"
_library = torch.library.Library(NAMESPACE, "DEF")
_DEVICES = ("CPU", "CUDA")
_LOWERINGS = "torch._inductor.lowering"
_BACKENDS = tuple(getattr(_C.DispatchKey, name) for name in _DEVICES)
_below_views = _C._after_ADInplaceOrView_keyset
_below_autograd = _C._after_autograd_keyset

# Looked up once: only_dispatches is on the path of every call of a layer.
_grad_enabled, _autocast_enabled = torch.is_grad_enabled, _C._is_any_autocast_enabled
_dispatch_modes, _function_modes = _C._len_torch_dispatch_stack, _C._len_torch_function_stack
_profiled, _tracer = _C._autograd._profiler_enabled, _C._get_tracing_state
_transform = _C._functorch.maybe_current_level

Kernel = Callable[..., Any]


def _some_wants_gradient(*args: Any) -> bool:
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in args)


_wants_gradient = getattr(_C, "_any_requires_grad", _some_wants_gradient)  # not every PyTorch has it


def define(
    schema: str,
    kernel: Kernel,
    fake: Kernel,
    *,
    backward: Kernel | None = None,
    setup_context: Kernel | None = None,
    autocast: Kernel | None = None,
    call: Kernel | None = None,
) -> None:
    """Register an op.

    ``schema`` without the namespace; ``kernel`` serves CPU and CUDA tensors, ``fake`` tensors without a
    value. ``backward`` and ``setup_context`` are those of ``torch.library.register_autograd``; an op without
    has no gradient, and says so. ``autocast`` takes the dtype and the arguments, and gives the arguments to
    call with. ``call`` makes a product's ``Call`` of the arguments, for Inductor to call it directly.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in _DEVICES:
        _library.impl(name, kernel, device)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    if call is not None:
        fake = _announced(op, call, fake)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    _library.impl(name, _autograd(op, kernel, backward, setup_context), "Autograd", with_keyset=True)
    _library.impl(name, _no_vmap(name), "FuncTorchBatched")
    if autocast is not None:
        for device in _DEVICES:
            _library.impl(name, _autocast(op, autocast, device), f"Autocast{device}")


def only_dispatches(x: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the dispatcher would do nothing with these operands but call the device's kernel.

    So no gradient, mode, transform, tracer, autocast or profiler, and plain tensors of one device type.
    """
    if type(x) is not torch.Tensor or _grad_enabled() or x.is_neg():
        return False
    if x.is_cuda:
        together = weight.is_cuda and (bias is None or bias.is_cuda)
    else:
        together = x.is_cpu and weight.is_cpu and (bias is None or bias.is_cpu)
    return together and not (
        _dispatch_modes()
        or _function_modes()
        or _autocast_enabled()
        or _profiled()
        or forward_ad._current_level >= 0
        or _transform() is not None
        or _tracer() is not None
    )


def _announced(op: Any, call: Kernel, fake: Kernel) -> Kernel:
    """The fake, which tells Inductor of the product when it is at work.

    Inductor knows no moment at which others may announce what they have; but it, or what runs in front of it,
    asks for every result's shape before anything is lowered. Until then it isn't imported.
    """

    @cache
    def announce() -> None:
        try:
            from . import inductor

            inductor.lower(op, call)
        except (ImportError, AttributeError, TypeError) as error:
            report_unknown(op, error)

    def announced(*args: Any, **kwargs: Any) -> Any:
        if _LOWERINGS in sys.modules:
            announce()
        return fake(*args, **kwargs)

    return announced


def report_unknown(op: Any, error: Exception) -> None:
    """Log that compiled code calls the op through the dispatcher, since Inductor's internals are unknown."""
    COMPILE.warning("%s goes through PyTorch's dispatcher in compiled code: %r", op.name(), error)


def _autograd(op: Any, kernel: Kernel, backward: Kernel | None, setup_context: Kernel | None) -> Kernel:
    if backward is None:
        full = _without_gradient(op)
    else:
        about = torch._library.autograd.Info(backward, setup_context)
        full = torch._library.autograd.make_autograd_impl(op, about)
    grad_enabled, wanted = torch.is_grad_enabled, _wants_gradient

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_tangents(op, args)
        wants_gradient = grad_enabled() and wanted(*args)
        if not wants_gradient and (keyset & _below_views).highestPriorityTypeId() in _BACKENDS:
            return kernel(*args, **kwargs)
        return full(keyset, *args, **kwargs)

    return call


def _refuse_tangents(op: Any, args: tuple[Any, ...]) -> None:
    """Forward-mode differentiation has begun: what isn't differentiated must not pass for a constant."""
    tensors = (one for one in args if isinstance(one, torch.Tensor))
    if any(forward_ad.unpack_dual(one).tangent is not None for one in tensors):
        raise UnsupportedError(
            f"{op.name()} has no forward-mode derivative (torch.func.jvp, make_dual); backward works"
        )


def _without_gradient(op: Any) -> Kernel:
    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and _wants_gradient(*args):
            raise UnsupportedError(f"{op.name()} has no gradient; call it under torch.no_grad()")
        with _C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & _below_autograd, *args, **kwargs)

    return call


def _no_vmap(name: str) -> Kernel:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"{NAMESPACE}::{name} can't be used in torch.vmap: its operands have batches of their own, so "
            "call it on the whole batch"
        )

    return refuse


def _autocast(op: Any, rule: Kernel, device: str) -> Kernel:
    key = _C.DispatchKeySet(getattr(_C.DispatchKey, f"Autocast{device}"))
    kind = device.lower()

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = rule(torch.get_autocast_dtype(kind), *args, **kwargs)
        with _C._ExcludeDispatchKeyGuard(key):
            return op(*args, **kwargs)

    return call
