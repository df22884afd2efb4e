"""The number formats that tensors may be stored in, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

FloatDType = Literal["float64", "float32", "bfloat16", "float16"]
LowDType = Literal["bfloat16", "float16"]
ComputeDType = Literal["float64", "float32"]

FLOAT_DTYPES: tuple[FloatDType, ...] = get_args(FloatDType)
LOW_DTYPES: tuple[LowDType, ...] = get_args(LowDType)
COMPUTE_DTYPES: tuple[ComputeDType, ...] = get_args(ComputeDType)

DTYPES: Mapping[FloatDType, torch.dtype] = MappingProxyType(
    {
        "float64": torch.float64,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
)
"""The dtype of each name."""

_BY_DTYPE: dict[torch.dtype, FloatDType] = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype, *, field: str) -> FloatDType:
    """``torch.bfloat16`` -> ``"bfloat16"``.

    Raises:
        TypeError: ``dtype`` is no floating-point format that everybit stores; the message names ``field``.
    """
    if dtype not in _BY_DTYPE:
        raise TypeError(f"{field}: got {dtype}; accepted are {', '.join(map(str, _BY_DTYPE))}.")
    return _BY_DTYPE[dtype]


_SHORT: dict[str, FloatDType] = {
    "fp64": "float64", "double": "float64", "fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16",
}  # fmt: skip


def spelled(value: Any) -> Any:
    """Return the one name of a dtype that goes by another (``torch.bfloat16``, ``"bf16"``); other values as they are."""
    if isinstance(value, torch.dtype):
        return _BY_DTYPE.get(value, value)
    if isinstance(value, str):
        name = value.lower().removeprefix("torch.")
        return _SHORT.get(name, name if name in DTYPES else value)
    return value


def settle_dtype(owner: object, name: str, accepted: tuple[str, ...], *, field: str) -> None:
    """Let a field of a frozen dataclass hold the one name of a dtype, however it was spelled.

    Raises:
        ValueError: It is none of the accepted dtypes; the message names ``field``.
    """
    value = getattr(owner, name)
    if value in accepted:
        return
    own = spelled(value)
    if own not in accepted:
        require_member(value, accepted, field=field)
    object.__setattr__(owner, name, own)


def require_member(value: object, accepted: tuple[str, ...], *, field: str) -> None:
    """Refuse a ``value`` that is not among the names in ``accepted``.

    Raises:
        ValueError: The value is not accepted; the message names ``field``, the value and the accepted names.
    """
    if value not in accepted:
        listed = ", ".join(repr(name) for name in accepted)
        raise ValueError(f"{field}: got {value!r}; accepted are {listed}.")


def is_parameter(leaf: object) -> bool:
    """Whether a tensor is a module's parameter: by the name of its class, or by torch's mark on tensors of other classes."""
    marked: bool = getattr(leaf, "_is_param", False)
    return marked or any(kind.__name__ == "Parameter" for kind in type(leaf).__mro__)


def is_dense(leaf: object) -> bool:
    """Whether a leaf is a tensor in strided memory."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


def itemsize(name: FloatDType) -> int:
    """Return the number of bytes of one element."""
    return DTYPES[name].itemsize
