"""Where a training run loses precision: layer by layer, of any ``torch.optim`` optimizer, with three lines in the script.

An audited step is taken twice: by a copy of the optimizer with weights, gradients and state in float64, and by the optimizer itself.
The copy computes the intended update. The difference is the loss by the formats of weights and state.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everybit_torch.audit.intended import After, Audited, Before, audited, nonfinite, whole
from everybit_torch.optim import TorchOptimizer
from everybit_torch.torch_internals.dtensors import is_dtensor

FORMAT = 1


@dataclass(frozen=True, slots=True)
class LayerAudit:
    """One parameter at one step.

    Attributes:
        step: Number of the optimizer's step, counted from 1 since the audit began.
        name: The parameter's name, as in ``model.named_parameters()``.
        stored: How its weights are stored: a dtype, or a format such as ``Kahan()``.
        stochastic: Whether they are rounded stochastically. Most small updates then have no effect in one step, and all of them together
            have the right one on average.
        elements: Its number of elements.
        lost_share: Share of its non-zero updates that left the weight as it was, in [0, 1].
        edq: Effective descent quality: the share of the intended update that reached the weights; 1 if all of it did.
            ``<change of the weights, intended update> / |intended update|**2`` (Collage, Yu et al. 2024, https://arxiv.org/abs/2405.03637).
        mended_lost_share: The lost share of the same updates if the weights were float32, which ``LEAN_BF16`` and ``EXACT_BF16`` keep in
            4 bytes.
        frozen: For each entry of the state that is rounded to nearest, coarser than float32: the share of its elements that should have
            changed and did not.
        nonfinite: The number of infinite or NaN elements of the gradient, of the weights after the step, and of each entry of the state,
            where there are any.
    """

    step: int
    name: str
    stored: str
    stochastic: bool
    elements: int
    lost_share: float
    edq: float
    mended_lost_share: float
    frozen: dict[str, float] = field(default_factory=dict)
    nonfinite: dict[str, int] = field(default_factory=dict)


class Audit:
    """Audit an optimizer's steps from now on, through its hooks; the numbers of the training run are not changed.

    An audited step takes more than two steps' time and, until it is over, memory for another copy of weights and 16-bit state, and for both
    in float64. Of an optimizer of everybit everything is decoded before the step and after it, too.

    Args:
        model: The model, for the names of parameters.
        optimizer: An optimizer of everybit or of ``torch.optim``, or a subclass. It may have schedulers. A closure has to be the first
            thing that its ``step`` calls, and to be called once. Parameters of ``torch.optim`` may be sharded: then every rank has to
            audit, and all have the same numbers.
        every: An audit at every so many steps.
        first: Number of the first audited step, counted from 1.

    Raises:
        TypeError: No optimizer of torch's kind, such as a ``FlatStepper``, which measures its own steps (``metrics=True``).
        ValueError: ``every`` or ``first`` is below 1; a parameter of the optimizer that is not the model's; one of an optimizer of
            everybit that is sharded (a DTensor).

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

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, every: int = 50, first: int = 1) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer: got {type(optimizer).__name__}; accepted is a torch.optim.Optimizer.")
        for name, value in (("every", every), ("first", first)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: got {value!r}; accepted is a whole number, at least 1.")
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        foreign = sum(id(p) not in self._names for group in optimizer.param_groups for p in group["params"])
        if foreign:
            raise ValueError(
                f"optimizer: got {foreign} parameters that are not the model's; accepted is the model's optimizer."
            )
        sharded = [self._names[id(p)] for group in optimizer.param_groups for p in group["params"] if is_dtensor(p)]
        if sharded and isinstance(optimizer, TorchOptimizer):
            raise ValueError(
                f"optimizer: got {sharded[0]!r}, which is sharded; accepted are whole parameters, and sharded ones of torch.optim: here"
                " metrics=True measures every step."
            )
        self.layers: list[LayerAudit] = []
        self._every, self._first = every, first
        self._step = 0
        self._audited = audited(optimizer)
        self._before: dict[Tensor, Before] = {}
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

    @property
    def step(self) -> int:
        """The number of steps so far."""
        return self._step

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._step += 1
        if self._step < self._first or (self._step - self._first) % self._every:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer
        if closure is None:
            self._look()
            return None

        def then_look() -> Any:
            loss = closure()
            self._look()  # the closure made the gradients
            return loss

        return (optimizer,), {**kwargs, "closure": then_look}

    def _look(self) -> None:
        with torch.no_grad():
            self._before = self._audited.before()

    def _after_step(self, *_: Any) -> None:
        if self._before:
            with torch.no_grad():
                self.layers += _compared(self._step, self._names, self._before, self._audited)
            self._before = {}


def audit_step(names: Mapping[int, str], optimizer: torch.optim.Optimizer, step: int) -> list[LayerAudit]:
    """Take a step, and audit it.

    Args:
        names: Names of the parameters, by id.
        optimizer: The optimizer. Its parameters have gradients.
        step: Number of the step.
    """
    way = audited(optimizer)
    with torch.no_grad():
        before = way.before()
        optimizer.step()
        return _compared(step, names, before, way)


def load_audit(path: str | Path) -> list[LayerAudit]:
    """Read what :meth:`Audit.save` wrote.

    Raises:
        ValueError: Another file, or a file of a later version.
    """
    accepted = f"a file that Audit.save wrote, of format {FORMAT}"
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: got no JSON ({error}); accepted is {accepted}.") from None
    if not isinstance(data, dict) or data.get("kind") != "everybit audit" or data.get("format") != FORMAT:
        raise ValueError(f"{path}: got something else; accepted is {accepted}.")
    return [LayerAudit(**layer) for layer in data["layers"]]


def _compared(step: int, names: Mapping[int, str], before: Mapping[Tensor, Before], way: Audited) -> list[LayerAudit]:
    after = way.after()
    return [_layer(step, names[id(parameter)], one, after[parameter]) for parameter, one in before.items()]


def _layer(step: int, name: str, before: Before, after: After) -> LayerAudit:
    intended = before.intended
    change = after.weights.double() - before.weights.double()
    moved = intended != 0
    meant = float(whole(intended.square().sum()))
    frozen = {}
    for key, earlier in before.state.items():
        # `!=` of two DTensors needs a torch after 2.11.
        changing = (before.intended_state[key] == earlier).logical_not()
        frozen[key] = _share((after.state[key] == earlier) & changing, changing)
    found = {"gradient": before.nonfinite_gradients, "weights": nonfinite(after.weights)}
    found |= {key: nonfinite(value) for key, value in after.state.items()}
    return LayerAudit(
        step,
        name,
        before.stored,
        before.stochastic,
        before.weights.numel(),
        _share((change == 0) & moved, moved),
        float(whole((change * intended).sum())) / meant if meant and math.isfinite(meant) else 1.0,
        _mended(before, moved),
        frozen,
        {key: count for key, count in found.items() if count},
    )


def _mended(before: Before, moved: Tensor) -> float:
    """The lost share if the weights were float32."""
    weights = before.weights.double()
    return _share(((weights + before.intended).float() == weights) & moved, moved)


def _share(some: Tensor, of: Tensor) -> float:
    total = int(whole(of.sum()))
    return int(whole(some.sum())) / total if total else 0.0


def worst(layers: Iterable[LayerAudit]) -> dict[str, LayerAudit]:
    """Return, for each parameter, the audit with the least effective update."""
    found: dict[str, LayerAudit] = {}
    for layer in layers:
        if layer.name not in found or layer.edq < found[layer.name].edq:
            found[layer.name] = layer
    return found
