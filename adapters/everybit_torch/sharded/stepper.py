"""The flat-buffer stepper: one optimizer over a model whose gradients, state and weights may be sharded over ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from everybit.base import FloatDType
from everybit.stepping import Unsafe
from everybit_torch import clipping, notices
from everybit_torch.ambient import in_plain_mode
from everybit_torch.collectives import groups
from everybit_torch.collectives.communicator import Communicator, GroupAxis
from everybit_torch.collectives.meshes import Mesh, ranks_of
from everybit_torch.collectives.reduction import has_own_processors
from everybit_torch.fused_sums import FusedSums
from everybit_torch.sharded.arguments import Arguments, Judged, claim, judge
from everybit_torch.sharded.casting import CastsOfUnits, watch
from everybit_torch.sharded.construction.sources import Values
from everybit_torch.sharded.control import Control
from everybit_torch.sharded.executor import Executor
from everybit_torch.sharded.full_parameters import FullParameters
from everybit_torch.sharded.gathering import Gathering
from everybit_torch.sharded.gradient_norm import answers_first
from everybit_torch.sharded.gradient_wires import GradientWires
from everybit_torch.sharded.guards import Guards
from everybit_torch.sharded.ignored_parameters import Ignored
from everybit_torch.sharded.late_weights import LateWeights
from everybit_torch.sharded.model_access import ModelAccess
from everybit_torch.sharded.model_buffers import ModelBuffers
from everybit_torch.sharded.model_layout import AnyPrecision, Labels, Transforms, Units
from everybit_torch.sharded.model_state import ModelState
from everybit_torch.sharded.offload import HostCopies, Offload
from everybit_torch.sharded.packing import MOST
from everybit_torch.sharded.pass_counts import PassCounts
from everybit_torch.sharded.passes import Passes
from everybit_torch.sharded.pending_save import PendingSave
from everybit_torch.sharded.plan import Plan, Ranks, plan_layout
from everybit_torch.sharded.registered_methods import RegisteredMethods
from everybit_torch.sharded.reports import NanCheck, StepReport
from everybit_torch.sharded.scheduling.events import Event
from everybit_torch.sharded.scheduling.schedule import Schedule, Settings
from everybit_torch.sharded.shard_optimizer import LabelledTransform, ShardOptimizer
from everybit_torch.sharded.staging import StagingMemory
from everybit_torch.sharded.step_agreement import StepAgreement, agree
from everybit_torch.sharded.step_checks import (
    Completeness,
    require_gathered,
    require_same_parameters,
)
from everybit_torch.sharded.strategies import OuterStrategy, Strategy
from everybit_torch.sharded.unit_weights import UnitWeights
from everybit_torch.torch_internals.optimizers import note_step


class FlatStepper(Control, ModelAccess):
    """Train a model on flat buffers, on one process or sharded over many ranks, with the dtypes of a policy.

    Parameters become pieces of flat buffers. In the backward pass every gradient is added (or copied) to its place in a buffer and freed;
    there never is a second full-size gradient. What is summed over the ranks is summed once, by one rule, and divided once.

    Args:
        model: On one device; or on the meta device, with ``values``. Parameters may be tied, frozen, of several dtypes.
        transform: The transform that computes updates; or a dict with one for each label, with ``labels``.
        policy: How weights, state and gradients are stored and sent: a policy or its name, several by :func:`everybit.by_label`, a
            :class:`~everybit_torch.MixedPrecision`, or None for a float32 or float64 model stored as it is.
        mesh: The ranks: a process group, a ``DeviceMesh`` of one dimension, or one of two, (outer, inner). None: all ranks, or this
            process alone if ``torch.distributed`` is not initialised.
        strategy: What the (inner) ranks shard: ``"no_shard"``, ``"optim"``, ``"optim_grads"``, ``"optim_grads_params"``, or a ZeRO stage.
        outer: What is sharded over the outer ranks as well: ``"no_shard"`` or ``"optim"``.
        units: Modules, or classes of modules, whose parameters are gathered and reduced together, such as ``[Block]``. Parameters in none
            form a unit of their own. Without units the whole model is one, and a sharded strategy needs memory for all of it at once.
        labels: From (name, parameter) to the key of its transform.
        divisor: What the sum of gradients is divided by. None: the number of ranks, which makes the mean of the ranks' gradients;
            1 for losses that are sums, or divided by the number of tokens already.
        nan: ``"off"``; ``"step"``: skip a step, on all ranks, if any gradient is not finite; ``"param"``: also report which, on which
            rank and in which phase, by counting in every gradient.
        reshard_after_forward: With ``optim_grads_params``: free a unit's weights after its forward pass, and gather them again for its
            backward pass.
        compile: Compile the step; the results are the same bits.
        metrics: Measure every step: ``as_optimizer().metrics()``.
        seed: Of stochastic rounding; the same on every rank.
        unsafe: See :func:`everybit.with_policy`.
        synchronize: Begin with the first rank's parameters and buffers, on every rank. False: they are the same already.
        offload: Keep the optimizer's state, residuals and main weights in the host's pinned memory, and copy them to the device for a
            step, a bucket at a time; with ``Offload(weights=True, gradients=True)`` this rank's weights and main gradients too, under
            ``optim_grads_params``. For models on another device than the host.
        keep_gradients: Keep the memory of main gradients from one step to the next. False: free it, and allocate it again.
        defer_reduction: With sharded gradients: sum them over the ranks in the last backward pass of a cycle, and not in each. Until then a
            rank keeps whole gradients. See :meth:`set_requires_gradient_sync`.
        ignored: Parameters, modules with all their parameters, and names of either, that are not managed: not sharded, gathered, stepped
            or synchronized; their gradients stay in ``.grad``. State dicts and checkpoints include them.
        overlap_param_gather: With ``optim`` and ``optim_grads``: return from a step while its weights are still being sent. Each unit
            waits for its weights when its forward pass begins; code that reads parameters elsewhere calls :meth:`wait_for_weights` first.
        casts: The dtypes of inputs and outputs of ``forward``: :class:`~everybit_torch.Casts`, whose inputs are those of every unit and of
            the model, and whose outputs the model's; or a dict of them by unit, or class of units.
        values: Where the values of a model on the meta device come from: ``FromInitializers``, ``FromSafetensors``, ``FromCheckpoint`` or
            ``FromStateDict``; each rank is given what it keeps. None: the model has values.
        device: The device for a model on the meta device. None: torch's default device.
        model_parallel: The ranks that hold other parameters of the same model: stages of a pipeline, or experts. A process group, or a
            ``DeviceMesh`` of any number of dimensions. Ranks of tensor parallelism, over which DTensors lie, are found without it. Random
            bits are those of one process that has the parameters of all these ranks, one rank's after the other's.
        copies: Names of parameters of which another rank of ``model_parallel`` has a copy that it counts, such as a tied embedding of the
            last stage; norms count them there. Under policies that draw random bits a dict, with the name that each has there: both draw
            the same ones.
        most_elements: The most elements that a rank has of tensors that stay whole, in means of all ranks; or as many as the largest has.

    Raises:
        TypeError: A parameter, unit, transform, policy or mesh of a kind that cannot be used.
        ValueError: A value that cannot work; messages name what it is about, what it got and what it accepts. Nothing is changed then.

    Examples:
        >>> import torch, everybit as eb
        >>> from everybit_torch import FlatStepper
        >>> model = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
        >>> policy = eb.Policy(params=eb.Kahan(), grads=eb.Grads(main="float32", comm="bfloat16", reduce="fp32"))
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
        *,
        policy: AnyPrecision = None,
        mesh: Mesh = None,
        strategy: Strategy | int = "optim",
        outer: OuterStrategy = "no_shard",
        units: Units | None = None,
        labels: Labels | None = None,
        divisor: float | None = None,
        nan: NanCheck = "off",
        reshard_after_forward: bool = True,
        compile: bool = False,
        metrics: bool = False,
        seed: int = 0,
        unsafe: Unsafe = "refuse",
        synchronize: bool = True,
        offload: bool | Offload = False,
        keep_gradients: bool = True,
        defer_reduction: bool = False,
        model_parallel: Mesh = None,
        copies: Collection[str] = (),
        values: Values | None = None,
        device: torch.device | str | None = None,
        ignored: Ignored | None = None,
        casts: CastsOfUnits | None = None,
        overlap_param_gather: bool = False,
        most_elements: float = MOST,
    ) -> None:
        given = Arguments(
            transform, policy, mesh, strategy, outer, units, labels, divisor, nan, reshard_after_forward, compile, metrics, seed, unsafe,
            synchronize, offload, keep_gradients, defer_reduction, model_parallel, copies, values, device, ignored, casts,
            overlap_param_gather, most_elements,
        )  # fmt: skip
        judged = judge(model, given)
        with judged.construction.all_or_nothing():
            self._make(model, given, judged)
        claim(model, self)
        call = "stepper.clip_grad_norm_(max_norm), or pass the parameters of stepper.as_optimizer()"
        clipping.advise(model.parameters(), self, lambda one: None if one.closed else call)

    def _make(self, model: nn.Module, given: Arguments, judged: Judged) -> None:
        """Make it of arguments that can work."""
        self.model, self._given, (self.inner, self.outer) = model, given.to_keep(), judged.ranks
        described, device, construction = judged.described, judged.device, judged.construction
        self.sharding, self.divisor, self.layout = judged.sharding, judged.divisor, judged.layout
        self.seed = given.seed
        self.all_ranks, self.beside = ranks_of(given.mesh), judged.beside
        self.groups: dict[str, dist.ProcessGroup] = {}  # of the same ranks, for checkpoints
        self.saving: PendingSave | None = None
        parameters = dict(zip([spec.name for spec in described.specs], described.parameters, strict=True))
        self._names, self._parameters = list(parameters), list(parameters.items())
        self._copies = HostCopies(device, Offload.of(given.offload))
        self.buffers = ModelBuffers(
            self.layout, parameters, described.labelled, self.sharding, self.inner, self.outer, device,
            construction.fill, keep_gradients=given.keep_gradients, copies=self._copies,
            fused=FusedSums(device) if given.compile else None,
        )  # fmt: skip
        self.weights, self.gradients = list(self.buffers.weights.values()), list(self.buffers.gradients.values())
        self._constructed = construction.schedule
        self.completeness = Completeness()  # of weights and state, for checkpoints
        settings = Settings(
            self.sharding, given.reshard_after_forward, given.keep_gradients, given.defer_reduction,
            overlap_param_gather=given.overlap_param_gather, overlap_reductions=has_own_processors(device),
        )  # fmt: skip
        self._schedule = Schedule(self.layout, settings)
        self._executor = Executor(self.buffers.weights, self.buffers.gradients, self.divisor, (self.inner, self.outer))
        self._executor.on({"agree": self._agree, "step": self._step_shards})
        self._agreed: StepAgreement | None = None
        self._prepared: Callable[[], None] | None = None
        self._optimizer = ShardOptimizer(
            described.labelled, self.buffers.shards, GroupAxis((*self.buffers.sharing, *self.beside.communicators)),
            self.beside, self.step, self.zero_grad,
            compile=given.compile, copies=self._copies, metrics=given.metrics, seed=given.seed, unsafe=given.unsafe,
        )  # fmt: skip
        self.staging = StagingMemory(device)
        construction.finish(self.buffers, self._optimizer, self._hand_out)
        self._copies.synchronize()
        self._passes = Passes(
            self.layout, parameters, self.buffers.gradients, self._schedule, self._executor, self.sharding, given.nan,
            (self.inner, self.outer), device, self._require_ready,
        )  # fmt: skip
        self._wires = GradientWires(self.buffers, described.labelled, self._passes.holds_gradients)
        self._trained_names = frozenset(s.spec.name for one in self.gradients for s in one.group.placements)
        self._pass_counts = PassCounts(self.layout.shards, device) if self.sharding.grads else None
        self._handles: list[Any] = [*watch(judged.casts), *self._passes.watch(model)]
        self._gathering: Gathering | None = None
        self._guards: Guards | None = None
        self._full = None
        self._made: list[Communicator] = []
        if self.sharding.params:
            unit_weights = UnitWeights.of(described.units, self.weights, self._schedule, self.inner, self.outer)
            self._made = unit_weights.communicators
            self._executor.on(unit_weights.handlers)
            self._gathering = Gathering(unit_weights, self._schedule, self._executor, self._passes.begin)
            self._passes.attach(self._gathering, unit_weights.comparer, self._made)
            self._guards = Guards(model, self._gathering)
            self._full = FullParameters(self._gathering, self.weights)
        self._state = ModelState(
            model, self.layout, parameters, self.buffers, self._schedule, self._executor, self._guards, self.beside
        )
        self._late: LateWeights | None = None
        if settings.overlaps:
            self._late = LateWeights(
                model, described.units, self.layout, parameters, self._schedule, self._executor, self.completeness
            )
        self._methods = RegisteredMethods(model, self.layout, self._gathering, self._late)

    # -- one cycle -------------------------------------------------------------------------------------------------------------------

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

    @in_plain_mode
    @torch.no_grad()
    def step(self, *, loss_scale: float = 1.0) -> StepReport:
        """Finish the sums over the ranks, step, and send new weights to ranks that keep a copy; return a report. A new cycle begins.

        Args:
            loss_scale: The factor by which the loss was multiplied; gradients are divided by it.

        Raises:
            RuntimeError: Inside a microbatch, or a rank is gone. An error before anything was stepped leaves weights and state as they
                were, and ``zero_grad()`` on every rank begins the next cycle; after one that came later a checkpoint has to be loaded.
                Or ranks had different numbers of backward passes: in this cycle, or, with ``nan="off"``, in that of the last step.
        """
        return self.carry_out(self.agree_on_step(loss_scale=loss_scale))

    @in_plain_mode
    @torch.no_grad()
    def agree_on_step(self, *, loss_scale: float = 1.0) -> StepAgreement:
        """Compute what :meth:`step` needs to know from all ranks, to be passed to :meth:`carry_out`. Every rank has to call it.

        Args:
            loss_scale: As :meth:`step`'s.

        Raises:
            RuntimeError: As :meth:`step`.
        """
        if self._passes.in_context or self._passes.in_pass:
            raise RuntimeError("step: inside a microbatch or a backward pass; accepted is after it.")
        self._require_ready("step")
        self._passes.require_in_place()
        note_step(self._optimizer)
        self._passes.begin_step()
        self._passes.failed = True
        self.require_equal_passes("step")
        if self._full is not None:
            self._full.keep()
        self._passes.finish_gradients()
        self._optimizer.attach_gradients()
        if loss_scale != 1.0:
            for buffer in self.gradients:
                buffer.divide(loss_scale)
        self._executor.run(self._schedule.agree())
        agreed, self._agreed = self._agreed, None
        assert agreed is not None
        return agreed

    @in_plain_mode
    @torch.no_grad()
    def carry_out(self, agreed: StepAgreement) -> StepReport:
        """Step as :meth:`step` does, with the result of :meth:`agree_on_step`.

        Args:
            agreed: The result of :meth:`agree_on_step`; its norm may be replaced, by that of several models for example.

        Raises:
            RuntimeError: As :meth:`step`.
        """
        by_name = dict(zip(self._names, agreed.touched, strict=True))
        untouched = tuple(name for name, here in by_name.items() if not here and name in self._trained_names)
        require_same_parameters(self.model, self._parameters, untouched)
        if self._given.nan == "off":
            require_gathered(self._idle, is_nan=agreed.is_nan)
        # Where other ranks hold other parts of the model, a part without any gradient takes part in their reductions.
        if not agreed.skipped and (len(untouched) < len(self._trained_names) or not self.beside.is_alone):
            known = [agreed.squares] if answers_first(self.labelled) else []
            self._prepared = self._optimizer.prepare_shards(lambda s: by_name[s.placement.spec.name], known)
            self.completeness.mark_incomplete("a step ended in an error after weights had been changed")
            self._executor.run(self._schedule.update())
        if self._gathering is not None and self._full is not None:
            self._gathering.free_all()
            self._gathering.scheduled.begin_cycle()
            self._full.renew()
        self.completeness.mark_complete()
        self._forget()
        return StepReport(agreed.norm, agreed.skipped, agreed.nonfinite, untouched)

    @torch.no_grad()
    def zero_grad(self) -> None:
        """Discard the gradients of this cycle.

        Call it on every rank after an error: it discards the interrupted cycle, and the next one begins normally.
        """
        if self._passes.interrupted:
            if self._late is not None:
                self._late.recover()
            self._passes.recover()
        self._forget()

    def _forget(self) -> None:
        self._passes.forget()
        self._optimizer.detach_gradients()
        self._wires.begin_cycle()
        self._passes.failed = False

    @property
    def _idle(self) -> list[str]:
        return [] if self._gathering is None else self._gathering.idle

    def _step_shards(self, _event: Event) -> None:
        step, self._prepared = self._prepared, None
        assert step is not None
        self.staging.order()
        step()

    def _agree(self, _event: Event) -> None:
        self.buffers.pool.drop()
        if self._given.nan != "off":
            self._copies.synchronize()  # main gradients are read where they lie
        trained = (
            here for name, here in zip(self._names, self._passes.touched, strict=True) if name in self._trained_names
        )
        self._agreed = agree(
            self._names, self._passes.touched, self._passes.reduced, self._passes.nonfinite, self.buffers.shards, self._given.nan,
            self.inner, self.outer, self.buffers.sharing, self.beside, self._pass_counts, looks=not all(trained) or bool(self._idle),
            as_written=not self._optimizer.gradients_were_handed_out,
        )  # fmt: skip

    # -- what one sees ---------------------------------------------------------------------------------------------------------------

    def as_optimizer(self) -> ShardOptimizer:
        """Return this stepper as a ``torch.optim.Optimizer``, for learning-rate schedulers and training frameworks.

        It has a param group for each label, with this rank's parts of the parameters; its ``step`` is this stepper's.
        """
        return self._optimizer

    def plan(self, *, microbatches: int = 1, second_order: bool = False) -> Plan:
        """Return this rank's memory by use, and what it sends in a step.

        Args:
            microbatches: The number of microbatches in a step.
            second_order: See :func:`everybit_torch.plan`.
        """
        given, weights = self._given, self._schedule.weights
        ranks = Ranks(self.inner.size, self.outer.size, self.inner.rank, self.outer.rank, self.beside.sizes)
        return plan_layout(
            self.layout, self.labelled, self.sharding, ranks, construction=self._constructed, others=self._optimizer.others,
            runs=self._optimizer.runs(), nan=given.nan, compile=given.compile, offload=given.offload, microbatches=microbatches,
            keep_gradients=given.keep_gradients, device=self._passes.nonfinite.device, metrics=self._optimizer.metrics_enabled,
            retained=None if weights is None else weights.retained, defer_reduction=self._schedule.defers,
            prefetch=None if weights is None else weights.prefetch, second_order=second_order,
        )  # fmt: skip

    def set_grad_comm(self, dtype: FloatDType | None, reduce: Literal["native", "fp32"] | None = None) -> None:
        """Send gradients in another dtype from now on. The dtype in which they are accumulated cannot change.

        Args:
            dtype: dtype in which gradients are sent; None: that in which they are accumulated.
            reduce: How they are summed; None: as before.

        Raises:
            ValueError: No dtype.
            RuntimeError: Gradients of this cycle have been put into a buffer for sending, or were sent already.
        """
        self._wires.change(dtype, reduce)

    @contextmanager
    def grad_comm(self, dtype: FloatDType | None, reduce: Literal["native", "fp32"] | None = None) -> Iterator[None]:
        """Send gradients in another dtype inside; see :meth:`set_grad_comm`.

        A cycle has one wire: where the context ends in the middle of one, what was before comes back with the next cycle.
        """
        with self._wires.changed(dtype, reduce):
            yield

    @property
    def labelled(self) -> Mapping[str, LabelledTransform]:
        """The transform and policy of each label, with the dtypes in which gradients are sent now."""
        return self._wires.labelled

    def close(self) -> None:
        """Gather all weights and remove every hook; the stepper cannot step afterwards. Every rank has to call it.

        The next stepper of these ranks reuses the process groups that this one made.
        """
        if self.closed:
            return
        if self._passes.failed or self._passes.in_pass:
            self.zero_grad()
        if self._gathering is not None:
            self._gathering.close()
        if self._guards is not None:
            self._guards.close()
        if self._late is not None:
            self._late.close()
        self._methods.close()
        for handle in self._handles:
            handle.remove()
        if self.saving is not None and (error := self.saving.unseen()) is not None:
            notices.warn(f"close: the last asynchronous save failed: {error}")
        self.staging.free()
        for communicator in self._made:
            communicator.close()
        for group in self.groups.values():
            groups.give_back(group)
        self.groups, self.completeness.is_closed = {}, True

    def __reduce_ex__(self, protocol: Any) -> Any:
        """There are no copies.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "FlatStepper: cannot be copied or pickled, for its buffers are the model's; save_sharded() writes a checkpoint."
        )

    @torch.no_grad()
    def loaded(self) -> None:
        """This rank's own weights and state were replaced, all of them: hand weights to the ranks that keep a copy.

        Every rank has to call it. What was incomplete is whole then, and what an error interrupted is forgotten.
        """
        if self._passes.failed or self._passes.in_pass:
            self._passes.recover()
        if self.completeness.is_complete:
            self.completeness.mark_incomplete("loading a checkpoint ended in an error")
        self._hand_out()
        if self._gathering is not None:
            self._gathering.free_all()
        if self._pass_counts is not None:
            self._pass_counts.forget()
        self.completeness.mark_complete()
        self._forget()

    def _hand_out(self) -> None:
        self._executor.run(self._schedule.hand_out(list(self.buffers.weights)))

    def __repr__(self) -> str:
        outer = f", outer={self.sharding.outer!r} over {self.outer.size}" if self.outer.size > 1 else ""
        sizes = f"{len(self.layout.units)} units, {self.layout.numel} elements and {self.layout.padding} of padding"
        head = f"FlatStepper(strategy={self.sharding.strategy!r} over {self.inner.size}{outer}, {sizes})"
        labels = (f"  {label or 'all parameters'}: {a.transform!r}; {a.policy!r}" for label, a in self.labelled.items())
        return "\n".join([head, *labels])
