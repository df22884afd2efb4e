"""A ``torch.optim.Optimizer`` that runs an everybit transform."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, ClassVar, Literal, Protocol, cast, get_args, overload

import torch
from torch import Tensor

import everybit as eb
from everybit.dtypes import dtype_name, torch_dtype
from everybit.metrics import Metrics
from everybit.optimizer import state_bytes, with_policy
from everybit.policies import native
from everybit.policy import AnyPolicy, resolve_tree
from everybit_torch import state_dicts
from everybit_torch.dtensors import axis_of, first_element, is_counted, is_dtensor, like, local, mesh_of
from everybit_torch.gradients import GradientBuffer, gather, piece
from everybit_torch.state_dicts import RoundingLoss, TorchNames
from everybit_torch.stepping import Factory, Group, Part, draws_bits, find_totals, write
from everybit_torch.transform_parts import scopes as transform_scopes
from everybit_torch.units import Member, Unit, can_be_flat, flatten, init_state, is_shared

Layout = Literal["auto", "flat", "tree"]
Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

# torch's names of hyperparameters, and the core's.
NAMES: Mapping[str, tuple[str, ...]] = {"lr": ("learning_rate",), "betas": ("b1", "b2"), "alpha": ("decay",)}


class Release(Protocol):
    """Who steps instead, during the backward pass."""

    def finish(self) -> None:
        """The step's end."""
        ...


class TorchOptimizer(torch.optim.Optimizer):
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
        compile: Compile the step with ``torch.compile``; the results are the same bits.
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
    _step_supports_amp_scaling: bool  # torch's: whether a GradScaler leaves everything to `step`

    def __init__(
        self,
        params: Params,
        factory: Factory,
        *,
        policy: AnyPolicy | None = None,
        layout: Layout = "auto",
        flat_gradients: bool = False,
        compile: bool = False,
        metrics: bool = False,
        seed: int = 0,
        unsafe: Literal["refuse", "warn", "allow"] = "refuse",
        **hyperparameters: Any,
    ) -> None:
        if layout not in get_args(Layout):
            raise ValueError(f"layout: got {layout!r}; accepted are 'auto', 'flat', 'tree'.")
        if flat_gradients and layout == "tree":
            raise ValueError("flat_gradients: got True with layout='tree'; accepted with it are 'auto' and 'flat'.")
        self._factory = factory
        # torch adds keys of its own to `defaults`.
        self._names = tuple(hyperparameters)
        self._policy = policy
        self._layout = layout
        self._flat_gradients = flat_gradients
        self._compile = compile
        self._seed = seed
        self._unsafe = unsafe
        self._groups: list[Group] = []
        self._arriving: list[Tensor] = []  # parameters of a group that is being added
        self._units: list[Unit] = []
        self._counted: dict[torch.dtype, int] = {}
        self._numbers: dict[Tensor, int] = {}  # of first elements, by parameter, where a model was named
        self._had_gradients = False
        self._release: Release | None = None  # set by enable_gradient_release
        self._metrics: Metrics | None = None
        self.metrics_enabled = metrics
        super().__init__(cast(Any, params), hyperparameters)

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
        given = [given] if isinstance(given, Tensor) else list(given)
        param_group["params"] = given
        number = len(self.param_groups)
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in given]
        for index, tensor in enumerate(tensors):
            if isinstance(tensor, Tensor) and (tensor.is_complex() or not tensor.is_floating_point()):
                raise TypeError(
                    f"param group {number}, parameter {index}: got {tensor.dtype}; accepted are real floating-point parameters."
                    + (" torch.view_as_real gives a real view of a complex one." if tensor.is_complex() else "")
                )
        places: dict[int, int] = {}
        for index, tensor in enumerate(tensors):
            if (first := places.setdefault(id(tensor), index)) != index:
                raise ValueError(
                    f"param group {number}: parameters {first} and {index} are the same tensor; accepted is each once."
                )
        hyperparameters = {**self.defaults, **{key: value for key, value in param_group.items() if key != "params"}}
        policies = {dtype: self._policy_for(policy, dtype, number) for dtype in dict.fromkeys(t.dtype for t in tensors)}
        group = Group(number, self._factory, policies, self._seed)
        arguments = self.factory_arguments(hyperparameters)
        group.follow(arguments, self._build(group, arguments))
        self._arriving = tensors
        self._require_one_tree([*self._groups, group])
        self._arriving = []
        main_dtypes = _main_gradients(number, tensors, policies)
        super().add_param_group(param_group)
        self._groups.append(group)
        # Now, not at the first step: the first backward pass comes before it.
        for tensor, dtype in main_dtypes:
            tensor.grad_dtype = dtype

    def factory_arguments(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The factory's keyword arguments for a param group: torch's names become the core's."""
        arguments: dict[str, Any] = {}
        for name in self._names:
            value = group[name]
            targets = NAMES.get(name, (name,))
            if len(targets) == 1:
                arguments[targets[0]] = value
            elif not isinstance(value, (tuple, list)) or len(value) != len(targets):
                raise ValueError(f"{name}: got {value!r}; accepted are {len(targets)} numbers.")
            else:
                arguments.update(zip(targets, value, strict=True))
        return arguments

    def _policy_for(self, policy: AnyPolicy | None, dtype: torch.dtype, number: int) -> AnyPolicy:
        if policy is not None:
            return policy
        return native(dtype_name(dtype, field=f"param group {number}"))

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
            raise type(error)(f"{type(self).__name__}, param group {group.number}: {error}") from None

    def _require_one_tree(self, groups: list[Group]) -> None:
        scopes = {optimizer.scope for group in groups for optimizer in group.optimizers.values()}
        if self._layout == "flat" and scopes - {"element"}:
            raise ValueError(
                f"layout: got 'flat' for a transform of scope {', '.join(sorted(scopes - {'element'}))!s}, which must see whole tensors;"
                " accepted are 'auto' and 'tree'."
            )
        dtypes = {(index, dtype) for index, group in enumerate(groups) for dtype in group.optimizers}
        sharded = self._is_sharded()
        if "tree" in scopes and len(scopes) > 1 and sharded:
            raise ValueError(
                f"{type(self).__name__}: some param groups have a transform that reduces over all gradients, some have not; accepted for"
                " sharded parameters is that all have, or none."
            )
        if "tree" in scopes and len(dtypes) > 1 and not sharded:
            raise ValueError(
                f"{type(self).__name__}: a transform that reduces over all gradients, such as clip_by_global_norm, sees one param group"
                f" of one dtype at a time, and there are {len(dtypes)}: its norm would not be the global one. Clip with"
                " torch.nn.utils.clip_grad_norm_ before the step instead, or use one group."
            )

    # -- placing parameters ---------------------------------------------------------------------------------------------------

    def _place(self, *, wanted: frozenset[int] = frozenset()) -> None:
        """Give every parameter that has none a unit: at the first step, so that a model may still be moved or swapped before it.

        A frozen parameter has no unit and no state until it is unfrozen, or is ``wanted`` (by id).

        Raises:
            RuntimeError: Parameters were cast since the optimizer was made, or taken out of a param group since the first step.
        """
        for group, values in zip(self._groups, self.param_groups, strict=True):
            params = values["params"]
            same = len(params) == len(group.known) and all(map(is_, params, group.known))
            if same and not any(_moves(p) or id(p) in wanted for p, _ in group.waiting):
                continue
            known = {id(p) for p in group.known}
            if gone := [index for index, p in enumerate(group.known) if id(p) not in {id(p) for p in params}]:
                raise RuntimeError(
                    f"param group {group.number}: parameters {gone} were taken out or replaced since the first step, and what the optimizer"
                    " keeps for them would be lost. Make a new optimizer, and carry the state over with a state_dict."
                )
            new = [p for p in params if id(p) not in known]
            if wrong := [p.dtype for p in new if p.dtype not in group.optimizers]:
                raise RuntimeError(
                    f"param group {group.number}: a parameter is {wrong[0]} now and was not when the optimizer was made. Cast the"
                    " model first, then make its optimizer."
                )
            waiting = list(group.waiting)
            for parameter in new:
                # Elements are numbered through all parameters of a dtype, so that a parameter's random bits are its own.
                first = self._counted.get(parameter.dtype, 0)
                self._counted[parameter.dtype] = first + parameter.numel()
                waiting.append((parameter, self._numbers.get(parameter, first)))
            group.known = list(params)
            group.waiting = []
            buckets: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, int]]] = {}
            for parameter, first in waiting:
                optimizer = group.optimizers[parameter.dtype]
                if _moves(parameter) or id(parameter) in wanted or optimizer.scope == "tree":
                    buckets.setdefault((parameter.dtype, parameter.device), []).append((parameter, first))
                else:
                    group.waiting.append((parameter, first))
            for (dtype, _), parameters in buckets.items():
                self._place_bucket(group, dtype, parameters)

    def _is_sharded(self) -> bool:
        """Whether any parameter is a part of one, by FSDP2."""
        groups = [*(values["params"] for values in self.param_groups), self._arriving]
        return any(is_dtensor(parameter) for parameters in groups for parameter in parameters)

    def _place_bucket(self, group: Group, dtype: torch.dtype, parameters: list[tuple[Tensor, int]]) -> None:
        optimizer = group.optimizers[dtype]
        flat = optimizer.scope == "element" and self._layout != "tree"
        # A sharded parameter is stepped by itself; what a transform asks of all of them is asked of all ranks.
        sharded = self._is_sharded()
        if sharded and "tensor" in transform_scopes(optimizer.transform):
            raise ValueError(
                f"param group {group.number}: {optimizer.transform!r} must see whole tensors (scope 'tensor'); ranks hold parts of them."
                " Accepted for sharded parameters are transforms of scope 'element' and 'tree'."
            )
        # Runs of neighbours that can share a buffer; what cannot is a run of its own.
        runs: list[tuple[list[Tensor], int]] = []
        end = -1
        for parameter, first in parameters:
            joins = flat and first == end and can_be_flat(parameter) and can_be_flat(runs[-1][0][-1])
            if runs and ((optimizer.scope == "tree" and not sharded) or joins):
                runs[-1][0].append(parameter)
            else:
                runs.append(([parameter], first))
            end = first + parameter.numel()
        for run, first in runs:
            share = flat and can_be_flat(run[0])
            gradients = None
            if share:
                if self._flat_gradients:
                    (one,) = resolve_tree(optimizer.policy, [run[0].detach()])
                    gradients = GradientBuffer(run, torch_dtype(one.grads_main))
                tensors, stop = [flatten(run)], 0
                members = [Member(p, 0, stop, stop := stop + p.numel()) for p in run]
            else:
                element = optimizer.scope == "element"
                whole = [local(p).detach() for p in run]
                tensors = [x.view(-1) if (element or sharded) and x.is_contiguous() else x for x in whole]
                members = [Member(p, i, 0, x.numel()) for i, (p, x) in enumerate(zip(run, whole, strict=True))]
                if draws_bits(optimizer.policy):
                    first += first_element(run[0])
            state = init_state(optimizer, tensors, first)
            unit = Unit(group.number, tensors, members, state, first, flat=share, gradients=gradients)
            self._units.append(unit)
            self._publish(unit)

    def _number_elements(self, model: torch.nn.Module) -> None:
        """Number elements through all parameters of a model, as a ``FlatStepper`` does, whichever of them are this optimizer's.

        By its number an element draws its random bits: a run goes on with the same ones in another front end.

        Raises:
            ValueError: A transform steps several parameters at once, between which others lie in the model. Nothing is changed then.
        """
        counted: dict[torch.dtype, int] = {}
        numbers: dict[Tensor, int] = {}
        for parameter in model.parameters():
            numbers[parameter] = counted.get(parameter.dtype, 0)
            counted[parameter.dtype] = numbers[parameter] + parameter.numel()
        found: list[
            tuple[Unit, list[int], list[int]]
        ] = []  # units, the numbers of their first elements, and where they are cut
        for unit in self._units:
            optimizer = self._groups[unit.group].optimizers[unit.tensors[0].dtype]
            if not draws_bits(optimizer.policy) or any(p not in numbers for p in unit.parameters):
                found.append((unit, [], []))
                continue
            sizes = [local(p).numel() for p in unit.parameters]
            firsts = [numbers[p] + first_element(p) for p in unit.parameters]
            gaps = [i for i in range(1, len(firsts)) if firsts[i] != firsts[i - 1] + sizes[i - 1]]
            if gaps and not unit.flat:
                raise ValueError(
                    f"{type(self).__name__}: a transform that reduces over all gradients steps its parameters at once, and others of the"
                    " model lie between them, whose random bits it would draw; accepted is an optimizer of all of the model's parameters."
                )
            found.append((unit, firsts, gaps))
        self._numbers |= numbers
        for group in self._groups:
            group.waiting = [(parameter, self._numbers.get(parameter, first)) for parameter, first in group.waiting]
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
        """Show each parameter's share of the unit's state in ``self.state``, as views."""
        for member in unit.members:
            named = unit.named_state(member)
            self.state[member.parameter] = {name: like(member.parameter, value) for name, value in named.items()}

    def _follow(self) -> None:
        """See to it that what is stepped is what the model computes with.

        Raises:
            RuntimeError: A parameter was moved to another dtype, device or shape since the first step.
        """
        for unit in self._units:
            if unit.in_place():
                continue
            for member in unit.members:
                tensor, parameter = unit.tensors[member.position], local(member.parameter)
                here = tensor.data_ptr() + member.start * tensor.element_size()
                if parameter.data_ptr() == here or parameter.numel() == 0:
                    continue
                size = member.stop - member.start
                if (parameter.dtype, parameter.device, parameter.numel()) != (tensor.dtype, tensor.device, size):
                    raise RuntimeError(
                        f"param group {unit.group}: a parameter of shape {tuple(parameter.shape)} is {parameter.dtype} on"
                        f" {parameter.device} now, but was {tensor.dtype} on {tensor.device} with {size} elements when"
                        " the optimizer first stepped. Move the model first; a state_dict carries the state to a new optimizer."
                    )
                if unit.flat and is_shared(parameter):
                    raise RuntimeError(
                        f"param group {unit.group}: a parameter of shape {tuple(parameter.shape)} was moved to shared memory since the"
                        " optimizer first stepped. Call model.share_memory() before that, or send a state_dict instead of the model."
                    )
                if unit.flat:
                    # Somebody gave the parameter other memory: its values count, and it returns to its place in the buffer.
                    place = piece(tensor, member.start, member.stop, parameter.shape)
                    place.copy_(parameter.detach())
                    parameter.data = place
                else:
                    flat = tensor.ndim == 1 and parameter.is_contiguous()
                    unit.tensors[member.position] = parameter.detach().view(-1) if flat else parameter.detach()
            unit.note_addresses()

    # -- stepping -------------------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

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
        totals = self._find_totals(work)
        total: Metrics | None = None
        for unit, grads in work:
            measured = self._step_unit(unit, grads, totals)
            if measured is not None and self._counts(unit):
                total = measured if total is None else total + eb.tree.map(to_device_of, measured, total)
        if self.metrics_enabled:
            self._metrics = self._over_ranks(total)
        return loss

    def _prepare(self) -> None:
        """Everything in its place, and present hyperparameters checked and where compiled code reads them."""
        self._place()
        self._follow()
        for group, values in zip(self._groups, self.param_groups, strict=True):
            arguments = self.factory_arguments(values)
            if arguments != group.arguments:
                group.follow(arguments, self._build(group, arguments))

    def _split_by_gradients(self, units: list[Unit]) -> list[tuple[Unit, list[Tensor | None]]]:
        """The units with their members' gradients, cut where parameters with a gradient meet such without."""
        collected = [unit.collect() for unit in units]
        for grads in collected:
            if any(layout is not torch.strided for layout in {grad.layout for grad in grads if grad is not None}):
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
                stacklevel=5,  # past torch's wrappers, at the line that called step
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

    def _find_totals(self, work: list[tuple[Unit, list[Tensor | None]]]) -> list[Tensor]:
        """What the transform asks of all ranks, where parameters are sharded over them; in one process its step sees them all."""
        if not any(optimizer.scope == "tree" for group in self._groups for optimizer in group.optimizers.values()):
            return []
        mesh = mesh_of([p for unit, _ in work for p in unit.parameters])
        if mesh is None:
            return []
        parts = []
        for unit, grads in work:
            optimizer = self._groups[unit.group].optimizers[unit.tensors[0].dtype]
            grad = None if grads[0] is None else grads[0].reshape(unit.tensors[0].shape)
            parts.append(Part(optimizer, unit, grad, is_counted(unit.parameters[0], mesh)))
        return find_totals(parts, axis_of(mesh))

    def _counts(self, unit: Unit) -> bool:
        """Whether what this rank measures of a unit is not another rank's to count."""
        mesh = mesh_of(unit.parameters)
        return mesh is None or is_counted(unit.parameters[0], mesh)

    def _over_ranks(self, measured: Metrics | None) -> Metrics | None:
        """What all ranks measured, where parameters are sharded over them."""
        parameters = [p for unit in self._units for p in unit.parameters]
        mesh = mesh_of(parameters) if parameters else None
        if mesh is None:
            return measured
        here = Metrics.zero(local(parameters[0]).device) if measured is None else measured
        return eb.tree.map(axis_of(mesh).sum, here)

    def _step_unit(self, unit: Unit, grads: list[Tensor | None], totals: Sequence[Tensor] = ()) -> Metrics | None:
        present = [grad is not None for grad in grads]
        if not any(present):
            return None
        if unit.gradients is not None:
            given: list[Any] = [unit.gradients.buffer]
        elif unit.flat:
            given = [gather(cast(list[Tensor], grads))]
        else:
            given = [
                g if g is None or g.shape == x.shape else g.reshape(x.shape)
                for g, x in zip(grads, unit.tensors, strict=True)
            ]
        measured = self._groups[unit.group].step(
            unit, given, present, compile=self._compile, metrics=self.metrics_enabled, totals=totals
        )
        if unit.flat:
            # Autograd does not see that writing to the buffer changes the parameters; a graph that needs the old values must not run.
            torch.autograd.graph.increment_version(unit.parameters)
        return measured

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as torch does; those in a flat buffer are zeroed where they are.

        Args:
            set_to_none: A parameter that receives no gradient after this is skipped. False: it is stepped with zeros.
        """
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
        """What became of the last measured step's updates, over all parameters.

        Raises:
            RuntimeError: No step was measured.
        """
        if self._metrics is None:
            raise RuntimeError(
                "metrics: no step was measured yet; pass metrics=True, or set metrics_enabled = True before a step."
            )
        return self._metrics

    def bytes_table(self) -> dict[str, int]:
        """Bytes of the tensors that are allocated now, by use; keys as in :meth:`everybit.Policy.bytes_table`, and ``counters``.

        Gradients that are not there at the moment are counted as they will be.
        """
        self._place()
        frozen = [parameter for group in self._groups for parameter, _ in group.waiting]
        table = {"parameter": sum(local(parameter).nbytes for parameter in frozen), "compensation": 0, "gradient": 0}
        for unit in self._units:
            table["parameter"] += sum(tensor.nbytes for tensor in unit.tensors)
            table["compensation"] += sum(leaf.nbytes for leaf in eb.tree.leaves(unit.state.extra))
            resolved = resolve_tree(self._groups[unit.group].optimizers[unit.tensors[0].dtype].policy, unit.tensors)
            for member in unit.members:
                grad = member.parameter.grad
                main = torch_dtype(resolved[member.position].grads_main)
                here = local(member.parameter)
                table["gradient"] += here.numel() * main.itemsize if grad is None else local(grad).nbytes
            for name, size in state_bytes(unit.state.inner, counters=unit.state.step.nbytes).items():
                table[name] = table.get(name, 0) + size
        if not table["compensation"]:
            del table["compensation"]
        return table

    def export_fp32(self) -> list[list[Tensor]]:
        """Every parameter with all the precision that it and its state hold together, in float32: one list per param group."""
        self._place()
        self._follow()
        exported = {
            id(p): p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for group in self._groups
            for p, _ in group.waiting
        }
        for unit in self._units:
            optimizer = self._groups[unit.group].optimizers[unit.tensors[0].dtype]
            values = optimizer.export_fp32(unit.tensors, unit.state)
            for member in unit.members:
                value = values[member.position]
                if unit.tensors[member.position].ndim == 1:
                    value = value[member.start : member.stop]
                value = value.reshape(local(member.parameter).shape)
                exported[id(member.parameter)] = like(member.parameter, value)
        return [[exported[id(p)] for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def import_fp32(self, weights: Iterable[Iterable[Tensor]]) -> None:
        """Store full-precision weights, as :meth:`export_fp32` gives them: the model's tensors are rounded, residuals hold the rest.

        Raises:
            ValueError: Numbers or shapes of weights differ from those of the parameters; nothing is changed.
        """
        self._place()
        self._follow()
        given = [list(group) for group in weights]
        expected = [list(group["params"]) for group in self.param_groups]
        shapes = [[tuple(w.shape) for w in group] for group in given]
        if shapes != [[tuple(p.shape) for p in group] for group in expected]:
            raise ValueError(
                f"weights: got {[len(group) for group in given]} tensors by param group, accepted are"
                f" {[len(group) for group in expected]}, each of its parameter's shape."
            )
        by_id = {id(p): w for ps, ws in zip(expected, given, strict=True) for p, w in zip(ps, ws, strict=True)}
        for unit in self._units:
            for member in unit.members:
                if local(by_id[id(member.parameter)]).numel() != local(member.parameter).numel():
                    raise ValueError(
                        "weights: got a whole tensor for a parameter of which this rank has a part; accepted are DTensors, as export_fp32"
                        " gives them."
                    )
        for unit in self._units:
            optimizer = self._groups[unit.group].optimizers[unit.tensors[0].dtype]
            wide = []
            for position, tensor in enumerate(unit.tensors):
                pieces = [
                    local(by_id[id(m.parameter)]).to(tensor.device).reshape(-1)
                    for m in unit.members
                    if m.position == position
                ]
                wide.append(torch.cat(pieces).view(tensor.shape))
            params, state = optimizer.import_fp32(wide, unit.tensors, unit.state)
            write((unit.tensors, unit.state), (params, state))
        for group in self._groups:
            for parameter, _ in group.waiting:
                parameter.copy_(by_id[id(parameter)])

    def __repr__(self) -> str:
        lines = [
            super().__repr__(),
            f"layout={self._layout!r}, flat_gradients={self._flat_gradients}, compile={self._compile}",
        ]
        for group in self._groups:
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
                scopes = {optimizer.scope for optimizer in group.optimizers.values()}
                placed = (
                    "flat" if scopes == {"element"} and self._layout != "tree" else "tree"
                ) + ", from the first step on"
            if group.waiting and units:
                placed += f", {len(group.waiting)} frozen"
            policies = ", ".join(dict.fromkeys(map(str, group.policies.values())))
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
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_optimizer_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_units" in state:
            # Parameters may have lost their place in the buffer: the next step puts them back.
            self.state.clear()
            for unit in self._units:
                self._publish(unit)
                if isinstance(unit.gradients, GradientBuffer):
                    unit.gradients.restore(unit.parameters)
            # torch copies a parameter without its grad_dtype.
            for group, values in zip(self._groups, self.param_groups, strict=True):
                for tensor, dtype in _main_gradients(group.number, values["params"], group.policies):
                    tensor.grad_dtype = dtype

    # -- checkpoints ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch's: per parameter, in its shape; tensors have the dtypes they are stored in, and load under ``weights_only=True``."""
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint, bit for bit. Every dtype must be the policy's own: nothing is cast.

        Raises:
            ValueError: The checkpoint's groups, parameters, names, shapes or dtypes are not this optimizer's; nothing is changed.
        """
        # torch's own loader casts state to its parameter's dtype; its hooks are run here as it runs them.
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        given = self._given_state(state_dict)
        for index, parameter in enumerate(self._parameters()):
            if id(parameter) in given:
                state_dicts.require_entries(index, given[id(parameter)], self.state[parameter])
        self._require_one_count(given)
        self._take_groups(state_dict["param_groups"])
        self._take_state(given)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def full_state_dict(self) -> dict[str, Any]:
        """A ``state_dict`` in full precision: what the stored bits stand for, in float32, whatever the policy.

        Beside the slots each parameter's state has its weights, as ``"param"``. :meth:`load_full_state_dict` of an optimizer with
        another policy takes it, so that a run goes on in another format.
        """
        self._place()
        self._follow()
        full: dict[int, dict[str, Tensor]] = {}
        for unit in self._units:
            optimizer = self._groups[unit.group].optimizers[unit.tensors[0].dtype]
            full |= state_dicts.decoded(unit, optimizer)
        plain = super().state_dict()
        numbers = chain.from_iterable(group["params"] for group in plain["param_groups"])
        state = {number: full[id(p)] for number, p in zip(numbers, self._parameters(), strict=True) if id(p) in full}
        return {"state": state, "param_groups": plain["param_groups"]}

    @torch.no_grad()
    def load_full_state_dict(self, state_dict: dict[str, Any]) -> dict[str, RoundingLoss]:
        """Go on from a :meth:`full_state_dict`, stored under this optimizer's policy; weights of the model included, if it has them.

        Returns:
            For the weights (``"param"``) and each slot: what rounding to this policy's formats lost.

        Raises:
            ValueError: Groups, parameters, names, shapes or dtypes are not this optimizer's; nothing is changed.
        """
        given = self._given_state(state_dict)
        for index, parameter in enumerate(self._parameters()):
            if id(parameter) in given:
                unit = next(unit for unit in self._units if any(p is parameter for p in unit.parameters))
                optimizer = self._groups[unit.group].optimizers[unit.tensors[0].dtype]
                state_dicts.require_full_entries(index, given[id(parameter)], parameter, unit, optimizer)
        self._take_groups(state_dict["param_groups"])
        self._cut_by_counts(given)
        losses: dict[str, RoundingLoss] = {}
        for unit in self._units:
            optimizer = self._groups[unit.group].optimizers[unit.tensors[0].dtype]
            for name, loss in state_dicts.encode(unit, optimizer, given).items():
                losses[name] = losses[name] + loss if name in losses else loss
        return losses

    def torch_state_dict(self) -> dict[str, Any]:
        """The state as the ``torch.optim`` optimizer of the same name saves it, in float32; it loads there.

        Raises:
            TypeError: There is no such optimizer in torch.
        """
        return state_dicts.to_torch(self, self.full_state_dict())

    def load_torch_state_dict(self, state_dict: dict[str, Any]) -> dict[str, RoundingLoss]:
        """Go on from what the ``torch.optim`` optimizer of the same name saved, under this optimizer's policy.

        The weights are the model's: load them there, or by :meth:`import_fp32`, before.

        Returns:
            As :meth:`load_full_state_dict`.

        Raises:
            TypeError: There is no such optimizer in torch.
            ValueError: The checkpoint is another optimizer's, or has options (``amsgrad``) that this one has not; nothing is changed.
        """
        return self.load_full_state_dict(state_dicts.from_torch(self, state_dict))

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _given_state(self, state_dict: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
        """A checkpoint's entries by id of our parameters, which are all placed then."""
        counts = [len(group["params"]) for group in self.param_groups]
        numbers = state_dicts.parameter_numbers(state_dict, counts)
        saved = state_dict["state"]
        parameters = self._parameters()
        given = {id(p): saved[number] for p, number in zip(parameters, numbers, strict=True) if number in saved}
        for index, parameter in enumerate(parameters):
            for name, value in given.get(id(parameter), {}).items():
                if is_dtensor(parameter) and isinstance(value, Tensor) and value.ndim and not is_dtensor(value):
                    raise ValueError(
                        f"state_dict: parameter {index}, {name!r}: got a whole tensor for a sharded parameter; accepted are DTensors, as"
                        " torch.distributed.checkpoint.state_dict.set_optimizer_state_dict makes of a whole state dict."
                    )
        self._place(wanted=frozenset(given))
        self._follow()
        return given

    def _take_groups(self, saved_groups: list[dict[str, Any]]) -> None:
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update({key: value for key, value in saved.items() if key not in ("params", "param_names")})

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

    def _require_one_count(self, given: Mapping[int, Mapping[str, Any]]) -> None:
        """Refuse counts that differ where one step sees several tensors, and counts for all of them.

        Raises:
            ValueError: They do; nothing is changed.
        """
        for unit in self._units:
            counts = {state_dicts.counts(given.get(id(m.parameter), {}), unit.named_state(m)) for m in unit.members}
            if not unit.flat and len(counts) > 1:
                raise ValueError(
                    f"state_dict: param group {unit.group}: parameters were stepped different numbers of times, {sorted(counts)}, and a"
                    " transform that reduces over all gradients counts once for all of them."
                )

    def _take_state(self, given: Mapping[int, Mapping[str, Any]]) -> None:
        self._cut_by_counts(given)
        for unit in self._units:
            if any(id(parameter) not in given for parameter in unit.parameters):
                fresh = init_state(self._groups[unit.group].optimizers[unit.tensors[0].dtype], unit.tensors, unit.first)
                write(unit.state, fresh)
            for member in unit.members:
                for name, value in given.get(id(member.parameter), {}).items():
                    self.state[member.parameter][name].copy_(value)


def _moves(parameter: Tensor) -> bool:
    return parameter.requires_grad or parameter.grad is not None


def to_device_of(x: Tensor, like: Tensor) -> Tensor:
    """A measurement where the others are."""
    return x.to(like.device)


def _main_gradients(
    number: int, tensors: list[Tensor], policies: Mapping[torch.dtype, AnyPolicy]
) -> list[tuple[Tensor, torch.dtype]]:
    """The parameters whose gradients a policy keeps in another dtype than the model's, with that dtype.

    Raises:
        ValueError: A policy that does not fit a parameter, or a gradient that is there already, in the model's dtype.
    """
    found = []
    for dtype, policy in policies.items():
        same = [tensor for tensor in tensors if tensor.dtype is dtype]
        for tensor, one in zip(same, resolve_tree(policy, [tensor.detach() for tensor in same]), strict=True):
            main = torch_dtype(one.grads_main)
            if main is dtype or is_dtensor(tensor):  # FSDP2 gives gradients their dtype
                continue
            if tensor.grad is not None and tensor.grad.dtype is not main:
                raise ValueError(
                    f"param group {number}: Grads.main: got {main}, but a parameter of shape {tuple(tensor.shape)} holds a"
                    f" {tensor.grad.dtype} gradient already; clear it (zero_grad) before making the optimizer."
                )
            found.append((tensor, main))
    return found
