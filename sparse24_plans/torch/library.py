"""Registers ops in PyTorch's dispatcher: device kernels, fakes, autograd, autocast, and a refusal of vmap.

It uses ``torch.library``'s define and impl and registers gradients apart, which saves several microseconds a
call over ``custom_op``. If no gradient is needed and no mode or subclass is in the way, the autograd key
calls the kernel itself and saves a second trip through the dispatcher.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import _C
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from ..device.log import COMPILE
from ..errors import InvalidProblemError, UnsupportedError

NAMESPACE = "sparse24"
_library = torch.library.Library(NAMESPACE, "DEF")
_DEVICES = ("CPU", "CUDA")
_LOWERINGS = "torch._inductor.lowering"
_BACKENDS = tuple(getattr(_C.DispatchKey, name) for name in _DEVICES)
_below_views = _C._after_ADInplaceOrView_keyset
_below_autograd = _C._after_autograd_keyset

# These are looked up once, because every call of a layer runs only_dispatches.
_grad_enabled, _autocast_enabled = torch.is_grad_enabled, _C._is_any_autocast_enabled
_dispatch_modes, _function_modes = _C._len_torch_dispatch_stack, _C._len_torch_function_stack
_profiled, _tracer = _C._autograd._profiler_enabled, _C._get_tracing_state
_transform = _C._functorch.maybe_current_level

Kernel = Callable[..., Any]


def autocasts(device_type: str) -> bool:
    """Whether autocast is on for a type of device. The meta device has none."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


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

    ``schema`` has no namespace. ``kernel`` serves CPU and CUDA tensors, ``fake`` tensors without values.
    ``backward`` and ``setup_context`` are arguments of ``torch.library.register_autograd``; an op without
    them raises where a gradient is needed. ``autocast`` maps autocast's dtype and the arguments to the
    arguments to call with. ``call`` turns the arguments of a product into a ``Call`` for Inductor.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in _DEVICES:
        _library.impl(name, kernel, device)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    fake = _on_one_device(op, fake)
    if call is not None:
        fake = _announced(op, call, fake)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    if written := [index for index, one in enumerate(op._schema.arguments) if one.is_write]:
        kernel = _counting_writes(kernel, written)
        views = _counting_writes(_below_views_alone(op), [1 + index for index in written])
        _library.impl(name, views, "ADInplaceOrView", with_keyset=True)
    _library.impl(name, _autograd(op, kernel, backward, setup_context), "Autograd", with_keyset=True)
    _library.impl(name, _no_vmap(name), "FuncTorchBatched")
    if autocast is not None:
        for device in _DEVICES:
            _library.impl(name, _autocast(op, autocast, device), f"Autocast{device}")


def only_dispatches(
    x: Any, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None = None
) -> bool:
    """Whether the dispatcher would do nothing with these operands but call the device's kernel.

    That is so for plain tensors of one device type without a gradient, mode, transform, tracer, autocast or
    profiler.
    """
    if type(x) is not torch.Tensor or _grad_enabled() or x.is_neg():
        return False
    if residual is not None and not only_dispatches(residual, weight, bias):
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


def _on_one_device(op: Any, fake: Kernel) -> Kernel:
    """The fake. It refuses tensors of several devices, of which only one need be meta's to call it."""
    names = [one.name for one in op._schema.arguments]

    def checked(*args: Any, **kwargs: Any) -> Any:
        found = fake(*args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        devices = {name: one.device for name, one in given.items() if isinstance(one, torch.Tensor)}
        wanted = next(iter(devices.values()), None)
        for name, device in devices.items():
            if device != wanted:
                raise InvalidProblemError(f"{name}: expected a tensor on {wanted}, got {device}")
        return found

    return checked


def _announced(op: Any, call: Kernel, fake: Kernel) -> Kernel:
    """The fake. It also registers the product's lowering once Inductor is at work.

    Inductor has no hook for this, but the shape of every result is asked for before anything is lowered.
    Inductor isn't imported before then.
    """

    @cache
    def announce() -> None:
        try:
            from . import inductor

            inductor.lower(op, call, report_unknown)
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
        if wants_gradient:
            refuse_in_transforms(op.name())
        if not wants_gradient and (keyset & _below_views).highestPriorityTypeId() in _BACKENDS:
            return kernel(*args, **kwargs)
        return full(keyset, *args, **kwargs)

    return call


def refuse_in_transforms(name: str) -> None:
    """Raise UnsupportedError inside of a transform of torch.func, whose gradients autograd doesn't make."""
    if _transform() is not None:
        raise UnsupportedError(
            f"{name} has no gradient in transforms of torch.func (grad, vjp, jacrev, vmap); call "
            "torch.autograd.grad or backward outside of them"
        )


def _refuse_tangents(op: Any, args: tuple[Any, ...]) -> None:
    """Raise if an argument has a forward-mode tangent, which would otherwise be dropped silently."""
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


def _below_views_alone(op: Any) -> Kernel:
    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        with _C._AutoDispatchBelowADInplaceOrView():
            return op.redispatch(keyset & _below_views, *args, **kwargs)

    return call


def _counting_writes(call: Kernel, written: list[int]) -> Kernel:
    """The call, which then increments the version of the arguments that it has ``written``.

    Versions tell autograd, and us of weights, that a tensor has changed. An inference tensor has none.
    """

    def counting(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        for one in (args[index] for index in written if index < len(args)):
            if one is not None and not one.is_inference():
                increment_version(one)
        return result

    return counting


def _no_vmap(name: str) -> Kernel:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"{NAMESPACE}::{name} can't be used in torch.vmap, as its operands have batch dimensions; call "
            "it on the whole batch"
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
