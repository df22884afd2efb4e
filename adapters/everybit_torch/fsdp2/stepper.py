"""A stepper over a model that FSDP2 shards: ``fully_shard`` gathers and frees weights, and a step is on each rank's rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from everybit.base import FloatDType, barriers
from everybit_torch.ambient import in_plain_mode
from everybit_torch.collectives.communicator import GroupAxis
from everybit_torch.dtensors import like, local
from everybit_torch.evaluation import evaluation_weights
from everybit_torch.fsdp2.judging import Judged
from everybit_torch.fsdp2.main_gradients import MainGradient
from everybit_torch.fsdp2.optimizer import LabelledGroups, RowOptimizer
from everybit_torch.fsdp2.outer_rows import OuterRows
from everybit_torch.fused_sums import FusedSums
from everybit_torch.routing import Routed
from everybit_torch.sharded.labelling import Labelled
from everybit_torch.sharded.nonfinite import count_nonfinite
from everybit_torch.sharded.planning.report import Plan, Ranks
from everybit_torch.sharded.planning.rows import plan_units
from everybit_torch.sharded.reports import NonFinite, StepReport
from everybit_torch.sharded.squares import sums_of_squares
from everybit_torch.sharded.staging import StagingMemory
from everybit_torch.sharded.step_checks import Completeness
from everybit_torch.torch_internals.optimizers import note_step

if TYPE_CHECKING:
    from everybit_torch.sharded.saved_parts import SavedParts


class FSDP2Stepper:
    """Steps a model that FSDP2 shards; see :class:`~everybit_torch.FlatStepper`, which makes it.

    Args:
        model: The model.
        judged: The arguments, and the model's units and labels.
    """

    def __init__(self, model: nn.Module, judged: Judged) -> None:
        given = judged.given
        self.model, self._judged = model, judged
        self.inner, self.outer = judged.ranks
        self.labelled = dict(judged.labelled.meaning)
        self.completeness = Completeness()
        self.parameters = {name: p for name, p in model.named_parameters() if name in judged.homes}
        self._numbers = {p: number for number, p in enumerate(self.parameters.values())}
        self._names = {p: name for name, p in self.parameters.items()}
        device = judged.device
        self._rows = OuterRows(self.parameters, judged.mesh, self.outer, is_cut=given.sharding.outer == "optim")
        fused = FusedSums(device) if given.compile else None
        self.main_gradients = [
            MainGradient(
                unit, judged.grads[unit.name], self.inner, self.outer.size,
                counts_nonfinite=given.nan == "param", fused=fused,
            )
            for unit in judged.units if unit.trained
        ]  # fmt: skip
        groups = LabelledGroups(
            self.labelled, seed=given.seed, unsafe=given.unsafe, compile=given.compile, mixed=judged.mixed
        )
        self._optimizer = RowOptimizer(
            judged.labelled, self._rows.stepped, groups, seed=given.seed, step=self.step, clear=self.zero_grad
        )
        self._context: str | None = None
        self._failed = False
        self._interrupted = False  # in the middle of FSDP2's passes
        self._touched: set[str] | None = None  # once the gradients of this cycle are final
        self._after_cycle: Callable[[], None] | None = None
        self._device = device
        self.staging = StagingMemory(next(iter(self.parameters.values())).device)

    # -- a cycle --------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _pass(self, name: str, *, last: bool, reduces: bool) -> Iterator[None]:
        self._require_ready(name)
        if self._touched is not None:
            raise RuntimeError(
                f"{name}: the gradients of this cycle are final; accepted next is step() or zero_grad()."
            )
        self._context, self._failed, self._interrupted = name, True, True
        model: Any = self.model
        if not reduces:
            model.set_requires_gradient_sync(False)
            for main in self.main_gradients:
                main.defer()
        try:
            yield
            self._failed = self._interrupted = False
        finally:
            self._context = None
            if not reduces:
                model.set_requires_gradient_sync(True)
        if last:
            self.finish_gradients()

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of a backward pass that sums its gradients over the ranks."""
        return self._pass("microbatch", last=last, reduces=True)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return the context of backward passes that keep gradients on this rank."""
        return self._pass("no_sync", last=False, reduces=False)

    def sync(self) -> AbstractContextManager[None]:
        """The last backward pass."""
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

    @in_plain_mode
    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Sum over the outer ranks, divide, and give the sums to the optimizer's parameters."""
        self._require_ready("finish_gradients")
        if self._touched is not None:
            return
        self._failed = True
        for main in self.main_gradients:
            main.require_sent("finish_gradients")
        touched = self._agree_on_passes()
        for main in self.main_gradients:
            for parameter, gradient in self._rows.finish(main, self._judged.divisor).items():
                name = self._names[parameter]
                stepped = self._rows.stepped[name]
                stepped.grad = like(stepped, gradient.to(stepped.device)) if name in touched else None
        self._touched, self._failed = touched, False

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

    def _summed(self, numbers: Tensor) -> Tensor:
        summed = numbers.to(self._device)
        for ranks in (self.inner, self.outer):
            ranks.all_reduce(summed, "what the gradients are like").wait()
        return summed

    @in_plain_mode
    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> Tensor:
        """Complete the gradients, and scale them; return their norm."""
        self.finish_gradients()
        gradients = [local(p.grad) for p in self._rows.stepped.values() if p.grad is not None]
        norm = self._norm(gradients, float(norm_type))
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch's
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.dtype))
        return norm

    def _norm(self, gradients: Sequence[Tensor], order: float) -> Tensor:
        """The p-norm of all ranks' gradients: float64, 0-d."""
        counted = self._rows.is_cut or self.outer.rank == 0  # of ranks that hold the same, the first counts
        parts = [gradient.double().abs() for gradient in gradients if gradient.numel() and counted]
        if math.isinf(order):
            own = torch.stack([part.amax() for part in parts] or [torch.zeros(()).double()]).amax()
            return GroupAxis((self.inner, self.outer)).max(own.to(self._device))
        own = sum((part.pow(order).sum() for part in parts), torch.zeros((), dtype=torch.float64))
        return self._summed(own) ** (1.0 / order)

    @in_plain_mode
    @torch.no_grad()
    def step(self, *, loss_scale: float = 1.0) -> StepReport:
        """Complete the gradients, agree, and step the rows."""
        self._require_ready("step")
        note_step(self._optimizer)
        self.finish_gradients()
        self._failed = True
        gradients = {name: local(p.grad) for name, p in self._rows.stepped.items() if p.grad is not None}
        if loss_scale != 1.0:
            for gradient in gradients.values():
                gradient.div_(loss_scale)
        squares, nonfinite, skipped = self._look_at(gradients)
        touched = self._touched or set()
        if touched and not skipped:
            self.completeness.mark_incomplete("a step ended in an error after weights had been changed")
            self.staging.order()
            self._optimizer.step_now()
            self._hand_out()
            self.completeness.mark_complete()
        self._forget()
        untouched = tuple(name for name in self.labels if name not in touched)
        report = nonfinite if self._judged.given.nan == "param" else ()
        return StepReport(barriers.sqrt(squares), skipped, report, untouched)

    def _look_at(self, gradients: Mapping[str, Tensor]) -> tuple[Tensor, tuple[NonFinite, ...], bool]:
        """Sum the squares over all ranks, and find non-finite gradients.

        An element that is not finite shows in the sum; of large float64 numbers the squares may overflow, so that elements are counted.
        """
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        if self._rows.is_cut or self.outer.rank == 0:  # of ranks that hold the same, the first counts
            flat = [gradient.reshape(-1) for gradient in gradients.values()]
            for one in sums_of_squares(flat, flat[0].device if flat else self._device):
                squares += one.to(self._device)
        squares = self._summed(squares)
        if self._judged.given.nan == "off" or math.isfinite(float(squares)):
            return squares, (), False
        found = self._find_nonfinite(gradients)
        return squares, found, bool(found)

    def _find_nonfinite(self, gradients: Mapping[str, Tensor]) -> tuple[NonFinite, ...]:
        """Name the parameters with non-finite gradients, the ranks, and the stage."""
        counts = torch.zeros(2, len(self.parameters), dtype=torch.int64, device=self._device)
        for main in self.main_gradients:
            for parameter, count in main.nonfinite.items():
                counts[0, self._numbers[parameter]] = count
        for number, name in enumerate(self.parameters):
            if name in gradients:
                counts[1, number] = count_nonfinite(gradients[name])
        everyone = counts[None]
        for ranks in (self.inner, self.outer):
            gathered = everyone.new_empty((ranks.size, *everyone.shape))
            ranks.all_gather(gathered.view(-1), everyone.reshape(-1), "counts of non-finite gradients").wait()
            everyone = gathered.view(-1, *counts.shape)
        found: list[NonFinite] = []
        for number, name in enumerate(self.parameters):
            before, after = everyone[:, 0, number].tolist(), everyone[:, 1, number].tolist()
            stage: Literal["backward", "reduction"] = "backward" if any(before) else "reduction"
            counted = before if any(before) else after
            found += [NonFinite(name, rank, count, stage) for rank, count in enumerate(counted) if count]
        return tuple(found)

    @torch.no_grad()
    def zero_grad(self) -> None:
        """Discard the gradients of this cycle, also of an interrupted one.

        Raises:
            RuntimeError: An error ended a pass, and this torch cannot bring FSDP2 back.
        """
        model: Any = self.model
        # An error may have left FSDP2 in the middle of a pass. Before the first pass it cannot be reset.
        if any(main.forwards for main in self.main_gradients):
            if hasattr(model, "reset_iter_state"):
                model.reset_iter_state()
            elif self._interrupted:
                raise RuntimeError(
                    "zero_grad: an error ended a pass of FSDP2, which torch before 2.13 cannot begin anew; accepted is a new model with"
                    " a new stepper, and load_sharded()."
                )
        self._interrupted = False
        self._forget()

    def _forget(self) -> None:
        for main in self.main_gradients:
            main.forget()
        for stepped in self._rows.stepped.values():
            stepped.grad = None
        self._failed, self._touched = False, None
        if self._after_cycle is not None:
            self._after_cycle()
            self._after_cycle = None

    # -- wires ----------------------------------------------------------------------------------------------------------------------

    def set_grad_comm(self, dtype: FloatDType | None, reduce: Literal["native", "fp32"] | None) -> None:
        """Send gradients in another dtype from now on."""
        if self._holds_gradients:
            raise RuntimeError(
                "set_grad_comm: there are gradients of this cycle, which are sent in one dtype; accepted before the first backward pass"
                " after step() or zero_grad()."
            )
        changed = {}
        for label, one in self.labelled.items():
            grads = replace(one.policy.grads, comm=dtype, reduce=reduce or one.policy.grads.reduce)
            changed[label] = replace(one, policy=replace(one.policy, grads=grads))
        grads_of = self._judged.grads_under(changed)
        self.labelled = changed
        for main in self.main_gradients:
            main.grads = grads_of[main.unit.name]

    @contextmanager
    def grad_comm(self, dtype: FloatDType | None, reduce: Literal["native", "fp32"] | None) -> Iterator[None]:
        """Send gradients in another dtype inside."""
        labelled, grads = self.labelled, [main.grads for main in self.main_gradients]
        self.set_grad_comm(dtype, reduce)
        pending = self._after_cycle

        def restore() -> None:
            self.labelled = labelled
            for main, before in zip(self.main_gradients, grads, strict=True):
                main.grads = before

        try:
            yield
        finally:
            if self._holds_gradients:
                self._after_cycle = pending or restore  # a cycle has one wire
            else:
                restore()

    # -- what one sees --------------------------------------------------------------------------------------------------------------

    def as_optimizer(self) -> RowOptimizer:
        """Return the optimizer over this rank's rows."""
        return self._optimizer

    def close(self) -> None:
        """Leave the model to FSDP2 alone."""
        self._forget()
        for main in self.main_gradients:
            main.close()
        self.completeness.is_closed = True

    @torch.no_grad()
    def loaded(self) -> None:
        """This rank's rows and state were replaced: hand out rows."""
        self._hand_out()
        self.completeness.mark_complete()
        self._forget()

    @property
    def stepped(self) -> Mapping[str, nn.Parameter]:
        """The tensors that the optimizer steps, by name: FSDP2's parameters, or outer parts of them."""
        return self._rows.stepped

    @property
    def routed(self) -> dict[str, Routed]:
        """The parameters that are trained."""
        shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        return {name: Routed(label, shapes[name], shapes[name]) for name, label in self.labels.items()}

    @property
    def labels(self) -> Mapping[str, str]:
        """The label of each parameter that is trained, by name."""
        return self._judged.labelled.of

    @property
    def described(self) -> str:
        """A description in one line."""
        kind = self._judged.given.sharding
        outer = f", outer={kind.outer!r} over {self.outer.size}" if self.outer.size > 1 else ""
        return f"strategy={kind.strategy!r} over {self.inner.size}{outer}, {len(self._judged.units)} units of FSDP2"

    def plan(self, *, microbatches: int) -> Plan:
        """Plan this rank's memory and traffic."""
        ranks = Ranks(self.inner.size, self.outer.size, self.inner.rank, self.outer.rank)
        labelled = Labelled(self.labels, self.labelled)
        return plan_units(
            self.parameters, self._judged.homes, labelled, self._judged.given.sharding, ranks,
            microbatches=microbatches, metrics=self._optimizer.metrics_enabled,
        )  # fmt: skip

    # -- weights --------------------------------------------------------------------------------------------------------------------

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
        return self._touched is not None or not all(main.is_empty for main in self.main_gradients)

    def require_equal_passes(self, name: str) -> None:
        """A no-op: every step compares the ranks' passes before it changes a weight."""

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """The model has the weights for evaluation inside."""
        self.staging.order()
        with evaluation_weights(self._optimizer):
            self._hand_out()
            yield
        self._hand_out()

    def _hand_out(self) -> None:
        """Send changed rows to the outer ranks, and free weights that were gathered before."""
        self._rows.hand_out(self.parameters)
        for unit in self._judged.units:
            unit.module.reshard()

    def saved_parts(self) -> SavedParts:
        """Return this rank's part of a checkpoint."""
        from everybit_torch.fsdp2.saved_rows import RowParts

        return RowParts(self)
