"""A stepper over a model that FSDP2 shards: ``fully_shard`` gathers and frees weights, and a step is on each rank's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from everybit.combinators import needs_whole_tensors
from everybit_torch.compiled import FusedSums
from everybit_torch.flat import GradientCycle, LabelledGroups, ShareOptimizer
from everybit_torch.fsdp2.main_gradients import MainGradient
from everybit_torch.fsdp2.outer_rows import OuterRows
from everybit_torch.fsdp2.requirements import JudgedUnits
from everybit_torch.placements import like
from everybit_torch.sharded.labelling import LabelledTransform


class FSDP2Stepper(GradientCycle):
    """Steps a model that FSDP2 shards; see :class:`~everybit_torch.FlatStepper`, which makes it.

    Args:
        model: The model.
        judged: The options, and the model's units and labels.

    Attributes:
        judged: The judged options.
    """

    def __init__(self, model: nn.Module, judged: JudgedUnits) -> None:
        options, device = judged.options, judged.device
        parameters = {name: p for name, p in model.named_parameters() if name in judged.homes}
        super().__init__(model, parameters, judged.ranks, device, judged.labelled, options.nan, compile=options.compile)
        self.judged, self._interrupted = judged, False  # in the middle of FSDP2's passes
        self._numbers = {p: number for number, p in enumerate(self.parameters.values())}
        self._names = {p: name for name, p in self.parameters.items()}
        whole = {
            name for name, label in judged.labelled.of.items()
            if needs_whole_tensors(judged.labelled.meaning[label].transform)
        }  # fmt: skip
        is_cut = options.sharding.outer == "optim"
        self._rows = OuterRows(self.parameters, judged.mesh, self.outer, is_cut=is_cut, whole=whole)
        fused = FusedSums(device) if options.compile else None
        self.main_gradients = [
            MainGradient(
                unit, judged.grads[unit.name], self.inner, self.outer.size,
                counts_nonfinite=options.nan == "param", fused=fused,
            )
            for unit in judged.units if unit.trained
        ]  # fmt: skip
        groups = LabelledGroups(
            self.labelled, seed=options.seed, unsafe=options.unsafe, compile=options.compile, mixed=judged.mixed
        )
        self._optimizer = ShareOptimizer(
            judged.labelled,
            self._rows.stepped,
            groups,
            seed=options.seed,
            step=self.step,
            clear=self.zero_grad,
            replacing=self._replacing,
            watch=options.watch,
            offload=options.offload,
        )

    @property
    def stepped(self) -> Mapping[str, nn.Parameter]:
        """The tensors that the optimizer steps, by name: FSDP2's parameters, or outer parts of them."""
        return self._rows.stepped

    # -- a cycle --------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _in_pass(self, *, last: bool, reduces: bool) -> Iterator[None]:  # noqa: ARG002  # all of these are alike
        self._interrupted = True
        model: Any = self.model
        if not reduces:
            model.set_requires_gradient_sync(False)
            for main in self.main_gradients:
                main.defer()
        try:
            yield
            self._interrupted = False
        finally:
            if not reduces:
                model.set_requires_gradient_sync(True)

    def _complete(self) -> set[str]:
        for main in self.main_gradients:
            main.require_sent("finish_gradients")
        touched = self._agree_on_passes()
        for main in self.main_gradients:
            for parameter, gradient in self._rows.finish(main, self.judged.divisor).items():
                name = self._names[parameter]
                stepped = self._rows.stepped[name]
                stepped.grad = like(stepped, gradient.to(stepped.device)) if name in touched else None
        return touched

    def _agree_on_passes(self) -> set[str]:
        """Return which parameters have a gradient on any rank.

        Raises:
            RuntimeError: Ranks had different numbers of forward passes of a unit.
        """
        count = len(self.parameters)
        numbers = torch.zeros(count + 2 * len(self.main_gradients), dtype=torch.float64)
        for number, main in enumerate(self.main_gradients):
            for parameter in main.touched:
                numbers[self._numbers[parameter]] = 1
            numbers[count + 2 * number] = main.forwards
            numbers[count + 2 * number + 1] = main.forwards**2
        summed = self._summed(numbers).tolist()
        ranks = self.inner.size * self.outer.size
        for number, main in enumerate(self.main_gradients):
            passes, squares = summed[count + 2 * number : count + 2 * number + 2]
            if passes**2 != ranks * squares:  # equal exactly where all ranks' numbers are
                raise RuntimeError(
                    f"{main.unit}: this rank had {main.forwards} forward passes of it in this cycle, and another rank another number."
                    " FSDP2 gathers weights in the order in which ranks ask, so they may have computed with other units' weights. Accepted"
                    " are the same units in the same order on every rank; zero_grad() begins anew."
                )
        return {name for name, here in zip(self.parameters, summed[:count], strict=True) if here}

    def _counted(self, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        first = self.outer.rank == 0
        return {name: x for name, x in gradients.items() if first or self._rows.cuts(self.parameters[name])}

    def _own_nonfinite(self) -> Mapping[str, Tensor]:
        return {self._names[p]: count for main in self.main_gradients for p, count in main.nonfinite.items()}

    def _recover(self) -> None:
        """Bring FSDP2 back, which an error may have left in the middle of a pass.

        Raises:
            RuntimeError: This torch cannot.
        """
        model: Any = self.model
        if any(main.forwards for main in self.main_gradients):  # before the first pass it cannot be reset
            if hasattr(model, "reset_iter_state"):
                model.reset_iter_state()
            elif self._interrupted:
                raise RuntimeError(
                    "zero_grad: an error ended a pass of FSDP2, which torch before 2.13 cannot begin anew; accepted is a new model with"
                    " a new stepper, and load_sharded()."
                )
        self._interrupted = False

    def _discard(self) -> None:
        for main in self.main_gradients:
            main.forget()

    @property
    def _has_gradients(self) -> bool:
        return not all(main.is_empty for main in self.main_gradients)

    def _send_by(self, labelled: Mapping[str, LabelledTransform]) -> Callable[[], None]:
        grads_of, before = self.judged.grads_under(labelled), [main.grads for main in self.main_gradients]
        for main in self.main_gradients:
            main.grads = grads_of[main.unit.name]

        def undo() -> None:
            for main, grads in zip(self.main_gradients, before, strict=True):
                main.grads = grads

        return undo

    def _hand_out(self) -> None:
        """Send changed rows to the outer ranks, and free weights that were gathered before."""
        self._rows.hand_out(self.parameters)
        for unit in self.judged.units:
            unit.module.reshard()

    # -- what one sees --------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the model to FSDP2 alone."""
        self._forget()
        for main in self.main_gradients:
            main.close()
        self.completeness.is_closed = True

    @property
    def described(self) -> str:
        """A description in one line."""
        kind = self.judged.options.sharding
        outer = f", outer={kind.outer!r} over {self.outer.size}" if self.outer.size > 1 else ""
        return f"strategy={kind.strategy!r} over {self.inner.size}{outer}, {len(self.judged.units)} units of FSDP2"

    @property
    def shares_pieces(self) -> bool:
        """Whether the inner ranks have different plain tensors of the parameters: they have DTensors."""
        return False
