"""The account of bytes: what an engine has allocated, by use."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import everybit as eb
from everybit.base import torch_dtype
from everybit.stepping import state_bytes
from everybit_torch.dtensors import local
from everybit_torch.optim.states import UNUSED, ParameterState, States
from everybit_torch.units import Unit


def bytes_table(units: Sequence[Unit], states: States, others: Sequence[Tensor] = ()) -> dict[str, int]:
    """Bytes by use; keys as in :meth:`everybit.Policy.bytes_table`, ``counters``, and ``unused``, which was put aside.

    Gradients that are not there at the moment are counted as they will be.

    Args:
        units: All there are.
        states: What is shown of them.
        others: Parameters that are in no unit.
    """
    table = {"parameter": sum(local(parameter).nbytes for parameter in others), "compensation": 0, "gradient": 0}
    for unit in units:
        assert unit.stored is not None
        table["parameter"] += unit.tensor.nbytes
        table["compensation"] += sum(leaf.nbytes for leaf in eb.tree.leaves(unit.state.extra))
        size = torch_dtype(unit.stored.grads_main).itemsize
        for parameter in unit.parameters:
            grad = parameter.grad
            table["gradient"] += local(parameter).numel() * size if grad is None else local(grad).nbytes
        for name, bytes in state_bytes(unit.state.inner, counters=unit.state.step.nbytes).items():
            table[name] = table.get(name, 0) + bytes
    unused = [
        local(value).nbytes
        for entries in states.values() if isinstance(entries, ParameterState)
        for name, value in entries.kept.items()
        if isinstance(name, str) and name.startswith(UNUSED) and isinstance(value, Tensor)
    ]  # fmt: skip
    if unused:
        table["unused"] = sum(unused)
    if not table["compensation"]:
        del table["compensation"]
    return table
