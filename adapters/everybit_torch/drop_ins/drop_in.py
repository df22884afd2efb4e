"""The base of the optimizers that stand in the place of ``torch.optim``'s, and taking over from those."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from everybit.policies import PolicyOrName
from everybit.stepping import Unsafe
from everybit_torch.arguments import ImplementationArguments
from everybit_torch.optim import TorchOptimizer
from everybit_torch.segments import Compile, Offload, WatchedDType
from everybit_torch.torch_internals.light_optimizer import hooks_of

IMPLEMENTATION: Mapping[str, Any] = {"foreach": None, "capturable": False, "differentiable": False}
"""Options of most of torch's optimizers that choose among its implementations, at the values that choose none."""


class DropInOptions(ImplementationArguments, total=False):
    """What every optimizer takes beside its own arguments.

    Arguments by which torch chooses among its implementations (``foreach``, ``fused``, ``capturable``) have no effect, which is said once.
    ``differentiable`` is taken at False.

    Attributes:
        unsafe: The handling of a policy under which a slot of the state would stop moving; see :func:`everybit.with_policy`.
        watch: The dtype in which changes of weights are noted; see :meth:`TorchOptimizer.take_changed`.
        offload: ``"state"``: state lies in the host's memory; see :class:`TorchOptimizer`.
    """

    unsafe: Unsafe
    watch: WatchedDType | None
    offload: Offload | None


class AdamOptions(DropInOptions, total=False):
    """The same, and an argument by which torch's Adam and AdamW differ, at the value of each."""

    decoupled_weight_decay: bool


class DropIn(TorchOptimizer):
    """The base of optimizers that ``torch.optim`` has under the same name, with the same arguments and the same state."""

    torch_class: ClassVar[type[torch.optim.Optimizer]]
    _by_torch_class: ClassVar[dict[type[object], type[DropIn]]] = {}

    def __init_subclass__(cls) -> None:
        if "torch_class" in cls.__dict__:
            DropIn._by_torch_class.setdefault(cls.torch_class, cls)

    @classmethod
    def from_torch(
        cls,
        optimizer: torch.optim.Optimizer,
        *,
        policy: PolicyOrName | None = None,
        compile: Compile = "auto",
        metrics: bool = False,
        seed: int = 0,
        unsafe: Unsafe = "refuse",
        watch: WatchedDType | None = None,
    ) -> Self:
        """Take over from the ``torch.optim`` optimizer of the same name, in the middle of a run or before its first step.

        The new optimizer steps the same parameters, with the param groups, hyperparameters and state of the old one, which has to be
        dropped. Options that choose among torch's implementations (``foreach``, ``fused``, ``capturable``) have no effect on state and are
        left out; other entries of the param groups, such as those of schedulers, are kept. State is stored once in the policy's formats:
        :meth:`load_torch_state_dict`, which does this for a state dict, returns what that rounds away.

        Args:
            optimizer: An optimizer of torch's class itself. A subclass may have another ``step``.
            policy: See :class:`~everybit_torch.AdamW`, as for all that follow. A group with an entry ``policy`` has that.
            compile: See there.
            metrics: See there.
            seed: See there.
            unsafe: See there.
            watch: See :class:`~everybit_torch.TorchOptimizer`.

        Raises:
            TypeError: An optimizer of another class.
            ValueError: An attribute that cannot be taken over, named in the message: hooks, or ``differentiable``; or a value that the
                constructor refuses. The old optimizer is not changed.

        Examples:
            >>> import torch
            >>> from everybit_torch import AdamW
            >>> model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
            >>> optimizer = AdamW.from_torch(torch.optim.AdamW(model.parameters(), lr=3e-4), policy="LEAN_BF16")
            >>> optimizer.param_groups[0]["lr"]
            0.0003
        """
        cls._require_class(optimizer)
        if hooks := hooks_of(optimizer):
            raise ValueError(
                f"{cls.__name__}.from_torch: got an optimizer with hooks of {', '.join(hooks)}; accepted is one without. Remove them (by"
                " the handle that registering returned), and register them on the new optimizer."
            )
        assert cls.torch_names is not None  # where there is a class there are names
        options = cls.torch_names.options
        groups = []
        for number, group in enumerate(optimizer.param_groups):
            for option, agrees in options.items():
                if option in _OF_THE_STEP and group.get(option, agrees) != agrees:
                    raise ValueError(
                        f"{cls.__name__}.from_torch: param group {number}, {option!r}: got {group[option]!r}; accepted is {agrees!r}."
                    )
            groups.append(_without(options, group))
        for group in groups:
            if "param_names" in group:
                group["params"] = [*zip(group.pop("param_names"), group["params"], strict=True)]
        made: Self = cast(Any, cls)(
            groups, **_without(options, optimizer.defaults), policy=policy, compile=compile,
            metrics=metrics, seed=seed, unsafe=unsafe, watch=watch,
        )  # fmt: skip
        made.load_torch_state_dict(optimizer.state_dict())
        return made

    @classmethod
    def _require_class(cls, optimizer: object) -> None:
        if type(optimizer) is cls.torch_class:
            return
        torchs, got = f"torch.optim.{cls.torch_class.__name__}", type(optimizer)
        hint = "; a subclass may step in another way" if isinstance(optimizer, cls.torch_class) else ""
        same = cls._by_torch_class.get(got)
        if same is not None:
            hint = f"; {same.__name__}.from_torch takes this one"
        elif isinstance(optimizer, TorchOptimizer):
            hint = "; between optimizers of everybit full_state_dict() and load_full_state_dict() carry the state"
        raise TypeError(
            f"{cls.__name__}.from_torch: got {got.__module__}.{got.__qualname__}; accepted is {torchs} itself{hint}."
        )


# Options of torch's that change the result of a step, and not only its implementation.
_OF_THE_STEP = ("decoupled_weight_decay", "differentiable")


def _without(options: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of a param group without those options. Tensors are copied, so that two optimizers do not share one."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in values.items()
        if name not in options
    }
