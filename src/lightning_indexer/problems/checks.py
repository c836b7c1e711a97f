"""What the checks of several operations ask in the same words."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """Inside, PyTorch computes as it is written: no gradient, no autocast, no TF32 and no other default dtype.

    A reference and a fallback give the same bits whatever modes the caller is in.
    """
    kind = device.type if device.type != "meta" else "cpu"
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    if precision != "highest":
        torch.set_float32_matmul_precision("highest")
    if dtype is not torch.float32:
        torch.set_default_dtype(torch.float32)
    try:
        with torch.no_grad(), torch.autocast(kind, enabled=False):
            yield
    finally:
        if precision != "highest":
            torch.set_float32_matmul_precision(precision)
        if dtype is not torch.float32:
            torch.set_default_dtype(dtype)


def check_tensor(name: str, value: object, dtypes: tuple[torch.dtype, ...], hint: str = "") -> None:
    """A dense tensor of one of these dtypes.

    Raises:
        TypeError: it is none; the message names the argument, what came and what was expected.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a torch.Tensor")
    if value.layout is not torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else str(value.layout)
        raise TypeError(f"{name}: got {kind}, expected a dense tensor")
    if value.dtype not in dtypes:
        raise TypeError(
            f"{name}: got dtype {value.dtype}, expected {' or '.join(str(dtype) for dtype in dtypes)}{hint}"
        )


def shape_of(tensor: torch.Tensor) -> list[int]:
    """As messages print it."""
    return list(tensor.shape)


def as_int(name: str, value: object) -> int | torch.SymInt:
    """An integer, NumPy's included; a bool is none.

    Raises:
        TypeError: anything else.
    """
    if isinstance(value, torch.SymInt):
        return value
    if isinstance(value, (bool, torch.Tensor)) or not hasattr(value, "__index__") or is_numpy_bool(value):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an int")
    return int(value.__index__())


def as_finite(name: str, value: object) -> float | torch.SymFloat:
    """A finite number, NumPy's included; a bool is none.

    Raises:
        TypeError, ValueError: anything else.
    """
    if isinstance(value, torch.SymFloat):
        return value
    if isinstance(value, bool) or is_numpy_bool(value) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a float")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}: got {value!r}, expected a finite number")
    return number


def as_bool(name: str, value: object) -> bool:
    """A bool, NumPy's included.

    Raises:
        TypeError: anything else.
    """
    if not isinstance(value, bool) and not is_numpy_bool(value):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a bool")
    return bool(value)


def is_numpy_bool(value: object) -> bool:
    """Without importing NumPy."""
    kind = type(value)
    return kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")


def check_pair(name: str, value: object, expected: str) -> None:
    """Two tensors.

    Raises:
        TypeError: anything else.
    """
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name}: got {type(value).__name__}, expected the pair {expected}")
    for number, tensor in enumerate(value):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}[{number}]: got {type(tensor).__name__}, expected a torch.Tensor")


def contiguous_vector(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """[N] from [N], [N, 1] or, where N is 1, []: a view where it can be, else a copy. Other shapes as they are."""
    if tensor.dim() == 0 and length == 1:
        tensor = tensor.reshape(1)
    elif tensor.dim() == 2 and tensor.shape[1] == 1:
        tensor = tensor[:, 0]
    return tensor.contiguous() if tensor.dim() == 1 else tensor
