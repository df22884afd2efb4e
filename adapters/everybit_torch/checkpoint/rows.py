"""The parts of a stepper over FSDP2 that a rank saves: its rows of weights and state."""

from __future__ import annotations

import math

from torch import Tensor

from everybit.stepping.entries import Entry
from everybit_torch.checkpoint.compatibility import elements
from everybit_torch.checkpoint.entries import Flat, model_tensors
from everybit_torch.checkpoint.shard_tensor import ShardTensor
from everybit_torch.dtensors import is_dtensor, local
from everybit_torch.fsdp2 import FSDP2Stepper
from everybit_torch.optim import entries_of, load_all
from everybit_torch.torch_internals.dtensors import offset_of_local_part


class RowParts:
    """This rank's rows of each parameter and of each tensor of its state."""

    def __init__(self, stepper: FSDP2Stepper) -> None:
        self._stepper, self._optimizer = stepper, stepper.as_optimizer()
        self.labels = stepper.labels
        self._optimizer.place()
        self._names = {id(p): name for name, p in stepper.stepped.items()}

    def model(self) -> Flat:
        """The rows of sharded tensors, and all of other tensors."""
        return {f"model.{name}": _run(x) for name, x in model_tensors(self._stepper.model).items()}

    def state(self) -> Flat:
        """Return the entries of the optimizer's state dict. Every rank has to call it."""
        found: Flat = {}
        for parameter, entries, values in self._optimizer.own.kept():
            factors = {entry.name for entry in entries if entry.cut == "tensor"}
            for name, value in values.items() if parameter.numel() else ():
                if name not in factors or value.numel():
                    found[f"optimizer.state.{self._names[id(parameter)]}.{name}"] = _run(value)
        return found

    def kept(self) -> dict[str, list[Entry]]:
        """Return the parameters that have elements. A rank may have no rows of one."""
        own = self._optimizer.own
        each = [(one.parameter, [entry for entry, _ in one.segment().entries()]) for one in own.own()]
        each += [(one.parameter, entries_of(one)) for one in own.visited()]
        return {self._names[id(parameter)]: entries for parameter, entries in each if parameter.numel()}

    def names(self) -> set[str]:
        """None that this rank does not have itself."""
        return set()

    def take_over(self, own: Flat, loaded: Flat) -> None:
        """Copy into the rows of the model, and to the state."""
        for key, value in own.items():
            if key.startswith("model."):
                elements(value).copy_(elements(loaded[key]))
        given: dict[int, dict[str, Tensor]] = {}
        for parameter, _, values in self._optimizer.own.kept():
            prefix = f"optimizer.state.{self._names[id(parameter)]}."
            given[id(parameter)] = {
                name: elements(loaded[prefix + name]).view(local(value).shape)
                for name, value in values.items()
                if prefix + name in loaded
            }
        load_all(self._optimizer.own, given)


def _run(x: Tensor) -> Tensor:
    """A DTensor's rows as a run of its elements; other tensors as they are."""
    if not is_dtensor(x):
        return x
    rows = local(x).detach()
    low = offset_of_local_part(x)[0] * math.prod(x.shape[1:]) if rows.numel() else 0
    return ShardTensor(rows.reshape(-1), x.shape, low)
