"""The flat-buffer stepper: one optimizer over a model whose gradients, state and weights may be shared out among ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from everybit.dtypes import FloatDType, dtype_name, torch_dtype
from everybit.optimizer import Unsafe
from everybit.policy import Resolved, resolve
from everybit_torch.collectives import groups
from everybit_torch.collectives.communicator import Communicator, GroupAxis
from everybit_torch.collectives.meshes import Mesh, communicators, ranks_of
from everybit_torch.collectives.reduction import Wire, divide
from everybit_torch.sharded.arguments import claim, judge
from everybit_torch.sharded.comparisons import Comparer
from everybit_torch.sharded.executor import Executor
from everybit_torch.sharded.fingerprint import require_alike
from everybit_torch.sharded.gathering import Gathering
from everybit_torch.sharded.gradient_buffers import GradientBuffer
from everybit_torch.sharded.guards import Guards
from everybit_torch.sharded.layout import Group, build
from everybit_torch.sharded.model_layout import AnyPrecision, Labels, ModelLayout, Transforms, Units
from everybit_torch.sharded.module_hooks import ModuleHook
from everybit_torch.sharded.pass_counts import PassCounts
from everybit_torch.sharded.passes import Passes
from everybit_torch.sharded.plan import Plan, Ranks, plan_layout
from everybit_torch.sharded.reports import NanCheck, StepReport
from everybit_torch.sharded.scheduling.events import Event
from everybit_torch.sharded.scheduling.schedule import Schedule, Settings
from everybit_torch.sharded.shard_optimizer import Shard, ShardOptimizer
from everybit_torch.sharded.step_agreement import StepAgreement, agree
from everybit_torch.sharded.strategies import OuterStrategy, Strategy
from everybit_torch.sharded.unit_weights import Unit, UnitWeights, each
from everybit_torch.sharded.weights import WeightBuffer


class FlatStepper:
    """Step a model on flat buffers, alone or with other ranks, each dtype where the policy says.

    Parameters become pieces of flat buffers. In the backward pass every gradient is added (or copied) to its place in a buffer and freed;
    there never is a second full-size gradient. What is summed over the ranks is summed once, by one rule, and divided once.

    Args:
        model: With its values in place, on one device. Parameters may be tied, frozen, of several dtypes.
        transform: What computes updates; or one for each label, with ``labels``.
        policy: How weights, state and gradients are stored and sent: a policy, several by :func:`everybit.by_label`, a
            :class:`~everybit_torch.MixedPrecision`, or None for a float32 or float64 model stored as it is.
        mesh: The ranks: a process group, a ``DeviceMesh`` of one dimension, or one of two, (outer, inner). None: all ranks, or this
            process alone if ``torch.distributed`` is not initialised.
        strategy: What the (inner) ranks share out; see :class:`~everybit_torch.sharded.strategies.Sharding`. A number is the ZeRO stage.
        outer: What the outer ranks do; see there.
        units: Modules, or classes of modules, whose parameters are gathered and reduced together, such as ``[Block]``. What is in none
            belongs to the model's own unit. Without units the whole model is one, and a sharded strategy needs room for all of it at once.
        labels: From (name, parameter) to the key of its transform.
        divisor: What the sum of gradients is divided by. None: the number of ranks, which makes the mean of the ranks' gradients;
            1 for losses that are sums, or divided by the number of tokens already.
        nan: ``"off"``; ``"step"``: skip a step, on all ranks, if any gradient is not finite; ``"param"``: and tell which, where and since
            when, which takes a look at every gradient.
        reshard_after_forward: With ``optim_grads_params``: give a unit's weights back after its forward pass, and gather them again for its
            backward pass.
        compile: Compile the step; the results are the same bits.
        metrics: Measure every step: ``as_optimizer().metrics()``.
        seed: Of stochastic rounding; the same on every rank.
        unsafe: See :func:`everybit.with_policy`.
        synchronize: Begin with the first rank's parameters and buffers, on every rank. False: they are equal already.
        offload: Keep the optimizer's state, residuals and main weights in the host's pinned memory, and bring them to the device a bucket
            at a time for a step. For models on another device than the host.
        keep_gradients: Keep the memory of main gradients from one step to the next. False: give it back, to activations, at the price of
            taking it again.

    Raises:
        TypeError: A parameter, unit, transform, policy or mesh of a kind that cannot be used.
        ValueError: A value that cannot work; messages name what it is about, what it got and what it accepts. Nothing is changed then.

    Example:
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
        offload: bool = False,
        keep_gradients: bool = True,
    ) -> None:
        self.inner, self.outer = communicators(mesh)
        # Ranks that are about to differ are told so here, before they meet in any other collective: also what one alone has to refuse.
        try:
            judged = judge(
                model, transform, policy, mesh, strategy, outer, units, labels, divisor, nan, offload, seed, unsafe,
                ranks=(self.inner.size, self.outer.size),
            )  # fmt: skip
        except Exception as error:
            require_alike(error, self.inner, self.outer)
            raise
        described, self.sharding, self.divisor = judged.described, judged.sharding, judged.divisor
        options = {
            "divisor": self.divisor,
            "nan": nan,
            "seed": seed,
            "reshard_after_forward": reshard_after_forward,
            "metrics": metrics,
            "synchronize": synchronize,
        }
        require_alike(
            [*judged.facts, *((name, repr(value)) for name, value in options.items())], self.inner, self.outer
        )
        self.model, self._nan = model, nan
        self._reshard_after_forward, self._compile = reshard_after_forward, compile
        self._keep_gradients = keep_gradients
        self.closed = False
        self.all_ranks = ranks_of(mesh)
        self.groups: dict[str, dist.ProcessGroup] = {}  # of the same ranks, for checkpoints
        self.saving: Future[Path] | None = None
        device = judged.device
        # A multiple of all ranks, though not all strategies cut so fine: an exact sum is made in parts on all of them.
        shards = self.inner.size * self.outer.size
        self.layout = build(described.specs, shards=shards, units=[name for name, _ in described.units])
        self._names = [spec.name for spec in described.specs]
        self._labelled = described.labelled
        if synchronize:
            self._synchronize()

        parameters = {spec.name: p for spec, p in zip(described.specs, described.parameters, strict=True)}
        weights_of: dict[int, WeightBuffer] = {}
        gradients_of: dict[int, GradientBuffer] = {}
        shard_list: list[Shard] = []
        self._trained: list[Group] = []
        for number, group in enumerate(self.layout.groups):
            if not group.requires_grad and not self.sharding.params:
                continue
            members = [parameters[place.spec.name] for place in group.placements]
            weights = WeightBuffer(group, members, self.sharding, self.inner, self.outer)
            weights_of[number] = weights
            if group.requires_grad:
                gradients = self._gradient_buffer(group, device)
                self._trained.append(group)
                gradients_of[number] = gradients
                shard_list.append(Shard.of(weights, gradients, *self._own_range(group)))
        self._weights_of = weights_of
        self.weights, self.gradients = list(weights_of.values()), list(gradients_of.values())
        self._shards = shard_list
        self._unit_weights: UnitWeights | None = None
        self._schedule = Schedule(
            self.layout, Settings(self.sharding, reshard_after_forward, keep_gradients), self._is_bounded
        )
        self._executor = Executor(weights_of, gradients_of, self.divisor, (self.inner, self.outer))
        self._executor.on({"agree": self._agree, "step": self._step_shards})
        self._agreed: StepAgreement | None = None
        self._prepared: Callable[[], None] | None = None
        self._trained_names = frozenset(place.spec.name for group in self._trained for place in group.placements)
        self._parameters = list(parameters.items())
        self._passes = Passes(
            self.layout,
            parameters,
            gradients_of,
            self._schedule,
            self._executor,
            self.sharding,
            nan,
            (self.inner, self.outer),
            device,
            self._require_ready,
        )
        # Where gradients are shared out each backward pass is summed over the ranks, and all of them need as many.
        self._pass_counts = PassCounts(shards, device) if self.sharding.grads else None
        self.in_full_parameters = False
        self._incomplete: str | None = None
        self._wire_after: Callable[[], None] | None = None
        self._handles: list[Any] = self._passes.watch()
        self._axis = GroupAxis(self._shard_communicators())
        self._optimizer = ShardOptimizer(
            self._labelled,
            shard_list,
            self._axis,
            self.step,
            self.zero_grad,
            compile=compile,
            offload=offload,
            metrics=metrics,
            seed=seed,
            unsafe=unsafe,
        )
        self._gathering: Gathering | None = None
        self._guards: Guards | None = None
        self._made: list[Communicator] = []
        if self.sharding.params:
            self._gathering = self._make_gathering(described)
            self._passes.attach(self._gathering, self._made)
            self._guards = Guards(model, self._gathering)
        else:
            self._handles.append(
                model.register_forward_hook(ModuleHook(self._passes, "after_forward", model, 0, compiled=False))
            )
        claim(model, self)

    # -- making it -----------------------------------------------------------------------------------------------------------------

    def _make_gathering(self, described: ModelLayout) -> Gathering:
        unit_weights: list[list[WeightBuffer]] = [[] for _ in described.units]
        for weights in self.weights:
            unit_weights[weights.group.unit].append(weights)
        gathers = self.inner.clone()
        hosts = self.inner.for_host_memory(), self.outer.for_host_memory()
        self._made = [gathers, *hosts]
        units = [
            Unit(name, module, buffers) for (name, module), buffers in zip(described.units, unit_weights, strict=True)
        ]
        assert self._schedule.weights is not None
        self._unit_weights = UnitWeights(units, gathers, Comparer(*hosts), self._schedule.weights)
        self._executor.on(self._unit_weights.handlers)
        return Gathering(self._unit_weights, self._schedule, self._executor, self._passes.begin)

    def _is_bounded(self) -> bool:
        assert self._unit_weights is not None
        return self._unit_weights.agreement().bounded

    def _synchronize(self) -> None:
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            for communicator in (self.outer, self.inner):
                values = tensor.detach()
                whole = values if values.is_contiguous() else values.contiguous()
                communicator.broadcast(whole, name)
                if whole is not values:
                    values.copy_(whole)

    def _gradient_buffer(self, group: Group, device: torch.device) -> GradientBuffer:
        resolved = self._resolved(group)
        main = torch_dtype(resolved.grads_main)
        wires = Wire.pair(resolved, self.inner.size, self.outer.size)
        return GradientBuffer(
            group, self.sharding, self.inner, self.outer, main, *wires, device, keep=self._keep_gradients
        )

    def _resolved(self, group: Group) -> Resolved:
        return resolve(self._labelled[group.label].policy, dtype_name(group.dtype, field="parameter"))

    def _own_range(self, group: Group) -> tuple[int, int]:
        """The part of a group's buffer that this rank steps."""
        return self.sharding.own_range(group.padded, self.inner.rank, self.inner.size, self.outer.rank, self.outer.size)

    def _shard_communicators(self) -> tuple[Communicator, ...]:
        """Over which ranks the parts of one gradient lie; copies are counted once."""
        if not self.sharding.state:
            return ()
        return (self.inner, self.outer) if self.sharding.outer == "optim" else (self.inner,)

    # -- one cycle -------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """One microbatch: its backward pass, and on the ``last`` one of a step the sum over the ranks.

        A rank whose loss reaches no parameter takes part with zeros. Without this context gradients are summed over the ranks by
        :meth:`step` (``no_shard``, ``optim``), or in every backward pass; then every rank needs one each time.

        Raises:
            RuntimeError: Inside another, or after the last one without a step.
        """
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
        """Backward passes in here are not the last of their step. Sharded gradients are summed over the ranks all the same.

        Raises:
            RuntimeError: Inside a microbatch.
        """
        with self._passes.context(last=False, name="no_sync"):
            yield

    @contextmanager
    def sync(self) -> Iterator[None]:
        """The one backward pass in here is the last of its step: gradients are summed over the ranks while it goes on.

        Raises:
            RuntimeError: Inside a microbatch.
        """
        with self._passes.context(last=True, name="sync"):
            yield

    def _require_ready(self, name: str) -> None:
        """Refuse to go on from a state that is not what it seems.

        Raises:
            RuntimeError: An error was not recovered from.
        """
        self.require_complete(name)
        if self._passes.failed:
            raise RuntimeError(
                f"{name}: the microbatch or step before ended in an error, and its gradients are in part; accepted is zero_grad(), on every"
                " rank."
            )

    def require_complete(self, name: str) -> None:
        """Refuse to use weights and state that do not belong together.

        Args:
            name: Of what is refused.

        Raises:
            RuntimeError: They do not; see :meth:`mark_incomplete`.
        """
        if self._incomplete is not None:
            raise RuntimeError(
                f"{name}: {self._incomplete}; accepted is load_sharded(stepper, path), on every rank, which makes the state whole."
            )

    def mark_incomplete(self, reason: str) -> None:
        """Weights and state do not belong together from here on: nothing but :meth:`loaded` goes on.

        Args:
            reason: What happened, as the beginning of a message.
        """
        self._incomplete = reason

    def require_equal_passes(self, name: str) -> None:
        """Refuse to go on from a step for which ranks had different numbers of backward passes. Every rank has to call it.

        Args:
            name: Of what is refused.

        Raises:
            RuntimeError: They had, and nobody has looked at it yet.
        """
        if self._pass_counts is not None:
            self._pass_counts.finish(name)

    @torch.no_grad()
    def step(self, *, loss_scale: float = 1.0) -> StepReport:
        """Finish the sums over the ranks, step, and hand the weights to the ranks that keep a copy. The next cycle begins.

        Args:
            loss_scale: What the loss was multiplied by; gradients are divided by it.

        Raises:
            RuntimeError: Inside a microbatch, or a rank is gone. An error before anything was stepped leaves weights and state as they
                were, and ``zero_grad()`` on every rank begins the next cycle; after one that came later a checkpoint has to be loaded.
                Or ranks had different numbers of backward passes: in this cycle, or, with ``nan="off"``, in that of the last step.
        """
        if self._passes.in_context or self._passes.in_pass:
            raise RuntimeError("step: inside a microbatch or a backward pass; accepted is after it.")
        self._require_ready("step")
        self._passes.require_in_place()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask for it
        self._passes.failed = True
        self.require_equal_passes("step")
        self._keep_what_was_written()
        self._passes.finish_gradients()
        self._optimizer.attach_gradients()
        if loss_scale != 1.0:
            for buffer in self.gradients:
                divide(buffer.own, loss_scale)
        self._executor.run(self._schedule.agree())
        agreed, self._agreed = self._agreed, None
        assert agreed is not None
        by_name = dict(zip(self._names, agreed.touched, strict=True))
        untouched = tuple(name for name, here in by_name.items() if not here and name in self._trained_names)
        self._require_sense(untouched, is_nan=agreed.is_nan)
        if not agreed.skipped and len(untouched) < len(self._trained_names):
            self._prepared = self._optimizer.prepare_shards(lambda s: by_name[s.placement.spec.name])
            self.mark_incomplete("a step ended in an error after weights had been changed")
            self._executor.run(self._schedule.update())
        if self._gathering is not None:
            self._gathering.free_all()
            self._gathering.scheduled.begin_cycle()
            if self.in_full_parameters:
                self._gather_again()
        self._incomplete = None
        self._forget()
        return StepReport(agreed.norm, agreed.skipped, agreed.nonfinite, untouched)

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Sum over the ranks what was not yet, and divide: the main gradients are final then. ``step`` does it by itself.

        They are the gradients of this rank's parameters in ``as_optimizer()`` until then, and may be scaled.
        """
        self._require_ready("finish_gradients")
        self._passes.failed = True
        self._passes.finish_gradients()
        self._optimizer.attach_gradients()
        self._passes.failed = False

    @torch.no_grad()
    def zero_grad(self) -> None:
        """Forget the gradients of this cycle.

        After an error, on every rank: whatever it interrupted, the next cycle begins as if there had been none.
        """
        if (
            self._passes.failed
            or self._passes.in_pass
            or (self._gathering is not None and self._gathering.scheduled.in_forward)
        ):
            self._passes.recover()
        self._forget()

    def _forget(self) -> None:
        self._passes.forget()
        self._optimizer.detach_gradients()
        if self._wire_after is not None:
            self._wire_after()
        self._passes.failed = False

    def _require_sense(self, untouched: tuple[str, ...], *, is_nan: bool) -> None:
        """Refuse a step that would train nothing, or on nothing.

        Raises:
            RuntimeError: The model has other parameters than those laid out; or weights were used that had not been gathered.
        """
        if untouched:
            there = dict(self.model.named_parameters())
            ours = dict(self._parameters)
            if replaced := [name for name in untouched if there.get(name) is not ours[name]]:
                raise RuntimeError(
                    f"{', '.join(replaced[:3])}: not the model's parameters any more; it has others (load_state_dict(assign=True)?)."
                    " Make a stepper after such a change."
                )
        if self._nan == "off" and is_nan and (idle := self._units_without_pass()):
            raise RuntimeError(
                f"the gradient is NaN, and {', '.join(map(repr, idle[:3]))} had no forward pass of its own in this cycle: weights are NaN"
                " while sharded. Call units, and the model, as modules."
            )

    def _units_without_pass(self) -> list[str]:
        """Units that are trained, gathered when they compute, and did not in this cycle."""
        if self._gathering is None:
            return []
        units = enumerate(self._gathering.units)
        return [str(one) for n, one in units if one.trained and n not in self._gathering.scheduled.ran]

    def _step_shards(self, _event: Event) -> None:
        step, self._prepared = self._prepared, None
        assert step is not None
        step()

    def _agree(self, _event: Event) -> None:
        trained = (
            here for name, here in zip(self._names, self._passes.touched, strict=True) if name in self._trained_names
        )
        self._agreed = agree(
            self._names,
            self._passes.touched,
            self._passes.number,
            self._passes.nonfinite,
            self._shards,
            self._nan,
            self.inner,
            self.outer,
            self._shard_communicators(),
            self._pass_counts,
            looks=not all(trained) or bool(self._units_without_pass()),
        )

    # -- what one sees ---------------------------------------------------------------------------------------------------------------

    def as_optimizer(self) -> ShardOptimizer:
        """The same, as a ``torch.optim.Optimizer``: for learning-rate schedulers and training frameworks.

        It has a param group for each label, with this rank's parts of the parameters; its ``step`` is this stepper's.
        """
        return self._optimizer

    def plan(self, *, microbatches: int = 1) -> Plan:
        """Where this rank's memory goes, and what it sends in a step.

        Args:
            microbatches: In a step.
        """
        return plan_layout(
            self.layout,
            self._labelled,
            self.sharding,
            Ranks(self.inner.size, self.outer.size, self.inner.rank, self.outer.rank),
            microbatches=microbatches,
            reshard_after_forward=self._reshard_after_forward,
            compile=self._compile,
            keep_gradients=self._keep_gradients,
            device=self._passes.nonfinite.device,
            metrics=self._optimizer.metrics_enabled,
            runs=self._optimizer.runs(),
        )

    def set_grad_comm(self, dtype: FloatDType | None, reduce: Literal["native", "fp32"] | None = None) -> None:
        """Send gradients in another dtype from now on. What they are accumulated in stays: buffers are laid out.

        Args:
            dtype: Of what is sent; None: as accumulated.
            reduce: How it is summed; None: as before.

        Raises:
            ValueError: No dtype.
            RuntimeError: Gradients of this cycle have been put into a buffer for sending, or were sent already.
        """
        if self._holds_gradients():
            raise RuntimeError(
                "set_grad_comm: there are gradients of this cycle, which are sent in one dtype; accepted before the first backward pass"
                " after step() or zero_grad()."
            )
        changed = {}
        for label, one in self._labelled.items():
            grads = replace(one.policy.grads, comm=dtype, reduce=reduce or one.policy.grads.reduce)
            changed[label] = replace(one, policy=replace(one.policy, grads=grads))
        self._labelled = changed
        for buffer in self.gradients:
            resolved = self._resolved(buffer.group)
            buffer.wire, buffer.outer_wire = Wire.pair(resolved, self.inner.size, self.outer.size)

    def _holds_gradients(self) -> bool:
        """Whether a buffer holds gradients of this cycle."""
        arrived = self._schedule.gradients.any_arrived
        return self._passes.in_pass or arrived or any(buffer.phase != "empty" for buffer in self.gradients)

    @contextmanager
    def grad_comm(self, dtype: FloatDType | None, reduce: Literal["native", "fp32"] | None = None) -> Iterator[None]:
        """Send gradients in another dtype inside; see :meth:`set_grad_comm`.

        A cycle has one wire: where the context ends in the middle of one, what was before comes back with the next cycle.
        """
        before = [(buffer.wire, buffer.outer_wire) for buffer in self.gradients]
        labelled = self._labelled
        self.set_grad_comm(dtype, reduce)
        pending = self._wire_after

        def restore() -> None:
            self._labelled, self._wire_after = labelled, None
            for buffer, wires in zip(self.gradients, before, strict=True):
                buffer.wire, buffer.outer_wire = wires

        try:
            yield
        finally:
            if self._holds_gradients():
                self._wire_after = pending or restore
            else:
                restore()

    @contextmanager
    def full_parameters(self) -> Iterator[nn.Module]:
        """The model with all of its weights on every rank, to look at, evaluate or save. What is written to them in here is kept.

        Every rank has to do it.

        Raises:
            RuntimeError: Inside a backward pass.
        """
        if self._passes.in_pass:
            raise RuntimeError("full_parameters: inside a backward pass; accepted is outside.")
        if self._gathering is None or self.in_full_parameters:
            yield self.model
            return
        with self._gathering.everything():
            self.in_full_parameters = True
            try:
                yield self.model
            finally:
                try:
                    self._keep_what_was_written()
                finally:
                    self.in_full_parameters = False

    def _keep_what_was_written(self) -> None:
        """Inside ``full_parameters()``: this rank's shards are what the model's tensors are now."""
        if self.in_full_parameters:
            each([weights.keep_what_was_written for weights in self.weights])

    def _gather_again(self) -> None:
        """Inside ``full_parameters()``: the model's tensors are what the shards are now."""
        assert self._gathering is not None
        for one in [weights.gather_again(self._gathering.communicator) for weights in self.weights]:
            one.wait()

    def own_state_dict(self) -> dict[str, Any]:
        """The model's ``state_dict()``, where tensors of sharded parameters have no values. For checkpoints, which know."""
        with nullcontext() if self._guards is None else self._guards.lifted():
            return dict(self.model.state_dict())

    def close(self) -> None:
        """Give the model back, with all of its weights: no hooks, no sharding. Every rank has to call it; nothing steps any more.

        Process groups that the stepper made are used by the next stepper of these ranks.
        """
        if self.closed:
            return
        if self._passes.failed or self._passes.in_pass:
            self.zero_grad()
        if self._gathering is not None:
            self._gathering.close()
        if self._guards is not None:
            self._guards.close()
        for handle in self._handles:
            handle.remove()
        if self.saving is not None:
            wait_for([self.saving])
        for communicator in self._made:
            communicator.close()
        for group in self.groups.values():
            groups.give_back(group)
        self.groups = {}
        self.closed = True

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
        if self._incomplete is None:
            self.mark_incomplete("loading a checkpoint ended in an error")
        self._executor.run(self._schedule.hand_out(list(self._weights_of)))
        if self._gathering is not None:
            self._gathering.free_all()
        if self._pass_counts is not None:
            self._pass_counts.forget()
        self._incomplete = None
        self._forget()

    def __repr__(self) -> str:
        outer = f", outer={self.sharding.outer!r} over {self.outer.size}" if self.outer.size > 1 else ""
        lines = [
            f"FlatStepper(strategy={self.sharding.strategy!r} over {self.inner.size}{outer}, {len(self.layout.units)} units,"
            f" {self.layout.numel} elements and {self.layout.padding} of padding)"
        ]
        for label, one in self._labelled.items():
            lines.append(f"  {label or 'all parameters'}: {one.transform!r}; {one.policy!r}")
        return "\n".join(lines)
