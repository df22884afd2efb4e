"""The torch optimizer on one rank's part of the flat buffers: plain 1-d tensors, in whatever formats a policy names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import everybit as eb
from everybit.entries import Entry, entries
from everybit.metrics import Metrics
from everybit.optimizer import Unsafe
from everybit.policy import Policy
from everybit_torch.compiling import can_compile
from everybit_torch.hyperparameter_names import spread
from everybit_torch.joining import Joining
from everybit_torch.optimizer import TorchOptimizer
from everybit_torch.reductions import Part, find_totals
from everybit_torch.sharded.gradient_buffers import GradientBuffer
from everybit_torch.sharded.hyperparameters import hyperparameter_fields, hyperparameters, with_hyperparameters
from everybit_torch.sharded.layout import Slice
from everybit_torch.sharded.nonfinite import has_nonfinite
from everybit_torch.sharded.offload import HostCopies, on_host, step_streamed
from everybit_torch.sharded.shard_gradient import AllGradients, ShardGradient
from everybit_torch.sharded.weights import WeightBuffer
from everybit_torch.state_dicts import RoundingLoss
from everybit_torch.stepping import Group
from everybit_torch.units import Member, Unit, init_state

if TYPE_CHECKING:
    from everybit_torch.sharded.reports import StepReport


SAVING = "accepted is save_sharded(stepper, path), or, for weights alone, model.state_dict() inside `with stepper.full_parameters():`."
LOADING = "accepted is load_sharded(stepper, path), or loading before the stepper is made."
WEIGHTS = "accepted is to read or write the model's weights inside `with stepper.full_parameters():`."


def _refusal(name: str, instead: str) -> RuntimeError:
    return RuntimeError(
        f"{name}: as_optimizer() holds this rank's parts of the parameters, and its state lies with them; {instead}"
    )


@dataclass(frozen=True, slots=True)
class LabelledTransform:
    """The transform and policy that the parameters of one label are stepped with.

    Attributes:
        source: Whose reductions go over the same parameters: two labels may be two cases of one transform.
        transform: With nothing left to choose.
        policy: How their weights and state are stored.
    """

    source: str
    transform: eb.Transform[Any]
    policy: Policy


@dataclass(slots=True)
class Shard:
    """This rank's shard of one group, which it steps.

    Attributes:
        weights: Of the group.
        gradients: Of the group.
        slices: The parts of parameters that lie in it, in order.
        parameters: A 1-d parameter for each, over the memory of the weights; its gradient lies in the main gradient.
    """

    weights: WeightBuffer
    gradients: GradientBuffer
    slices: list[Slice]
    parameters: list[nn.Parameter]

    @classmethod
    def of(cls, weights: WeightBuffer, gradients: GradientBuffer, low: int, high: int) -> Shard:
        """Return the shard of elements ``low`` to ``high`` of the group's buffer."""
        slices = list(weights.group.slices(low, high))
        own = weights.own
        parameters = [nn.Parameter(own[s.offset : s.offset + s.high - s.low]) for s in slices]
        return cls(weights, gradients, slices, parameters)

    @property
    def without_padding(self) -> Tensor:
        """This rank's slice of the main gradient, without padding: 1-d, in the main dtype."""
        return self.gradients.without_padding


class _ShardGradients:
    """The part of a main gradient (``source``) that belongs to a unit; its memory may come and go."""

    def __init__(self, source: GradientBuffer, low: int, high: int) -> None:
        self.source, self._low, self._high = source, low, high

    @property
    def buffer(self) -> Tensor:
        """The gradients, while their memory is allocated."""
        return self.source.own[self._low : self._high]

    def part(self, low: int, high: int, start: int, stop: int) -> _ShardGradients:
        return _ShardGradients(self.source, self._low + start, self._low + stop)

    def collect(self, parameters: list[Tensor]) -> list[Tensor | None]:
        return [parameter.grad for parameter in parameters]


class ShardOptimizer(TorchOptimizer):
    """A :class:`~everybit_torch.TorchOptimizer` over this rank's shards; made by a stepper, see ``FlatStepper.as_optimizer``.

    There is a param group for each label, whose hyperparameters schedulers may change. Its parameters are 1-d, and hold what this rank
    has of the model's. ``step`` reduces what has not been reduced yet, steps, and hands the weights to the other ranks.

    ``torch.amp.GradScaler`` and ``torch.nn.utils.clip_grad_norm_`` work on it as on an optimizer of the whole model, if every rank calls
    them. What would read or write this rank's part alone (state dicts, ``import_fp32``, ``export_fp32``) is refused, and says what to use.
    """

    def __init__(
        self,
        labelled: Mapping[str, LabelledTransform],
        shards: Sequence[Shard],
        axis: eb.Axis,
        step: Callable[[], StepReport],
        clear: Callable[[], None],
        *,
        compile: bool,
        metrics: bool,
        seed: int,
        unsafe: Unsafe,
        offload: bool = False,
    ) -> None:
        self._copies = HostCopies() if offload else None
        self._labelled, self._shards, self._axis = dict(labelled), list(shards), axis
        self._step_all, self._clear = step, clear
        found = {label: hyperparameters(one.transform) for label, one in self._labelled.items()}
        names = dict.fromkeys(name for values in found.values() for name in values)
        groups = [
            {
                "params": [
                    (s.placement.spec.name, p)
                    for shard in self._shards
                    if shard.weights.group.label == label
                    for s, p in zip(shard.slices, shard.parameters, strict=True)
                ],
                "label": label,
                **{name: values.get(name) for name in names},
            }
            for label, values in found.items()
        ]
        absent: dict[str, Any] = dict.fromkeys(names)
        self._joining: Joining[Unit] = Joining()
        self._placeholders: list[tuple[nn.Parameter, torch.dtype]] = []
        self._all_gradients = AllGradients(axis, lambda: has_nonfinite(self._shards))
        self._parts: dict[int, tuple[Tensor, list[ShardGradient]]] = {}  # by shard: its main gradient, and parts of it
        super().__init__(
            groups,
            self._transform,
            compile=compile,
            metrics=metrics,
            seed=seed,
            unsafe=unsafe,
            label="",
            **absent,
        )
        # Buffers are laid out: nothing moves any more, and what a stepper takes it takes at once.
        self._place()
        if compile and self._shards and can_compile(device := self._shards[0].weights.own.device):
            for group in self._groups:
                group.numbers(device)

    def _transform(self, label: str, **values: Any) -> eb.Transform[Any]:
        """The factory: a label's transform, with other numbers."""
        return with_hyperparameters(self._labelled[label].transform, values)

    def factory_arguments(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the label's transform; a number that only another label's transform has is left out."""
        arguments: dict[str, Any] = {"label": group["label"]}
        for name, fields in hyperparameter_fields(self._labelled[group["label"]].transform).items():
            arguments |= spread(name, group[name], fields)
        return arguments

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is made: what a stepper shards is settled then.

        Raises:
            RuntimeError: Later.
        """
        label = param_group.get("label")
        if len(self.param_groups) >= len(self._labelled) or label not in self._labelled:
            raise RuntimeError(
                "add_param_group: a stepper's parameters are laid out when it is made; accepted is to make another."
            )
        dtypes = {s.weights.group.dtype for s in self._shards if s.weights.group.label == label}
        # torch refuses a group without parameters, which a rank without elements of this label has.
        empty = not param_group["params"]
        if empty:
            like = next(shard for shard in self._shards if shard.weights.group.label == label)
            placeholder = nn.Parameter(like.weights.own.new_empty(0))
            self._placeholders.append((placeholder, like.gradients.main.dtype))
            param_group = {**param_group, "params": [("", placeholder)]}
        super().add_param_group({**param_group, "policy": self._labelled[str(label)].policy})
        group = self._groups[-1]
        for dtype in dtypes - set(group.policies):
            group.policies[dtype] = self._labelled[str(label)].policy
        group.follow(group.arguments, self._build(group, group.arguments))

    # -- placing --------------------------------------------------------------------------------------------------------------------

    def _place(self, *, wanted: frozenset[int] = frozenset()) -> None:
        if self._units:
            return
        for group, values in zip(self._groups, self.param_groups, strict=True):
            group.known = list(values["params"])
            for shard in self._shards:
                if shard.weights.group.label == values["label"]:
                    self._place_shard(group, shard)

    def _place_shard(self, group: Any, shard: Shard) -> None:
        own = shard.weights.own
        policy = self._labelled[shard.weights.group.label].policy
        runs = contiguous_runs(shard.slices, by_index=policy.draws_bits, block=policy.block)
        for run in runs:
            low = shard.slices[run[0]].offset if run else 0
            high = shard.slices[run[-1]].offset + shard.parameters[run[-1]].numel() if run else 0
            index = shard.slices[run[0]].placement.spec.index + shard.slices[run[0]].low if run else 0
            start = 0
            run_parameters = [shard.parameters[number] for number in run]
            members = [Member(p, 0, start, start := start + p.numel()) for p in run_parameters]
            tensor = own[low:high]
            allocate = None if self._copies is None else on_host
            state = init_state(group.optimizers[tensor.dtype], [tensor], index, allocate=allocate)
            unit = Unit(
                group.number,
                [tensor],
                members,
                state,
                index,
                flat=True,
                gradients=_ShardGradients(shard.gradients, low, high),
                stored=group.optimizers[tensor.dtype].formats([tensor]),
            )
            self._units.append(unit)
            self._publish(unit)

    def forget_counts(self) -> None:
        """Counts of steps were replaced: units that are cut now stay so."""
        self._joining.forget()

    def runs(self) -> list[list[int]]:
        """Return for each shard the elements of each unit: runs, or the parts into which parameters without a gradient cut them."""
        found: dict[int, list[int]] = {id(shard.gradients): [] for shard in self._shards}
        for unit in self._units:
            assert isinstance(unit.gradients, _ShardGradients)
            found[id(unit.gradients.source)].append(unit.tensors[0].numel())
        return list(found.values())

    # -- stepping -------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Reduce, step, and hand out the weights: the stepper's ``step``, for those who know ``torch.optim``.

        Args:
            closure: Recomputes the loss and the gradients; called once, with gradients enabled.

        Returns:
            What ``closure`` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_all()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this cycle."""
        self._clear()

    def attach_gradients(self, of: Callable[[Slice], bool] = lambda s: True) -> None:
        """Make this rank's slices of the main gradients the ``.grad`` of its parameters; they are final, and may be scaled.

        Args:
            of: Which parameters get one; the others get None.
        """
        self._all_gradients.forget()
        for number, shard in enumerate(self._shards):
            known = self._parts.get(number)
            if known is None or known[0] is not shard.gradients.main:
                own = shard.gradients.own
                parts = [own[s.offset : s.offset + s.high - s.low] for s in shard.slices]
                known = shard.gradients.main, [ShardGradient.of(part, self._all_gradients) for part in parts]
                self._parts[number] = known
            for s, parameter, gradient in zip(shard.slices, shard.parameters, known[1], strict=True):
                parameter.grad = gradient if of(s) else None
        for parameter, dtype in self._placeholders:
            # So that a rank without elements of a label is asked with the others.
            none = torch.empty_like(parameter.detach(), dtype=dtype)
            parameter.grad = ShardGradient.of(none, self._all_gradients)

    @property
    def gradients_were_handed_out(self) -> bool:
        """Whether somebody ever did something with a gradient."""
        return self._all_gradients.handed_out

    def detach_gradients(self) -> None:
        """Set the ``.grad`` of all parameters to None, until the next cycle's gradients are final."""
        for shard in self._shards:
            for parameter in shard.parameters:
                parameter.grad = None
        for parameter, _ in self._placeholders:
            parameter.grad = None

    def prepare_shards(self, touched: Callable[[Slice], bool], known: Sequence[Tensor] = ()) -> Callable[[], None]:
        """Look at everything that a step needs and may refuse, and ask all ranks what it asks of them; nothing is changed yet.

        Args:
            touched: Which parameters have a gradient on any rank.
            known: Answers to the first reductions of every transform.

        Returns:
            Steps what this rank has of them.
        """
        self.attach_gradients(touched)
        self._prepare()
        self._units, made = self._joining.arrange(
            self._units, lambda unit: [grad is not None for grad in unit.collect()]
        )
        for unit in made:
            self._publish(unit)
        work = self._split_by_gradients(self._units)
        stepped = [unit for unit, grads in work if grads and grads[0] is not None]
        totals = self._reduce(stepped, known)

        def step() -> None:
            self._joining.stepped(stepped)
            measured: Metrics | None = None
            for unit in stepped:
                assert unit.gradients is not None
                group = self._groups[unit.group]
                for one in self._step_parts(group, unit, totals[self._source(unit)]):
                    measured = one if measured is None else measured + one
            if self._copies is not None:
                self._copies.synchronize()
            if self.metrics_enabled:
                here = Metrics.zero(self._units[0].tensors[0].device) if measured is None else measured
                self._metrics = eb.tree.map(self._axis.sum, here)

        return step

    def _step_parts(self, group: Group, unit: Unit, totals: Sequence[Tensor]) -> list[Metrics]:
        """Step a unit, at once or bucket by bucket if its state is offloaded, and return the metrics."""
        assert unit.gradients is not None

        def step(part: Unit, grad: Tensor) -> Metrics | None:
            return group.step(part, grad, compile=self._compiles(unit), metrics=self.metrics_enabled, totals=totals)

        gradient = unit.gradients.buffer
        copies = self._copies
        found = [step(unit, gradient)] if copies is None else step_streamed(unit, gradient, step, copies)
        return [one for one in found if one is not None]

    # -- what would be about this rank's part alone -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Refused: it would hold this rank's parts, and not say so.

        Raises:
            RuntimeError: Always.
        """
        raise _refusal("state_dict", SAVING)

    def full_state_dict(self) -> dict[str, Any]:
        """Refused: it would hold this rank's parts, and not say so.

        Raises:
            RuntimeError: Always.
        """
        raise _refusal("full_state_dict", SAVING)

    def torch_state_dict(self) -> dict[str, Any]:
        """Refused: it would hold this rank's parts, and not say so.

        Raises:
            RuntimeError: Always.
        """
        raise _refusal("torch_state_dict", SAVING)

    def export_fp32(self) -> list[list[Tensor]]:
        """Refused: it would hold this rank's parts, and not say so.

        Raises:
            RuntimeError: Always.
        """
        raise _refusal("export_fp32", WEIGHTS)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused: other ranks would not have it.

        Raises:
            RuntimeError: Always.
        """
        raise _refusal("load_state_dict", LOADING)

    def load_full_state_dict(self, state_dict: dict[str, Any]) -> dict[str, RoundingLoss]:
        """Refused: other ranks would not have it.

        Raises:
            RuntimeError: Always.
        """
        raise _refusal("load_full_state_dict", LOADING)

    def load_torch_state_dict(self, state_dict: dict[str, Any]) -> dict[str, RoundingLoss]:
        """Refused: other ranks would not have it.

        Raises:
            RuntimeError: Always.
        """
        raise _refusal("load_torch_state_dict", LOADING)

    def import_fp32(self, weights: Iterable[Iterable[Tensor]]) -> None:
        """Refused: other ranks would not have it.

        Raises:
            RuntimeError: Always.
        """
        raise _refusal("import_fp32", WEIGHTS)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied or pickled.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "as_optimizer(): cannot be copied or pickled, for its tensors are parts of the stepper's buffers; " + SAVING
        )

    # -- counts and reductions ------------------------------------------------------------------------------------------------------

    def _entries(self, unit: Unit) -> list[Entry]:
        """List the entries of each parameter of a unit."""
        assert unit.stored is not None
        return [entry for entry, _ in entries(unit.state, unit.tensors, 0, unit.stored[0])]

    def _source(self, unit: Unit) -> str:
        return self._labelled[self.param_groups[unit.group]["label"]].source

    def _reduce(self, stepped: list[Unit], known: Sequence[Tensor]) -> dict[str, list[Tensor]]:
        """Find the totals of each transform's reductions, in the order of the labels, which is the same on every rank."""
        parts: dict[str, list[Part]] = {}
        taking_part = set(map(id, stepped))
        for unit in self._units:
            optimizer = self._groups[unit.group].optimizer_of(unit)
            assert unit.gradients is not None
            grad = unit.gradients.buffer if id(unit) in taking_part else None
            parts.setdefault(self._source(unit), []).append(Part(optimizer, unit, grad))
        reads = self._groups[0].reads
        return {source: find_totals(members, self._axis, reads, known) for source, members in parts.items()}


def contiguous_runs(slices: Sequence[Slice], *, by_index: bool, block: int) -> list[list[int]]:
    """Numbers of the slices that are stepped together: all, or those whose elements have consecutive global indices; one run if none.

    Slices between which the buffer has padding are stepped apart; so is one that ends inside a ``block``, which is stepped uncompiled.

    Elements that are neighbours in a buffer but not in the model draw bits of indices that are apart. Nobody sees it where no bits
    are drawn.
    """
    runs: list[list[int]] = [[]]
    expected = end = None
    for number, s in enumerate(slices):
        apart = s.offset != end or (s.high - s.low) % block or (by_index and s.placement.spec.index + s.low != expected)
        if runs[-1] and apart:
            runs.append([])
        runs[-1].append(number)
        end = s.offset + s.high - s.low
        expected = s.placement.spec.index + s.high
    return runs
