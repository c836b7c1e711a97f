"""What every public call does before and after its backend: who goes through the custom operators, and the memo.

Calls on plain tensors in eager code go straight to the backend. Under ``torch.compile``, fake tensors, subclasses and
other dispatch modes they go through the operators, which PyTorch can see.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from lightning_indexer.selection import registry

# From the facts of a call, everything that validation, selection and a kernel's preparation read, to what they came to.
PLANS: dict[object, Any] = {}
MAX_PLANS = 4096


def forget_plans() -> None:
    """Drops what earlier calls decided. Who changes the registry through its functions need not call it."""
    PLANS.clear()


registry.on_change(forget_plans)


def keep(facts: object, plan: Any) -> None:
    """Keeps a plan for the calls that agree with this one."""
    if len(PLANS) >= MAX_PLANS:
        PLANS.clear()
    PLANS[facts] = plan


_transforms = torch._C._functorch.get_dynamic_layer_stack_depth
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


dispatch_modes = torch._C._len_torch_dispatch_stack
functorch = torch._C._functorch.peek_interpreter_stack
tracing = torch._C._get_tracing_state


def tensors_of(call: Any) -> list[torch.Tensor]:
    return [argument for argument in call if isinstance(argument, torch.Tensor)]


def workspace(given: torch.Tensor | int | None, needed: int, device: torch.device) -> torch.Tensor | None:
    """What a run works in: the caller's, or a new one.

    Raises:
        ValueError: as :func:`check_workspace`.
    """
    check_workspace(given, needed)
    if isinstance(given, torch.Tensor):
        return given
    return torch.empty(needed, dtype=torch.uint8, device=device) if needed else None


def check_workspace(given: torch.Tensor | int | None, needed: int) -> None:
    """A workspace of the caller's, or what it allows, has room for what a run works in.

    Raises:
        ValueError: it has not, or is not on a 16-byte boundary.
    """
    room = given.numel() if isinstance(given, torch.Tensor) else given
    if room is not None and room < needed:
        raise ValueError(f"workspace: got {room} bytes, expected at least {needed} for this call")
    if needed and isinstance(given, torch.Tensor) and given.data_ptr() & 15:
        raise ValueError("workspace: got an address off a 16-byte boundary, expected one on it")


def facts(operation: str, tensors: Sequence[Any], *others: Any) -> object:
    """What a plan may depend on, of a call whose tensors come as they are; None where one is no dense tensor.

    Of addresses, what lies below a boundary of 16 bytes counts.
    """
    try:
        found = (
            operation,
            *[
                None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.is_neg(), t.data_ptr() & 15)
                for t in tensors
            ],
            *others,
        )
        hash(found)
    except (AttributeError, TypeError, RuntimeError):  # the checks say which
        return None
    return found


def fact_of(argument: Any) -> object:
    """What a plan may depend on, of an optional argument by itself: of a tensor all but its address and its values."""
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.device, argument.is_neg()
    return argument.__class__, argument


def plain(call: Any) -> Any:
    """A call, parameters and subclasses among its tensors as the tensors they hold; of named tuples within it too."""

    def of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return plain_tensor(value)
        return plain(value) if isinstance(value, tuple) and hasattr(value, "_fields") else value

    return call._replace(**{name: of(value) for name, value in zip(call._fields, call, strict=True)})


_T = TypeVar("_T", torch.Tensor, torch.Tensor | None)


def plain_tensor(tensor: _T) -> _T:
    """A parameter or a subclass as the tensor that it holds."""
    return tensor if tensor is None or type(tensor) is torch.Tensor else tensor.detach().as_subclass(torch.Tensor)


def needs_operator(tensors: Sequence[object]) -> bool:
    """True where a call on these has to go through PyTorch's dispatcher: subclasses, of any operand, and meta."""
    return any(isinstance(t, torch.Tensor) and (type(t) is not torch.Tensor or t.is_meta) for t in tensors)


def refuse(operation: str, tensors: Sequence[object]) -> None:
    """Refuses by name what would go wrong without a word.

    Raises:
        NotImplementedError: an operand that a function transform has wrapped, one with a tangent, or a call inside
            ``torch.jit.trace``.
    """
    if torch._C._get_tracing_state() is not None:
        raise NotImplementedError(
            f"{operation}: torch.jit.trace records PyTorch's own operations alone; torch.compile and torch.export have "
            "this one"
        )
    given = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    name = _transform_of(given)
    if name is not None:
        what = "no batching rule: pack a batch by its windows" if name == "vmap" else "no derivative: detach it"
        raise NotImplementedError(f"{operation}: called on an operand of torch.func's {name}; it has {what}")
    if forward_ad._current_level >= 0 and any(map(_has_tangent, given)):
        raise NotImplementedError(f"{operation}: got an operand with a tangent, and it has no derivative: detach it")


def _transform_of(tensors: Sequence[torch.Tensor]) -> str | None:
    """The transform that has wrapped one of these; functionalisation, for which the operators have a rule, is none."""
    if torch.compiler.is_compiling():
        # Dynamo reads the depth alone; inside a transform that it traces, operands are wrapped.
        return "transforms" if _transforms() > 0 else None
    stack = functorch()
    if stack is None or not any(map(_is_wrapped, tensors)):
        return None
    name = str(stack.key()).rpartition(".")[2].lower()
    return None if name == "functionalize" else name


def _has_tangent(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


_WARNED: set[str] = set()


def warn_of_gradients(operation: str, stacklevel: int = 4) -> None:
    """Says once a process that no gradient flows through the operation.

    ``stacklevel`` is how far up the stack the caller's own line is.
    """
    if operation in _WARNED:
        return
    _WARNED.add(operation)
    warnings.warn(
        f"{operation}: an operand requires grad, and no gradient flows through this operation: it trains nothing. "
        "Detach the operand, or call under torch.no_grad(), to be told so no more",
        UserWarning,
        stacklevel=stacklevel,
    )
