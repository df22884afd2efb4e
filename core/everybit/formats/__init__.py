"""Formats: how a number computed in float32 is kept in fewer bits.

A format is a pair of pure functions. ``encode`` turns a computed value into *parts* to store, ``decode`` turns them back. For a
parameter the first part is the model's own tensor and the rest lives in the optimizer's state; for a slot of the state all parts
live there. The optimizer never knows. Compensation of a parameter, of the second moment and of an average is therefore one piece
of code, and weight decay, being part of the update, is always inside it.

=====================  ====================  ========================================  ==============================
format                 parts                 error of one encode, relative to ``|x|``   bytes (bfloat16 value)
=====================  ====================  ========================================  ==============================
``Nearest``            value                 2**-8                                     2
``Stochastic``         value                 2**-7, zero on average                    2
``Kahan``              value, residual       2**-17 / 2**-20 / exact                   2 + 2 / 2 + 2 / 2 + 4
``Split(16)``          value, remainder      exact                                     2 + 2
``Split(8)``           value, remainder      2**-16                                    2 + 1
``Master``             value, main           exact                                     2 + 4
``Blockwise``          codes, scale          see :class:`Blockwise`                    1 or 0.5, + 4 / block
=====================  ====================  ========================================  ==============================

``Kahan`` and ``Split(8)`` with stochastic rounding are off by up to twice as much, and unbiased.

A format of your own subclasses :class:`Format`: see docs/formats.md.

Parameters are public: anyone may zero or overwrite the model's tensor between two steps. Each two-part format therefore decides on
``decode`` whether the second part can belong to the first, and drops it if not. The result is never NaN unless the value is, and is within
half a unit in the last place of the value part; ``Split`` cannot tell a stale remainder from its own, and adds it.
"""

from __future__ import annotations

from everybit.formats.blockwise import Blockwise
from everybit.formats.kahan import Kahan
from everybit.formats.main_copy import Master
from everybit.formats.one_part import Nearest, Stochastic
from everybit.formats.protocol import (
    HALF_UNITS, SLOT_KINDS, Format, ParamFormat, Parts, PartSpec, Rounding, SlotKind, StateFormat,
)  # fmt: skip
from everybit.formats.split import Split

__all__ = [
    "BUILT_IN", "HALF_UNITS", "SLOT_KINDS", "Blockwise", "Format", "Kahan", "Master", "Nearest", "ParamFormat", "PartSpec", "Parts",
    "Rounding", "SlotKind", "Split", "StateFormat", "Stochastic", "bytes_of",
]  # fmt: skip

BUILT_IN: tuple[type[Nearest] | type[Stochastic] | type[Kahan] | type[Split] | type[Master] | type[Blockwise], ...] = (
    Nearest, Stochastic, Kahan, Split, Master, Blockwise,
)  # fmt: skip
"""The formats of this package, which can be written to a file."""


def bytes_of(format: Format, elements: int) -> list[tuple[str, int]]:
    """(part name, bytes) of a value of so many elements, under a format with every dtype named."""
    return [(part.name, part.count(elements) * part.dtype.itemsize) for part in format.parts()]
