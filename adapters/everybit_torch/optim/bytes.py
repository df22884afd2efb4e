"""The account of bytes: an optimizer's allocations, by use."""

from __future__ import annotations

import everybit as eb
from everybit.base import DTYPES
from everybit.stepping import state_bytes
from everybit_torch.optim.parameters import Parameters
from everybit_torch.segments import Segment
from everybit_torch.torch_internals.dtensors import local


def _add_state(table: dict[str, int], segment: Segment) -> None:
    if segment.watched is not None:
        table["changed"] = table.get("changed", 0) + segment.watched.mask.nbytes
    if segment.host is not None:
        entries = segment.entries()
        for use, nbytes in (
            ("host", sum(x.nbytes for entry, x in entries if entry.role != "shared")),
            ("counters", sum(x.nbytes for entry, x in entries if entry.role == "shared")),
        ):
            table[use] = table.get(use, 0) + nbytes
        return
    table["compensation"] += sum(leaf.nbytes for leaf in eb.tree.leaves(segment.state.extra))
    for name, bytes in state_bytes(segment.state.inner, counters=segment.state.step.nbytes).items():
        table[name] = table.get(name, 0) + bytes


def bytes_table(parameters: Parameters) -> dict[str, int]:
    """Return bytes by use; keys as in :meth:`everybit.Policy.bytes_table`, and ``counters``.

    With ``watch`` there is ``changed``, the masks. With ``offload`` there are ``host``, all state that lies there, in place of its slots;
    and ``staging``, the memory on the device for two pieces of it.

    Gradients that are not there at the moment are counted as they will be. The vectors into which a step gathers short parameters are not
    counted.
    """
    table = {"parameter": sum(local(p).nbytes for p in parameters.waiting()), "compensation": 0, "gradient": 0}
    for one in parameters.stepped:
        segment = one.of.segment
        size = DTYPES[segment.stored.grads_main].itemsize
        for parameter in one.of.parameters:
            table["parameter"] += local(parameter).nbytes
            grad = parameter.grad
            table["gradient"] += local(parameter).numel() * size if grad is None else local(grad).nbytes
        _add_state(table, segment)
    for member in parameters.visited():
        here, grad = local(member.parameter), member.parameter.grad
        table["parameter"] += here.nbytes
        size = DTYPES[member.visitor.shadow().stored.grads_main].itemsize
        table["gradient"] += here.numel() * size if grad is None else local(grad).nbytes
        if member.visitor.watched is not None:
            table["changed"] = table.get("changed", 0) + member.visitor.watched.mask.nbytes
        if member.visitor.segment is not None:
            _add_state(table, member.visitor.segment)
    if parameters.hosts:
        table["staging"] = sum(host.nbytes for host in parameters.hosts.values())
    if not table["compensation"]:
        del table["compensation"]
    return table
