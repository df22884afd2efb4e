"""``torch.optim.Optimizer`` over one rank's part of the flat buffers: plain 1-d tensors, stepped by an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

import everybit as eb
from everybit.policies import block_of
from everybit.stepping import Metrics, Unsafe
from everybit_torch.arguments import as_python
from everybit_torch.collectives.communicator import GroupAxis
from everybit_torch.compiled.compilation import can_compile
from everybit_torch.dtensors import Over
from everybit_torch.engine import Engine
from everybit_torch.groups import Group
from everybit_torch.hyperparameter_names import spread
from everybit_torch.members import ParameterTable
from everybit_torch.optim.states import state_replaced
from everybit_torch.sharded.gradient_buffers import GradientBuffer
from everybit_torch.sharded.hyperparameters import Factory, hyperparameter_fields, hyperparameters
from everybit_torch.sharded.labelling import LabelledTransform
from everybit_torch.sharded.layout import Slice
from everybit_torch.sharded.nonfinite import has_nonfinite
from everybit_torch.sharded.shard_gradient import AllGradients, ShardGradient
from everybit_torch.sharded.weights import WeightBuffer
from everybit_torch.stepping import PIECE
from everybit_torch.torch_internals import optimizers as torch_optimizers
from everybit_torch.units import Unit, laid_out, map_state, numbered

if TYPE_CHECKING:
    from everybit_torch.sharded.reports import StepReport


SAVING = "accepted is save_sharded(stepper, path), or, for weights alone, model.state_dict()."
LOADING = "accepted is load_sharded(stepper, path), or loading before the stepper is made."
WEIGHTS = "accepted is to read or write the model's weights, and then stepper.loaded()."


INSTEAD = {
    "state_dict": SAVING,
    "full_state_dict": SAVING,
    "torch_state_dict": SAVING,
    "export_fp32": SAVING,
    "eval_params": WEIGHTS,
    "load_state_dict": LOADING,
    "load_full_state_dict": LOADING,
    "load_torch_state_dict": LOADING,
    "import_fp32": WEIGHTS,
}
"""The methods that as_optimizer() does not support, and what is accepted instead."""


def _refusal(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name}: as_optimizer() holds this rank's parts of the parameters, and its state lies with them; {INSTEAD[name]}"
    )


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
    def of(cls, weights: WeightBuffer, gradients: GradientBuffer) -> Shard:
        """Return what this rank steps of a group's buffers."""
        slices, own = list(weights.group.slices(*weights.own_range)), weights.own
        parameters = [nn.Parameter(own[s.offset : s.offset + s.high - s.low]) for s in slices]
        return cls(weights, gradients, slices, parameters)

    @property
    def without_padding(self) -> Tensor:
        """This rank's slice of the main gradient, without padding: 1-d, in the main dtype."""
        return self.gradients.without_padding


class _ShardGradients:
    """The part of a main gradient (``source``) that belongs to a unit; its memory may come and go.

    ``shape``: of the unit's tensor, if that is a whole tensor and no run of elements.
    """

    def __init__(self, source: GradientBuffer, low: int, high: int, shape: tuple[int, ...] | None = None) -> None:
        self.source, self._low, self._high, self._shape = source, low, high, shape

    @property
    def buffer(self) -> Tensor:
        """The gradients, while their memory is allocated."""
        own = self.source.own[self._low : self._high]
        return own if self._shape is None else own.view(self._shape)

    def part(self, low: int, high: int, start: int, stop: int) -> _ShardGradients:  # noqa: ARG002  # the protocol's
        return _ShardGradients(self.source, self._low + start, self._low + stop)

    def collect(self, parameters: list[Tensor]) -> list[Tensor | None]:
        return [parameter.grad for parameter in parameters]


class ShardOptimizer(torch_optimizers.Optimizer):
    """A ``torch.optim.Optimizer`` over this rank's shards; made by a stepper, see ``FlatStepper.as_optimizer``.

    There is a param group for each label, whose hyperparameters schedulers may change. Its parameters are 1-d, and hold what this rank
    has of the model's. ``step`` reduces what has not been reduced yet, steps, and hands the weights to the other ranks.

    ``torch.amp.GradScaler`` and ``torch.nn.utils.clip_grad_norm_`` work on it as on an optimizer of the whole model, if every rank calls
    them. What would read or write this rank's part alone (state dicts, ``import_fp32``, ``export_fp32``) is refused, and says what to use.
    """

    of_shards: ClassVar[bool] = True
    """For who would add up squares of gradients: this rank has some of them only."""

    def __init__(
        self,
        labelled: Mapping[str, LabelledTransform],
        shards: Sequence[Shard],
        axis: GroupAxis,
        step: Callable[[], StepReport],
        clear: Callable[[], None],
        *,
        compile: bool,
        seed: int,
        unsafe: Unsafe,
    ) -> None:
        self.metrics_enabled = False
        self.shards = list(shards)
        self.fields = {label: hyperparameter_fields(one.transform) for label, one in labelled.items()}
        """By label, the names of the hyperparameters in its param group, and the fields of the transform that they stand for."""
        self._device = shards[0].gradients.device if shards else torch.device("cpu")
        # Data-parallel ranks that hold copies do not reduce.
        over = Over(axis, lambda _: True)
        self.engine = Engine(lambda _: over)
        self._step_all, self._clear = step, clear
        self._all_gradients = AllGradients(axis, lambda: has_nonfinite(self.shards), self._device)
        self._parts: dict[int, tuple[Tensor, list[ShardGradient]]] = {}  # by shard: its main gradient, and parts of it
        self._placeholders: list[tuple[nn.Parameter, torch.dtype]] = []
        names = dict.fromkeys(name for fields in self.fields.values() for name in fields)
        groups = []
        options: dict[str, Any] = {"seed": seed, "unsafe": unsafe, "compile": compile}
        for label, one in labelled.items():
            values = {"label": label, **dict.fromkeys(names), **hyperparameters(one.transform)}
            groups.append({"params": self._parameters(label), **values})
            self._add_group(values, one, options)
        self._is_made = False
        super().__init__(groups, dict.fromkeys((*names, "label")))
        self._is_made = True
        self.state = self.engine.states
        self.engine.table = self._parameter_table()
        self.engine.describe(self.engine.units)
        if compile and self.shards and can_compile(self._device):
            for group in self.engine.groups:
                group.numbers(self._device)

    # -- making it ------------------------------------------------------------------------------------------------------------------

    def _parameters(self, label: str) -> list[tuple[str, nn.Parameter]]:
        """This rank's parameters of a label, by name."""
        shards = [shard for shard in self.shards if shard.weights.group.label == label]
        named = [
            (s.placement.spec.name, _with_gradients_in(p, shard.gradients.main.dtype))
            for shard in shards
            for s, p in zip(shard.slices, shard.parameters, strict=True)
        ]
        if named:
            return named
        # torch refuses a group without parameters, which a rank without elements of this label has.
        main = shards[0].gradients.main.dtype
        placeholder = _with_gradients_in(nn.Parameter(shards[0].weights.own.new_empty(0)), main)
        self._placeholders.append((placeholder, main))
        return [("", placeholder)]

    def _add_group(self, values: Mapping[str, Any], one: LabelledTransform, options: Mapping[str, Any]) -> None:
        """Give the engine a label's group, with a unit for each run of its shards: nothing moves any more."""
        label, number = values["label"], len(self.engine.groups)
        shards = [shard for shard in self.shards if shard.weights.group.label == label]
        group = Group(
            number,
            Factory(one.transform),
            dict.fromkeys((shard.weights.group.dtype for shard in shards), one.policy),
            names=self.fields[label],
            owner=type(self).__name__,
            source=one.source,
            **options,
        )
        arguments = self.factory_arguments(values)
        group.follow(arguments, group.build(arguments))
        self.engine.groups.append(group)
        for shard in shards:
            optimizer = group.optimizers[shard.weights.group.dtype]
            if any(s.placement.spec.whole for s in shard.slices):
                for n, s in enumerate(shard.slices):
                    self._add_run(number, optimizer, shard, [n], s.placement.spec.stepped_as(s.low, s.high))
            else:
                for run in contiguous_runs(shard.slices, by_index=one.draws_bits, block=one.policy.block):
                    self._add_run(number, optimizer, shard, run)

    def _add_run(
        self,
        number: int,
        optimizer: eb.Optimizer[Any],
        shard: Shard,
        run: list[int],
        shape: tuple[int, ...] | None = None,
    ) -> None:
        """Step slices that lie one after the other as a vector, or a single one, of whole tensors or parts of one, in a ``shape``."""
        slices = [shard.slices[n] for n in run]
        low, block = slices[0].offset if slices else 0, block_of(optimizer.policy)
        lengths, firsts = [s.high - s.low for s in slices], [s.placement.spec.index + s.low for s in slices]
        starts, numel = laid_out(lengths, block) if shape is None else ([0], sum(lengths))
        tensor = shard.weights.own[low : low + numel]
        tensor = tensor if shape is None else tensor.view(shape)
        first = numbered(lengths, firsts, starts, numel, block, tensor.device)
        state = self.engine.init_state(optimizer, tensor, first, chunk=PIECE)
        # Counts lie where steps are computed.
        state = map_state(state, lambda x: x, lambda x: x.to(self._device))
        gradients = _ShardGradients(shard.gradients, low, low + numel, shape)
        named = [
            (s.placement.spec.name, shard.parameters[n], first) for n, s, first in zip(run, slices, firsts, strict=True)
        ]
        self.engine.add(Unit.of(number, optimizer, tensor, named, state, flat=shape is None, gradients=gradients))

    def _parameter_table(self) -> ParameterTable:
        """Number all parameters that are trained, wherever they lie."""
        specs = [place.spec for shard in self.shards for place in shard.weights.group.placements]
        sizes = [spec.numel for spec in specs]
        number_of = {spec: number for number, spec in enumerate(specs)}
        numbers = {
            id(p): number_of[s.placement.spec]
            for shard in self.shards
            for s, p in zip(shard.slices, shard.parameters, strict=True)
        }
        return ParameterTable(numbers, sizes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is made: what a stepper shards is settled then.

        Raises:
            RuntimeError: Later.
        """
        if self._is_made:
            raise RuntimeError(
                "add_param_group: a stepper's parameters are laid out when it is made; accepted is to make another."
            )
        super().add_param_group(param_group)

    def require_hyperparameters(self, number: int, group: Mapping[str, Any]) -> None:
        """Refuse values of a param group that cannot work, by a TypeError or ValueError; the present ones stay."""
        self.engine.groups[number].build(self.factory_arguments(group))

    def factory_arguments(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the label's transform; a number that only another label's transform has is left out.

        Raises:
            ValueError: A hyperparameter that stands for several numbers, and is another number of them.
        """
        arguments: dict[str, Any] = {}
        for name, fields in self.fields[group["label"]].items():
            arguments |= spread(name, as_python(name, group[name]), fields)
        return arguments

    def runs(self) -> list[list[tuple[int, ...]]]:
        """Return for each shard the shape of each unit: runs, the parts into which parameters without a gradient cut them, or tensors."""
        found: dict[int, list[tuple[int, ...]]] = {id(shard.gradients): [] for shard in self.shards}
        for unit in self.engine.units:
            assert isinstance(unit.gradients, _ShardGradients)
            found[id(unit.gradients.source)].append(tuple(unit.tensor.shape))
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

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002  # torch's signature; there is one way here
        """Discard the gradients of this cycle."""
        self._clear()

    def attach_gradients(self, of: Callable[[Slice], bool] = lambda _: True) -> None:
        """Make this rank's slices of the main gradients the ``.grad`` of its parameters; they are final, and may be scaled.

        Args:
            of: Which parameters get one; the others get None.
        """
        self._all_gradients.forget()
        for number, shard in enumerate(self.shards):
            known = self._parts.get(number)
            if known is None or known[0] is not shard.gradients.main:
                own = shard.gradients.own
                parts = [own[s.offset : s.offset + s.high - s.low] for s in shard.slices]
                known = (shard.gradients.main, [ShardGradient.of(part, self._all_gradients) for part in parts])
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
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def prepare_shards(self, touched: Callable[[Slice], bool], known: Sequence[Tensor] = ()) -> Callable[[], None]:
        """Look at everything that a step needs and may refuse, and ask all ranks what it asks of them; nothing is changed yet.

        Args:
            touched: Which parameters have a gradient on any rank.
            known: Answers to the first reductions of every transform.

        Returns:
            Steps what this rank has of them.

        Raises:
            RuntimeError: ``state`` was given another object, or a parameter was cast or moved to another device.
            TypeError: A hyperparameter that is none.
            ValueError: A hyperparameter that is out of range, or a policy in a param group.
        """
        self.attach_gradients(touched)
        if self.state is not self.engine.states:
            raise state_replaced()
        if policies := [number for number, group in enumerate(self.param_groups) if "policy" in group]:
            raise ValueError(
                f"param group {policies[0]}: policy: got one for parameters that are laid out; accepted is another stepper."
            )
        self.engine.follow([self.factory_arguments(group) for group in self.param_groups])
        self.engine.follow_parameters(lambda: [p for group in self.param_groups for p in group["params"]])
        prepared = self.engine.prepare(known)

        return lambda: self.engine.step(prepared, metrics=self.metrics_enabled)

    # -- what one sees --------------------------------------------------------------------------------------------------------------

    def metrics(self) -> Metrics:
        """Return the metrics of the last measured step, over all parameters and ranks.

        Raises:
            RuntimeError: No step was measured.
        """
        return self.engine.last_metrics()

    def bytes_table(self) -> dict[str, int]:
        """Bytes of this rank's tensors, by use; see :meth:`everybit_torch.TorchOptimizer.bytes_table`."""
        return self.engine.bytes_table()

    # -- what would be about this rank's part alone -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Refused: it would hold this rank's parts, and not say so.

        Raises:
            RuntimeError: Always.
        """
        raise _refusal("state_dict")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: ARG002  # torch's signature
        """Refused: other ranks would not have it.

        Raises:
            RuntimeError: Always.
        """
        raise _refusal("load_state_dict")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # What a TorchOptimizer has, and nobody can do rightly for one rank: not offered, and said why.
            if name in INSTEAD:
                raise AttributeError(str(_refusal(name)), name=name, obj=self)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied or pickled.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "as_optimizer(): cannot be copied or pickled, for its tensors are parts of the stepper's buffers; " + SAVING
        )


def _with_gradients_in(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    if dtype is not parameter.dtype:
        parameter.grad_dtype = dtype
    return parameter


def contiguous_runs(slices: Sequence[Slice], *, by_index: bool, block: int) -> list[list[int]]:
    """Numbers of the slices that are stepped together: all, or those whose elements have consecutive global indices; one run if none.

    Slices between which the buffer has padding are stepped apart, unless each begins with a ``block`` of its own, which has an index.

    Elements that are neighbours in a buffer but not in the model draw bits of indices that are apart. It makes no difference where no bits
    are drawn.
    """
    runs: list[list[int]] = [[]]
    expected = end = None
    for number, s in enumerate(slices):
        apart = s.offset != end or (by_index and block == 1 and s.placement.spec.index + s.low != expected)
        if runs[-1] and apart:
            runs.append([])
        runs[-1].append(number)
        end = -(-(s.offset + s.high - s.low) // block) * block
        expected = s.placement.spec.index + s.high
    return runs
