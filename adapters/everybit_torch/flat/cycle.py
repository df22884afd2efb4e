"""The cycle of a stepper: backward passes, sums over the ranks, one agreement, a step, new weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from everybit.base import FloatDType, barriers
from everybit_torch.ambient import in_plain_mode
from everybit_torch.checkpoint.background import StagingMemory
from everybit_torch.collectives import Communicator, GroupAxis
from everybit_torch.flat.norm_partials import Squares
from everybit_torch.flat.piece_optimizer import ShareOptimizer
from everybit_torch.routed import Routed
from everybit_torch.sharded.labelling import Labelled, LabelledTransform
from everybit_torch.sharded.reports import NanCheck, NonFinite, StepReport, count_nonfinite
from everybit_torch.sharded.step_checks import Completeness
from everybit_torch.torch_internals.dtensors import local
from everybit_torch.torch_internals.light_optimizer import note_step


class GradientCycle(ABC):
    """The cycle of a stepper, whatever its ranks share out.

    Args:
        model: The model.
        parameters: Those that are managed, by name, in the model's order.
        ranks: The inner ranks, which hold different parts, and the outer ranks, which hold copies.
        device: On which they send.
        labelled: The labels of the parameters that are trained.
        nan: Which gradients that are not finite are looked for.
        compile: Whether steps are compiled.

    Attributes:
        labelled: The transform and policy of each label, with the dtypes in which gradients are sent now.
        completeness: Whether weights and state belong together.
        staging: The host's memory for asynchronous saves.
    """

    _optimizer: ShareOptimizer

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        ranks: tuple[Communicator, Communicator],
        device: torch.device,
        labelled: Labelled,
        nan: NanCheck,
        *,
        compile: bool,
    ) -> None:
        self._squares = Squares(device, compile=compile)
        self.model, self.parameters, (self.inner, self.outer) = model, dict(parameters), ranks
        self.labelled, self._labels, self._nan, self._device = dict(labelled.meaning), labelled.of, nan, device
        self.completeness = Completeness()
        self.staging = StagingMemory(next(iter(self.parameters.values())).device)
        self._context: str | None = None
        self._failed = False
        self._touched: set[str] | None = None  # once the gradients of this cycle are final
        self._after_cycle: Callable[[], None] | None = None

    # -- what differs ---------------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def stepped(self) -> Mapping[str, nn.Parameter]:
        """The tensors that the optimizer steps, by name of the parameter: this rank's parts."""

    @abstractmethod
    def _in_pass(self, *, last: bool, reduces: bool) -> AbstractContextManager[None]:
        """Return the context of a backward pass."""

    @abstractmethod
    def _complete(self) -> set[str]:
        """Complete the sums, and give them to the tensors that are stepped; return which parameters have a gradient on any rank."""

    @abstractmethod
    def _own_nonfinite(self) -> Mapping[str, Tensor]:
        """Return how many elements of this rank's own gradients were not finite, by name."""

    @abstractmethod
    def _hand_out(self) -> None:
        """Send new weights to the ranks that keep copies of them."""

    @abstractmethod
    def _discard(self) -> None:
        """Discard the gradients of this cycle."""

    @abstractmethod
    def _recover(self) -> None:
        """Recover from a pass that was interrupted."""

    @property
    @abstractmethod
    def _has_gradients(self) -> bool:
        """Whether a gradient has arrived in this cycle."""

    @abstractmethod
    def _send_by(self, labelled: Mapping[str, LabelledTransform]) -> Callable[[], None]:
        """Send gradients from now on as these policies say; return a function that undoes it.

        Raises:
            ValueError: The dtype or the reduction cannot be used; the settings are unchanged.
        """

    # -- passes ---------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _pass(self, name: str, *, last: bool, reduces: bool) -> Iterator[None]:
        self._require_ready(name)
        if self._touched is not None:
            raise RuntimeError(
                f"{name}: the gradients of this cycle are final; accepted next is step() or zero_grad()."
            )
        self._context, self._failed = name, True
        try:
            with self._in_pass(last=last, reduces=reduces):
                yield
            self._failed = False
        finally:
            self._context = None
        if last:
            self.finish_gradients()

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of a backward pass that sums its gradients over the ranks."""
        return self._pass("microbatch", last=last, reduces=True)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return the context of backward passes before the last."""
        return self._pass("no_sync", last=False, reduces=False)

    def sync(self) -> AbstractContextManager[None]:
        """Return the context of the last backward pass."""
        return self._pass("sync", last=True, reduces=True)

    def _require_ready(self, name: str) -> None:
        self.completeness.require(name)
        if self._context is not None:
            raise RuntimeError(f"{name}: inside {self._context}(); accepted is after it.")
        if self._failed:
            raise RuntimeError(
                f"{name}: the microbatch or step before ended in an error, and its gradients are in part; accepted is zero_grad(), on every"
                " rank."
            )

    # -- a step ---------------------------------------------------------------------------------------------------------------------

    @in_plain_mode
    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Complete the sums over the ranks, divide, and give them to the optimizer's parameters."""
        self._require_ready("finish_gradients")
        self._finish()

    def _finish(self) -> None:
        if self._touched is None:
            self._failed = True
            self._touched = self._complete()
            self._failed = False

    def _gradients(self) -> dict[str, Tensor]:
        """The final gradients of this rank's parts, by name."""
        return {name: local(p.grad) for name, p in self.stepped.items() if p.grad is not None}

    def _give_to_optimizer(self, gradients: Mapping[str, Tensor]) -> None:  # noqa: B027  # it is complete
        """Give the optimizer's parameters these gradients, if they show others."""

    @abstractmethod
    def _counted(self, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Those of this rank's gradients that count here in a sum over all ranks, by name: of ranks that hold the same, the first's."""

    def _flat_gradients(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """The gradients that count here as vectors, for their norm."""
        return [gradient.reshape(-1) for gradient in self._counted(gradients).values()]

    def _summed(self, numbers: Tensor) -> Tensor:
        """Sum over all ranks."""
        summed = numbers.to(self._device)
        for ranks in (self.inner, self.outer):
            ranks.all_reduce(summed, "what the gradients are like").wait()
        return summed

    @in_plain_mode
    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> Tensor:
        """Complete the gradients, and scale them; return their norm."""
        self.finish_gradients()
        gradients = self._gradients()
        norm = self._norm([*self._counted(gradients).values()], float(norm_type))
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch's
        for gradient in gradients.values():
            gradient.mul_(scale.to(gradient.dtype))
        return norm

    def _norm(self, gradients: Sequence[Tensor], order: float) -> Tensor:
        """The p-norm of all ranks' gradients: float64, 0-d."""
        parts = [gradient.double().abs() for gradient in gradients if gradient.numel()]
        if math.isinf(order):
            own = torch.stack([part.amax() for part in parts] or [torch.zeros(()).double()]).amax()
            return GroupAxis((self.inner, self.outer)).max(own.to(self._device))
        own = sum((part.pow(order).sum() for part in parts), torch.zeros((), dtype=torch.float64))
        return self._summed(own) ** (1.0 / order)

    @in_plain_mode
    @torch.no_grad()
    def step(self, *, loss_scale: float = 1.0) -> StepReport:
        """Complete the gradients, agree, step this rank's parts, and hand out new weights."""
        self._require_ready("step")
        note_step(self._optimizer)
        self._finish()
        self._failed = True
        gradients = self._gradients()
        if loss_scale != 1.0:
            for gradient in gradients.values():
                gradient.div_(loss_scale)
        squares, nonfinite, skipped = self._look_at(gradients)
        touched = self._touched or set()
        if touched and not skipped:
            self.completeness.mark_incomplete("a step ended in an error after weights had been changed")
            self.staging.order()
            self._give_to_optimizer(gradients)
            self._optimizer.step_now()
            self._hand_out()
            self.completeness.mark_complete()
        self._forget()
        untouched = tuple(name for name in self.labels if name not in touched)
        report = nonfinite if self._nan == "param" else ()
        return StepReport(barriers.sqrt(squares), skipped, report, untouched)

    def _look_at(self, gradients: Mapping[str, Tensor]) -> tuple[Tensor, tuple[NonFinite, ...], bool]:
        """Sum the squares over all ranks, and find non-finite gradients.

        An element that is not finite shows in the sum; of large float64 numbers the squares may overflow, so that elements are counted.
        """
        squares = self._summed(self._squares(self._flat_gradients(gradients)))
        if self._nan == "off" or math.isfinite(float(squares)):
            return squares, (), False
        found = self._find_nonfinite(gradients)
        return squares, found, bool(found)

    def _find_nonfinite(self, gradients: Mapping[str, Tensor]) -> tuple[NonFinite, ...]:
        """Name the parameters with non-finite gradients, the ranks, and the stage."""
        names = list(self.parameters)
        counts = torch.zeros(2, len(names), dtype=torch.int64, device=self._device)
        own = self._own_nonfinite()
        for number, name in enumerate(names):
            if name in own:
                counts[0, number] = own[name]
            if name in gradients:
                counts[1, number] = count_nonfinite(gradients[name])
        everyone = counts[None]
        for ranks in (self.inner, self.outer):
            gathered = everyone.new_empty((ranks.size, *everyone.shape))
            ranks.all_gather(gathered.view(-1), everyone.reshape(-1), "counts of non-finite gradients").wait()
            everyone = gathered.view(-1, *counts.shape)
        found: list[NonFinite] = []
        for number, name in enumerate(names):
            before, after = everyone[:, 0, number].tolist(), everyone[:, 1, number].tolist()
            stage: Literal["backward", "reduction"] = "backward" if any(before) else "reduction"
            counted = before if any(before) else after
            found += [NonFinite(name, rank, count, stage) for rank, count in enumerate(counted) if count]
        return tuple(found)

    @torch.no_grad()
    def zero_grad(self) -> None:
        """Discard the gradients of this cycle, also of an interrupted one."""
        self._recover()
        self._forget()

    def _forget(self) -> None:
        self._discard()
        for stepped in self.stepped.values():
            stepped.grad = None
        self._failed, self._touched = False, None
        if self._after_cycle is not None:
            self._after_cycle()
            self._after_cycle = None

    # -- how gradients are sent -----------------------------------------------------------------------------------------------------

    def set_grad_comm(self, dtype: FloatDType | None, reduce: Literal["native", "float32"] | None) -> None:
        """Send gradients in another dtype from now on."""
        self._send_in(dtype, reduce)

    def _send_in(self, dtype: FloatDType | None, reduce: Literal["native", "float32"] | None) -> Callable[[], None]:
        """Change the wire; return a function that undoes it."""
        if self._holds_gradients:
            raise RuntimeError(
                "set_grad_comm: there are gradients of this cycle, which are sent in one dtype; accepted before the first backward pass"
                " after step() or zero_grad()."
            )
        before, changed = self.labelled, {}
        for label, one in before.items():
            grads = replace(one.policy.grads, comm=dtype, reduce=reduce or one.policy.grads.reduce)
            changed[label] = replace(one, policy=replace(one.policy, grads=grads))
        undo = self._send_by(changed)
        self.labelled = changed

        def restore() -> None:
            self.labelled = before
            undo()

        return restore

    @contextmanager
    def grad_comm(self, dtype: FloatDType | None, reduce: Literal["native", "float32"] | None) -> Iterator[None]:
        """Send gradients in another dtype inside."""
        pending = self._after_cycle
        restore = self._send_in(dtype, reduce)
        try:
            yield
        finally:
            if self._holds_gradients:
                self._after_cycle = pending or restore  # a cycle has one wire
            else:
                restore()

    # -- what one sees --------------------------------------------------------------------------------------------------------------

    def as_optimizer(self) -> ShareOptimizer:
        """Return the optimizer over this rank's parts."""
        return self._optimizer

    @property
    def labels(self) -> Mapping[str, str]:
        """The label of each parameter that is trained, by name."""
        return self._labels

    @property
    def routed(self) -> dict[str, Routed]:
        """The parameters that are trained."""
        shapes = {name: tuple(self.parameters[name].shape) for name in self.labels}
        return {name: Routed(label, shapes[name], shapes[name]) for name, label in self.labels.items()}

    # -- weights --------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _replacing(self) -> Iterator[None]:
        """Replace this rank's weights and state inside: after a save has copied them, and before weights are handed out."""
        self.staging.order()
        yield
        self._hand_out()

    @torch.no_grad()
    def loaded(self) -> None:
        """This rank's weights and state were replaced: hand out weights."""
        self._optimizer.own.note_loading()
        self._hand_out()
        self.completeness.mark_complete()
        self._forget()

    def require_between_cycles(self, name: str) -> None:
        """Refuse what changes weights while there are gradients of them.

        Raises:
            RuntimeError: There are some, or an error was not recovered from.
        """
        self._require_ready(name)
        if self._holds_gradients:
            raise RuntimeError(
                f"{name}: in the middle of a cycle, with gradients of other weights; accepted is after step() or zero_grad()."
            )

    @property
    def _holds_gradients(self) -> bool:
        return self._touched is not None or self._has_gradients

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """The model has the weights for evaluation inside."""
        self.staging.order()
        try:
            with self._optimizer.evaluated():
                self._hand_out()
                yield
        finally:  # after an error, too: ranks have copies of each other's weights for evaluation
            self._hand_out()
