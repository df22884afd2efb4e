"""A ``torch.optim.Optimizer`` that runs an everybit transform: torch's signatures and state dicts over segments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, ClassVar, cast, overload

import torch
from torch import Tensor

import everybit as eb
from everybit.policies import LOW, PolicyOrName
from everybit.stepping import Metrics, Unsafe, require_factors
from everybit_torch import clip_notice, notices
from everybit_torch.ambient import in_plain_mode
from everybit_torch.arguments import WithAverage, argument_names, require_factory, settled
from everybit_torch.compiled import Factory
from everybit_torch.embeddings import require_names
from everybit_torch.label_resolution import tree_of
from everybit_torch.optim import common_numbers, evaluating, following, moved_state, param_groups, stepping
from everybit_torch.optim.bytes import bytes_table
from everybit_torch.optim.changes import Changed, changed
from everybit_torch.optim.groups import GroupMaker
from everybit_torch.optim.interfaces import Release, TorchNames
from everybit_torch.optim.param_groups import Params
from everybit_torch.optim.parameters import Parameters
from everybit_torch.optim.planned import parameters_of
from everybit_torch.optim.seen import Seen
from everybit_torch.optim.state_dicts import assigned, full_weights, loading, saving, scaled_rows, torch_format
from everybit_torch.optim.state_dicts.full_precision import LoadReport
from everybit_torch.optim.state_dicts.saved_structure import Saved, read
from everybit_torch.optim.states import ParameterState, States, state_replaced
from everybit_torch.optim.watching import Watch, require_watched
from everybit_torch.placements import Region
from everybit_torch.segments import Compile, Offload, WatchedDType, require_compile, require_offload
from everybit_torch.streams import is_capturing
from everybit_torch.torch_internals.dtensors import is_dtensor
from everybit_torch.torch_internals.light_optimizer import LightOptimizer


class TorchOptimizer(LightOptimizer):
    """Optimize a model's parameters by the transform that ``factory`` makes, stored as ``policy`` says.

    Everything written for ``torch.optim`` works on it: param groups, learning-rate schedulers, closures, hooks, ``state_dict``.
    Hyperparameters go by torch's names: ``lr`` is the factory's ``learning_rate``, ``betas`` its ``b1`` and ``b2``; all others keep
    theirs. They are in ``param_groups`` and may be changed there at any time, without recompiling.

    Args:
        params: Parameters, named parameters, or dicts of a param group. A group may have a ``policy`` of its own.
        factory: A function from hyperparameters to a transform, such as ``everybit.adamw``.
        policy: How everything is stored; a preset's name will do. None: as the model is, for float32 and float64 models alone.
        compile: Compile the step with ``torch.compile``; the results are the same bits. ``"auto"``: for param groups of at least
            ``everybit_torch.segments.steps.WORTH_COMPILING`` elements of one dtype, where there is a compiler; the first step then takes
            some seconds longer, and says so.
        metrics: Measure every step; see :meth:`metrics`. ``metrics_enabled`` may be switched between steps.
        seed: The seed of stochastic rounding.
        unsafe: See :func:`everybit.with_policy`.
        average: The decay rate of a moving average of the weights (EMA), such as 0.999; None: no average. It is state, in the format that
            the policy has for it (``Policy.state``), and ``evaluation_weights(optimizer)`` gives it to the model. A factory with an
            argument of this name is given the value instead.
        watch: Note which weights steps change, as they are seen in this dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``. It takes a
            byte for each element, and :meth:`take_changed` names them. None: changes are not noted.
        offload: ``"state"``: keep state and residuals of weights in pinned memory of the host. Each step copies it to the device and back,
            piece by piece, beside the steps of other pieces; two pieces are on the device at once. The bits are the same. None: state lies
            where its parameter does.
        hyperparameters: Defaults for the param groups.

    Raises:
        TypeError: A parameter that is not a real floating-point tensor.
        ValueError: A hyperparameter or policy that cannot work; the message names it.

    Examples:
        >>> import torch, everybit as eb
        >>> from everybit_torch import TorchOptimizer
        >>> model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
        >>> optimizer = TorchOptimizer(model.parameters(), eb.lion, lr=1e-4, policy=eb.policies.KAHAN_BF16)
    """

    torch_names: ClassVar[TorchNames | None] = None
    # What torch's argument `decoupled_weight_decay` has to be, where torch's optimizer of this name has it.
    _decoupled: ClassVar[bool | None] = None
    # Whether it is a stepper's, which takes gradients and steps by itself.
    of_stepper: ClassVar[bool] = False
    # Whether the model has the weights for evaluation.
    evaluating: bool = False
    # Whether state was moved to the host.
    _is_away: bool = False

    def __init__(
        self,
        params: Params,
        factory: Factory | GroupMaker,
        *,
        policy: PolicyOrName | None = None,
        compile: Compile = "auto",
        metrics: bool = False,
        seed: int = 0,
        unsafe: Unsafe = "refuse",
        average: float | Tensor | None = None,
        watch: WatchedDType | None = None,
        offload: Offload | None = None,
        **hyperparameters: Any,
    ) -> None:
        require_compile(compile)
        require_offload(offload)
        watch = require_watched(watch)
        kind = type(self).__name__
        if not isinstance(factory, GroupMaker):
            require_factory(factory)
            if average is not None:
                hyperparameters["average"] = average
                factory = factory if "average" in argument_names(factory) else WithAverage(factory)
            hyperparameters = settled(kind, TorchOptimizer.__init__, factory, hyperparameters, self._decoupled)
        self._compile: Compile = compile
        self.metrics_enabled, self.had_gradients = metrics, False
        self.own = Parameters(States(torch_names=self._slots))
        self.own.hosts = None if offload is None else {}
        self.own.watch = None if watch is None else Watch(watch, sees_writes=not self.of_stepper)
        self._measured: Metrics | None = None
        self._seen = Seen()
        self.release: Release | None = None  # set by enable_gradient_release
        # All parameters, before the first group is added: a policy for 16-bit weights keeps float32 parameters beside them as they are.
        params = param_groups.as_lists(params)
        mixed = any(p.dtype in LOW for p in param_groups.tensors_of(params))
        self._maker = factory if isinstance(factory, GroupMaker) else GroupMaker(
            kind, factory, hyperparameters, policy,
            seed=seed, unsafe=unsafe, compile=compile, decoupled=self._decoupled, mixed=mixed,
        )  # fmt: skip
        super().__init__(cast(Any, params), hyperparameters)
        if not self.of_stepper and self.own.groups:
            clip_notice.look_at(next(iter(self.own.groups[0].optimizers.values())).transform)
        self.state = self.own.states

    @property
    def _slots(self) -> Mapping[str, str]:
        return self.torch_names.slots if self.torch_names is not None else {}

    # -- groups ---------------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group at any time; it may have a ``policy`` of its own.

        Raises:
            TypeError: A parameter that is not a real floating-point tensor.
            ValueError: A hyperparameter or policy that cannot work.
        """
        param_group = dict(param_group)
        policy = param_group.pop("policy", self._maker.policy)
        param_group["params"] = given = param_groups.listed(param_group["params"])
        number = len(self.param_groups)
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in given]
        param_groups.require_parameters(number, tensors)
        param_group |= self._maker.options(param_group)
        mixed = self._maker.mixed or any(tensor.dtype in LOW for tensor in tensors)
        policies = self._maker.policies(policy, dict.fromkeys(tensor.dtype for tensor in tensors), number, mixed=mixed)
        group = self._maker.make(number, policies, self.factory_arguments({**self.defaults, **param_group}))
        require_names(group.optimizers.values(), param_groups.named_tree(given))
        param_groups.require_storable(number, param_groups.named_tree(given), group.optimizers)
        main_dtypes = param_groups.main_gradients(number, param_groups.named_tree(given), policies)
        super().add_param_group(param_group)
        self._maker.mixed = mixed
        self.own.add_group(group)
        # Now, not at the first step: the first backward pass comes before it.
        for tensor, dtype in main_dtypes:
            tensor.grad_dtype = dtype

    @property
    def own_groups(self) -> list[dict[str, Any]]:
        """The param groups. Those put into the list by hand are added, as torch steps those, too."""
        param_groups.require_distinct(self.param_groups)
        if len(self.param_groups) > len(self.own.groups):
            param_groups.add_by_hand(self.param_groups, len(self.own.groups), self.add_param_group)
        param_groups.require_all(self.param_groups, len(self.own.groups), self._has_policy)
        return self.param_groups

    def _has_policy(self, number: int, policy: PolicyOrName | None) -> bool:
        own = self.own.groups[number].policies
        return self._maker.policies(policy, own, number) == own

    def factory_arguments(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The factory's keyword arguments for a param group: torch's names become the core's.

        Raises:
            TypeError: A flag that is neither True nor False.
            ValueError: A pair of another length, or a number that is not finite.
        """
        return self._maker.arguments(group)

    # -- stepping -------------------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient. The result is the same in every mode: autocast, default dtype or device, and others.

        Args:
            closure: Recomputes the loss and the gradients; called once, with gradients enabled, in the mode of the caller.

        Returns:
            What ``closure`` returned.

        Raises:
            TypeError: A sparse gradient.
            ValueError: A hyperparameter that has become impossible.
            RuntimeError: A parameter that was moved since the first step.
        """
        self.require_trained("step")
        loss = None
        if closure is not None:
            if self.release is not None:
                raise RuntimeError(
                    "gradient release: step(closure) would run the backward pass again; accepted is step()."
                )
            # Out of inference mode, gradients are enabled as well.
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else torch.enable_grad():
                loss = closure()
        self.step_now()
        return loss

    def require_trained(self, name: str) -> None:
        """Refuse what reads or changes weights and state together, while the model has other weights.

        Args:
            name: The refused method.

        Raises:
            RuntimeError: Inside ``evaluation_weights()``, or after :meth:`eval`.
        """
        if self.evaluating:
            raise RuntimeError(
                f"{name}: the model has its weights for evaluation; accepted is outside of evaluation_weights(), or after train()."
            )

    @in_plain_mode
    def step_now(self) -> None:
        """Update every parameter that has a gradient, without what torch's hooks and schedulers see of :meth:`step`."""
        if self._is_away:
            raise RuntimeError("step: state was moved to the host by offload(); accepted is after reload().")
        if self.release is not None:
            self.release.finish()
            return
        self.prepare()  # what has changed since the last step
        tasks, visits = stepping.find_gradients(self.own)
        stepping.add_totals(self.own, tasks, visits)
        measured = stepping.step(self.own, tasks, visits, metrics=self.metrics_enabled)
        self._require_some_gradient(has_gradients=bool(tasks or visits))
        if self.metrics_enabled:
            self.note_metrics(measured)

    def note_metrics(self, measured: Metrics | None) -> None:
        """Let these be the metrics of the last step, added up over all processes that have parts of the parameters."""
        self._measured = stepping.over_all(self._parameters(), measured, self.own.ranks)

    def prepare(self) -> None:
        """Prepare a step: place parameters and state, and copy changed hyperparameters to the device. It counts no step.

        It serves CUDA graphs, partial steps, and code that reads the state before the first step: ``get_optimizer_state_dict`` of
        :mod:`torch.distributed.checkpoint` otherwise takes a step with zero gradients, which counts.

        Raises:
            RuntimeError: A parameter that was moved, a replaced ``state``, or work that a captured graph must not repeat.
            TypeError: A value that is no hyperparameter.
            ValueError: A hyperparameter, or a policy, that cannot be.
        """
        if is_capturing():
            self._require_capturable()
        if self._seen.is_in_place(self.own, self.param_groups, self.state):
            if not self._seen.has_values(self.own, self.param_groups):  # a schedule
                self._follow_hyperparameters(self.own_groups)
                self._seen.note_values(self.own, self.param_groups)
            return
        self._settle_state()
        groups = self.own_groups
        self._follow_hyperparameters(groups)
        self._settle_parameters(groups)
        self.own.relocate(groups)
        self.own.take_back()
        self._seen.note(self.own, groups, self.state)

    def _require_capturable(self) -> None:
        """Refuse a step that is captured in a CUDA graph, if more had to be done than is to be done again at every replay.

        Raises:
            RuntimeError: A parameter that was not stepped before, or a hyperparameter that has changed since.
            ValueError: A hyperparameter that is a tensor on another device.
        """
        groups = self.own_groups
        if self.own.plan(groups, frozenset()) is not None:
            raise RuntimeError(
                "step: a CUDA graph is being captured, and there are parameters that were not stepped yet, whose state every replay would"
                " begin anew; accepted is a step before the capture."
            )
        for one in self.own.stepped:
            arguments = self.factory_arguments(groups[one.group.number])
            one.group.require_capturable(arguments, one.of.segment.tensor.device)

    def place(self) -> None:
        """Create the state of parameters without state, as the first step does, and look where all parameters lie now.

        Raises:
            RuntimeError: A parameter that was moved to where it cannot be stepped.
            ValueError: A parameter that cannot be stepped, or a policy that cannot be.
        """
        groups = self.own_groups
        self._settle_parameters(groups)
        self.own.relocate(groups)

    def _settle_parameters(self, groups: list[dict[str, Any]]) -> None:
        """Give parameters without state their state: that which was assigned to them, or that before the first step."""
        plan = self.own.plan(groups, frozenset())
        if plan is not None:
            given, known = assigned.judge(self, plan), [*self.own.stepped]
            self.own.carry_out(plan)
            common_numbers.spread(self.own.stepped, known)
            assigned.adopt(self, given)

    def _parameters(self) -> list[Tensor]:
        return parameters_of(self.own_groups)

    def _follow_hyperparameters(self, groups: list[dict[str, Any]]) -> None:
        """Step with the hyperparameters that the param groups have now."""
        following.follow(self.own, groups, [self.factory_arguments(values) for values in groups])

    def _settle_state(self) -> None:
        """Take over a mapping assigned to ``self.state``, which is possible until parameters are placed."""
        if self.state is self.own.states:
            return
        if self.own.stepped or self.own.visiting:
            raise state_replaced()
        self.state = self.own.states = self.own.states.replaced(self.state)

    def _require_some_gradient(self, *, has_gradients: bool) -> None:
        """Warn where gradients stop: the model then trains on with parameters that are not the optimizer's."""
        had, self.had_gradients = self.had_gradients, has_gradients
        if had and not has_gradients:
            notices.warn_of_no_gradient(type(self).__name__)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as torch does.

        Args:
            set_to_none: A parameter that receives no gradient after this is skipped. False: it is stepped with zeros.
        """
        if self.release is not None:
            self.release.abandon()
        super().zero_grad(set_to_none)

    def metrics(self) -> Metrics:
        """Return the metrics of the last measured step, over all parameters.

        Raises:
            RuntimeError: No step was measured.
        """
        if self._measured is None:
            raise RuntimeError("metrics: no step was measured yet; pass metrics=True, or set metrics_enabled = True.")
        return self._measured

    # -- the host's memory ----------------------------------------------------------------------------------------------------

    @in_plain_mode
    @torch.no_grad()
    def offload(self) -> None:
        """Move the state to the host's memory, and free its memory on the device, until :meth:`reload`.

        It is for programs in which something else takes the device between steps. State dicts and checkpoints may be read and loaded
        meanwhile; a step is refused. It is a no-op for state that lies on the host already.

        Raises:
            ValueError: Parameters that are on no CUDA device.
        """
        self.place()
        if not self._is_away:
            moved_state.move_to_host(self.own)
            self._is_away = True

    @in_plain_mode
    @torch.no_grad()
    def reload(self) -> None:
        """Move the state back to the device. The host does not wait for the copies; later work on the device does."""
        if self._is_away:
            moved_state.move_back(self.own)
            self._is_away = False

    # -- edits ----------------------------------------------------------------------------------------------------------------

    @in_plain_mode
    @torch.no_grad()
    def scale_rows(self, factors: Mapping[str, Tensor]) -> None:
        """Multiply rows of weights by factors, the stored weights and their residuals together, as QK-clip does after a step.

        The result is that of weights in full precision, rounded once; moments stay. On shards each rank scales its own rows, and every rank
        has to call it, with the same factors.

        Args:
            factors: A factor for each row of the whole parameter, 1-d, by the parameter's name.

        Raises:
            ValueError: A name of no parameter that is trained, or factors of another shape. All weights stay.
            RuntimeError: The model has its weights for evaluation.

        Examples:
            >>> import torch
            >>> from everybit_torch import AdamW
            >>> model = torch.nn.Linear(2, 4, bias=False, dtype=torch.bfloat16)
            >>> optimizer = AdamW(model.named_parameters(), policy="LEAN_BF16")
            >>> head = torch.tensor([0.9, 0.9, 1.0, 1.0])
            >>> optimizer.scale_rows({"weight": head})
        """
        self.require_trained("scale_rows")
        self.place()
        placed = {*(one.parameter for one in self.own.visited()), *(one.parameter for one in self.own.own())}
        names: dict[Tensor, str] = {}
        for number, group in enumerate(self.own_groups):
            named = zip(group["params"], param_groups.names_of(number, group), strict=True)
            names |= {p: name for p, name in named if p in placed}
        by_name = {name: p for p, name in names.items()}
        require_factors(factors, {name: self._whole_shape(name, p) for name, p in by_name.items()})
        with self.replacing():
            scaled_rows.scale_rows(
                self.own, {id(by_name[name]): x for name, x in factors.items()}, lambda p: self._region_of(names[p], p)
            )

    def _whole_shape(self, name: str, parameter: Tensor) -> tuple[int, ...]:  # noqa: ARG002  # steppers find it by the name
        return tuple(parameter.shape)

    # -- changes --------------------------------------------------------------------------------------------------------------

    def take_changed(self) -> Changed:
        """Return the weights that have changed since they were taken last, as they are seen in the dtype of ``watch``.

        A program that keeps a copy of the weights elsewhere, such as an inference engine, sends these. The first call names all weights,
        and so does the first after a load, an import or a write by other code; ``whole`` names such parameters. A write that autograd does
        not count (``parameter.data.copy_(...)``) is not seen; call :meth:`forget_changes` after it.

        Returns:
            An iterable of (name, indices, values), which takes each parameter as it is reached; see
            :class:`~everybit_torch.optim.changes.Changed`. On shards each rank names its own elements, by their indices in the whole.

        Raises:
            RuntimeError: The optimizer was made without ``watch``; or the model has its weights for evaluation.

        Examples:
            >>> import torch
            >>> from everybit_torch import AdamW
            >>> model = torch.nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
            >>> optimizer = AdamW(model.named_parameters(), policy="LEAN_BF16", watch="bfloat16")
            >>> [(name, indices.tolist()) for name, indices, values in optimizer.take_changed()]
            [('weight', [0, 1, 2, 3])]
            >>> [(name, indices.tolist()) for name, indices, values in optimizer.take_changed()]
            [('weight', [])]
        """
        self._require_watched("take_changed")
        self.require_trained("take_changed")
        return changed(self.own, self.own_groups, self._region_of)

    def forget_changes(self) -> None:
        """Let the next :meth:`take_changed` name all weights, as after a load.

        Raises:
            RuntimeError: The optimizer was made without ``watch``.
        """
        self._require_watched("forget_changes")
        self.own.note_loading()

    def _require_watched(self, name: str) -> None:
        if self.own.watch is None:
            raise RuntimeError(
                f"{name}: changes are not noted; accepted is an optimizer that was made with watch='bfloat16'."
            )

    def _region_of(self, name: str, parameter: Tensor) -> Region:  # noqa: ARG002  # steppers find it by the name
        return Region.of(parameter)

    @in_plain_mode
    def bytes_table(self) -> dict[str, int]:
        """Return the bytes of the tensors that are allocated now, by use; keys as in :meth:`everybit.Policy.bytes_table`, and ``counters``.

        Gradients that are not there at the moment are counted as they will be. Entries of other code in ``state`` are not counted.
        """
        self.place()
        return bytes_table(self.own)

    @in_plain_mode
    def export_fp32(self) -> list[list[Tensor]]:
        """Return every parameter with all the precision that it and its state hold together, in float32: one list per param group."""
        self.require_trained("export_fp32")
        self.place()
        return full_weights.export(self)

    @in_plain_mode
    @torch.no_grad()
    def eval_params(self) -> list[list[Tensor]]:
        """Return the weights for evaluation, in float32, if the transform has such weights; in the form of :meth:`export_fp32`."""
        self.require_trained("eval_params")
        self.place()
        return full_weights.export(self, eb.Optimizer.eval_params)

    @in_plain_mode
    def eval(self) -> None:
        """Give the model its weights for evaluation, until :meth:`train`. Programs such as accelerate call both where they exist.

        It is a no-op for a transform that evaluates the weights which it trains, and at a second call. The state dict of an optimizer in
        this state has the trained weights too, so that a checkpoint of both goes on in training.
        """
        if not self.evaluating:
            self.place()
            if evaluating.has_others(self):
                self._show_evaluated()

    def train(self) -> None:
        """Give the model the weights that are trained, after :meth:`eval`."""
        if self.evaluating:
            self._show_trained()

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Give the model its weights for evaluation inside; see :func:`everybit_torch.evaluation_weights`."""
        self.require_trained("evaluation_weights")
        self.place()
        try:
            self._show_evaluated()
            yield
        finally:
            self._show_trained()

    def _show_evaluated(self) -> None:
        """Give the model the weights for evaluation, whatever they are."""
        evaluating.begin(self)
        self.evaluating = True

    def _show_trained(self) -> None:
        """Give the model the weights that are trained."""
        evaluating.end(self)
        self.evaluating = False

    @in_plain_mode
    @torch.no_grad()
    def import_fp32(self, weights: Iterable[Iterable[Tensor]]) -> None:
        """Store full-precision weights, as :meth:`export_fp32` gives them: the model's tensors are rounded, residuals hold the rest.

        Args:
            weights: For each param group, a tensor for each parameter: of its shape, and of a dtype that the policy's compute dtype holds
                exactly.

        Raises:
            ValueError: Numbers, shapes, dtypes or layouts of weights that are not accepted; the model is unchanged.
        """
        given = self.judge_weights(weights)
        self.place()
        with self.replacing():
            full_weights.store(self, given)

    def replacing(self) -> AbstractContextManager[None]:
        """Return the context in which weights and state are replaced; for subclasses."""
        return nullcontext()

    def judge_weights(self, weights: Iterable[Iterable[Tensor]]) -> dict[int, Tensor]:
        """Refuse what :meth:`import_fp32` would refuse; return the weights by id of their parameter.

        Raises:
            ValueError: They do not fit; the model is unchanged.
            RuntimeError: Parameters that cannot be placed.
        """
        self.require_trained("import_fp32")
        given = full_weights.judge(self, weights)
        self.own.plan(self.own_groups, frozenset())
        self.own.require_relocatable(self._parameters())
        return given

    def export_dtypes(self) -> dict[int, torch.dtype]:
        """Return, by id of the parameter, the dtype in which :meth:`export_fp32` gives its weights."""
        return full_weights.dtypes(self)

    def __repr__(self) -> str:
        groups = [
            f"param group {group.number}: {self.own.described(group.number)}; {param_groups.described(group.policies)}"
            for group in self.own.groups
        ]
        return "\n".join([super().__repr__(), f"compile={self._compile!r}", *groups])

    # -- copies ----------------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Everything but hooks, as torch; a copy steps its own parameters, from here on.

        Raises:
            RuntimeError: Gradients are released during the backward pass, by hooks that cannot be copied.
            TypeError: Parameters that ranks hold rows of are stepped whole by owners.
        """
        self.require_trained("a copy of the optimizer")
        if self.release is not None:
            raise RuntimeError(
                "gradient release: an optimizer that steps by hooks cannot be copied; call remove() on its handle first."
            )
        if self.own.visiting:
            raise TypeError(
                "a copy of the optimizer: parameters are stepped whole by owners, among ranks that a copy cannot have. Accepted are another"
                " optimizer, and the state of this one by state_dict()."
            )
        # Schedulers put a `step` of their own into an optimizer; it is no part of torch's optimizers when they are copied, either.
        copied = {
            name: value
            for name, value in self.__dict__.items()
            if not name.startswith("_optimizer_") and name != "step"
        }
        # The optimizer's own entries are in its segments. Of the state only entries of other code are copied.
        copied["state"] = {
            key: entries.kept if isinstance(entries, ParameterState) else entries for key, entries in self.state.items()
        }
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "own" in state:
            self.state = self.own.states = States(None, state["state"], torch_names=self._slots)
            self.own.show(self.own.stepped)
            # torch copies a parameter without its grad_dtype.
            for group, values in zip(self.own.groups, self.own_groups, strict=True):
                for tensor, dtype in param_groups.main_gradients(group.number, tree_of(values), group.policies):
                    tensor.grad_dtype = dtype

    # -- checkpoints ----------------------------------------------------------------------------------------------------------

    @in_plain_mode
    def state_dict(self) -> dict[str, Any]:
        """Return the state per parameter, as torch does; tensors have their stored dtypes, and load under ``weights_only=True``.

        Raises:
            RuntimeError: The model has its weights for evaluation, and its parameters are DTensors.
            ValueError: State of a tensor that is no parameter of the optimizer.
        """
        if any(map(is_dtensor, self._parameters())):
            # Functions that load sharded state look for the entries that the optimizer has then, and would leave the trained weights out.
            self.require_trained("state_dict")
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._settle()
        packed = saving.packed(self)
        for after in self._optimizer_state_dict_post_hooks.values():
            replaced = after(self, packed)
            if replaced is not None:
                packed = replaced
        return packed

    def _settle(self) -> None:
        """Let the state follow the param groups, so that a checkpoint fits itself."""
        self._settle_state()
        with suppress(TypeError, ValueError):
            self._follow_hyperparameters(self.own_groups)

    @in_plain_mode
    @torch.no_grad()
    def load_state_dict(  # type: ignore[override]  # torch's returns nothing
        self, state_dict: dict[str, Any], *, strict: bool = True
    ) -> LoadReport:
        """Continue from a checkpoint, bit for bit. Every dtype must be the policy's own: there is no cast.

        Parameters are found by their names, where the optimizer and the checkpoint have them (``model.named_parameters()``), and else by
        position. Entries of other code in ``state`` (wrappers' entries, keys that are no parameters) and in param groups come back too, as
        copies.

        Args:
            state_dict: The result of :meth:`state_dict`.
            strict: Refuse a checkpoint that has other names. False: what only one side has is left out; such a parameter keeps its state.

        Returns:
            The names that were left out. It has no losses.

        Raises:
            TypeError: A hyperparameter that is not one.
            ValueError: Something that does not fit: structure, hyperparameters, entries, dtypes, shapes, layouts, counts. The message names
                the place, and the optimizer is unchanged.
        """
        # torch's own loader casts state to its parameter's dtype; its hooks are run here as it runs them.
        if isinstance(state_dict, Mapping):
            state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        loaded = self._judge(state_dict, strict=strict)
        is_evaluated = evaluating.is_saved_in(loaded, self._parameters())
        with self.replacing():
            report = loading.restore(self, loaded)
        self.evaluating = is_evaluated
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)
        return report

    @in_plain_mode
    def full_state_dict(self) -> dict[str, Any]:
        """Return a ``state_dict`` in full precision: decoded weights and state in float32, whatever the policy.

        Beside the slots each parameter's state has its weights, as ``"param"``. :meth:`load_full_state_dict` of an optimizer with
        another policy takes it, so that a run goes on in another format.
        """
        self.require_trained("full_state_dict")
        self._settle()
        self.place()
        return saving.packed_in_full(self)

    @in_plain_mode
    @torch.no_grad()
    def load_full_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> LoadReport:
        """Continue from a :meth:`full_state_dict`, stored under this optimizer's policy; the model's weights are loaded, if it has them.

        Args:
            state_dict: The result of :meth:`full_state_dict`.
            strict: Whether state must be complete, as for :meth:`load_state_dict`.

        Returns:
            For the weights (``"param"``) and each slot: what rounding to this policy's formats lost. And the names that were left out.

        Raises:
            TypeError: A hyperparameter that is not one.
            ValueError: An entry that does not fit; the message names the place, and the optimizer is unchanged.
        """
        loaded = self._judge(state_dict, full=True, strict=strict)
        with self.replacing():
            return loading.restore_in_full(self, loaded)

    def torch_state_dict(self) -> dict[str, Any]:
        """Return the state in the form of the ``torch.optim`` optimizer of the same name, in float32, which can load it.

        Raises:
            TypeError: There is no such optimizer in torch.
            ValueError: A hyperparameter that torch's does not have is in use.
        """
        return torch_format.to_torch(self, self.full_state_dict())

    @in_plain_mode
    @torch.no_grad()
    def load_torch_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> LoadReport:
        """Continue from the ``state_dict`` of the ``torch.optim`` optimizer of the same name, under this optimizer's policy.

        The weights are the model's: load them there, or by :meth:`import_fp32`, before.

        Args:
            state_dict: A state dict of torch's optimizer.
            strict: Whether state must be complete, as for :meth:`load_state_dict`.

        Returns:
            The same as :meth:`load_full_state_dict`.

        Raises:
            TypeError: There is no such optimizer in torch.
            ValueError: The checkpoint is another optimizer's, or has options (``amsgrad``) that this optimizer does not have; it is
                unchanged.
        """
        self.require_trained("load_torch_state_dict")
        saved = self._completed(torch_format.from_torch(self, state_dict, strict=strict), full=True)
        loaded = loading.judge(self, saved, loading.judge_settings(self, saved), full=True, from_torch=True)
        with self.replacing():
            return loading.restore_in_full(self, loaded)

    def _judge(self, state_dict: Mapping[str, Any], *, full: bool = False, strict: bool = True) -> loading.Loaded:
        """Judge a state dict as a whole; the optimizer is unchanged."""
        self.require_trained("load_full_state_dict" if full else "load_state_dict")
        self._settle_state()
        saved = self._completed(read(state_dict, self.own_groups, strict=strict), full=full)
        return loading.judge(self, saved, loading.judge_settings(self, saved), full=full)

    def _completed(self, saved: Saved, *, full: bool) -> Saved:
        """A state dict with the present state of parameters that it does not have by name."""
        if not saved.missing:
            return saved
        present = (self.full_state_dict() if full else saving.packed(self))["state"]
        kept = {position: present[position] for position in saved.missing if position in present}
        return replace(saved, entries={**saved.entries, **kept})
