"""A stepper on flat buffers, for ranks that all have whole weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from everybit.base import FloatDType
from everybit_torch.ambient import in_plain_mode
from everybit_torch.collectives.communicator import GroupAxis
from everybit_torch.collectives.reduction import has_own_processors
from everybit_torch.fused_sums import FusedSums
from everybit_torch.routing import Routed
from everybit_torch.sharded.arguments import Arguments, Judged
from everybit_torch.sharded.executor import Executor
from everybit_torch.sharded.gradient_norm import answers_first
from everybit_torch.sharded.gradient_wires import GradientWires
from everybit_torch.sharded.labelling import LabelledTransform
from everybit_torch.sharded.model_buffers import ModelBuffers, synchronize_values
from everybit_torch.sharded.pass_counts import PassCounts
from everybit_torch.sharded.passes import Passes
from everybit_torch.sharded.plan import Plan, Ranks, plan_layout
from everybit_torch.sharded.reports import StepReport
from everybit_torch.sharded.scheduling.events import Event
from everybit_torch.sharded.scheduling.schedule import Schedule, Settings
from everybit_torch.sharded.shard_optimizer import ShardOptimizer
from everybit_torch.sharded.staging import StagingMemory
from everybit_torch.sharded.step_agreement import StepAgreement, agree
from everybit_torch.sharded.step_checks import Completeness, require_same_parameters
from everybit_torch.stepping import PIECE
from everybit_torch.torch_internals.optimizers import note_step

if TYPE_CHECKING:
    from everybit_torch.sharded.saved_parts import SavedParts


class BufferStepper:
    """Steps a model on flat buffers; see :class:`~everybit_torch.FlatStepper`, which makes it.

    Args:
        model: The model; its parameters become pieces of the buffers.
        given: The stepper's arguments.
        judged: What was found out about them.
    """

    def __init__(self, model: nn.Module, given: Arguments, judged: Judged) -> None:
        self.model, self._given, (self.inner, self.outer) = model, given, judged.ranks
        described, device = judged.described, judged.device
        self.sharding, self.divisor, self.layout = given.sharding, judged.divisor, judged.layout
        parameters = dict(zip([spec.name for spec in described.specs], described.parameters, strict=True))
        self._names, self._parameters = list(parameters), list(parameters.items())
        synchronize_values(model, (self.outer, self.inner), described.parameters)
        self.buffers = ModelBuffers(
            self.layout, parameters, described.labelled, self.sharding, self.inner, self.outer, device,
            fused=FusedSums(device) if given.compile else None,
        )  # fmt: skip
        self.weights, self.gradients = list(self.buffers.weights.values()), list(self.buffers.gradients.values())
        self.completeness = Completeness()  # of weights and state, for checkpoints
        self._schedule = Schedule(self.layout, Settings(self.sharding, overlap_reductions=has_own_processors(device)))
        self._executor = Executor(self.buffers.weights, self.buffers.gradients, self.divisor, (self.inner, self.outer))
        self._executor.on({"agree": self._agree, "step": self._step_shards})
        self._agreed: StepAgreement | None = None
        self._prepared: Callable[[], None] | None = None
        self._optimizer = ShardOptimizer(
            described.labelled, self.buffers.shards, GroupAxis(self.buffers.sharing), self.step, self.zero_grad,
            compile=given.compile, seed=given.seed, unsafe=given.unsafe,
        )  # fmt: skip
        self.staging = StagingMemory(device)
        self._passes = Passes(
            parameters, self.buffers.gradients, self._schedule, self._executor, given.nan,
            (self.inner, self.outer), device, self._require_ready,
        )  # fmt: skip
        self._wires = GradientWires(self.buffers, described.labelled, self._passes.holds_gradients)
        self._trained_names = frozenset(s.spec.name for one in self.gradients for s in one.group.placements)
        self._pass_counts = PassCounts(self.layout.shards, device) if self.sharding.grads else None
        self._handles: list[Any] = self._passes.watch(model)

    # -- a pass ----------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """One backward pass."""
        if self._passes.in_context:
            raise RuntimeError("microbatch: one is open already; accepted is one after the other.")
        if any(buffer.phase == "final" for buffer in self.gradients):
            raise RuntimeError(
                "microbatch: the last one of this cycle is over; accepted next is step() or zero_grad()."
            )
        with self._passes.context(last=last, name="microbatch"):
            before = self._passes.total
            yield
            if self._passes.total == before:
                self._passes.empty_pass()
            if last:
                self._optimizer.attach_gradients()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes that are not the last."""
        with self._passes.context(last=False, name="no_sync"):
            yield

    @contextmanager
    def sync(self) -> Iterator[None]:
        """The last backward pass."""
        with self._passes.context(last=True, name="sync"):
            yield

    # -- a step ----------------------------------------------------------------------------------------------------------------------

    def _require_ready(self, name: str) -> None:
        """Refuse to go on from a state that is not what it seems.

        Raises:
            RuntimeError: An error was not recovered from.
        """
        self.completeness.require(name)
        if self._passes.failed:
            raise RuntimeError(
                f"{name}: the microbatch or step before ended in an error, and its gradients are in part; accepted is zero_grad(), on every"
                " rank."
            )

    def require_equal_passes(self, name: str) -> None:
        """Raise an error if the ranks had different numbers of backward passes before the last step. Every rank has to call it.

        Args:
            name: Of what is refused.

        Raises:
            RuntimeError: They had, and nobody has looked at it yet.
        """
        if self._pass_counts is not None:
            self._pass_counts.finish(name)

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Complete the sums over the ranks, and divide."""
        self._require_ready("finish_gradients")
        self._passes.begin_step()
        self._passes.failed = True
        self._passes.finish_gradients()
        self._optimizer.attach_gradients()
        self._passes.failed = False

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> Tensor:
        """Complete the gradients, and scale them; return their norm."""
        self.finish_gradients()
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    @in_plain_mode
    @torch.no_grad()
    def step(self, *, loss_scale: float = 1.0) -> StepReport:
        """Finish the sums, agree, step, and hand out new weights."""
        if self._passes.in_context or self._passes.in_pass:
            raise RuntimeError("step: inside a microbatch or a backward pass; accepted is after it.")
        self._require_ready("step")
        self._passes.require_in_place()
        note_step(self._optimizer)
        self._passes.begin_step()
        self._passes.failed = True
        self.require_equal_passes("step")
        self._passes.finish_gradients()
        self._optimizer.attach_gradients()
        if loss_scale != 1.0:
            for buffer in self.gradients:
                buffer.divide(loss_scale)
        self._executor.run(self._schedule.agree())
        agreed, self._agreed = self._agreed, None
        assert agreed is not None
        return self._carry_out(agreed)

    def _carry_out(self, agreed: StepAgreement) -> StepReport:
        by_name = dict(zip(self._names, agreed.touched, strict=True))
        untouched = tuple(name for name, here in by_name.items() if not here and name in self._trained_names)
        require_same_parameters(self.model, self._parameters, untouched)
        if not agreed.skipped and len(untouched) < len(self._trained_names):
            known = [agreed.squares] if answers_first(self.labelled) else []
            self._prepared = self._optimizer.prepare_shards(lambda s: by_name[s.placement.spec.name], known)
            self.completeness.mark_incomplete("a step ended in an error after weights had been changed")
            self._executor.run(self._schedule.update())
        self.completeness.mark_complete()
        self._forget()
        return StepReport(agreed.norm, agreed.skipped, agreed.nonfinite, untouched)

    @torch.no_grad()
    def zero_grad(self) -> None:
        """Discard the gradients of this cycle, also of an interrupted one."""
        if self._passes.interrupted:
            self._passes.recover()
        self._forget()

    def _forget(self) -> None:
        self._passes.forget()
        self._optimizer.detach_gradients()
        self._wires.begin_cycle()
        self._passes.failed = False

    def _step_shards(self, _event: Event) -> None:
        step, self._prepared = self._prepared, None
        assert step is not None
        self.staging.order()
        step()

    def _agree(self, _event: Event) -> None:
        self.buffers.pool.drop()
        trained = (
            here for name, here in zip(self._names, self._passes.touched, strict=True) if name in self._trained_names
        )
        self._agreed = agree(
            self._names, self._passes.touched, self._passes.reduced, self._passes.nonfinite, self.buffers.shards, self._given.nan,
            self.inner, self.outer, self.buffers.sharing, self._pass_counts, looks=not all(trained),
            as_written=not self._optimizer.gradients_were_handed_out,
        )  # fmt: skip

    # -- weights ---------------------------------------------------------------------------------------------------------------------

    def require_between_cycles(self, name: str) -> None:
        """Refuse what changes weights while there are gradients of them.

        Raises:
            RuntimeError: There are some, or an error was not recovered from.
        """
        self._require_ready(name)
        if self._passes.in_context or self._passes.holds_gradients():
            raise RuntimeError(
                f"{name}: in the middle of a cycle, with gradients of other weights; accepted is after step() or zero_grad()."
            )

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """The model has the weights for evaluation inside."""
        self.staging.order()
        kept = [shard.weights.own.clone() for shard in self.buffers.shards]
        with torch.no_grad():
            for unit in self._optimizer.engine.units:
                stored = self._optimizer.engine.optimizer_of(unit)
                for _, piece in unit.pieces(PIECE):
                    (values,) = stored.eval_params([piece.tensor], piece.state)
                    piece.tensor.copy_(values)
            self._hand_out()
        try:
            yield
        finally:
            with torch.no_grad():
                for shard, own in zip(self.buffers.shards, kept, strict=True):
                    shard.weights.own.copy_(own)
                self._hand_out()

    def _hand_out(self) -> None:
        self._executor.run(self._schedule.hand_out(list(self.buffers.weights)))

    def saved_parts(self) -> SavedParts:
        """What this rank saves."""
        from everybit_torch.sharded.saved_parts import BufferParts

        return BufferParts(self)

    # -- what one sees ---------------------------------------------------------------------------------------------------------------

    def as_optimizer(self) -> ShardOptimizer:
        """Return the optimizer over this rank's shards."""
        return self._optimizer

    def plan(self, *, microbatches: int) -> Plan:
        """Plan this rank's memory and traffic."""
        ranks = Ranks(self.inner.size, self.outer.size, self.inner.rank, self.outer.rank)
        return plan_layout(
            self.layout, self.labelled, self.sharding, ranks,
            runs=self._optimizer.runs(), nan=self._given.nan, compile=self._given.compile, microbatches=microbatches,
            device=self._passes.nonfinite.device, metrics=self._optimizer.metrics_enabled,
        )  # fmt: skip

    def set_grad_comm(self, dtype: FloatDType | None, reduce: Literal["native", "fp32"] | None) -> None:
        """Send gradients in another dtype from now on."""
        self._wires.change(dtype, reduce)

    @contextmanager
    def grad_comm(self, dtype: FloatDType | None, reduce: Literal["native", "fp32"] | None) -> Iterator[None]:
        """Send gradients in another dtype inside."""
        with self._wires.changed(dtype, reduce):
            yield

    @property
    def routed(self) -> dict[str, Routed]:
        """The parameters that are trained."""
        return {
            spec.name: Routed(spec.label, spec.shape, spec.shape if spec.parts == 1 else spec.stepped_as(0, spec.numel))
            for spec in self.layout.specs
            if spec.requires_grad
        }

    @property
    def labelled(self) -> Mapping[str, LabelledTransform]:
        """The transform and policy of each label."""
        return self._wires.labelled

    def close(self) -> None:
        """Remove every hook."""
        if self._passes.failed or self._passes.in_pass:
            self.zero_grad()
        for handle in self._handles:
            handle.remove()
        self.completeness.is_closed = True

    def loaded(self) -> None:
        """This rank's weights and state were replaced: hand out weights."""
        if self._passes.failed or self._passes.in_pass:
            self._passes.recover()
        if self.completeness.is_complete:
            self.completeness.mark_incomplete("loading a checkpoint ended in an error")
        self._hand_out()
        if self._pass_counts is not None:
            self._pass_counts.forget()
        self.completeness.mark_complete()
        self._forget()

    @property
    def described(self) -> str:
        """What it is, in a line."""
        outer = f" x {self.outer.size} outer" if self.outer.size > 1 else ""
        sizes = f"{len(self.layout.units)} units, {self.layout.numel} elements and {self.layout.padding} of padding"
        return f"strategy={self.sharding.strategy!r} over {self.inner.size}{outer}, {sizes}"
