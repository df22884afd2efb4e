"""Where the values of a model on the meta device come from: what the caller of a stepper writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

ModuleFunction = Callable[[nn.Module], object]
"""Writes to the tensors of a module; what it returns is not looked at."""


@dataclass(frozen=True, slots=True)
class FromInitializers:
    """Weights from the model's own initializers, or from a function, the same on every rank.

    They are called for one module after the other, children before their parent, as ``model.apply`` does, while torch's generators begin at
    ``seed``. A model whose modules are initialized as they are constructed (``nn.Linear`` and all of torch's) gets the bits that
    ``torch.manual_seed(seed)`` and constructing it whole give on a device of the same type. Ranks compare what they initialized.

    Args:
        function: Called for each module, instead of its own ``reset_parameters``, ``_reset_parameters`` or ``init_weights``.
        seed: The seed for torch's generators, the same on every rank. The generators are restored afterwards.
        whole_units: The function uses tensors of modules below the one it is called for, too: all of a unit stay in memory until its last
            call.

    Examples:
        >>> import torch, everybit as eb
        >>> from everybit_torch import FlatStepper, FromInitializers
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(4, 2)
        >>> stepper = FlatStepper(model, eb.adamw(1e-3), values=FromInitializers(seed=1))
        >>> model.weight.device.type
        'cpu'
    """

    function: ModuleFunction | None = None
    seed: int = 0
    whole_units: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.function, int):
            raise TypeError(
                f"FromInitializers: write seed={self.function}. Got {self.function} as function; accepted is a function of a module."
            )
        _require_function("FromInitializers: function", self.function)


@dataclass(frozen=True, slots=True)
class FromSafetensors:
    """A file in the safetensors format, or several with an index. Each rank reads what it keeps.

    Args:
        path: A ``.safetensors`` file, an index (``model.safetensors.index.json``), or a folder that holds one of the two.
        buffers: Called for each module with buffers that no ``state_dict`` holds (``persistent=False``), to write them. Not needed where
            the model has none, or has their values already.
    """

    path: str | os.PathLike[str]
    buffers: ModuleFunction | None = None

    def __post_init__(self) -> None:
        _require_function("FromSafetensors: buffers", self.buffers)


@dataclass(frozen=True, slots=True)
class FromCheckpoint:
    """A checkpoint of ``torch.distributed.checkpoint``, such as ``dcp.save`` and ``save_sharded`` write. Each rank reads what it needs.

    Only the model is read. To continue a run make the stepper and call ``load_sharded``, which also brings the state.

    Args:
        path: The checkpoint's folder, or the directory that ``save_sharded`` was given.
        prefix: Of the model's names in the checkpoint, such as ``"model."``. None: ``"model."`` if the first of the model's names is there
            with it, else none. With a prefix, names without it belong to something else and are passed over.
        buffers: As :class:`FromSafetensors`'s.
    """

    path: str | os.PathLike[str]
    prefix: str | None = None
    buffers: ModuleFunction | None = None

    def __post_init__(self) -> None:
        _require_function("FromCheckpoint: buffers", self.buffers)


@dataclass(frozen=True, slots=True)
class FromStateDict:
    """A ``state_dict`` in the first rank's memory, which sends it to the others a part at a time.

    The stepper does not keep it. What the first rank holds on to stays its own.

    Args:
        state_dict: On the first rank; None on all others.
        buffers: As :class:`FromSafetensors`'s; on every rank.
    """

    state_dict: Mapping[str, Tensor] | None = None
    buffers: ModuleFunction | None = None

    def __post_init__(self) -> None:
        _require_function("FromStateDict: buffers", self.buffers)


def _require_function(field: str, value: object) -> None:
    """Refuse a value that cannot be called, with a TypeError."""
    if value is not None and not callable(value):
        raise TypeError(f"{field}: got {value!r}; accepted is a function of a module.")


Values = FromInitializers | FromSafetensors | FromCheckpoint | FromStateDict
"""A source of values."""
