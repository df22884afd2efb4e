"""The flat-buffer stepper: one optimizer over a model whose gradients, state and weights may be shared out among ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

import everybit as eb
from everybit import borders
from everybit.dtypes import FloatDType, dtype_name, torch_dtype
from everybit.policy import Resolved, resolve
from everybit_torch.sharded.communicator import Communicator, GroupAxis, Pending
from everybit_torch.sharded.gathering import Gathering, ModuleHook, Unit
from everybit_torch.sharded.gradient_buffers import GradientBuffer
from everybit_torch.sharded.layout import Group, build
from everybit_torch.sharded.model_layout import AnyPrecision, Labels, ModelLayout, Transforms, Units, describe
from everybit_torch.sharded.nonfinite import count_nonfinite, find_nonfinite, has_nonfinite
from everybit_torch.sharded.offload import is_host
from everybit_torch.sharded.plan import Plan, Ranks, plan_layout
from everybit_torch.sharded.reduction import Reduction, Wire, divide, give_back
from everybit_torch.sharded.reports import NanCheck, NonFinite, StepReport
from everybit_torch.sharded.shard_optimizer import Shard, ShardOptimizer
from everybit_torch.sharded.strategies import OuterStrategy, Strategy, sharding
from everybit_torch.sharded.weights import WeightBuffer
from everybit_torch.stepping import piece_size

Mesh = DeviceMesh | dist.ProcessGroup | None

# Sums of squares outside are made again in float64.
_TINY, _HUGE = 1e-24, 1e36

_OWNERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[FlatStepper]] = weakref.WeakKeyDictionary()


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
        unsafe: Literal["refuse", "warn", "allow"] = "refuse",
        synchronize: bool = True,
        offload: bool = False,
        keep_gradients: bool = True,
    ) -> None:
        if nan not in ("off", "step", "param"):
            raise ValueError(f"nan: got {nan!r}; accepted are 'off', 'step', 'param'.")
        if divisor is not None and (isinstance(divisor, bool) or not divisor > 0 or divisor == float("inf")):
            raise ValueError(
                f"divisor: got {divisor!r}; accepted is a finite number above zero, or None for the number of ranks."
            )
        self.model, self.sharding, self._nan = model, sharding(strategy, outer), nan
        self._reshard_after_forward, self._compile = reshard_after_forward, compile
        self._keep_gradients = keep_gradients
        self.inner, self.outer = communicators(mesh)
        if outer == "optim" and self.outer.size == 1 and not isinstance(mesh, DeviceMesh):
            raise ValueError(
                "outer: got 'optim' without an outer dimension; accepted with it is a DeviceMesh of two dimensions."
            )
        self.closed = False
        self.all_ranks = ranks_of(mesh)
        self.groups: dict[str, dist.ProcessGroup] = {}  # of the same ranks, for checkpoints
        self.saving: Future[Path] | None = None
        self.divisor = float(self.inner.size * self.outer.size if divisor is None else divisor)
        owner = _OWNERS.get(model)
        if owner is not None and (other := owner()) is not None and not other.closed:
            raise ValueError(
                "model: belongs to a stepper already, whose buffers its parameters lie in; call that stepper's close() first."
            )
        described = describe(model, transform, policy, units, labels)
        for spec, parameter in zip(described.specs, described.parameters, strict=True):
            if parameter.grad is not None:
                raise ValueError(
                    f"{spec.name}: holds a gradient already, which would be counted; clear it (model.zero_grad()) before."
                )
        device = _device_of(described)
        if offload and is_host(device):
            raise ValueError(
                "offload: got True for a model in the host's memory, where its state is already; accepted is False."
            )
        # A multiple of all ranks, though not all strategies cut so fine: an exact sum is made in parts on all of them.
        shards = self.inner.size * self.outer.size
        self.layout = build(described.specs, shards=shards, units=[name for name, _ in described.units])
        self._names = [spec.name for spec in described.specs]
        self._labelled = described.labelled
        _judge(described, seed, unsafe)
        if synchronize:
            self._synchronize()

        parameters = {spec.name: p for spec, p in zip(described.specs, described.parameters, strict=True)}
        self.weights: list[WeightBuffer] = []
        self.gradients: list[GradientBuffer] = []
        shard_list: list[Shard] = []
        self._trained: list[Group] = []
        for group in self.layout.groups:
            if not group.requires_grad and not self.sharding.params:
                continue
            members = [parameters[place.spec.name] for place in group.placements]
            weights = WeightBuffer(group, members, self.sharding, self.inner, self.outer)
            self.weights.append(weights)
            if group.requires_grad:
                gradients = self._gradient_buffer(group, device)
                self._trained.append(group)
                self.gradients.append(gradients)
                shard_list.append(Shard.of(weights, gradients, *self._own_range(group)))
        self._shards = shard_list
        self._trained_names = frozenset(place.spec.name for group in self._trained for place in group.placements)
        laid_out = {place.spec.name for weights in self.weights for place in weights.group.placements}
        self._flags = [(name, p, p.requires_grad) for name, p in parameters.items()]
        self._homes = [
            (name, p, p.data_ptr()) for name, p in parameters.items() if name in laid_out and not self.sharding.params
        ]
        self._touched = [False] * len(self._names)
        self._nonfinite = torch.zeros(len(self._names), dtype=torch.int64, device=device)
        self._last: bool | None = None
        self._in_context = self._in_pass = self.in_full_parameters = False
        self._failed = False
        self._passes = 0
        self._next = len(self.gradients) - 1
        self._in_flight: Reduction | None = None
        self._handles: list[Any] = []
        self._watch(parameters)
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
        if self.sharding.params:
            unit_weights: list[list[WeightBuffer]] = [[] for _ in described.units]
            for weights in self.weights:
                unit_weights[weights.group.unit].append(weights)
            self._gathering = Gathering(
                [
                    Unit(name, module, buffers)
                    for (name, module), buffers in zip(described.units, unit_weights, strict=True)
                ],
                self.inner.clone(),
                reshard_after_forward=reshard_after_forward,
                on_backward=self._begin_pass,
            )
        else:
            self._handles.append(
                model.register_forward_hook(ModuleHook(self, "_after_forward", model, 0, compiled=False))
            )
        _OWNERS[model] = weakref.ref(self)

    # -- making it -----------------------------------------------------------------------------------------------------------------

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

    def _watch(self, parameters: dict[str, nn.Parameter]) -> None:
        numbers = {name: number for number, name in enumerate(self._names)}
        for buffer in self.gradients:
            for place, placement in enumerate(buffer.group.placements):
                name = placement.spec.name
                hook = self._arrival(buffer, place, numbers[name])
                self._handles.append(parameters[name].register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _arrival(self, buffer: GradientBuffer, place: int, number: int) -> Callable[[Tensor], None]:
        # Hooks live as long as the model, and torch's collector does not see through them: they must not keep the stepper alive.
        reference, buffer_reference = weakref.ref(self), weakref.ref(buffer)

        @torch.no_grad()  # backward(create_graph=True) runs hooks with gradients enabled
        def arrive(parameter: Tensor) -> None:
            stepper, into = reference(), buffer_reference()
            if stepper is not None and into is not None:
                gradient, parameter.grad = parameter.grad, None
                assert gradient is not None
                stepper._take(gradient.detach(), into, place, number)

        return arrive

    def _take(self, gradient: Tensor, buffer: GradientBuffer, place: int, number: int) -> None:
        """A parameter's gradient is there: into its buffer with it."""
        self._begin_pass()
        if gradient.layout is not torch.strided:
            raise TypeError(f"{self._names[number]}: got a {gradient.layout} gradient; accepted are dense gradients.")
        unit = buffer.group.unit
        if self._gathering is not None and unit > 0 and unit not in self._gathering.entered:
            raise RuntimeError(
                f"{self._names[number]}: its gradient came before that of what its unit, {self.layout.units[unit]}, returned, so the unit's"
                " weights may not have been there. Accepted are units that return every tensor that the loss depends on."
            )
        if self._nan == "param":
            self._nonfinite[number] += count_nonfinite(gradient)
        buffer.add(place, gradient)
        self._touched[number] = True
        if buffer.complete:
            self._advance()

    def _after_forward(self, number: int, arguments: Any, outputs: Any) -> None:
        """Have a pass begin when the backward pass comes to what the model returned, and not in the inner pass of a checkpoint."""
        tensors = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
        if tensors and torch.is_grad_enabled():
            reference = weakref.ref(self)

            def enter(_: object) -> None:
                stepper = reference()
                if stepper is not None:
                    stepper._begin_pass()

            register_multi_grad_hook(tensors, enter, mode="any")

    # -- one backward pass ---------------------------------------------------------------------------------------------------------

    def _begin_pass(self) -> None:
        if self._in_pass:
            return
        for name, parameter, flag in self._flags:
            if parameter.requires_grad is not flag:
                raise RuntimeError(
                    f"{name}: requires_grad is {parameter.requires_grad}, and was {flag} when the stepper was made."
                    " Make a new stepper, and carry the state over with a checkpoint."
                )
        for name, parameter, address in self._homes:
            if parameter.data_ptr() != address:
                raise RuntimeError(
                    f"{name}: was moved, cast or given other memory since the stepper was made, and is not in its buffer now. Cast and move"
                    " a model first, then make its stepper; close() gives a model back."
                )
        self._in_pass = True
        self._next = len(self.gradients) - 1
        for buffer in self.gradients:
            buffer.begin_pass()
            if buffer.group.unit == 0:
                buffer.open()  # of the model's own unit, whose gradients come first and last
        torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)

    @property
    def _reduces(self) -> bool:
        """Whether gradients are summed over the ranks in this backward pass."""
        return self.sharding.grads or self._last is True

    def _advance(self) -> None:
        """Reduce what is complete, from the layout's last group on: the order is the same on every rank, whatever arrives first."""
        while self._reduces and self._next >= 0 and self.gradients[self._next].complete:
            self._reduce_next()

    def _reduce_next(self) -> None:
        buffer = self.gradients[self._next]
        self._next -= 1
        unit = buffer.group.unit
        if self._gathering is not None and (self._next < 0 or self.gradients[self._next].group.unit != unit):
            self._gathering.after_backward(unit)
        self._finish_in_flight()
        self._in_flight = buffer.reduce(self.divisor if self._last else None)

    def _finish_in_flight(self) -> None:
        if self._in_flight is not None:
            in_flight, self._in_flight = self._in_flight, None
            in_flight.finish()

    def _end_pass(self) -> None:
        while self._reduces and self._next >= 0:
            if self._gathering is not None:
                # In the order of a rank that came by here in its backward pass, or the two would wait for each other.
                self._gathering.take_part(self.gradients[self._next].group.unit)
            self._reduce_next()
        self._finish_in_flight()
        if self._gathering is not None:
            self._gathering.end_backward()
        self._in_pass = False
        self._passes += 1

    # -- one cycle -------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """One microbatch: its backward pass, and on the ``last`` one of a step the sum over the ranks.

        A rank whose loss reaches no parameter takes part with zeros. Without this context gradients are summed over the ranks by
        :meth:`step` (``no_shard``, ``optim``), or in every backward pass; then every rank needs one each time.

        Raises:
            RuntimeError: Inside another, or after the last one without a step.
        """
        if self._in_context:
            raise RuntimeError("microbatch: one is open already; accepted is one after the other.")
        if any(buffer.phase == "final" for buffer in self.gradients):
            raise RuntimeError(
                "microbatch: the last one of this cycle is over; accepted next is step() or zero_grad()."
            )
        self._require_whole("microbatch")
        self._in_context, self._last = True, last
        passes = self._passes
        self._failed = True
        try:
            yield
            if self._passes == passes:
                self._empty_pass()
            if last:
                self._optimizer.show_gradients()
            self._failed = False
        finally:
            self._in_context, self._last = False, None

    def _require_whole(self, name: str) -> None:
        if self._failed:
            raise RuntimeError(
                f"{name}: the microbatch before ended in an error, and its gradients are in part; accepted is zero_grad(), on every rank."
            )

    def _empty_pass(self) -> None:
        """Take part in what other ranks' passes do."""
        if self._gathering is not None and not self._gathering.forward_over:
            self._gathering.skip_forward()
        self._next = len(self.gradients) - 1
        for buffer in self.gradients:
            buffer.begin_pass()
        self._end_pass()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here are not the last of their step. Shared-out gradients are summed over the ranks all the same.

        Raises:
            RuntimeError: Inside a microbatch.
        """
        with self._mode(last=False, name="no_sync"):
            yield

    @contextmanager
    def sync(self) -> Iterator[None]:
        """The one backward pass in here is the last of its step: gradients are summed over the ranks while it goes on.

        Raises:
            RuntimeError: Inside a microbatch.
        """
        with self._mode(last=True, name="sync"):
            yield

    @contextmanager
    def _mode(self, *, last: bool, name: str) -> Iterator[None]:
        if self._in_context:
            raise RuntimeError(
                f"{name}: a microbatch, sync or no_sync is open already; accepted is one after the other."
            )
        self._in_context, self._last = True, last
        try:
            yield
        finally:
            self._in_context, self._last = False, None

    @torch.no_grad()
    def step(self, *, loss_scale: float = 1.0) -> StepReport:
        """Finish the sums over the ranks, step, and hand the weights to the ranks that keep a copy. The next cycle begins.

        Args:
            loss_scale: What the loss was multiplied by; gradients are divided by it.

        Raises:
            RuntimeError: Inside a microbatch, or a rank is gone.
        """
        if self._in_context or self._in_pass:
            raise RuntimeError("step: inside a microbatch or a backward pass; accepted is after it.")
        self._require_whole("step")
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask for it
        self.finish_gradients()
        if loss_scale != 1.0:
            for buffer in self.gradients:
                divide(buffer.own, loss_scale)
        touched, norm, skipped, nonfinite = self._agree()
        untouched = tuple(
            name for name, here in zip(self._names, touched, strict=True) if not here and name in self._trained_names
        )
        self._require_sense(norm, untouched)
        if not skipped and len(untouched) < len(self._trained_names):
            by_name = dict(zip(self._names, touched, strict=True))
            self._optimizer.step_shards(lambda s: by_name[s.placement.spec.name])
            self._hand_out()
        if self._gathering is not None:
            self._gathering.release_all()
            self._gathering.begin_cycle()
        self.zero_grad()
        return StepReport(norm, skipped, nonfinite, untouched)

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Sum over the ranks what was not yet, and divide: the main gradients are final then. ``step`` does it by itself.

        They are the gradients of this rank's parameters in ``as_optimizer()`` until then, and may be scaled.
        """
        self._next = len(self.gradients) - 1
        for buffer in reversed(self.gradients):
            if buffer.phase in ("empty", "partial") and not (self.sharding.grads and buffer.phase == "partial"):
                self._finish_in_flight()
                self._in_flight = buffer.reduce(self.divisor)
        self._finish_in_flight()
        for buffer in reversed(self.gradients):
            buffer.finalize(self.divisor)
        self._optimizer.show_gradients()

    def zero_grad(self) -> None:
        """Forget the gradients of this cycle."""
        for buffer in self.gradients:
            buffer.clear()
        self._optimizer.hide_gradients()
        self._touched = [False] * len(self._names)
        self._nonfinite.zero_()
        for _, parameter, _ in self._flags:
            parameter.grad = None
        if self._failed and self._gathering is not None:
            self._gathering.end_backward()
        self._in_flight = None
        self._in_pass = self._failed = False

    def _require_sense(self, norm: Tensor, untouched: tuple[str, ...]) -> None:
        """Refuse a step that would train nothing, or on nothing.

        Raises:
            RuntimeError: The model has other parameters than those laid out; or weights were used that had not been gathered.
        """
        if untouched:
            there = dict(self.model.named_parameters())
            ours = {name: p for name, p, _ in self._flags}
            if replaced := [name for name in untouched if there.get(name) is not ours[name]]:
                raise RuntimeError(
                    f"{', '.join(replaced[:3])}: not the model's parameters any more; it has others (load_state_dict(assign=True)?)."
                    " Make a stepper after such a change."
                )
        if self._gathering is not None and self._nan == "off" and bool(norm.isnan()):
            units = enumerate(self._gathering.units)
            idle = [repr(one.name or "the model") for n, one in units if one.trained and n not in self._gathering.ran]
            if idle:
                raise RuntimeError(
                    f"the gradient is NaN, and {', '.join(idle[:3])} had no forward pass of its own in this cycle: weights are NaN while"
                    " shared out. Call units, and the model, as modules."
                )

    def _agree(self) -> tuple[list[bool], Tensor, bool, tuple[NonFinite, ...]]:
        """Which parameters have a gradient on any rank, the gradient's norm, whether to skip the step, and why: one sum over the ranks."""
        count = len(self._names)
        numbers = torch.zeros(count + 2, dtype=torch.float64)
        numbers[:count] = torch.tensor(self._touched)
        numbers = numbers.to(self._nonfinite.device, non_blocking=True)
        mine = self._shard_communicators()
        # Of ranks that hold the same the first one counts.
        counts = all(one.rank == 0 for one in (self.inner, self.outer) if one not in mine)
        if counts:
            numbers[count] = self._sum_of_squares(torch.float32)
        if self._nan == "step":
            numbers[count + 1] = has_nonfinite(self._shards)
        for communicator in (self.inner, self.outer):
            communicator.all_reduce(numbers, "what the gradients are like").wait()
        *flags, square, nonfinite = numbers.tolist()
        touched, bad = [flag > 0 for flag in flags], nonfinite > 0
        if not _TINY < square < _HUGE:
            # Squares of float32 numbers may be too large or too small for it, where the numbers are not. All ranks see the same here.
            numbers[count] = 0.0
            if counts:
                numbers[count] = self._sum_of_squares(torch.float64)
            for communicator in (self.inner, self.outer):
                communicator.all_reduce(numbers[count : count + 1], "the gradient's norm").wait()
        norm = borders.sqrt(numbers[count])
        give_back(numbers)
        if self._nan != "param":
            return touched, norm, bad, ()
        found = find_nonfinite(self._shards, self._names, self._nonfinite, self.inner, self.outer)
        return touched, norm, bool(found), found

    def _sum_of_squares(self, precision: torch.dtype) -> Tensor:
        """Of this rank's part of the gradient: float64, 0-d. Short pieces are summed in ``precision`` at least, and added up in float64."""
        total = torch.zeros((), dtype=torch.float64, device=self._nonfinite.device)
        for shard in self._shards:
            own = shard.without_padding
            wide = torch.promote_types(own.dtype, precision)
            size = piece_size(own.device)
            for low in range(0, own.numel(), size):
                part = own[low : low + size].to(wide)
                total += torch.dot(part, part)
        return total

    def _hand_out(self, *, trained_only: bool = True) -> None:
        changed = [weights for weights in self.weights if weights.group.requires_grad or not trained_only]
        pending: list[Pending] = [weights.start_spread() for weights in changed]
        for one in pending:
            one.wait()
        for weights in changed:
            weights.stepped()

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
            device=self._nonfinite.device,
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
        busy = [
            b for b in self.gradients if b.phase == "reduced" or b.phase == "final" or (b.sharding.grads and b.arrived)
        ]
        if busy or self._in_pass:
            raise RuntimeError(
                "set_grad_comm: gradients of this cycle were sent, or lie in a buffer of the old dtype; accepted before the first backward"
                " pass after step() or zero_grad()."
            )
        changed = {}
        for label, one in self._labelled.items():
            grads = replace(one.policy.grads, comm=dtype, reduce=reduce or one.policy.grads.reduce)
            changed[label] = replace(one, policy=replace(one.policy, grads=grads))
        self._labelled = changed
        for buffer in self.gradients:
            resolved = self._resolved(buffer.group)
            buffer.wire, buffer.outer_wire = Wire.pair(resolved, self.inner.size, self.outer.size)

    @contextmanager
    def grad_comm(self, dtype: FloatDType | None, reduce: Literal["native", "fp32"] | None = None) -> Iterator[None]:
        """Send gradients in another dtype inside; see :meth:`set_grad_comm`."""
        before = [(buffer.wire, buffer.outer_wire) for buffer in self.gradients]
        labelled = self._labelled
        self.set_grad_comm(dtype, reduce)
        try:
            yield
        finally:
            self._labelled = labelled
            for buffer, wires in zip(self.gradients, before, strict=True):
                buffer.wire, buffer.outer_wire = wires

    @contextmanager
    def full_parameters(self) -> Iterator[nn.Module]:
        """The model with all of its weights on every rank, to look at, evaluate or save. What is written to them in here is kept.

        Every rank has to do it.

        Raises:
            RuntimeError: Inside a backward pass.
        """
        if self._in_pass:
            raise RuntimeError("full_parameters: inside a backward pass; accepted is outside.")
        if self._gathering is None:
            yield self.model
            return
        with self._gathering.everything():
            self.in_full_parameters = True
            try:
                yield self.model
            finally:
                self.in_full_parameters = False
            for weights in self.weights:
                weights.shard.copy_(weights.whole.view(self.inner.size, -1)[self.inner.rank])

    def close(self) -> None:
        """Give the model back, with all of its weights: no hooks, no sharing out. Every rank has to call it; nothing steps any more."""
        if self._gathering is not None:
            self._gathering.close()
        for handle in self._handles:
            handle.remove()
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
        """This rank's own weights were replaced: hand them to the ranks that keep a copy. Every rank has to call it."""
        self._hand_out(trained_only=False)
        if self._gathering is not None:
            self._gathering.release_all()
        self.zero_grad()

    def __repr__(self) -> str:
        outer = f", outer={self.sharding.outer!r} over {self.outer.size}" if self.outer.size > 1 else ""
        lines = [
            f"FlatStepper(strategy={self.sharding.strategy!r} over {self.inner.size}{outer}, {len(self.layout.units)} units,"
            f" {self.layout.numel} elements and {self.layout.padding} of padding)"
        ]
        for label, one in self._labelled.items():
            lines.append(f"  {label or 'all parameters'}: {one.transform!r}; {one.policy!r}")
        return "\n".join(lines)


def communicators(mesh: Mesh) -> tuple[Communicator, Communicator]:
    """The inner and the outer ranks of a mesh.

    Raises:
        TypeError: It is none.
        ValueError: A mesh of more than two dimensions.
    """
    if mesh is None:
        return Communicator(dist.group.WORLD if dist.is_initialized() else None), Communicator(None)
    if isinstance(mesh, dist.ProcessGroup):
        return Communicator(mesh), Communicator(None)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: got {mesh!r}; accepted are a DeviceMesh, a process group, or None.")
    if mesh.ndim == 1:
        return Communicator(mesh.get_group()), Communicator(None)
    if mesh.ndim == 2:
        return Communicator(mesh.get_group(1)), Communicator(mesh.get_group(0))
    raise ValueError(f"mesh: got {mesh.ndim} dimensions; accepted are one, or two: (outer, inner).")


def ranks_of(mesh: Mesh) -> list[int]:
    """The ranks of a mesh, numbered as in the world."""
    if isinstance(mesh, DeviceMesh):
        return [int(rank) for rank in mesh.mesh.flatten().tolist()]
    if mesh is None and not dist.is_initialized():
        return [0]
    return dist.get_process_group_ranks(dist.group.WORLD if mesh is None else mesh)


def _device_of(described: ModelLayout) -> torch.device:
    devices = {parameter.device for parameter in described.parameters}
    if len(devices) > 1:
        raise ValueError(f"model: has parameters on {', '.join(sorted(map(str, devices)))}; accepted is one device.")
    (device,) = devices
    if device.type == "meta":
        raise ValueError(
            "model: is on the meta device, without values; accepted is a model with values. (everybit_torch.plan and `everybit plan` take"
            " one on the meta device.)"
        )
    return device


def _judge(described: ModelLayout, seed: int, unsafe: Literal["refuse", "warn", "allow"]) -> None:
    """Refuse what cannot work before anything is laid out."""
    for one in described.labelled.values():
        eb.with_policy(one.transform, one.policy, seed=seed, unsafe="allow" if unsafe == "warn" else unsafe)
