"""The main gradients of a model that FSDP2 shards: taken from it in its reduce-scatter, summed exactly, and added up in their own dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from everybit_torch.collectives import (
    Communicator,
    FusedSum,
    GradientWires,
    Mode,
    accumulate,
    cast,
    reduce_scatter_into,
)
from everybit_torch.fsdp2.units import Unit
from everybit_torch.sharded.reports import count_nonfinite
from everybit_torch.torch_internals.autograd import weakly
from everybit_torch.torch_internals.dtensors import local
from everybit_torch.torch_internals.fsdp import ReduceScatter


class MainGradient(ReduceScatter):
    """The main gradient of one unit on this rank, and the reduce-scatter that adds to it.

    FSDP2 passes the gradients of a unit's parameters at once. Each has a place, as long as the most rows that a rank has; their order is
    FSDP2's own, and is read from the order in which it reports them. The gradient that it then assigns to ``.grad`` is dropped.

    Args:
        unit: The unit, with at least one parameter that is trained.
        grads: How its gradients are kept and sent.
        inner: The ranks that FSDP2 shards over.
        multiple: A divisor of the buffer's length.
        counts_nonfinite: Count the elements that are not finite in this rank's own gradients.
        fused: The compiled sum of values that an exact wire received, if there is one.

    Attributes:
        main: The sums; None before the first gradient.
        touched: The parameters that had a gradient on this rank in this cycle.
        nonfinite: The number of non-finite elements of each of these gradients: int64, 0-d.
        forwards: Forward passes in this cycle.
    """

    def __init__(
        self, unit: Unit, grads: GradientWires, inner: Communicator, multiple: int, *, counts_nonfinite: bool, fused: FusedSum | None
    ) -> None:  # fmt: skip
        self.unit, self.grads, self._inner, self._multiple, self._fused = unit, grads, inner, multiple, fused
        self._counts_nonfinite = counts_nonfinite
        self._padded = {p: -(-p.shape[0] // inner.size) * math.prod(p.shape[1:]) for p in unit.trained.values()}
        self.main: Tensor | None = None
        self._places: dict[nn.Parameter, int] = {}
        self._cursor, self._is_fresh, self._defers, self._waits = 0, True, False, False
        self._output: Tensor | None = None
        self.touched: set[nn.Parameter] = set()
        self.nonfinite: dict[nn.Parameter, Tensor] = {}
        self.forwards = 0
        self._wholes: dict[nn.Parameter, nn.Parameter] = {}  # the gathered parameter of each
        self._owners: dict[nn.Parameter, nn.Parameter] = {}  # and that of which each was gathered
        self._handles = self._watch()

    def _watch(self) -> list[Any]:
        """Install hooks. Gathered parameters tell which of them have a gradient, and sharded parameters that it was sent."""
        module: Any = self.unit.module
        module.set_custom_reduce_scatter(self)
        module.set_gradient_divide_factor(1.0)  # a sum, which a step divides once
        module.set_force_sum_reduction_for_comms(True)
        handles = [module.register_forward_pre_hook(self._forward)]
        if hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True, recurse=False)
        owners = [
            (owner, key, parameter)
            for owner in module.modules() for key, parameter in owner.named_parameters(recurse=False) if parameter in self._padded
        ]  # fmt: skip
        module.unshard()
        for owner, key, parameter in owners:
            if parameter not in self._wholes:  # tied names come twice
                whole = self._wholes[parameter] = getattr(owner, key)
                self._owners[whole] = parameter
                parameter.grad_dtype = None  # FSDP2 assigns the model's dtype, and a step has the main gradient's
                handles.append(parameter.register_post_accumulate_grad_hook(weakly(self._take)))
                handles.append(whole.register_post_accumulate_grad_hook(weakly(self._arrive)))
        module.reshard()
        return handles

    def close(self) -> None:
        """Leave the module to FSDP2."""
        for handle in self._handles:
            handle.remove()
        for parameter in self._padded:
            parameter.grad_dtype = parameter.dtype

    # -- a pass ---------------------------------------------------------------------------------------------------------------------

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a reduce-scatter's input, and then its output, for FSDP2."""
        self._output = torch.empty(tuple(size), dtype=dtype, device=device)
        return self._output

    def __call__(
        self,
        output_tensor: Tensor,  # noqa: ARG002
        input_tensor: Tensor,
        group: Any,  # noqa: ARG002
        op: Any,  # noqa: ARG002
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        """Add the sum over the ranks to the main gradient; ``output_tensor`` is neither written nor read."""
        self._require_layout(input_tensor.numel() // self._inner.size)
        wire, sent = self.grads.inner, input_tensor
        if sent.dtype is not wire.dtype or wire.prescale != 1.0:
            sent = torch.empty_like(input_tensor, dtype=wire.dtype)
            cast(sent, input_tensor, wire.prescale)
        reduce_scatter_into(
            self._room(sent.device), sent, self._inner, wire, mode=self._mode, what=f"gradients of {self.unit}", fused=self._fused
        ).finish()  # fmt: skip

    def _take(self, parameter: nn.Parameter) -> None:
        """FSDP2 has assigned a gradient: note its place, and drop it."""
        parameter.grad = None
        if self._cursor == 0 and self._inner.size == 1:  # one rank sends nothing: what FSDP2 has copied is the sum
            assert self._output is not None
            self._require_layout(self._output.numel())
            accumulate(self._room(self._output.device), self._output, mode=self._mode)
        self._places[parameter] = self._cursor
        self._cursor += self._padded[parameter]
        if self._cursor == self._numel:
            self._cursor, self._is_fresh, self._waits, self._output = 0, False, False, None

    def _arrive(self, whole: nn.Parameter) -> None:
        """This rank has a gradient of its own."""
        parameter = self._owners[whole]
        self.touched.add(parameter)
        self._waits = True
        if self._counts_nonfinite and whole.grad is not None:
            before = 0 if self._defers else self.nonfinite.get(parameter, 0)
            self.nonfinite[parameter] = before + count_nonfinite(whole.grad)

    def _forward(self, _module: nn.Module, _arguments: Any) -> None:
        self.forwards += 1
        if torch.is_grad_enabled() and not hasattr(self.unit.module, "set_reduce_scatter_unused_params"):
            self._fill()  # torch before 2.13 sends nothing of a parameter without a gradient, and ranks would send differently

    def _fill(self) -> None:
        """Give zeros to gathered parameters without a gradient, so that all ranks send all of them, in one dtype."""
        for parameter, whole in self._wholes.items():
            if parameter.requires_grad and whole.grad is None:
                whole.grad = torch.zeros(whole.shape, dtype=whole.grad_dtype, device=whole.device)

    def defer(self) -> None:
        """Keep whole gradients, and add them up in the main gradient's dtype, until they are sent."""
        self._defers = True
        for whole in self._wholes.values():
            if whole.grad is None:
                whole.grad_dtype = self.grads.main
        self._fill()

    # -- a cycle --------------------------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether this cycle has no gradients yet."""
        return self._is_fresh and not self.touched and not self._defers

    def require_sent(self, name: str) -> None:
        """Refuse gradients that were not summed over the ranks.

        Raises:
            RuntimeError: There are some.
        """
        if self._waits or self._cursor:
            raise RuntimeError(
                f"{name}: gradients of {self.unit} were not summed over the ranks in the last backward pass; accepted before it is a pass"
                " inside sync(), or after no_sync(). (model.set_requires_gradient_sync is the stepper's to call.)"
            )

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """This rank's rows of the sums, in the shapes of its rows of parameters; none before something was sent in this cycle."""
        if self._is_fresh:
            return {}
        assert self.main is not None
        main, trained = self.main, [p for p in self._places if p.requires_grad]
        shapes = [rows.shape for rows in map(local, trained)]
        starts = [self._places[p] for p in trained]
        return {
            p: main[start : start + shape.numel()].view(shape)
            for p, start, shape in zip(trained, starts, shapes, strict=True)
        }

    def forget(self) -> None:
        """Begin a cycle."""
        if self._defers:
            for whole in self._wholes.values():
                whole.grad = None
                whole.grad_dtype = whole.dtype
        self._is_fresh, self._cursor, self._defers, self._waits, self.forwards = True, 0, False, False, 0
        self._output = None
        self.touched.clear()
        self.nonfinite.clear()

    @property
    def _mode(self) -> Mode:
        return "copy" if self._is_fresh else "add"

    @property
    def _numel(self) -> int:
        """Elements of what FSDP2 sends in a pass, for each rank."""
        return sum(numel for parameter, numel in self._padded.items() if parameter.requires_grad)

    def _require_layout(self, numel: int) -> None:
        if numel != self._numel:
            raise RuntimeError(
                f"{self.unit}: FSDP2 sends {numel} elements to a rank where its parameters have {self._numel}; accepted is to freeze and"
                " unfreeze parameters between a step and the next forward pass, and only those that were trained when the stepper was made."
            )

    def _room(self, device: torch.device) -> Tensor:
        if self.main is None:
            most = sum(self._padded.values())
            self.main = torch.zeros(self._multiple * -(-most // self._multiple), dtype=self.grads.main, device=device)
        return self.main[: self._numel]
