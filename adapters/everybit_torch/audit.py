"""Where a training run loses precision: layer by layer, of any ``torch.optim`` optimizer, with three lines in the script.

An audited step is taken twice: by a copy of the optimizer whose weights, gradients and state are in float64, parameter by parameter, and
by the optimizer itself. The copy says what was intended, and the difference is what the dtypes of weights and state lost.
"""

from __future__ import annotations

import copy
import json
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everybit_torch.optimizer import TorchOptimizer

FORMAT = 1
LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class LayerAudit:
    """One parameter at one step.

    Attributes:
        step: Number of the optimizer's step, counted from 1 since the audit began.
        name: The parameter's name, as in ``model.named_parameters()``.
        dtype: dtype of its weights.
        elements: Its number of elements.
        lost_share: Share of its non-zero updates that left the weight as it was, in [0, 1].
        edq: Effective descent quality: the share of the intended update that reached the weights; 1 if all of it did.
            ``<change of the weights, intended update> / |intended update|**2`` (Collage, Yu et al. 2024, https://arxiv.org/abs/2405.03637).
        mended_lost_share: The lost share of the same updates if the weights were float32, which ``LEAN_BF16`` and ``EXACT_BF16`` keep in
            4 bytes.
        frozen: For each entry of the state that is stored in 16 bits: the share of its elements that should have changed and did not.
        nonfinite: The number of infinite or NaN elements of the gradient, of the weights after the step, and of each entry of the state,
            where there are any.
    """

    step: int
    name: str
    dtype: str
    elements: int
    lost_share: float
    edq: float
    mended_lost_share: float
    frozen: dict[str, float] = field(default_factory=dict)
    nonfinite: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Before:
    """The tensors before an audited step, and the intended ones after it."""

    weights: Tensor
    intended: Tensor
    state: dict[str, Tensor]
    intended_state: dict[str, Tensor]
    nonfinite_gradients: int


class Audit:
    """Audit an optimizer's steps from now on, through its hooks; the numbers of the training run are not changed.

    An audited step takes more than two steps' time and, until it is over, memory for another copy of weights and 16-bit state, and for both
    in float64.

    Args:
        model: For the names of parameters.
        optimizer: One of ``torch.optim``, or a subclass whose ``step`` takes no closure. It may have schedulers.
        every: An audit at every so many steps, beginning with the first.

    Raises:
        TypeError: An optimizer of everybit, which measures its own steps (``metrics=True``); or no optimizer of torch's.
        ValueError: ``every`` is below 1; a parameter of the optimizer that is not one of the model's.

    Examples:
        >>> import torch
        >>> from everybit_torch import Audit
        >>> model = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        >>> audit = Audit(model, optimizer, every=10)
        >>> model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> [layer.name for layer in audit.layers]
        ['weight', 'bias']
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, every: int = 50) -> None:
        if isinstance(optimizer, TorchOptimizer):
            kind = type(optimizer).__name__
            raise TypeError(
                f"optimizer: got everybit's {kind}, which measures its own steps: {kind}(..., metrics=True) and optimizer.metrics();"
                " accepted is an optimizer of torch.optim."
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer: got {type(optimizer).__name__}; accepted is an optimizer of torch.optim.")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every: got {every!r}; accepted is a whole number, at least 1.")
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        foreign = sum(id(p) not in self._names for group in optimizer.param_groups for p in group["params"])
        if foreign:
            raise ValueError(
                f"optimizer: got {foreign} parameters that are not the model's; accepted is the model's optimizer."
            )
        self.layers: list[LayerAudit] = []
        self._every = every
        self._step = 0
        self._before: dict[int, _Before] = {}
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        """Audit no further steps."""
        for hook in self._hooks:
            hook.remove()
        self._before.clear()

    def save(self, path: str | Path) -> None:
        """Write everything to a JSON file, for ``everybit audit``; folders are made if need be."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {"format": FORMAT, "kind": "everybit audit", "layers": [asdict(layer) for layer in self.layers]}
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._step += 1
        if (self._step - 1) % self._every:
            return
        if any(value is not None for value in (*args[1:], *kwargs.values())):  # the first is the optimizer
            raise TypeError(
                "step: got a closure at an audited step; accepted is step() without one, or Audit.remove() before."
            )
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._before[id(parameter)] = _intended(optimizer, group, parameter)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    before = self._before.pop(id(parameter), None)
                    if before is not None:
                        state = _tensors(optimizer.state[parameter], parameter)
                        self.layers.append(_audited(self._step, self._names[id(parameter)], parameter, state, before))


def load_audit(path: str | Path) -> list[LayerAudit]:
    """Read what :meth:`Audit.save` wrote.

    Raises:
        ValueError: Another file, or one of a later version.
    """
    accepted = f"a file that Audit.save wrote, of format {FORMAT}"
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: got no JSON ({error}); accepted is {accepted}.") from None
    if not isinstance(data, dict) or data.get("kind") != "everybit audit" or data.get("format") != FORMAT:
        raise ValueError(f"{path}: got something else; accepted is {accepted}.")
    return [LayerAudit(**layer) for layer in data["layers"]]


def _intended(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> _Before:
    """Compute the step that the optimizer would make for a parameter if all its tensors were float64, with a copy that has only them."""
    assert parameter.grad is not None
    wide = nn.Parameter(parameter.detach().double())
    wide.grad = parameter.grad.detach().double()
    shadow = copy.copy(optimizer)
    # A scheduler replaces the object's own step, and hooks would audit the audit.
    for name in ("step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        shadow.__dict__.pop(name, None)
    shadow._optimizer_step_pre_hooks, shadow._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    state = optimizer.state.get(parameter, {})
    shadow.param_groups = [{**group, "params": [wide]}]
    shadow.state = defaultdict(dict)
    if state:
        shadow.state[wide] = {
            key: _wide(value) if isinstance(value, Tensor) else copy.deepcopy(value) for key, value in state.items()
        }
    type(shadow).step(shadow)
    return _Before(
        parameter.detach().clone(),
        wide.detach() - parameter.detach(),
        {key: value.clone() for key, value in _tensors(state, parameter).items() if value.dtype in LOW},
        _tensors(shadow.state[wide], wide),
        _nonfinite(parameter.grad),
    )


def _audited(step: int, name: str, parameter: Tensor, state: dict[str, Tensor], before: _Before) -> LayerAudit:
    intended = before.intended
    change = parameter.detach().double() - before.weights.double()
    moved = intended != 0
    meant = float(intended.square().sum())
    frozen = {}
    for key, earlier in before.state.items():
        changing = before.intended_state[key] != earlier
        frozen[key] = _share((state[key] == earlier) & changing, changing)
    nonfinite = {
        "gradient": before.nonfinite_gradients,
        "weights": _nonfinite(parameter),
        **{key: _nonfinite(value) for key, value in state.items()},
    }
    return LayerAudit(
        step,
        name,
        str(parameter.dtype).removeprefix("torch."),
        parameter.numel(),
        _share((change == 0) & moved, moved),
        float((change * intended).sum()) / meant if meant and math.isfinite(meant) else 1.0,
        _mended(before, moved),
        frozen,
        {key: count for key, count in nonfinite.items() if count},
    )


def _mended(before: _Before, moved: Tensor) -> float:
    """The lost share if the weights were float32."""
    weights = before.weights.double()
    return _share(((weights + before.intended).float() == weights) & moved, moved)


def _tensors(state: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """The entries of a parameter's state that have its shape."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape and value.ndim
    }


def _wide(x: Tensor) -> Tensor:
    """A copy, in float64 if it is not a count of steps."""
    return x.detach().to(torch.float64, copy=True) if x.is_floating_point() and x.ndim else x.detach().clone()


def _share(some: Tensor, of: Tensor) -> float:
    total = int(of.sum())
    return int(some.sum()) / total if total else 0.0


def _nonfinite(x: Tensor) -> int:
    return int((~torch.isfinite(x.detach())).sum())


def worst(layers: Iterable[LayerAudit]) -> dict[str, LayerAudit]:
    """For each parameter the audit at which least of its update arrived."""
    found: dict[str, LayerAudit] = {}
    for layer in layers:
        if layer.name not in found or layer.edq < found[layer.name].edq:
            found[layer.name] = layer
    return found
