"""How gradients are sent, which may change between cycles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from everybit.base import FloatDType
from everybit_torch.sharded.labelling import LabelledTransform
from everybit_torch.sharded.model_buffers import ModelBuffers


class GradientWires:
    """The dtype in which gradients are sent, and how they are summed.

    Args:
        buffers: Whose gradients.
        labelled: How each label's parameters are stored.
        holds_gradients: Whether there are gradients of this cycle, which have one wire.

    Attributes:
        labelled: How each label's parameters are stored, with the present wire.
    """

    def __init__(
        self,
        buffers: ModelBuffers,
        labelled: Mapping[str, LabelledTransform],
        holds_gradients: Callable[[], bool],
    ) -> None:
        self.labelled = dict(labelled)
        self._buffers, self._holds_gradients = buffers, holds_gradients
        self._after: Callable[[], None] | None = None

    def change(self, dtype: FloatDType | None, reduce: Literal["native", "fp32"] | None) -> None:
        """Send gradients in another dtype from now on; see :meth:`.stepper.FlatStepper.set_grad_comm`."""
        if self._holds_gradients():
            raise RuntimeError(
                "set_grad_comm: there are gradients of this cycle, which are sent in one dtype; accepted before the first backward pass"
                " after step() or zero_grad()."
            )
        changed = {}
        for label, one in self.labelled.items():
            grads = replace(one.policy.grads, comm=dtype, reduce=reduce or one.policy.grads.reduce)
            changed[label] = replace(one, policy=replace(one.policy, grads=grads))
        self.labelled = changed
        self._buffers.send_as(changed)

    @contextmanager
    def changed(self, dtype: FloatDType | None, reduce: Literal["native", "fp32"] | None) -> Iterator[None]:
        """Send gradients in another dtype inside; see :meth:`.stepper.FlatStepper.grad_comm`."""
        before, labelled = self._buffers.wires, self.labelled
        self.change(dtype, reduce)
        pending = self._after

        def restore() -> None:
            self.labelled, self._after = labelled, None
            self._buffers.wires = before

        try:
            yield
        finally:
            if self._holds_gradients():
                self._after = pending or restore
            else:
                restore()

    def begin_cycle(self) -> None:
        """There are no gradients any more: what was before a context that ended in the middle of a cycle comes back."""
        if self._after is not None:
            self._after()
