"""The ``torch.optim.Optimizer`` of a stepper: a param group for each label, over this rank's parts, and the stepper's step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from everybit.policies import AnyPolicy
from everybit.stepping import Unsafe
from everybit_torch.arguments import as_python, spread
from everybit_torch.flat.places import Place
from everybit_torch.optim import Group, GroupMaker, TorchOptimizer, evaluating
from everybit_torch.placements import Region
from everybit_torch.segments import Compile, Offload, WatchedDType
from everybit_torch.sharded.labelling import Labelled, LabelledTransform
from everybit_torch.sharded.numbers_inside import WithNumbers, hyperparameter_fields, hyperparameters


class LabelledGroups(GroupMaker):
    """Makes a group for each label, which steps with the label's own transform.

    Args:
        labelled: The transform and policy of each label.
        seed: The seed of stochastic rounding.
        unsafe: See :func:`everybit.with_policy`.
        compile: Whether steps are compiled.
        mixed: Whether some parameters of the model are of 16 bits.

    Attributes:
        fields: The hyperparameters of each label's param group, and the fields of its transform that they set.
    """

    def __init__(
        self, labelled: Mapping[str, LabelledTransform], *, seed: int, unsafe: Unsafe, compile: Compile, mixed: bool
    ) -> None:
        self._labelled = list(labelled.values())
        self.fields = {label: hyperparameter_fields(one.transform) for label, one in labelled.items()}
        super().__init__(
            "FlatStepper", WithNumbers(self._labelled[0].transform), (), None,
            seed=seed, unsafe=unsafe, compile=compile, decoupled=None, mixed=mixed,
        )  # fmt: skip

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the transform of a param group's label."""
        arguments: dict[str, Any] = {}
        for name, fields in self.fields[values["label"]].items():
            arguments |= spread(name, as_python(name, values[name]), fields)
        return arguments

    def options(self, values: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002  # a stepper makes its groups itself
        """Return no hyperparameters: the transform of a label has them."""
        return {}

    def make(self, number: int, policies: Mapping[torch.dtype, AnyPolicy], arguments: dict[str, Any]) -> Group:
        """Make the group of the label with this number."""
        one, names = self._labelled[number], list(self.fields.values())[number]
        return self.made(number, WithNumbers(one.transform), policies, arguments, names=names, source=one.source)


class ShareOptimizer(TorchOptimizer):
    """A ``torch.optim.Optimizer`` over the parts that this rank steps; made by a stepper, see ``FlatStepper.as_optimizer``.

    Schedulers may change the hyperparameters of the param groups, of which each label has one. FSDP2's parts are DTensors, so that
    ``torch.amp.GradScaler`` and ``torch.nn.utils.clip_grad_norm_`` see all ranks' gradients, if every rank calls them.

    Args:
        labelled: The labels of the model.
        parameters: The parameters to step, by name, in the model's order, frozen parameters included.
        groups: Makes its groups.
        step: The stepper's step.
        clear: Discards the gradients of a cycle.
        replacing: The context in which this rank's weights and state are replaced.
        watch: See :class:`~everybit_torch.TorchOptimizer`.
        offload: See there.
        places: Where this rank's part of each parameter lies, by name; None: the parts are DTensors, which say it.
    """

    of_stepper: ClassVar[bool] = True

    def __init__(
        self,
        labelled: Labelled,
        parameters: Mapping[str, nn.Parameter],
        groups: LabelledGroups,
        *,
        seed: int,
        step: Callable[[], object],
        clear: Callable[[], None],
        replacing: Callable[[], AbstractContextManager[None]],
        watch: WatchedDType | None = None,
        offload: Offload | None = None,
        places: Mapping[str, Place] | None = None,
    ) -> None:
        self._places = places
        self._step_all, self._clear, self._replacing, self._is_made = step, clear, replacing, False
        self.fields = groups.fields
        names = dict.fromkeys(name for fields in self.fields.values() for name in fields)
        given = [
            {
                "params": [(name, p) for name, p in parameters.items() if labelled.of.get(name) == label],
                "policy": one.policy,
                "label": label,
                **dict.fromkeys(names),
                **hyperparameters(one.transform),
            }
            for label, one in labelled.meaning.items()
        ]
        super().__init__(given, groups, seed=seed, watch=watch, offload=offload)
        self._is_made = True
        self.defaults |= dict.fromkeys((*names, "label"))  # schedulers look for what they may change
        self.own.number_elements(parameters.values())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is made.

        Raises:
            RuntimeError: Later.
        """
        if self._is_made:
            raise RuntimeError("add_param_group: a stepper's parameters are settled; accepted is to make another.")
        super().add_param_group(param_group)

    def require_hyperparameters(self, number: int, group: Mapping[str, Any]) -> None:
        """Refuse values of a param group that cannot work; the present values stay.

        Raises:
            TypeError: A hyperparameter of another kind.
            ValueError: One that is out of range.
        """
        self.own.groups[number].build(self.factory_arguments(group))

    def _region_of(self, name: str, parameter: Tensor) -> Region:
        if self._places is None:
            return super()._region_of(name, parameter)
        place = self._places[name]
        return Region((place.numel,), (place.offset,), (place.spec.numel,))

    def _whole_shape(self, name: str, parameter: Tensor) -> tuple[int, ...]:
        return super()._whole_shape(name, parameter) if self._places is None else self._places[name].spec.shape

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Complete the gradients, and step: the stepper's ``step``.

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

    def replacing(self) -> AbstractContextManager[None]:
        """Return the context in which weights and state are replaced, after which all ranks have them. Every rank has to be there."""
        return self._replacing()

    def eval(self) -> None:
        """A no-op for a transform that evaluates the weights which it trains.

        Raises:
            RuntimeError: It evaluates others, which the stepper gives to the model.
        """
        if evaluating.has_others(self):
            raise RuntimeError(
                "eval: the weights for evaluation are gathered by the stepper; accepted is `with evaluation_weights(stepper):`."
            )

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002  # torch's signature; there is one way here
        """Discard the gradients of this cycle."""
        self._clear()


_SAVING = "accepted is save_sharded(stepper, path), or, for weights alone, model.state_dict()."
_LOADING = "accepted is load_sharded(stepper, path), or loading before the stepper is made."
_WEIGHTS = "accepted is to read or write the model's weights, and then stepper.loaded()."


def _refused(name: str, accepted: str) -> Any:
    """Return a method that refuses, with what is accepted in its place."""

    def refuse(self: PieceOptimizer, *_: object, **__: object) -> NoReturn:  # noqa: ARG001
        raise RuntimeError(
            f"{name}: as_optimizer() holds this rank's parts of the parameters, and its state lies with them; {accepted}"
        )

    return refuse


class PieceOptimizer(ShareOptimizer):
    """A :class:`ShareOptimizer` over pieces of flat buffers, which are of this rank alone: what would save or load them is refused.

    Gradients of pieces are measured over all ranks by ``torch.amp.GradScaler`` and ``torch.nn.utils.clip_grad_norm_``, if every rank
    calls them.
    """

    of_shards: ClassVar[bool] = True
    """For code that would add up squares of gradients: this rank has some of them only."""

    state_dict = _refused("state_dict", _SAVING)
    full_state_dict = _refused("full_state_dict", _SAVING)
    torch_state_dict = _refused("torch_state_dict", _SAVING)
    export_fp32 = _refused("export_fp32", _SAVING)
    eval_params = _refused("eval_params", _WEIGHTS)
    import_fp32 = _refused("import_fp32", _WEIGHTS)
    load_state_dict = _refused("load_state_dict", _LOADING)
    load_full_state_dict = _refused("load_full_state_dict", _LOADING)
    load_torch_state_dict = _refused("load_torch_state_dict", _LOADING)

    def __getstate__(self) -> NoReturn:
        """Refuse to be copied or pickled.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "as_optimizer(): cannot be copied or pickled, for its tensors are parts of the stepper's buffers; "
            + _SAVING
        )
