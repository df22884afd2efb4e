"""The parts of a stepper's model and optimizer that a rank saves, by their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from everybit.stepping.entries import Entry

Flat = dict[str, Tensor]


class SavedParts(Protocol):
    """A rank's part of a stepper's model and optimizer."""

    @property
    def labels(self) -> Mapping[str, str]:
        """The label of each parameter that is trained, by name."""
        ...

    def model(self) -> Flat:
        """This rank's parts of the model, by name in a checkpoint."""
        ...

    def state(self) -> Flat:
        """This rank's parts of the optimizer's state, by name in a checkpoint."""
        ...

    def kept(self) -> Mapping[str, list[Entry]]:
        """The entries of each parameter that is trained, by the parameter's name, over all ranks."""
        ...

    def names(self) -> set[str]:
        """The names of the model's tensors in a checkpoint, over all ranks."""
        ...

    def take_over(self, own: Flat, loaded: Flat) -> None:
        """Copy loaded values into the stepper: ``own`` are model and state, and ``loaded`` the same with other values."""
        ...


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's ``state_dict()``.

    Raises:
        TypeError: It has something that a checkpoint cannot hold.
    """
    found = model.state_dict()
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name}: the model's state has a {type(tensor).__name__} here (get_extra_state?), and checkpoints hold tensors only. Save"
                " it beside them."
            )
    return {name: tensor.detach() for name, tensor in found.items()}
