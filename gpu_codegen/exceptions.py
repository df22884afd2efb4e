"""Steps of which not every law holds, and why. One of which all hold again is to be taken out of here."""

from __future__ import annotations

from collections.abc import Mapping

_LIBRARY = (
    "calls a function of a library beside the kernels, for the bits of eager code, and writes what it is called with"
)
_START = "moves fewer bytes than the policy counts: the weights at the start are read where totals are found"

EXCEPTIONS: Mapping[str, str] = {
    "registry: adam atan2": _LIBRARY,
    "registry: prodigy": _START,
    "registry: prodigy limited": _START,
}
"""What is said of a step, by the name of its optimizer."""
