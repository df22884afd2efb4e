"""A ``torch.optim.Optimizer`` that runs an everybit transform."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, cast, get_args, overload

import torch
from torch import Tensor

import everybit as eb
from everybit.dtypes import dtype_name, torch_dtype
from everybit.metrics import Metrics, measure
from everybit.optimizer import OptimizerState, state_bytes, with_policy
from everybit.policies import native
from everybit.policy import AnyPolicy, resolve_tree
from everybit_torch.compiling import compile_step
from everybit_torch.units import Member, Unit, can_be_flat, flatten, init_state, map_state, named_fields

Layout = Literal["auto", "flat", "tree"]
Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
Factory = Callable[..., eb.Transform[Any]]

# Elements stepped at a time without a compiler: the temporaries of one operation fit into a core's cache.
PIECE = 1 << 17

# torch's names of hyperparameters, and the core's.
NAMES: Mapping[str, tuple[str, ...]] = {"lr": ("learning_rate",), "betas": ("b1", "b2"), "alpha": ("decay",)}


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

    def __init__(
        self,
        params: Params,
        factory: Factory,
        *,
        policy: AnyPolicy | None = None,
        layout: Layout = "auto",
        compile: bool = False,
        metrics: bool = False,
        seed: int = 0,
        unsafe: Literal["refuse", "warn", "allow"] = "refuse",
        **hyperparameters: Any,
    ) -> None:
        if layout not in get_args(Layout):
            raise ValueError(f"layout: got {layout!r}; accepted are 'auto', 'flat', 'tree'.")
        self._factory = factory
        # torch adds keys of its own to `defaults`.
        self._names = tuple(hyperparameters)
        self._policy = policy
        self._layout = layout
        self._compile = compile
        self._seed = seed
        self._unsafe = unsafe
        self._groups: list[_Group] = []
        self._units: list[Unit] = []
        self._placed: set[int] = set()
        self._counted: dict[torch.dtype, int] = {}
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
        hyperparameters = {**self.defaults, **{key: value for key, value in param_group.items() if key != "params"}}
        policies = {dtype: self._policy_for(policy, dtype, number) for dtype in dict.fromkeys(t.dtype for t in tensors)}
        group = _Group(number, policies, {})
        group.optimizers = self._build(group, self.factory_arguments(hyperparameters))
        self._require_one_tree([*self._groups, group])
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

    def _build(self, group: _Group, arguments: dict[str, Any]) -> dict[torch.dtype, eb.Optimizer[Any]]:
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

    def _require_one_tree(self, groups: list[_Group]) -> None:
        scopes = {optimizer.scope for group in groups for optimizer in group.optimizers.values()}
        if self._layout == "flat" and scopes - {"element"}:
            raise ValueError(
                f"layout: got 'flat' for a transform of scope {', '.join(sorted(scopes - {'element'}))!s}, which must see whole tensors;"
                " accepted are 'auto' and 'tree'."
            )
        dtypes = {(index, dtype) for index, group in enumerate(groups) for dtype in group.optimizers}
        if "tree" in scopes and len(dtypes) > 1:
            raise ValueError(
                f"{type(self).__name__}: a transform that reduces over all gradients, such as clip_by_global_norm, sees one param group"
                f" of one dtype at a time, and there are {len(dtypes)}: its norm would not be the global one. Clip with"
                " torch.nn.utils.clip_grad_norm_ before the step instead, or use one group."
            )

    # -- placing parameters ---------------------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Give every parameter that has none a unit: at the first step, so that a model may still be moved or swapped before it."""
        for number, group in enumerate(self.param_groups):
            new = [p for p in group["params"] if id(p) not in self._placed]
            if not new:
                continue
            buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
            for parameter in new:
                if parameter.dtype not in self._groups[number].optimizers:
                    raise RuntimeError(
                        f"param group {number}: a parameter is {parameter.dtype} now and was not when the optimizer was made. Cast the"
                        " model first, then make its optimizer."
                    )
                buckets.setdefault((parameter.dtype, parameter.device), []).append(parameter)
            for (dtype, _), parameters in buckets.items():
                self._place_bucket(number, dtype, parameters)
            self._placed.update(id(p) for p in new)

    def _place_bucket(self, number: int, dtype: torch.dtype, parameters: list[Tensor]) -> None:
        optimizer = self._groups[number].optimizers[dtype]
        # Runs of neighbours that can share a buffer; what cannot is a run of its own.
        runs: list[list[Tensor]] = []
        flat = optimizer.scope == "element" and self._layout != "tree"
        for parameter in parameters:
            if runs and (optimizer.scope == "tree" or (flat and can_be_flat(parameter) and can_be_flat(runs[-1][-1]))):
                runs[-1].append(parameter)
            else:
                runs.append([parameter])
        for run in runs:
            first = self._counted.get(dtype, 0)
            self._counted[dtype] = first + sum(p.numel() for p in run)
            share = flat and can_be_flat(run[0])
            if share:
                tensors, stop = [flatten(run)], 0
                members = [Member(p, 0, stop, stop := stop + p.numel()) for p in run]
            else:
                element = optimizer.scope == "element"
                tensors = [p.detach().view(-1) if element and p.is_contiguous() else p.detach() for p in run]
                members = [Member(p, i, 0, p.numel()) for i, p in enumerate(run)]
            unit = Unit(number, tensors, members, init_state(optimizer, tensors, first), first, flat=share)
            self._units.append(unit)
            self._publish(unit)

    def _publish(self, unit: Unit) -> None:
        """Show each parameter's share of the unit's state in ``self.state``, as views."""
        for member in unit.members:
            self.state[member.parameter] = unit.named_state(member)

    def _follow(self) -> None:
        """See to it that what is stepped is what the model computes with.

        Raises:
            RuntimeError: A parameter was moved to another dtype, device or shape since the first step.
        """
        for unit in self._units:
            for member in unit.members:
                tensor, parameter = unit.tensors[member.position], member.parameter
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
                if unit.flat:
                    # Somebody gave the parameter other memory: its values count, and it returns to its place in the buffer.
                    place = tensor[member.start : member.stop].view(parameter.shape)
                    place.copy_(parameter.detach())
                    parameter.data = place
                else:
                    flat = tensor.ndim == 1 and parameter.is_contiguous()
                    unit.tensors[member.position] = parameter.detach().view(-1) if flat else parameter.detach()

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
            with torch.enable_grad():
                loss = closure()
        self._check_gradients()
        self._place()
        self._follow()
        self._split_by_gradients()
        for group, values in zip(self._groups, self.param_groups, strict=True):
            self._refresh(group, self.factory_arguments(values))
        total: Metrics | None = None
        for unit in self._units:
            present = [member.parameter.grad is not None for member in unit.members]
            if any(present):
                measured = self._step_unit(unit, present)
                if measured is not None:
                    total = (
                        measured if total is None else total + eb.tree.map(lambda x, y: x.to(y.device), measured, total)
                    )
        if self.metrics_enabled:
            self._metrics = total
        return loss

    def _check_gradients(self) -> None:
        for number, group in enumerate(self.param_groups):
            for index, parameter in enumerate(group["params"]):
                grad = parameter.grad
                if grad is not None and grad.layout is not torch.strided:
                    raise TypeError(
                        f"param group {number}, parameter {index}: got a {grad.layout} gradient; accepted are dense gradients"
                        " (torch.nn.Embedding(sparse=False), or torch.optim.SparseAdam for sparse ones)."
                    )

    def _split_by_gradients(self) -> None:
        units: list[Unit] = []
        for unit in self._units:
            present = [member.parameter.grad is not None for member in unit.members]
            boundaries = [i for i in range(1, len(present)) if present[i] != present[i - 1]]
            if unit.flat and boundaries:
                parts = list(unit.split(boundaries))
                units += parts
                for part in parts:
                    self._publish(part)
            else:
                units.append(unit)
        self._units = units

    def _refresh(self, group: _Group, arguments: dict[str, Any]) -> None:
        """Follow changed hyperparameters: check them, and put them where compiled code reads them."""
        if arguments == group.arguments:
            return
        group.optimizers = self._build(group, arguments)
        group.arguments = arguments

    def _step_unit(self, unit: Unit, present: list[bool]) -> Metrics | None:
        group = self._groups[unit.group]
        dtype = unit.tensors[0].dtype
        grads = _gradients(unit)
        tensors, state = unit.tensors, unit.state
        if not all(present):
            # Only where a group is one tree: what has no gradient becomes a hole in parameters, gradients and state alike.
            tensors = [x if here else None for x, here in zip(tensors, present, strict=True)]  # type: ignore[misc]
            state = _with_holes(state, present)
        if not self._compile:
            optimizer = group.optimizers[dtype]
            if unit.flat and unit.tensors[0].numel() > PIECE:
                return _step_in_pieces(optimizer, unit, grads[0], metrics=self.metrics_enabled)
            return _step_in_place(optimizer, tensors, grads, state, unit.first, metrics=self.metrics_enabled)
        return group.compiled(self, dtype, self.metrics_enabled)(
            tensors, grads, state, group.tensors(unit.tensors[0].device), _scalar(unit.first, unit.tensors[0].device)
        )

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
        table = {"parameter": 0, "compensation": 0, "gradient": 0}
        for unit in self._units:
            table["parameter"] += sum(tensor.nbytes for tensor in unit.tensors)
            table["compensation"] += sum(leaf.nbytes for leaf in eb.tree.leaves(unit.state.extra))
            resolved = resolve_tree(self._groups[unit.group].optimizers[unit.tensors[0].dtype].policy, unit.tensors)
            for member in unit.members:
                grad = member.parameter.grad
                main = torch_dtype(resolved[member.position].grads_main)
                table["gradient"] += member.parameter.numel() * main.itemsize if grad is None else grad.nbytes
            for name, size in state_bytes(unit.state.inner, counters=unit.state.step.nbytes).items():
                table[name] = table.get(name, 0) + size
        if not table["compensation"]:
            del table["compensation"]
        return table

    def export_fp32(self) -> list[list[Tensor]]:
        """Every parameter with all the precision that it and its state hold together, in float32: one list per param group."""
        self._place()
        exported: dict[int, Tensor] = {}
        for unit in self._units:
            optimizer = self._groups[unit.group].optimizers[unit.tensors[0].dtype]
            values = optimizer.export_fp32(unit.tensors, unit.state)
            for member in unit.members:
                value = values[member.position]
                if unit.tensors[member.position].ndim == 1:
                    value = value[member.start : member.stop]
                exported[id(member.parameter)] = value.reshape(member.parameter.shape)
        return [[exported[id(p)] for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def import_fp32(self, weights: Iterable[Iterable[Tensor]]) -> None:
        """Store full-precision weights, as :meth:`export_fp32` gives them: the model's tensors are rounded, residuals hold the rest.

        Raises:
            ValueError: Numbers or shapes of weights differ from those of the parameters; nothing is changed.
        """
        self._place()
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
            optimizer = self._groups[unit.group].optimizers[unit.tensors[0].dtype]
            wide = []
            for position, tensor in enumerate(unit.tensors):
                pieces = [
                    by_id[id(m.parameter)].to(tensor.device).reshape(-1) for m in unit.members if m.position == position
                ]
                wide.append(torch.cat(pieces).view(tensor.shape))
            params, state = optimizer.import_fp32(wide, unit.tensors, unit.state)
            _write((unit.tensors, unit.state), (params, state))

    def __repr__(self) -> str:
        flat = sum(unit.flat for unit in self._units)
        placed = f"{flat} flat buffer runs, {len(self._units) - flat} other units" if self._units else "not placed yet"
        policies = "; ".join(
            f"group {group.number}: {set(map(str, group.policies.values()))}" for group in self._groups
        )
        return (
            f"{super().__repr__()}\nlayout={self._layout!r} ({placed}), compile={self._compile}, policies: {policies}"
        )

    # -- copies ----------------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Everything but hooks, as torch; a copy steps its own parameters, from here on."""
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_optimizer_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_units" in state:
            # Objects have new identities, and parameters may have lost their place in the buffer: the next step puts them back.
            self._placed = {id(member.parameter) for unit in self._units for member in unit.members}
            self.state.clear()
            for unit in self._units:
                self._publish(unit)
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
        absent = [key for key in ("state", "param_groups") if key not in state_dict]
        if absent:
            raise ValueError(
                f"state_dict: has no {' and no '.join(map(repr, absent))}; accepted is what state_dict() returns."
            )
        saved, saved_groups = state_dict["state"], state_dict["param_groups"]
        counts = [len(group["params"]) for group in self.param_groups]
        if counts != [len(group["params"]) for group in saved_groups]:
            raise ValueError(
                f"state_dict: got param groups of {[len(group['params']) for group in saved_groups]} parameters; accepted are {counts}."
            )
        self._place()
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbers = [number for group in saved_groups for number in group["params"]]
        given = {id(p): saved[number] for p, number in zip(parameters, numbers, strict=True) if number in saved}
        for index, parameter in enumerate(parameters):
            if id(parameter) in given:
                _require_entries(index, given[id(parameter)], self.state[parameter])
        super().load_state_dict({"state": {}, "param_groups": saved_groups})
        units: list[Unit] = []
        for unit in self._units:
            counts_of = [
                _counts(given.get(id(member.parameter), {}), unit.named_state(member)) for member in unit.members
            ]
            boundaries = [i for i in range(1, len(counts_of)) if counts_of[i] != counts_of[i - 1]]
            units += unit.split(boundaries) if unit.flat and boundaries else [unit]
        self._units = units
        for unit in units:
            fresh = init_state(self._groups[unit.group].optimizers[unit.tensors[0].dtype], unit.tensors, unit.first)
            _write(unit.state, fresh)
            self._publish(unit)
            for member in unit.members:
                for name, value in given.get(id(member.parameter), {}).items():
                    self.state[member.parameter][name].copy_(value)


class _Group:
    """What a param group needs beside its dict: policies, optimizers with the present hyperparameters, compiled steps."""

    def __init__(
        self, number: int, policies: dict[torch.dtype, AnyPolicy], optimizers: dict[torch.dtype, eb.Optimizer[Any]]
    ) -> None:
        self.number = number
        self.policies = policies
        self.optimizers = optimizers
        self.arguments: dict[str, Any] | None = None
        self._compiled: dict[tuple[torch.dtype, bool], Callable[..., Metrics | None]] = {}
        self._tensors: dict[torch.device, dict[str, Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_compiled": {}}

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """The numeric hyperparameters as 0-d float64 tensors, so that a new value is new data and not new code."""
        assert self.arguments is not None
        held = self._tensors.setdefault(device, {})
        for name, value in self.arguments.items():
            if isinstance(value, Tensor):
                held[name] = value
            elif _is_number(value):
                held.setdefault(name, torch.empty((), dtype=torch.float64, device=device)).fill_(value)
        return held

    def compiled(self, owner: TorchOptimizer, dtype: torch.dtype, metrics: bool) -> Callable[..., Metrics | None]:
        """The compiled step for parameters of a dtype; hyperparameters are arguments, the rest is constant."""
        known = self._compiled.get((dtype, metrics))
        if known is None:
            assert self.arguments is not None
            constants = {k: v for k, v in self.arguments.items() if not (_is_number(v) or isinstance(v, Tensor))}
            factory, policy, seed = owner._factory, self.policies[dtype], owner._seed

            def step(
                tensors: list[Tensor],
                grads: list[Tensor],
                state: OptimizerState[Any],
                hyperparameters: dict[str, Tensor],
                first: Tensor,
            ) -> Metrics | None:
                optimizer = eb.Optimizer(factory(**hyperparameters, **constants), policy, seed)
                return _step_in_place(optimizer, tensors, grads, state, first, metrics=metrics)

            # A copy of the code, because the compiler's cache belongs to the code object and is bounded: every group has its own.
            own = types.FunctionType(
                step.__code__.replace(), step.__globals__, step.__name__, step.__defaults__, step.__closure__
            )
            known = self._compiled[dtype, metrics] = compile_step(own)
        return known


def _step_in_place(
    optimizer: eb.Optimizer[Any],
    tensors: list[Tensor],
    grads: list[Tensor],
    state: OptimizerState[Any],
    first: int | Tensor,
    *,
    metrics: bool,
) -> Metrics | None:
    """The pure step, and its results written over what went in; compiled, the writes become in-place stores."""
    ctx = eb.Context(first_element=first)
    advance = optimizer.advance(tensors, grads, state, ctx)
    measured = measure(optimizer, advance, ctx) if metrics else None
    _write((tensors, state), (advance.params, advance.state))
    return measured


def _step_in_pieces(optimizer: eb.Optimizer[Any], unit: Unit, grad: Tensor, *, metrics: bool) -> Metrics | None:
    """The step of a long buffer without a compiler: piece by piece, so that what is computed on the way stays in the cache.

    The pieces' results are the whole's, bit for bit: that is what the scope ``"element"`` promises.
    """
    total: Metrics | None = None
    counters: list[Tensor] = []
    for start in range(0, grad.numel(), PIECE):
        stop = start + PIECE
        # Counters are copied in, so that every piece counts from the same step; the last one's are kept.
        state = map_state(unit.state, lambda x, a=start, b=stop: x[a:b], torch.clone)  # type: ignore[misc]
        measured = _step_in_place(
            optimizer, [unit.tensors[0][start:stop]], [grad[start:stop]], state, unit.first + start, metrics=metrics
        )
        if measured is not None:
            total = measured if total is None else total + measured
        counters = [value for _, value, is_slot in named_fields(state) if not is_slot]
    for counter, value in zip([v for _, v, is_slot in named_fields(unit.state) if not is_slot], counters, strict=True):
        counter.copy_(value)
    return total


def _write(into: object, values: object) -> None:
    for old, new in zip(eb.tree.leaves(into), eb.tree.leaves(values), strict=True):
        old.copy_(new)


def _gradients(unit: Unit) -> list[Any]:
    """The gradients of a unit, in the shapes of its tensors; None where there is none."""
    grads = [member.parameter.grad for member in unit.members]
    if unit.flat:
        found = [grad.reshape(-1) for grad in grads if grad is not None]
        if len({grad.dtype for grad in found}) > 1:
            found = [grad.float() if grad.dtype.itemsize < 4 else grad for grad in found]
        return [found[0] if len(found) == 1 else torch.cat(found)]
    return [
        grad if grad is None or grad.shape == tensor.shape else grad.reshape(tensor.shape)
        for grad, tensor in zip(grads, unit.tensors, strict=True)
    ]


def _with_holes(state: OptimizerState[Any], present: list[bool]) -> OptimizerState[Any]:
    def hide(slot: Any) -> Any:
        return [value if here else None for value, here in zip(slot, present, strict=True)]

    return OptimizerState(state.step, hide(state.extra), eb.tree.map_slots(lambda name, slot: hide(slot), state.inner))


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
            if main is dtype:
                continue
            if tensor.grad is not None and tensor.grad.dtype is not main:
                raise ValueError(
                    f"param group {number}: Grads.main: got {main}, but a parameter of shape {tuple(tensor.shape)} holds a"
                    f" {tensor.grad.dtype} gradient already; clear it (zero_grad) before making the optimizer."
                )
            found.append((tensor, main))
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _scalar(value: int, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=torch.int64, device=device)


class _Kind(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]


def _require_entries(index: int, saved: Mapping[str, Any], own: Mapping[str, Tensor]) -> None:
    """Refuse a parameter's saved state unless it has the names, dtypes and shapes of this optimizer's."""
    if not isinstance(saved, Mapping) or set(saved) != set(own):
        raise ValueError(
            f"state_dict: parameter {index} has state {sorted(saved)}; accepted under this policy is {sorted(own)}."
        )
    for name, tensor in own.items():
        value = saved[name]
        got = _Kind(value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else value
        accepted = _Kind(tensor.dtype, tuple(tensor.shape))
        if got != accepted:
            raise ValueError(
                f"state_dict: parameter {index}, {name!r}: got {got}; accepted is {accepted}. The checkpoint was made under another"
                " policy or for another model; nothing is cast, because that would lose bits."
            )


def _counts(saved: Mapping[str, Any], own: Mapping[str, Tensor]) -> tuple[int, ...]:
    """The 0-d integers of a parameter's state, which all members of a unit share; zeros where nothing is saved."""
    return tuple(int(saved[name]) if name in saved else 0 for name, x in own.items() if x.dtype is torch.int64)
