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
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import everybit as eb
from everybit_torch import TorchOptimizer, create, enable_gradient_release
from tests.support.exact_models import weights_of
from tests.support.rows import in_parts
from tests.support.weights import Weights

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
    def begin(
        cls, seed: int, make: Make, dtype: torch.dtype, *, mesh: DeviceMesh | None = None, sharded: bool = False
    ) -> Life:
        """Begin the life of a seed: with ``sharded`` of a model that FSDP2 may shard, over a mesh or not."""
        draw = random.Random(seed)
        model = nn.ParameterList(new_parameter(draw, dtype, sharded=sharded) for _ in range(draw.randint(1, 6)))
        if mesh is not None:
            fully_shard(model, mesh=mesh)
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


def maker(name: eb.OptimizerName, policy: eb.PolicyName, clips: bool) -> Any:
    """Makes an optimizer of the library, maybe with a clip before it."""

    def clipped(learning_rate: Any) -> eb.Transform[Any]:
        return eb.chain(eb.clip_by_global_norm(0.5), eb.optimizers()[name].function(learning_rate))

    rate: Any = {} if eb.optimizers()[name].learning_rate is None else {"lr": 0.02}

    def make(groups: Any) -> TorchOptimizer:
        if clips and rate:
            return TorchOptimizer(groups, clipped, policy=policy, seed=5, compile=False, **rate)
        return create(name, groups, policy=policy, seed=5, compile=False, **rate)

    return make


def drawn(draw: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(draw.randrange(1 << 30)), dtype=torch.float64).to(
        dtype
    )


def new_parameter(draw: random.Random, dtype: torch.dtype, *, sharded: bool) -> nn.Parameter:
    if sharded:  # FSDP2 takes no numbers, and contiguous tensors only
        return nn.Parameter(drawn(draw, draw.choice([one for one in SHAPES if one]), dtype))
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
        if isinstance(parameter, DTensor):
            gradient = in_parts(gradient.contiguous(), parameter)
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


# -- on ranks ------------------------------------------------------------------------------------------------------------------------


def handed_over(life: Life, draw: random.Random) -> None:
    """Another optimizer goes on from a state dict of this rank's parts."""
    state = copy.deepcopy(life.optimizer.state_dict())
    life.optimizer = life.again()
    life.optimizer.load_state_dict(state)


def gathered(life: Life, draw: random.Random) -> None:
    """Another goes on from torch's whole state dict, where every parameter has state: torch takes no other."""
    own = [parameter for group in life.groups for parameter in group["params"]]
    if len(own) < len(life.model) or not all("step" in life.optimizer.state.get(p, {}) for p in own):
        return
    if not all(p.requires_grad for p in own) or not any(x.ndim for p in own for x in life.optimizer.state[p].values()):
        return
    for parameter in own:
        parameter.grad = None  # else torch takes the new optimizer's state for settled
    options = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(life.model, life.optimizer, options=options)
    life.optimizer = life.again()
    set_optimizer_state_dict(life.model, life.optimizer, state, options=options)


def exported(life: Life, draw: random.Random) -> None:
    life.optimizer.import_fp32(life.optimizer.export_fp32())


ON_RANKS = (handed_over, gathered, saved_in_full, exported)


def sharded_life(seed: int, make: Make, dtype: torch.dtype, mesh: DeviceMesh | None) -> list[tuple[str, Weights]]:
    """Return the whole weights after each event, with its name; without a mesh on one process, which is not carried about."""
    draw = random.Random(seed + 1)
    life = Life.begin(seed, make, dtype, mesh=mesh, sharded=True)
    found = []
    for _ in range(draw.randint(4, 12)):
        each, kind = random.Random(draw.randrange(1 << 30)), draw.random()
        event: Any = stepped
        if kind > 0.5:
            event = draw.choice((other_rate, other_hyperparameter, added, frozen) if kind < 0.75 else ON_RANKS)
        if event not in ON_RANKS or mesh is not None:
            event(life, each)
        found.append((event.__name__, weights_of(life.model)))
    return found
