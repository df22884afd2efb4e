"""Random lives of an optimizer: what users do with it between steps, drawn from a seed.

Two optimizers live the same life. One of them is also carried about: copied, saved, given other memory, released. That changes no number.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everybit_torch import TorchOptimizer, enable_gradient_release

SHAPES = ((3, 4), (5,), (), (2, 3, 2), (4, 3, 2, 2), (1,), (0, 3), (7, 1), (33, 9))
WRITTEN = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta", "sum", "exp_inf", "prev", "ax")
"""Names of torch's state that a wrapper may write."""

Make = Callable[[list[dict[str, Any]]], Any]
"""Makes an optimizer of param groups."""


@dataclass
class Life:
    """A model and its optimizer.

    Attributes:
        make: Makes the optimizer, and others like it.
        model: The parameters, of which some are the optimizer's.
        optimizer: The optimizer.
        added: How many of the parameters are the optimizer's.
    """

    make: Make
    model: nn.ParameterList
    optimizer: Any
    added: int

    @classmethod
    def begin(cls, seed: int, make: Make, dtype: torch.dtype) -> Life:
        """Begin the life of a seed."""
        draw = random.Random(seed)
        model = nn.ParameterList(new_parameter(draw, dtype) for _ in range(draw.randint(1, 6)))
        added = max(1, len(model) - draw.randint(0, 2))
        named = [(str(number), p) for number, p in enumerate(model)][:added]
        return cls(make, model, make([{"params": named}]), added)

    def again(self) -> Any:
        """Make another optimizer for the same param groups."""
        return self.make([{"params": [*zip(one["param_names"], one["params"], strict=True)]} for one in self.groups])

    @property
    def groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups


def drawn(draw: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(draw.randrange(1 << 30)), dtype=torch.float64).to(
        dtype
    )


def new_parameter(draw: random.Random, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(in_some_order(drawn(draw, draw.choice(SHAPES), dtype), draw))


def in_some_order(x: Tensor, draw: random.Random) -> Tensor:
    """The same numbers, maybe in another order of memory."""
    if x.ndim == 2 and draw.random() < 0.4:
        return x.t().contiguous().t()
    if x.ndim == 4 and draw.random() < 0.4:
        return x.contiguous(memory_format=torch.channels_last)
    return x.contiguous()


# -- what happens in both lives ----------------------------------------------------------------------------------------------------


def stepped(life: Life, draw: random.Random) -> None:
    for parameter in life.model:
        gradient = in_some_order(drawn(draw, tuple(parameter.shape), parameter.dtype), draw)
        parameter.grad = gradient if draw.random() > 0.25 and parameter.requires_grad else None
    life.optimizer.step(*([lambda: 1.0] if draw.random() < 0.2 else []))


def other_rate(life: Life, draw: random.Random) -> None:
    rate = draw.choice([0.0, 0.02, 0.2, 0.001])
    for group in life.groups:
        if group.get("lr") is not None:
            group["lr"] = rate


def other_hyperparameter(life: Life, draw: random.Random) -> None:
    name = draw.choice(["weight_decay", "betas", "momentum", "maximize"])
    value = {"weight_decay": 0.1, "betas": (0.8, 0.95), "momentum": 0.8, "maximize": draw.random() < 0.5}[name]
    group = life.groups[-1]
    if isinstance(group.get(name), (float, tuple, bool)) and group[name] != 0.0:
        group[name] = value


def added(life: Life, draw: random.Random) -> None:
    """A group more, or a parameter that is put into one by hand."""
    if life.added == len(life.model):
        return
    name, parameter = str(life.added), life.model[life.added]
    life.added += 1
    if draw.random() < 0.5:
        life.optimizer.add_param_group({"params": [(name, parameter)]})
    else:
        life.groups[0]["params"].append(parameter)
        life.groups[0]["param_names"].append(name)


def frozen(life: Life, draw: random.Random) -> None:
    life.model[draw.randrange(len(life.model))].requires_grad_(draw.random() < 0.5)


def cleared(life: Life, draw: random.Random) -> None:
    life.optimizer.zero_grad(set_to_none=draw.random() < 0.5)


def written(life: Life, draw: random.Random) -> None:
    """A wrapper halves an entry of the state, in place or by another tensor."""
    parameter, place = life.model[draw.randrange(len(life.model))], draw.random() < 0.5
    entries = life.optimizer.state.get(parameter, {})
    for name in WRITTEN:
        if name in entries and entries[name].shape == parameter.shape:
            if place:
                entries[name].mul_(0.5)
            else:
                entries[name] = entries[name] * 0.5


def exchanged(life: Life, draw: random.Random) -> None:
    """Two parameters exchange their memory."""
    one, other = draw.choices(list(life.model), k=2)
    if one.shape == other.shape:
        one.data, other.data = other.data, one.data


BOTH = (other_rate, other_hyperparameter, added, frozen, cleared, written, exchanged)


def released(life: Life, draw: random.Random, by_hooks: bool) -> None:
    """Two backward passes, each with its step."""
    for parameter in life.model:
        parameter.grad = None
    trained = [p for p in list(life.model)[: life.added] if p.requires_grad]
    if not trained:
        return
    release = enable_gradient_release(life.model, life.optimizer) if by_hooks else None
    for _ in range(2):
        products = [(p * drawn(draw, tuple(p.shape), p.dtype)).float().sum() for p in trained]
        torch.stack(products).sum().backward()  # type: ignore[no-untyped-call]
        life.optimizer.step()
        life.optimizer.zero_grad()
    if release is not None:
        release.remove()


# -- what changes no number --------------------------------------------------------------------------------------------------------


def copied(life: Life, draw: random.Random) -> None:
    life.model, life.optimizer = copy.deepcopy((life.model, life.optimizer))


def pickled(life: Life, draw: random.Random) -> None:
    life.model, life.optimizer = pickle.loads(pickle.dumps((life.model, life.optimizer)))


def through_a_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def saved(life: Life, draw: random.Random) -> None:
    """Another optimizer goes on from a state dict, of which tensors may lie in another order."""
    state = through_a_file(life.optimizer.state_dict())
    for entries in state["state"].values():
        entries |= {name: in_some_order(x, draw) for name, x in entries.items()}
    life.optimizer = life.again()
    life.optimizer.load_state_dict(state)


def saved_in_full(life: Life, draw: random.Random) -> None:
    state = through_a_file(life.optimizer.full_state_dict())
    life.optimizer = life.again()
    life.optimizer.load_full_state_dict(state)


def moved(life: Life, draw: random.Random) -> None:
    """A parameter is given other memory, maybe in another order."""
    parameter = life.model[draw.randrange(len(life.model))]
    parameter.data = in_some_order(parameter.data.clone(), draw)
    parameter.grad = None


def looked_at(life: Life, draw: random.Random) -> None:
    optimizer: TorchOptimizer = life.optimizer
    optimizer.prepare()
    optimizer.bytes_table()
    optimizer.eval()
    optimizer.train()
    optimizer.import_fp32(optimizer.export_fp32())


CARRIED = (copied, pickled, saved, saved_in_full, moved, looked_at)


def lives(
    seed: int, plain: Make, carried: Make, dtype: torch.dtype, *, pickles: bool = True, releases: bool = True
) -> Iterator[tuple[Life, Life, list[str]]]:
    """Two lives of a seed, after each event, with what has happened.

    Args:
        seed: The seed.
        plain: Makes the optimizer that is not carried about.
        carried: Makes the other, one of this library.
        dtype: Of the parameters.
        pickles: Whether it can be pickled.
        releases: Whether its gradients can be released.
    """
    draw = random.Random(seed + 1)
    one, other = (Life.begin(seed, make, dtype) for make in (plain, carried))
    happened: list[str] = []
    carry = [event for event in CARRIED if pickles or event is not pickled]
    for _ in range(draw.randint(4, 20)):
        each, kind = draw.randrange(1 << 30), draw.random()
        if kind < 0.4:
            event: Any = stepped
        elif kind < 0.65:
            event = draw.choice(BOTH)
        elif kind < 0.95 or not releases:
            event = draw.choice(carry)
        else:
            event = released
        happened.append(event.__name__)
        if event is released:
            released(one, random.Random(each), by_hooks=False)
            released(other, random.Random(each), by_hooks=True)
        else:
            if event is stepped or event in BOTH:
                event(one, random.Random(each))
            event(other, random.Random(each))
        yield one, other, happened
