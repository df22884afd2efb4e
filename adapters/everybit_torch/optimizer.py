"""A ``torch.optim.Optimizer`` that runs an everybit transform."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, ClassVar, Literal, ParamSpec, Protocol, TypeVar, cast, get_args, overload

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

import everybit as eb
from everybit.dtypes import FLOAT_DTYPES, torch_dtype
from everybit.entries import VERSION, VERSION_KEY
from everybit.metrics import Metrics
from everybit.optimizer import Unsafe, state_bytes, with_policy
from everybit.parts import needs_whole_tensors
from everybit.policies import describe
from everybit.policy import LOW, AnyPolicy, resolve_tree
from everybit_torch import loading, state_dicts, stepping
from everybit_torch.arguments import (
    as_python,
    by_given_name,
    flags_of,
    require_factory,
    require_known_options,
    settled,
)
from everybit_torch.choosing import applied, resolve_parameters, tree_of
from everybit_torch.compiling import has_compiler
from everybit_torch.dtensors import axis_of, first_element, is_counted, is_dtensor, like, local, mesh_of
from everybit_torch.entries import UNUSED, ParameterState, States, state_replaced
from everybit_torch.following import follow, require_followable
from everybit_torch.gradients import GradientBuffer, gather
from everybit_torch.hyperparameter_names import ARGUMENTS, argument_names, core_names, spread
from everybit_torch.members import ParameterTable
from everybit_torch.migration import Migration, plan_migration, skeleton
from everybit_torch.param_groups import (
    Params,
    as_lists,
    described,
    main_gradients,
    named_tree,
    policy_for,
    require_parameters,
    tensors_of,
)
from everybit_torch.placement import Placement, Run, is_settled, moves, plan_placement
from everybit_torch.probing import Factory
from everybit_torch.reductions import Part, find_totals
from everybit_torch.state_dicts import RoundingLoss, TorchNames
from everybit_torch.stepping import Compile, Group, require_compile, write
from everybit_torch.torch_internals import optimizers as torch_optimizers
from everybit_torch.units import Unit, flatten, init_state

Layout = Literal["auto", "flat", "tree"]

FLOATS = tuple(map(torch_dtype, FLOAT_DTYPES))

P = ParamSpec("P")
R = TypeVar("R")


def outside_inference(function: Callable[P, R]) -> Callable[P, R]:
    """Run a method with ``torch.inference_mode`` off: memory that it makes would be unusable outside for good."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return run


class Release(Protocol):
    """Steps parameters during the backward pass (gradient release)."""

    def finish(self) -> None:
        """End the step: step the parameters that are left."""
        ...

    def abandon(self) -> None:
        """Drop a step that an exception interrupted; called when the gradients are cleared."""
        ...


class TorchOptimizer(torch_optimizers.Optimizer):
    """Run the transform that ``factory`` makes on a model's parameters, stored as ``policy`` says.

    Everything written for ``torch.optim`` works on it: param groups, learning-rate schedulers, closures, hooks, ``state_dict``.
    Hyperparameters go by torch's names: ``lr`` is the factory's ``learning_rate``, ``betas`` its ``b1`` and ``b2``; all others keep
    theirs. They live in ``param_groups``, may be changed there at any time, and changing one never recompiles.

    Args:
        params: Parameters, named parameters, or dicts of a param group. A group may have a ``policy`` of its own.
        factory: From hyperparameters to a transform, such as ``everybit.adamw``, or any function that composes one.
        policy: How parameters and state are stored. None: as the model is, for float32 and float64 models; a 16-bit model needs a choice.
        layout: ``"flat"``: parameters become views of one buffer per group, dtype and device, which is fast. ``"tree"``: parameters
            stay where they are. ``"auto"``: flat where the transform works element by element.
        flat_gradients: From the first step on, autograd accumulates the gradients of flat parameters in one buffer, and a step gathers
            nothing; they stay allocated, and :meth:`zero_grad` fills them with zeros.
        compile: Compile the step with ``torch.compile``; the results are the same bits. ``"auto"``: for param groups of at least
            ``everybit_torch.stepping.WORTH_COMPILING`` elements of one dtype, where there is a compiler; the first step then takes some
            seconds longer, and says so.
        metrics: Measure every step; see :meth:`metrics`. ``metrics_enabled`` may be switched between steps.
        seed: Of stochastic rounding.
        unsafe: See :func:`everybit.with_policy`.
        hyperparameters: Defaults for the param groups.

    Raises:
        TypeError: A parameter that is not a real floating-point tensor.
        ValueError: A hyperparameter, layout or policy that cannot work; the message names it.

    Example:
        >>> import torch, everybit as eb
        >>> from everybit_torch import TorchOptimizer
        >>> model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
        >>> optimizer = TorchOptimizer(model.parameters(), eb.lion, lr=1e-4, policy=eb.policies.KAHAN_BF16)
    """

    torch_names: ClassVar[TorchNames | None] = None
    # What torch's argument `decoupled_weight_decay` has to be, where torch's optimizer of this name has it.
    _decoupled: ClassVar[bool | None] = None
    _step_supports_amp_scaling: bool  # torch's: whether a GradScaler leaves everything to `step`

    def __init__(
        self,
        params: Params,
        factory: Factory,
        *,
        policy: AnyPolicy | None = None,
        layout: Layout = "auto",
        flat_gradients: bool = False,
        compile: Compile = "auto",
        metrics: bool = False,
        seed: int = 0,
        unsafe: Unsafe = "refuse",
        **hyperparameters: Any,
    ) -> None:
        if layout not in get_args(Layout):
            raise ValueError(f"layout: got {layout!r}; accepted are 'auto', 'flat', 'tree'.")
        require_compile(compile)
        if flat_gradients and layout == "tree":
            raise ValueError("flat_gradients: got True with layout='tree'; accepted with it are 'auto' and 'flat'.")
        require_factory(factory)
        hyperparameters = settled(type(self).__name__, factory, hyperparameters, self._decoupled)
        self._factory = factory
        # By the user's name, without the keys that torch adds to `defaults`, the factory's arguments that are meant.
        known = argument_names(factory)
        self._names = {name: core_names(name, ARGUMENTS, known) for name in hyperparameters}
        self._flags = flags_of(factory)
        self._policy = policy
        self._layout = layout
        self._flat_gradients = flat_gradients
        self._compile = compile
        self._seed = seed
        self._unsafe = unsafe
        self._groups: list[Group] = []
        self._units: list[Unit] = []
        self._counted: dict[torch.dtype, int] = {}
        self._first_elements: dict[Tensor, int] = {}  # of first elements, by parameter, where a model was named
        self._table: ParameterTable | None = None  # made when a step first reduces
        self._had_gradients = False
        self._release: Release | None = None  # set by enable_gradient_release
        self._metrics: Metrics | None = None
        self.metrics_enabled = metrics
        # All of them, before the first group is added: a policy for 16-bit weights keeps float32 parameters beside 16-bit ones as they are.
        params = as_lists(params)
        self._is_mixed = any(p.dtype in LOW for p in tensors_of(params))
        super().__init__(cast(Any, params), hyperparameters)
        self.state = self._states = States()

    # -- groups ---------------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; it may have a ``policy`` of its own. Possible at any time.

        Raises:
            TypeError: A parameter that is not a real floating-point tensor.
            ValueError: A hyperparameter or policy that cannot work.
        """
        param_group = dict(param_group)
        policy = param_group.pop("policy", self._policy)
        given = param_group["params"]
        if isinstance(given, set):
            raise TypeError("params: got a set, whose order differs between runs; accepted are lists and generators.")
        given = [given] if isinstance(given, Tensor) else list(given)
        param_group["params"] = given
        number = len(self.param_groups)
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in given]
        require_parameters(number, tensors)
        kind = type(self).__name__
        options = {key: value for key, value in param_group.items() if key not in ("params", "param_names")}
        require_known_options(kind, self._names, options, self._decoupled)
        param_group |= {name: as_python(name, options[name]) for name in self._names if name in options}
        mixed = self._is_mixed or any(tensor.dtype in LOW for tensor in tensors)
        dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
        policies = {dtype: policy_for(policy, dtype, number, mixed=mixed) for dtype in dtypes}
        group = Group(number, self._factory, policies, self._seed, announce=self._compile == "auto")
        arguments = self.factory_arguments({**self.defaults, **param_group})
        group.follow(arguments, self._build(group, arguments))
        self._require_layout(group.optimizers)
        main_dtypes = main_gradients(number, named_tree(given), policies)
        super().add_param_group(param_group)
        self._is_mixed = mixed
        self._groups.append(group)
        # Now, not at the first step: the first backward pass comes before it.
        for tensor, dtype in main_dtypes:
            tensor.grad_dtype = dtype

    def factory_arguments(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The factory's keyword arguments for a param group: torch's names become the core's.

        Raises:
            TypeError: A flag that is neither True nor False.
            ValueError: A pair of another length, or a number that is not finite.
        """
        arguments: dict[str, Any] = {}
        for name, targets in self._names.items():
            value = as_python(name, group[name])
            if name in self._flags and not isinstance(value, bool):
                raise TypeError(f"{type(self).__name__}: {name}: got {value!r}; accepted are True and False.")
            arguments |= spread(name, value, targets)
        return arguments

    def _build(self, group: Group, arguments: dict[str, Any]) -> dict[torch.dtype, eb.Optimizer[Any]]:
        """The group's optimizers, by dtype of the parameters; validates hyperparameters and policies."""
        # Judged anew whenever hyperparameters change; but of what was accepted with a warning nobody is warned twice.
        unsafe = "allow" if self._unsafe == "warn" and group.optimizers else self._unsafe
        try:
            transform = self._factory(**arguments)
            return {
                dtype: with_policy(transform, policy, seed=self._seed, unsafe=unsafe)
                for dtype, policy in group.policies.items()
            }
        except (TypeError, ValueError) as error:
            message = by_given_name(str(error), self._names, arguments)
            raise type(error)(f"{type(self).__name__}, param group {group.number}: {message}") from None

    def _require_layout(self, optimizers: Mapping[torch.dtype, eb.Optimizer[Any]]) -> None:
        if self._layout == "flat" and any(needs_whole_tensors(one.transform) for one in optimizers.values()):
            raise ValueError(
                "layout: got 'flat' for a transform that must see whole tensors (its cut is 'tensor'); accepted are 'auto' and 'tree'."
            )

    def _require_cuts(self, optimizers: Sequence[dict[torch.dtype, eb.Optimizer[Any]]]) -> None:
        """Refuse optimizers that have to see whole tensors, where parameters were placed for others, and the other way round.

        Raises:
            ValueError: The message says what changed.
        """
        for group, new in zip(self._groups, optimizers, strict=True):
            for dtype, old in group.optimizers.items():
                before, after = needs_whole_tensors(old.transform), needs_whole_tensors(new[dtype].transform)
                if group.known and before != after:
                    raise ValueError(
                        f"{type(self).__name__}, param group {group.number}: its transform would {'have' if after else 'not have'} to see"
                        " whole tensors, and its parameters were placed at the first step for one that"
                        f" {'has' if before else 'has not'}; make a new optimizer."
                    )
            self._require_layout(new)

    def _settle_policies(self) -> None:
        """Carry out what was written to ``param_groups[i]["policy"]``, which is possible until parameters are placed.

        Raises:
            ValueError: They are, under another policy.
        """
        # Not strict: groups that somebody put into the list by hand are told of where they would be stepped.
        for number, (group, values) in enumerate(zip(self._groups, self.param_groups, strict=False)):
            if "policy" not in values:
                continue
            policy = values["policy"]
            if group.known:
                if not self._is_in_force(group, policy):
                    now = described(group.policies)
                    raise ValueError(
                        f"param group {number}: policy: got {describe(policy)}, and since the first step its parameters and state are"
                        f" stored under {now}; accepted is a change before it. To carry the run over delete the entry, make an optimizer"
                        " with the new policy, and give the old one's full_state_dict() to its load_full_state_dict()."
                    )
                del values["policy"]
                continue
            policies = {dtype: policy_for(policy, dtype, number, mixed=self._is_mixed) for dtype in group.policies}
            new = Group(number, self._factory, policies, self._seed, announce=self._compile == "auto")
            arguments = self.factory_arguments(values)
            new.follow(arguments, self._build(new, arguments))
            self._require_layout(new.optimizers)
            wide = dict(main_gradients(number, tree_of(values), policies))
            for tensor, _ in main_gradients(number, tree_of(values), group.policies):
                if tensor not in wide:
                    wide[tensor] = tensor.dtype
            for tensor, dtype in wide.items():
                tensor.grad_dtype = dtype
            self._groups[number] = new
            del values["policy"]

    def _is_in_force(self, group: Group, policy: AnyPolicy | None) -> bool:
        return all(
            one == policy_for(policy, dtype, group.number, mixed=self._is_mixed)
            for dtype, one in group.policies.items()
        )

    # -- placing parameters ---------------------------------------------------------------------------------------------------

    def _plan(
        self, wanted: frozenset[int], optimizers: Sequence[dict[torch.dtype, eb.Optimizer[Any]]] | None = None
    ) -> Placement | None:
        """Plan the placement of parameters, without changing anything; None if there is nothing to place.

        Args:
            wanted: Parameters, by id, that get state although they are frozen.
            optimizers: For each group, by dtype; None: its present ones.
        """
        if type(self)._place is not TorchOptimizer._place:
            # A subclass whose parameters lie in memory of its own.
            self._place(wanted=wanted)
            return None
        params = [values["params"] for values in self.param_groups]
        if is_settled(self._groups, params, wanted):
            return None
        present = [group.optimizers for group in self._groups]
        return plan_placement(
            self._groups,
            present if optimizers is None else optimizers,
            self.param_groups,
            self._counted,
            self._first_elements,
            wanted,
            allow_flat=self._layout != "tree",
        )

    def _place(self, *, wanted: frozenset[int] = frozenset()) -> None:
        """Give every parameter that has none a unit: at the first step, so that a model may still be moved or swapped before it.

        A frozen parameter has no unit and no state until it is unfrozen, or is ``wanted`` (by id); one of a lazy module not until it has
        a shape.

        Raises:
            RuntimeError: Parameters were cast since the optimizer was made, or taken out of a param group since the first step.
            ValueError: Parameters that cannot be stepped where they lie.
        """
        plan = self._plan(wanted)
        if plan is not None:
            self._carry_out(plan)

    def _carry_out(self, plan: Placement) -> None:
        self._counted = plan.counted
        self._table = None
        for group, known, waiting, lazy in zip(self._groups, plan.known, plan.waiting, plan.uninitialized, strict=True):
            group.known, group.waiting, group.uninitialized = known, waiting, lazy
        for run in plan.runs:
            self._place_run(run)
        for group in self._groups:
            group.elements = Counter()
        for unit in self._units:
            self._groups[unit.group].elements[unit.tensors[0].dtype] += unit.tensors[0].numel()

    def _is_sharded(self) -> bool:
        """Whether any parameter is a part of one, by FSDP2."""
        return any(is_dtensor(parameter) for values in self.param_groups for parameter in values["params"])

    def _place_run(self, run: Run) -> None:
        optimizer, first = run.optimizer, run.first
        gradients = None
        if run.flat:
            if self._flat_gradients:
                (one,) = resolve_tree(optimizer.policy, [run.parameters[0].detach()])
                gradients = GradientBuffer(run.parameters, torch_dtype(one.grads_main))
            tensors = [flatten(run.parameters)]
        else:
            tensors = run.tensors(sharded=self._is_sharded())
            if optimizer.draws_bits:
                first += first_element(run.parameters[0])
        state = init_state(optimizer, tensors, first)
        unit = Unit(
            run.group.number,
            tensors,
            run.members(),
            state,
            first,
            flat=run.flat,
            gradients=gradients,
            decision=run.decision,
            stored=optimizer.formats(tensors),
        )
        self._units.append(unit)
        self._publish(unit)

    def _number_elements(self, model: torch.nn.Module) -> None:
        """Number elements through all parameters of a model, as a ``FlatStepper`` does, whichever of them are this optimizer's.

        By its number an element draws its random bits: a run goes on with the same ones in another front end.
        """
        counted: dict[torch.dtype, int] = {}
        numbers: dict[Tensor, int] = {}
        for parameter in model.parameters():
            numbers[parameter] = counted.get(parameter.dtype, 0)
            counted[parameter.dtype] = numbers[parameter] + parameter.numel()
        # Units, the numbers of their parameters' first elements, and where they are cut.
        found: list[tuple[Unit, list[int], list[int]]] = []
        for unit in self._units:
            optimizer = self._groups[unit.group].optimizer_of(unit)
            if not optimizer.draws_bits or any(p not in numbers for p in unit.parameters):
                found.append((unit, [], []))
                continue
            sizes = [local(p).numel() for p in unit.parameters]
            firsts = [numbers[p] + first_element(p) for p in unit.parameters]
            gaps = [i for i in range(1, len(firsts)) if firsts[i] != firsts[i - 1] + sizes[i - 1]]
            found.append((unit, firsts, gaps))
        self._first_elements |= numbers
        for group in self._groups:
            group.waiting = [
                (parameter, self._first_elements.get(parameter, first)) for parameter, first in group.waiting
            ]
        self._units = []
        for unit, firsts, gaps in found:
            parts = list(unit.split(gaps)) if gaps else [unit]
            self._units += parts
            if not firsts:
                continue
            for part, at in zip(parts, [0, *gaps], strict=True):
                part.first = firsts[at]
                part.first_tensor.fill_(part.first)
                self._publish(part)

    def _publish(self, unit: Unit) -> None:
        """Show each parameter's share of the unit's state in ``self.state``, as views; what others keep there stays."""
        torch_names = self.torch_names.slots if self.torch_names is not None else {}
        for member in unit.members:
            self.state[member.parameter].publish(unit.published(member), torch_names)

    def _follow_hyperparameters(self) -> None:
        """Step with what the param groups hold from here on; state that it needs begins, and what it does not need is put aside.

        Raises:
            TypeError: A hyperparameter that is none.
            ValueError: A hyperparameter out of range, or one by which it cannot be told which state is carried over. Nothing is changed.
        """
        changes: list[tuple[Group, dict[str, Any], dict[torch.dtype, eb.Optimizer[Any]]]] = []
        for group, values in zip(self._groups, self.param_groups, strict=True):
            arguments = self.factory_arguments(values)
            if arguments != group.arguments:
                changes.append((group, arguments, self._build(group, arguments)))
        plans = [plan for change in changes for plan in self._plan_migrations(*change)]
        for group, arguments, optimizers in changes:
            group.follow(arguments, optimizers)
        for unit, plan in plans:
            self._migrate(unit, plan)

    def _plan_migrations(
        self, group: Group, arguments: dict[str, Any], optimizers: dict[torch.dtype, eb.Optimizer[Any]]
    ) -> list[tuple[Unit, Migration]]:
        """Plan the state of a group's units for other hyperparameters.

        Raises:
            ValueError: It cannot be told.
        """
        changed = {
            dtype for dtype, old in group.optimizers.items()
            if skeleton(old.transform) != skeleton(optimizers[dtype].transform)
        }  # fmt: skip
        if not changed:
            return []
        self._require_cuts([optimizers if one is group else one.optimizers for one in self._groups])
        plans: list[tuple[Unit, Migration]] = []
        for unit in self._units:
            dtype = unit.tensors[0].dtype
            if unit.group != group.number or dtype not in changed:
                continue
            try:
                plan = plan_migration(unit, applied(optimizers[dtype], unit.decision))
                self._require_can_begin(unit, plan.begun, arguments)
            except ValueError as error:
                before = group.arguments
                names = [
                    name for name, targets in self._names.items()
                    if any(arguments[one] is not before[one] for one in targets if one in before)
                ]  # fmt: skip
                raise ValueError(f"param group {group.number}: {', '.join(names)}: {error}") from None
            plans.append((unit, plan))
        return plans

    def _require_can_begin(self, unit: Unit, begun: list[str], arguments: Mapping[str, Any]) -> None:
        """Refuse slots that cannot begin after other steps; for subclasses.

        Raises:
            ValueError: One cannot.
        """

    def _migrate(self, unit: Unit, plan: Migration) -> None:
        before = [self.state[member.parameter].own for member in unit.members]
        unit.state = plan.state
        self._publish(unit)
        torch_names = self.torch_names.slots if self.torch_names is not None else {}
        for member, own in zip(unit.members, before, strict=True):
            self.state[member.parameter].put_aside(own, plan.ended)
            self.state[member.parameter].take_up(plan.begun, torch_names)

    def _require_followable(self) -> None:
        """Refuse parameters that were given something else than other memory since they were placed.

        Raises:
            RuntimeError: The message names the group and says what happened; nothing is changed.
        """
        require_followable(self._units, self._groups, self._parameters)

    def _follow(self) -> None:
        """Re-attach parameters whose storage was replaced since the last step; refuse those that were moved or cast.

        Raises:
            RuntimeError: As :meth:`_require_followable`.
        """
        if all(unit.in_place() for unit in self._units):
            return
        self._require_followable()
        self._units, changed = follow(self._units, self._parameters())
        for unit in changed:
            self._publish(unit)

    # -- stepping -------------------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @outside_inference
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: Recomputes the loss and the gradients; called once, with gradients enabled.

        Returns:
            What ``closure`` returned.

        Raises:
            TypeError: A sparse gradient.
            ValueError: A hyperparameter that has become impossible.
            RuntimeError: A parameter that was moved since the first step.
        """
        loss = None
        if closure is not None:
            if self._release is not None:
                raise RuntimeError(
                    "gradient release: step(closure) would run the backward pass again; accepted is step()."
                )
            with torch.enable_grad():
                loss = closure()
        if self._release is not None:
            self._release.finish()
            return loss
        self._prepare()
        work = self._split_by_gradients(self._units)
        self._units = [unit for unit, _ in work]
        self._require_some_gradient(work)
        reducing = [(unit, grads) for unit, grads in work if self._reduces(unit)]
        # A transform that reduces looks at all gradients before any is used.
        gathered = {
            id(unit): _gathered(unit, cast(list[Tensor], grads)) for unit, grads in reducing if grads[0] is not None
        }
        totals = self._find_totals([unit for unit, _ in reducing], gathered)
        total: Metrics | None = None
        for unit, grads in work:
            measured = self._step_unit(unit, grads, totals, gathered.pop(id(unit), None))
            if measured is not None and self._counts(unit):
                total = measured if total is None else total + eb.tree.map(to_device_of, measured, total)
        if self.metrics_enabled:
            self._metrics = self._over_ranks(total)
        return loss

    def _prepare(self) -> None:
        """Everything in its place, and present hyperparameters checked and where compiled code reads them."""
        if self.state is not self._states:
            self._take_states()
        self._settle_policies()
        self._follow_hyperparameters()
        self._place()
        self._follow()

    def _take_states(self) -> None:
        """Take over what was assigned to ``self.state``, which is possible until parameters are placed.

        Raises:
            RuntimeError: They are.
        """
        if self._units:
            raise state_replaced()
        self.state = self._states = States(None, self.state)

    def _split_by_gradients(self, units: list[Unit]) -> list[tuple[Unit, list[Tensor | None]]]:
        """The units with their members' gradients, cut where parameters with a gradient meet such without."""
        collected = [unit.collect() for unit in units]
        for unit, grads in zip(units, collected, strict=True):
            # Those that lie in a buffer are dense.
            if unit.gradients is None and any(
                layout is not torch.strided for layout in {grad.layout for grad in grads if grad is not None}
            ):
                self._refuse_sparse()
        work: list[tuple[Unit, list[Tensor | None]]] = []
        for unit, grads in zip(units, collected, strict=True):
            present = [grad is not None for grad in grads]
            if not unit.flat or all(present) or not any(present):
                work.append((unit, grads))
                continue
            start = 0
            for part in unit.split([i for i in range(1, len(present)) if present[i] != present[i - 1]]):
                self._publish(part)
                work.append((part, grads[start : start + len(part.members)]))
                start += len(part.members)
        return work

    def _require_some_gradient(self, work: list[tuple[Unit, list[Tensor | None]]]) -> None:
        """Warn where gradients stop: the model then trains on with parameters that are not the optimizer's."""
        if any(grad is not None for _, grads in work for grad in grads):
            self._had_gradients = True
        elif self._had_gradients:
            self._had_gradients = False
            warnings.warn(
                f"{type(self).__name__}.step(): no parameter has a gradient any more, and nothing was stepped. Parameters that a model was"
                " given since (load_state_dict(assign=True), or assigning a new Parameter) are not the optimizer's.",
                stacklevel=6,  # past torch's wrappers and ours, at the line that called step
            )

    def _refuse_sparse(self) -> None:
        for number, group in enumerate(self.param_groups):
            for index, parameter in enumerate(group["params"]):
                grad = parameter.grad
                if grad is not None and grad.layout is not torch.strided:
                    raise TypeError(
                        f"param group {number}, parameter {index}: got a {grad.layout} gradient; accepted are dense gradients"
                        " (torch.nn.Embedding(sparse=False), or torch.optim.SparseAdam for sparse ones)."
                    )

    def _compiles(self, unit: Unit) -> bool:
        """Whether the step of a unit is compiled; of those of a group with one dtype all are, or none."""
        if self._compile != "auto":
            return self._compile
        if torch.compiler.is_compiling():
            return False
        group = self._groups[unit.group]
        return group.elements.get(unit.tensors[0].dtype, 0) >= stepping.WORTH_COMPILING and has_compiler(
            unit.tensors[0].device
        )

    def _reduces(self, unit: Unit) -> bool:
        return self._groups[unit.group].optimizer_of(unit).transform.reduces

    def _find_totals(self, reducing: list[Unit], gathered: Mapping[int, Tensor]) -> list[Tensor]:
        """Find the totals of the transform's reductions over all units, on all ranks if parameters are sharded over them.

        Args:
            reducing: The units whose transform reduces.
            gathered: By id of the unit, the gradients of those that have some.
        """
        if not reducing:
            return []
        mesh = mesh_of([parameter for unit in reducing for parameter in unit.parameters])
        if mesh is None and not gathered:
            return []
        self._describe(reducing)
        parts = [
            Part(
                self._groups[unit.group].optimizer_of(unit),
                unit,
                gathered.get(id(unit)),
                mesh is None or is_counted(unit.parameters[0], mesh),
            )
            for unit in reducing
        ]
        return find_totals(parts, eb.Local if mesh is None else axis_of(mesh), self._groups[0].reads)

    def _describe(self, units: list[Unit]) -> None:
        """Let those units say which parameters their elements belong to whose transform asks for it."""
        for unit in units:
            if self._groups[unit.group].optimizer_of(unit).per_tensor:
                if self._table is None:
                    self._table = self._parameter_table()
                self._table.describe(unit)

    def _parameter_table(self) -> ParameterTable:
        parameters = list({id(p): p for p in self._parameters()}.values())
        # Those of lazy modules without a shape are numbered; they have no gradient.
        sizes = [0 if is_lazy(p) else p.numel() for p in parameters]
        return ParameterTable({id(p): number for number, p in enumerate(parameters)}, sizes)

    def _counts(self, unit: Unit) -> bool:
        """Whether what this rank measures of a unit is not another rank's to count."""
        mesh = mesh_of(unit.parameters)
        return mesh is None or is_counted(unit.parameters[0], mesh)

    def _over_ranks(self, measured: Metrics | None) -> Metrics | None:
        """Sum metrics over the ranks, where parameters are sharded over them."""
        parameters = [p for unit in self._units for p in unit.parameters]
        mesh = mesh_of(parameters) if parameters else None
        if mesh is None:
            return measured
        here = Metrics.zero(local(parameters[0]).device) if measured is None else measured
        return eb.tree.map(axis_of(mesh).sum, here)

    def _step_unit(
        self,
        unit: Unit,
        grads: list[Tensor | None],
        totals: Sequence[Tensor] = (),
        gathered: Tensor | None = None,
    ) -> Metrics | None:
        """Step a unit whose members have gradients, all or none."""
        if grads[0] is None:
            return None
        measured = self._groups[unit.group].step(
            unit,
            _gathered(unit, cast(list[Tensor], grads)) if gathered is None else gathered,
            compile=self._compiles(unit),
            metrics=self.metrics_enabled,
            totals=totals if totals and self._reduces(unit) else (),
        )
        if unit.flat:
            # Autograd does not see that writing to the buffer changes the parameters; a graph that needs the old values must not run.
            torch.autograd.graph.increment_version(unit.parameters)
        return measured

    @outside_inference
    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as torch does; those in a flat buffer are zeroed where they are.

        Args:
            set_to_none: A parameter that receives no gradient after this is skipped. False: it is stepped with zeros.
        """
        if self._release is not None:
            self._release.abandon()
        if not self._flat_gradients:
            super().zero_grad(set_to_none)
            return
        cleared: set[int] = set()
        for unit in self._units:
            if isinstance(unit.gradients, GradientBuffer):
                unit.gradients.clear(unit.parameters, absent=set_to_none)
                cleared.update(map(id, unit.parameters))
        for parameter in chain.from_iterable(group["params"] for group in self.param_groups):
            if id(parameter) not in cleared and parameter.grad is not None:
                if set_to_none:
                    parameter.grad = None
                else:
                    parameter.grad = parameter.grad.detach().zero_()

    # -- what one sees --------------------------------------------------------------------------------------------------------

    def metrics(self) -> Metrics:
        """Return the metrics of the last measured step, over all parameters.

        Raises:
            RuntimeError: No step was measured.
        """
        if self._metrics is None:
            raise RuntimeError(
                "metrics: no step was measured yet; pass metrics=True, or set metrics_enabled = True before a step."
            )
        return self._metrics

    @outside_inference
    def bytes_table(self) -> dict[str, int]:
        """Bytes of the tensors that are allocated now, by use; keys as in :meth:`everybit.Policy.bytes_table`, and ``counters``.

        ``unused`` is what the present hyperparameters do not need and is kept for when they do. Gradients that are not there at the moment
        are counted as they will be. What others keep in ``state`` is not counted.
        """
        self._settle_policies()
        self._place()
        frozen = [parameter for group in self._groups for parameter, _ in group.waiting]
        table = {"parameter": sum(local(parameter).nbytes for parameter in frozen), "compensation": 0, "gradient": 0}
        for unit in self._units:
            table["parameter"] += sum(tensor.nbytes for tensor in unit.tensors)
            table["compensation"] += sum(leaf.nbytes for leaf in eb.tree.leaves(unit.state.extra))
            resolved = resolve_tree(self._groups[unit.group].optimizer_of(unit).policy, unit.tensors)
            for member in unit.members:
                grad = member.parameter.grad
                main = torch_dtype(resolved[member.position].grads_main)
                here = local(member.parameter)
                table["gradient"] += here.numel() * main.itemsize if grad is None else local(grad).nbytes
            for name, size in state_bytes(unit.state.inner, counters=unit.state.step.nbytes).items():
                table[name] = table.get(name, 0) + size
        unused = [
            local(value).nbytes
            for entries in self.state.values() if isinstance(entries, ParameterState)
            for name, value in entries.kept.items()
            if isinstance(name, str) and name.startswith(UNUSED) and isinstance(value, Tensor)
        ]  # fmt: skip
        if unused:
            table["unused"] = sum(unused)
        if not table["compensation"]:
            del table["compensation"]
        return table

    @outside_inference
    def export_fp32(self) -> list[list[Tensor]]:
        """Every parameter with all the precision that it and its state hold together, in float32: one list per param group."""
        return self._exported(eb.Optimizer.export_fp32)

    @outside_inference
    @torch.no_grad()
    def eval_params(self) -> list[list[Tensor]]:
        """The weights for evaluation, in float32, of a transform that has others than those it trains; as :meth:`export_fp32`."""
        return self._exported(eb.Optimizer.eval_params)

    def _exported(self, export: Callable[..., list[Tensor]]) -> list[list[Tensor]]:
        self._place()
        self._follow()
        exported = {
            id(p): p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for group in self._groups
            for p, _ in group.waiting
        }
        for unit in self._units:
            optimizer = self._groups[unit.group].optimizer_of(unit)
            values = export(optimizer, unit.tensors, unit.state)
            for member in unit.members:
                value = values[member.position]
                if unit.tensors[member.position].ndim == 1:
                    value = value[member.start : member.stop]
                value = value.reshape(local(member.parameter).shape)
                exported[id(member.parameter)] = like(member.parameter, value)
        return [[exported[id(p)] for p in group["params"]] for group in self.param_groups]

    @outside_inference
    @torch.no_grad()
    def import_fp32(self, weights: Iterable[Iterable[Tensor]]) -> None:
        """Store full-precision weights, as :meth:`export_fp32` gives them: the model's tensors are rounded, residuals hold the rest.

        Args:
            weights: For each param group, a tensor for each parameter: of its shape, and of a dtype that the policy's compute dtype holds
                exactly.

        Raises:
            ValueError: Numbers, shapes, dtypes or layouts of weights differ from what is accepted; nothing is changed.
        """
        given = self._judge_weights(weights)
        self._place()
        self._follow()
        for unit in self._units:
            optimizer = self._groups[unit.group].optimizer_of(unit)
            wide = []
            for position, tensor in enumerate(unit.tensors):
                pieces = [
                    local(given[id(m.parameter)]).to(tensor.device).reshape(-1)
                    for m in unit.members
                    if m.position == position
                ]
                wide.append(torch.cat(pieces).view(tensor.shape))
            params, state = optimizer.import_fp32(wide, unit.tensors, unit.state)
            write((unit.tensors, unit.state), (params, state))
        for group in self._groups:
            for parameter, _ in group.waiting:
                parameter.copy_(given[id(parameter)])

    def _judge_weights(self, weights: Iterable[Iterable[Tensor]]) -> dict[int, Tensor]:
        """Full-precision weights by id of their parameter.

        Raises:
            ValueError: They do not fit; nothing is changed.
            RuntimeError: Parameters that cannot be placed.
        """
        expected = [list(group["params"]) for group in self.param_groups]
        accepted = f"accepted are {list(map(len, expected))}, each of its parameter's shape"
        given = [
            _listed(f"weights[{number}]", group, accepted)
            for number, group in enumerate(_listed("weights", weights, accepted))
        ]
        if list(map(len, given)) != list(map(len, expected)):
            raise ValueError(f"weights: got {list(map(len, given))} tensors by param group; {accepted}.")
        dtypes = self.export_dtypes()
        found: dict[int, Tensor] = {}
        for number, (parameters, values) in enumerate(zip(expected, given, strict=True)):
            for index, (parameter, value) in enumerate(zip(parameters, values, strict=True)):
                wide = dtypes[id(parameter)]
                held = [one for one in FLOATS if torch.promote_types(one, wide) is wide]
                loading.require_tensor(
                    f"weights[{number}][{index}]", value, held, tuple(parameter.shape), parameter,
                    accepted=f"{wide}, or what it holds exactly, of shape {tuple(parameter.shape)}.",
                )  # fmt: skip
                found[id(parameter)] = value
        self._settle_policies()
        self._plan(frozenset())
        self._require_followable()
        return found

    def export_dtypes(self) -> dict[int, torch.dtype]:
        """Return, by id of the parameter, the dtype in which :meth:`export_fp32` gives its weights."""
        dtypes: dict[int, torch.dtype] = {}
        placed = {id(p) for unit in self._units for p in unit.parameters}
        for group, values in zip(self._groups, self.param_groups, strict=True):
            policies = {dtype: optimizer.policy for dtype, optimizer in group.optimizers.items()}
            known = {key: p for key, p in tree_of(values).items() if not is_lazy(p) and p.dtype in policies}
            resolved = resolve_parameters(policies, known)
            for parameter in values["params"]:
                wide = torch.promote_types(parameter.dtype, torch.float32)
                if (one := resolved.get(id(parameter))) and (id(parameter) in placed or moves(parameter)):
                    wide = torch_dtype(one.policy.compute)
                dtypes[id(parameter)] = wide
        return dtypes

    def __repr__(self) -> str:
        lines = [
            super().__repr__(),
            f"layout={self._layout!r}, flat_gradients={self._flat_gradients}, compile={self._compile!r}",
        ]
        for group, values in zip(self._groups, self.param_groups, strict=False):
            units = [unit for unit in self._units if unit.group == group.number]
            flat = [unit for unit in units if unit.flat]
            elsewhere = len(units) - len(flat)
            if flat:
                placed = (
                    f"flat, {sum(len(u.members) for u in flat)} parameters in {len(flat)} run{'s' * (len(flat) > 1)}"
                )
                placed += f", {elsewhere} parameter{'s' * (elsewhere > 1)} apart" if elsewhere else ""
            elif units:
                placed = f"tree, {sum(len(unit.members) for unit in units)} parameters where they were"
            else:
                whole = any(needs_whole_tensors(one.transform) for one in group.optimizers.values())
                placed = ("tree" if whole or self._layout == "tree" else "flat") + ", from the first step on"
            if group.waiting and units:
                placed += f", {len(group.waiting)} frozen"
            policies = described(group.policies)
            if "policy" in values and not self._is_in_force(group, values["policy"]):
                when = "not in force" if group.known else "from the first step on"
                policies += f" (param_groups[{group.number}]['policy'] is {describe(values['policy'])}, {when})"
            if self._compile == "auto" and units:
                placed += ", compiled" if self._compiles(units[0]) else ", uncompiled"
            lines.append(f"param group {group.number}: {placed}; {policies}")
        return "\n".join(lines)

    # -- copies ----------------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Everything but hooks, as torch; a copy steps its own parameters, from here on.

        Raises:
            RuntimeError: Gradients are released during the backward pass, by hooks that cannot be copied.
        """
        if self._release is not None:
            raise RuntimeError(
                "gradient release: an optimizer that steps by hooks cannot be copied; call remove() on its handle first."
            )
        # Schedulers put a `step` of their own into an optimizer; it is no part of torch's optimizers when they are copied, either.
        copied = {
            name: value
            for name, value in self.__dict__.items()
            if not name.startswith("_optimizer_") and name != "step"
        }
        # What the optimizer keeps is in its units; of the state that shows it, what others keep there.
        del copied["_states"]
        copied["_table"] = None  # it knows parameters by their ids
        copied["state"] = {
            key: entries.kept if isinstance(entries, ParameterState) else entries for key, entries in self.state.items()
        }
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_units" in state:
            # Parameters may have lost their place in the buffer: the next step puts them back.
            self.state = self._states = States(None, state["state"])
            for unit in self._units:
                self._publish(unit)
                if isinstance(unit.gradients, GradientBuffer):
                    unit.gradients.restore(unit.parameters)
            # torch copies a parameter without its grad_dtype.
            for group, values in zip(self._groups, self.param_groups, strict=True):
                for tensor, dtype in main_gradients(group.number, tree_of(values), group.policies):
                    tensor.grad_dtype = dtype

    # -- checkpoints ----------------------------------------------------------------------------------------------------------

    @outside_inference
    def state_dict(self) -> dict[str, Any]:
        """Return the state per parameter, as torch does; tensors have their stored dtypes, and load under ``weights_only=True``."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._settle()
        numbers = self._numbers()
        packed: dict[str, Any] = {"state": {}, "param_groups": self._packed_groups(numbers), VERSION_KEY: VERSION}
        for key, value in self.state.items():
            if not isinstance(key, Tensor):
                packed["state"][key] = dict(value) if isinstance(value, ParameterState) else value
            elif value:
                packed["state"][_number(numbers, key)] = value.packed()
        for after in self._optimizer_state_dict_post_hooks.values():
            replaced = after(self, packed)
            if replaced is not None:
                packed = replaced
        return packed

    def _settle(self) -> None:
        """Let state be what the param groups hold, so that a checkpoint fits itself.

        Raises:
            RuntimeError: ``self.state`` was given another object.
            ValueError: A policy that cannot be carried out.
        """
        if self.state is not self._states:
            self._take_states()
        self._settle_policies()
        # A hyperparameter that cannot be is told of where it would be used.
        with suppress(TypeError, ValueError):
            self._follow_hyperparameters()

    def _numbers(self) -> dict[int, int]:
        """Return the number of each parameter in checkpoints, by its id."""
        numbers: dict[int, int] = {}
        for number, parameter in enumerate(self._parameters()):
            numbers.setdefault(id(parameter), number)
        return numbers

    def _packed_groups(self, numbers: Mapping[int, int]) -> list[dict[str, Any]]:
        return [group | {"params": [numbers[id(p)] for p in group["params"]]} for group in self.param_groups]

    @outside_inference
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint, bit for bit. Every dtype must be the policy's own: nothing is cast.

        What others keep in ``state`` (wrappers' entries, keys that are no parameters) and in param groups comes back too, as copies.

        Raises:
            TypeError: A hyperparameter that is not one.
            ValueError: Something that does not fit: structure, hyperparameters, entries, dtypes, shapes, layouts, counts. The message names
                the place, and nothing is changed.
        """
        # torch's own loader casts state to its parameter's dtype; its hooks are run here as it runs them.
        if isinstance(state_dict, Mapping):
            state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        loaded = self._judge(state_dict)
        self._take_settings(loaded)
        self._take_state(loaded.own)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @outside_inference
    def full_state_dict(self) -> dict[str, Any]:
        """A ``state_dict`` in full precision: what the stored bits stand for, in float32, whatever the policy.

        Beside the slots each parameter's state has its weights, as ``"param"``. :meth:`load_full_state_dict` of an optimizer with
        another policy takes it, so that a run goes on in another format.
        """
        self._settle()
        self._place()
        self._follow()
        full: dict[int, dict[Any, Any]] = {}
        for unit in self._units:
            optimizer = self._groups[unit.group].optimizer_of(unit)
            full |= state_dicts.decoded(unit, optimizer)
        numbers = self._numbers()
        state: dict[Any, Any] = {}
        for key, entries in self.state.items():
            if not isinstance(key, Tensor):
                state[key] = loading.copied(entries, f"state[{loading.shown(key)}]")
                continue
            # What is put aside is in the formats of this policy, which another may not have.
            kept = {name: x for name, x in entries.packed({}).items() if not str(name).startswith(UNUSED)}
            number = _number(numbers, key)
            if entry := full.get(id(key), {}) | loading.copied(kept, f"state[{number}]"):
                state[number] = entry
        return {"state": state, "param_groups": self._packed_groups(numbers), VERSION_KEY: VERSION}

    @outside_inference
    @torch.no_grad()
    def load_full_state_dict(self, state_dict: dict[str, Any]) -> dict[str, RoundingLoss]:
        """Go on from a :meth:`full_state_dict`, stored under this optimizer's policy; weights of the model included, if it has them.

        Returns:
            For the weights (``"param"``) and each slot: what rounding to this policy's formats lost.

        Raises:
            TypeError: A hyperparameter that is not one.
            ValueError: Something that does not fit; the message names the place, and nothing is changed.
        """
        return self._take_full(self._judge(state_dict, full=True))

    def torch_state_dict(self) -> dict[str, Any]:
        """The state as the ``torch.optim`` optimizer of the same name saves it, in float32; it loads there.

        Raises:
            TypeError: There is no such optimizer in torch.
            ValueError: A hyperparameter that torch's does not have is in use.
        """
        return state_dicts.to_torch(self, self.full_state_dict())

    @outside_inference
    @torch.no_grad()
    def load_torch_state_dict(self, state_dict: dict[str, Any]) -> dict[str, RoundingLoss]:
        """Go on from what the ``torch.optim`` optimizer of the same name saved, under this optimizer's policy.

        The weights are the model's: load them there, or by :meth:`import_fp32`, before.

        Returns:
            As :meth:`load_full_state_dict`.

        Raises:
            TypeError: There is no such optimizer in torch.
            ValueError: The checkpoint is another optimizer's, or has options (``amsgrad``) that this one has not; nothing is changed.
        """
        self._settle_policies()
        saved = state_dicts.from_torch(self, state_dict)
        settings = loading.judge_settings(self, saved)
        return self._take_full(loading.judge(self, saved, settings, full=True, from_torch=True))

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _judge(self, state_dict: Mapping[str, Any], *, full: bool = False) -> loading.Loaded:
        """A state dict, looked at from all sides; nothing is changed."""
        if self.state is not self._states:
            self._take_states()
        self._settle_policies()
        saved = loading.read(state_dict, [len(group["params"]) for group in self.param_groups])
        return loading.judge(self, saved, loading.judge_settings(self, saved), full=full)

    def _take_settings(self, loaded: loading.Loaded) -> None:
        """Hyperparameters, places for parameters that get state, and what others keep: all but the optimizer's own entries."""
        changed: set[tuple[int, torch.dtype]] = set()
        for group, values, arguments, optimizers, new in zip(
            self._groups,
            self.param_groups,
            loaded.settings.arguments,
            loaded.settings.optimizers,
            loaded.settings.groups,
            strict=True,
        ):
            for dtype, old in group.optimizers.items():
                if skeleton(old.transform) != skeleton(optimizers[dtype].transform):
                    changed.add((group.number, dtype))
            values.update(new)
            group.follow(arguments, optimizers)
        for unit in self._units:
            if (unit.group, dtype := unit.tensors[0].dtype) in changed:
                unit.state = init_state(self._groups[unit.group].optimizer_of(unit), unit.tensors, unit.first)
                self._publish(unit)
        if loaded.placement is not None:
            self._carry_out(loaded.placement)
        self._follow()
        for key in [key for key in self.state if not isinstance(key, Tensor)]:
            del self.state[key]
        self._states.update(loaded.elsewhere)
        for parameter in self._parameters():
            kept = loaded.kept.get(id(parameter), {})
            if kept or parameter in self.state:
                self.state[parameter].keep(kept)
        # The first step after this that finds no gradient is told of, as if a step had gone before it.
        self._had_gradients = self._had_gradients or bool(loaded.own)

    def _take_full(self, loaded: loading.Loaded) -> dict[str, RoundingLoss]:
        self._take_settings(loaded)
        self._cut_by_counts(loaded.own)
        losses: dict[str, RoundingLoss] = {}
        for unit in self._units:
            optimizer = self._groups[unit.group].optimizer_of(unit)
            for name, loss in state_dicts.encode(unit, optimizer, loaded.own).items():
                losses[name] = losses[name] + loss if name in losses else loss
        return losses

    def _cut_by_counts(self, given: Mapping[int, Mapping[str, Any]]) -> None:
        """Cut flat units where counts of steps change."""
        units: list[Unit] = []
        for unit in self._units:
            counts = [state_dicts.counts(given.get(id(m.parameter), {}), unit.named_state(m)) for m in unit.members]
            boundaries = [i for i in range(1, len(counts)) if counts[i] != counts[i - 1]]
            units += unit.split(boundaries) if unit.flat and boundaries else [unit]
        self._units = units
        for unit in units:
            self._publish(unit)

    def _require_counts(self, given: Mapping[int, Mapping[str, Any]]) -> None:
        """Refuse counts that are none.

        Raises:
            ValueError: One is none; nothing is changed.
        """
        for unit in self._units:
            for member in unit.members:
                for name, value in given.get(id(member.parameter), {}).items():
                    if isinstance(value, Tensor) and value.dtype is torch.int64 and not value.ndim:
                        loading.as_count(f"state_dict: param group {unit.group}, {name!r}", value)

    def _take_state(self, given: Mapping[int, Mapping[str, Any]]) -> None:
        """Write the optimizer's own entries, by id of the parameter; parameters without are as before their first step."""
        self._cut_by_counts(given)
        for unit in self._units:
            if any(id(parameter) not in given for parameter in unit.parameters):
                fresh = init_state(self._groups[unit.group].optimizer_of(unit), unit.tensors, unit.first)
                write(unit.state, fresh)
            for member in unit.members:
                own = self.state[member.parameter].own
                for name, value in given.get(id(member.parameter), {}).items():
                    if name in own:
                        local(own[name]).copy_(local(value))


def _number(numbers: Mapping[int, int], parameter: Tensor) -> int:
    """Return the number of a parameter in checkpoints.

    Raises:
        ValueError: It is none of the optimizer's.
    """
    if id(parameter) not in numbers:
        raise ValueError(
            f"state: has entries for a tensor of shape {tuple(parameter.shape)} that is in no param group, which a checkpoint has no number"
            " for; accepted are the optimizer's parameters, and keys that are no tensors."
        )
    return numbers[id(parameter)]


def _listed(where: str, values: Any, accepted: str) -> list[Any]:
    """Return the items of a list, a tuple or a generator.

    Raises:
        ValueError: It is none of them.
    """
    if not isinstance(values, Iterable) or isinstance(values, (Tensor, Mapping, str, bytes)):
        raise ValueError(f"{where}: got {loading.shown(values)}; {accepted}.")
    return list(values)


def _gathered(unit: Unit, grads: list[Tensor]) -> Tensor:
    """The gradients of a unit's members as one tensor, of the shape of the unit's."""
    if unit.gradients is not None:
        return unit.gradients.buffer
    if unit.flat:
        return gather(grads)
    (grad,), (tensor,) = grads, unit.tensors
    return grad if grad.shape == tensor.shape else grad.reshape(tensor.shape)


def to_device_of(x: Tensor, like: Tensor) -> Tensor:
    """A measurement where the others are."""
    return x.to(like.device)
