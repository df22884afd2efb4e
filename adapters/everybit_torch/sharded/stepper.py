"""The stepper: an optimizer over a model with state, gradients and weights that may be sharded over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from torch import Tensor, nn

from everybit.base import FloatDType
from everybit_torch import clip_notice, notices
from everybit_torch.ambient import in_plain_mode
from everybit_torch.checkpoint.background import PendingSave, StagingMemory
from everybit_torch.collectives import Communicator, ranks_of
from everybit_torch.optim import Changed
from everybit_torch.planning.report import Plan
from everybit_torch.routed import Routed
from everybit_torch.sharded.labelling import LabelledTransform, Transforms
from everybit_torch.sharded.models import BufferValues, claim, synchronize_buffers
from everybit_torch.sharded.options import StepperKeywords, StepperOptions
from everybit_torch.sharded.reports import StepReport

if TYPE_CHECKING:
    from everybit_torch.flat import BufferStepper, ShareOptimizer
    from everybit_torch.fsdp2 import FSDP2Stepper


class FlatStepper:
    """Train a model on one process, or sharded over many ranks, with the dtypes of a policy.

    Gradients are added to main gradients, in the policy's dtype, and freed; there never is a second full-size gradient. Sums over
    the ranks are made once, by one rule, and divided once.

    Under the first three strategies every rank has all weights, and parameters become pieces of flat buffers. Under
    ``"optim_grads_params"`` weights are sharded by FSDP2: ``fully_shard`` is applied to ``units`` and to the model, unless that was done
    before, and parameters are DTensors. Every rank then runs the same units in the same order, backward passes included.

    Args:
        model: On one device. Parameters may be tied, frozen, of several dtypes.
        transform: The transform that computes updates; or a dict with one for each label, with ``labels``.
        options: The options; see :class:`~everybit_torch.StepperOptions`.
        **changes: Single options by name, such as ``policy="LEAN_BF16", strategy="optim_grads"``, in place of those of ``options``.

    Attributes:
        model: The model as given.
        engine: The implementation of the methods: on flat buffers, or on FSDP2's rows.
        ranks: Those of the mesh, numbered as in the world.

    Raises:
        TypeError: A parameter, unit, transform, policy or mesh of a kind that cannot be used.
        ValueError: A value that cannot work; messages have its name, its value and accepted values. All objects are then as before.

    Examples:
        >>> import torch, everybit as eb
        >>> from everybit_torch import FlatStepper
        >>> model = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
        >>> policy = eb.Policy(params=eb.Kahan(), grads=eb.Grads(main="float32", comm="bfloat16", reduce="float32"))
        >>> stepper = FlatStepper(model, eb.adamw(1e-3), policy=policy)
        >>> with stepper.microbatch(last=True):
        ...     model(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
        >>> stepper.step().skipped
        False
    """

    @in_plain_mode
    def __init__(
        self,
        model: nn.Module,
        transform: Transforms,
        options: StepperOptions | None = None,
        **changes: Unpack[StepperKeywords],
    ) -> None:
        chosen = StepperOptions.of(options, changes)
        self.model = model
        self.engine: BufferStepper | FSDP2Stepper
        if chosen.sharding.params:
            from everybit_torch.fsdp2 import FSDP2Stepper
            from everybit_torch.fsdp2 import judge as judge_rows

            self.engine = FSDP2Stepper(model, judge_rows(model, transform, chosen))
        else:
            from everybit_torch.flat import BufferStepper, judge

            self.engine = BufferStepper(model, judge(model, transform, chosen))
        self.ranks = ranks_of(chosen.mesh)
        self.others: dict[str, Communicator] = {}  # over the same ranks, for checkpoints
        self.saving: PendingSave | None = None
        claim(model, self)
        call = "stepper.clip_grad_norm_(max_norm), or pass the parameters of stepper.as_optimizer()"
        clip_notice.advise(model.parameters(), self, lambda one: None if one.closed else call)

    # -- one cycle -------------------------------------------------------------------------------------------------------------------

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of a microbatch's backward pass; in the ``last`` microbatch of a step gradients are summed over the ranks.

        Under strategies with sharded gradients every microbatch sums them. A rank with a loss that reaches no parameter contributes
        zeros; under ``optim_grads_params`` it has to run forward and backward passes with the others. Without this context gradients are
        summed by :meth:`step` (under ``no_shard`` and ``optim``), or in every backward pass, which every rank then has to run.

        Raises:
            RuntimeError: Inside another microbatch, or after the last microbatch without a step.
        """
        return self.engine.microbatch(last=last)

    def no_sync(self) -> AbstractContextManager[None]:
        """Context of backward passes that are not the last before a step.

        Under ``optim_grads_params`` they send no gradient: each rank adds up whole gradients, in the main gradients' dtype, until the
        next pass outside. Under ``optim_grads`` gradients are summed in each pass.

        Raises:
            RuntimeError: Inside a microbatch.
        """
        return self.engine.no_sync()

    def sync(self) -> AbstractContextManager[None]:
        """Context of the last backward pass before a step: gradients are summed over the ranks while it runs.

        Raises:
            RuntimeError: Inside a microbatch.
        """
        return self.engine.sync()

    def finish_gradients(self) -> None:
        """Complete the sums over the ranks, and divide: the main gradients are final then. A step does this by itself.

        Until the step, they are the gradients of the parameters of ``as_optimizer()``, and may be scaled. Every rank has to call it.

        Raises:
            RuntimeError: An error was not recovered from, or the stepper is closed.
        """
        self.engine.finish_gradients()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Complete the gradients as :meth:`finish_gradients` does, and scale them. Every rank has to call it.

        ``torch.nn.utils.clip_grad_norm_`` on the model's parameters finds no gradients: they are in this rank's buffers.

        Args:
            max_norm: The limit for the norm of all gradients together, after the division.
            norm_type: The p of the norm; ``inf`` for the greatest absolute value.

        Returns:
            The norm before, over all parameters and ranks: 0-d.

        Raises:
            RuntimeError: Gradients are not finished, as for :meth:`finish_gradients`.
        """
        return self.engine.clip_grad_norm_(max_norm, norm_type)

    def step(self, *, loss_scale: float = 1.0) -> StepReport:
        """Finish the sums over the ranks, step, and send new weights to ranks that keep a copy; return a report. A new cycle begins.

        Args:
            loss_scale: The factor by which the loss was multiplied; gradients are divided by it.

        Raises:
            RuntimeError: Inside a microbatch, or a rank is gone. An error before anything was stepped leaves weights and state as they
                were, and ``zero_grad()`` on every rank begins the next cycle; after a later error a checkpoint has to be loaded.
                Or ranks began different things, or had different numbers of passes in this cycle.
        """
        return self.engine.step(loss_scale=loss_scale)

    def zero_grad(self) -> None:
        """Discard the gradients of this cycle.

        Call it on every rank after an error: it discards the interrupted cycle, and the next one begins normally.
        """
        self.engine.zero_grad()

    # -- how gradients are sent ------------------------------------------------------------------------------------------------------

    def set_grad_comm(self, dtype: FloatDType | None, reduce: Literal["native", "float32"] | None = None) -> None:
        """Send gradients in another dtype from now on. The dtype in which they are accumulated cannot change.

        Args:
            dtype: dtype in which gradients are sent; None: that in which they are accumulated.
            reduce: How they are summed; None: as before.

        Raises:
            ValueError: No dtype.
            RuntimeError: There are gradients of this cycle.
        """
        self.engine.set_grad_comm(dtype, reduce)

    @contextmanager
    def grad_comm(self, dtype: FloatDType | None, reduce: Literal["native", "float32"] | None = None) -> Iterator[None]:
        """Send gradients in another dtype inside; see :meth:`set_grad_comm`.

        A cycle has one wire: if the context ends within a cycle, the wire before returns with the next cycle.
        """
        with self.engine.grad_comm(dtype, reduce):
            yield

    # -- what one sees ---------------------------------------------------------------------------------------------------------------

    def as_optimizer(self) -> ShareOptimizer:
        """Return this stepper as a ``torch.optim.Optimizer``, for learning-rate schedulers and training frameworks.

        It has a param group for each label, with this rank's parts of the parameters; its ``step`` is this stepper's. With
        ``metrics_enabled = True`` it measures every step, and ``metrics()`` returns the results.
        """
        return self.engine.as_optimizer()

    def take_changed(self) -> Changed:
        """Return the weights that have changed since they were taken last; see :meth:`everybit_torch.TorchOptimizer.take_changed`.

        Each rank names the elements that it steps, by their indices in the whole parameter: all ranks together name every change. Ranks
        that hold copies of one another name the same elements.

        Raises:
            RuntimeError: The stepper was made without ``watch``; the model has its weights for evaluation; or weights and state do not
                belong together.
        """
        self.engine.completeness.require("take_changed")
        return self.as_optimizer().take_changed()

    def scale_rows(self, factors: Mapping[str, Tensor]) -> None:
        """Multiply rows of weights by factors; see :meth:`everybit_torch.TorchOptimizer.scale_rows`. Every rank has to call it.

        Raises:
            RuntimeError: Weights and state do not belong together, or a pass was not completed.
        """
        self.engine.completeness.require("scale_rows")
        self.as_optimizer().scale_rows(factors)

    @property
    def labelled(self) -> Mapping[str, LabelledTransform]:
        """The transform and policy of each label, with the dtypes in which gradients are sent now."""
        return self.engine.labelled

    @property
    def routed(self) -> Mapping[str, Routed]:
        """The parameters that are trained, by name: of which label, and in which shape they are stepped."""
        return self.engine.routed

    def plan(self, *, microbatches: int = 1) -> Plan:
        """Return this rank's memory by use, and the bytes that it sends in a step.

        Args:
            microbatches: The number of microbatches in a step.
        """
        from everybit_torch.planning.plan import plan_stepper

        return plan_stepper(self.engine, microbatches)

    def synchronize_buffers(self, values: BufferValues = "first") -> None:
        """Make the model's buffers, such as running statistics, the same on all ranks. Every rank has to call it.

        Args:
            values: ``"first"``: those of the first rank. ``"mean"``: the mean over the ranks, computed in float64 in the order of the
                ranks and rounded once; buffers that are not floating-point are the first rank's.

        Raises:
            ValueError: ``values`` is neither of the two.
        """
        synchronize_buffers(self.model, (self.outer, self.inner), values)

    @property
    def inner(self) -> Communicator:
        """The ranks that hold different parts."""
        return self.engine.inner

    @property
    def outer(self) -> Communicator:
        """The ranks that hold copies of these."""
        return self.engine.outer

    @property
    def staging(self) -> StagingMemory:
        """The host's memory for asynchronous saves."""
        return self.engine.staging

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Give the model the weights for evaluation inside, as :func:`everybit_torch.evaluation_weights` does. Every rank has to call it.

        A step is refused, and so is a checkpoint of weights and state together. Memory for another copy of this rank's part of the weights
        is taken.

        Raises:
            RuntimeError: Inside a microbatch, or with gradients of a cycle that is not over; or weights and state do not belong together.
        """
        self.engine.require_between_cycles("evaluation_weights")
        with self.engine.evaluation_weights():
            self.engine.completeness.mark_incomplete(
                "inside evaluation_weights() the model has other weights", accepted="outside of it"
            )
            try:
                yield
            finally:
                self.engine.completeness.mark_complete()

    # -- its end ---------------------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self.engine.completeness.is_closed

    def close(self) -> None:
        """Remove every hook; the stepper cannot step afterwards. Every rank has to call it.

        Parameters stay where they are. The next stepper of these ranks reuses the process groups that were made here.
        """
        if self.closed:
            return
        self.engine.close()
        if self.saving is not None and (error := self.saving.unseen()) is not None:
            notices.warn(f"close: the last asynchronous save failed: {error}")
        self.staging.free()
        for other in self.others.values():
            other.close()
        self.others = {}

    @torch.no_grad()
    def loaded(self) -> None:
        """This rank's own weights and state were replaced, all of them: hand weights to the ranks that keep a copy.

        Every rank has to call it. Incomplete weights are whole then, and an interrupted cycle is dropped.
        """
        self.engine.loaded()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """There are no copies.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "FlatStepper: cannot be copied or pickled, for its tensors are the model's; save_sharded() writes a checkpoint."
        )

    def __repr__(self) -> str:
        labels = (f"  {label or 'all parameters'}: {a.transform!r}; {a.policy!r}" for label, a in self.labelled.items())
        return "\n".join([f"FlatStepper({self.engine.described})", *labels])
