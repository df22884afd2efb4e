"""Damage to state dicts: a seeded stream of mutations, and what has to be true of an optimizer that was given one.

Run as a program it goes through many more of them: ``python mutations.py SEED COUNT``, with the project on the path.
"""

from __future__ import annotations

import copy
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import SGD, Adam, AdamW, Lion, RMSprop, TorchOptimizer, export_weights, import_weights

LOADERS = ("load_state_dict", "load_full_state_dict", "load_torch_state_dict", "import_fp32", "import_weights")


class Small(nn.Module):
    """Four parameters, one of them frozen, and a buffer."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in {"matrix": (2, 3), "vector": (4,), "scalar": (), "frozen": (2,)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
        self.get_parameter("frozen").requires_grad_(False)
        self.register_buffer("running", torch.zeros(2))


def clipped(learning_rate: float, b1: float, b2: float) -> eb.Transform[Any]:
    """A transform over the whole tree, with a count of its own."""
    return eb.chain(
        eb.clip_by_global_norm(1.0), eb.chain(eb.scale_by_adam(b1, b2)), eb.scale_by_learning_rate(learning_rate)
    )


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two param groups, with something of the user's own in one."""
    parameters = list(model.parameters())
    return [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 1e-3, "mine": {"a": [1]}}]


Make = Callable[[nn.Module, Any], TorchOptimizer]
KINDS: dict[str, Make] = {
    "AdamW": lambda m, policy: AdamW(m.parameters(), lr=1e-2, betas=(0.9, 0.95), policy=policy),
    "Adam": lambda m, policy: Adam(
        groups(m),
        lr=1e-2, betas=(0.9, 0.95), maximize=True, policy=policy,
    ),
    "SGD": lambda m, policy: SGD(m.named_parameters(), lr=1e-2, momentum=0.9, nesterov=True, policy=policy),
    "RMSprop": lambda m, policy: RMSprop(
        m.parameters(), lr=1e-2, alpha=0.95, momentum=0.9, centered=True, policy=policy
    ),
    "Lion": lambda m, policy: Lion(m.parameters(), lr=torch.tensor(1e-2), betas=(0.9, 0.95), policy=policy),
    "clipped": lambda m, policy: TorchOptimizer(
        m.parameters(), clipped, lr=1e-2, betas=(0.9, 0.95), policy=policy
    ),
}  # fmt: skip
POLICIES = ("FP32", "EXACT_BF16", "KAHAN_BF16", "FLOOR_BF16", "PURE_BF16", "MIXED_BF16")


def make(kind: str, policy: str, *, steps: int, seed: int) -> tuple[Small, TorchOptimizer]:
    """A model and its optimizer, after some steps; one parameter falls behind."""
    model = Small(torch.float32 if policy == "FP32" else torch.bfloat16, seed)
    optimizer = KINDS[kind](model, eb.policies.PRESETS[policy])
    for step in range(steps):
        take_step(model, optimizer, step, without="vector" if step == 1 and kind != "clipped" else "")
    return model, optimizer


def take_step(model: nn.Module, optimizer: TorchOptimizer, seed: int, *, without: str = "") -> None:
    """One step with gradients of a seed."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if name in (without, "frozen") else gradient
    optimizer.step()


def saved_by(loader: str, model: nn.Module, optimizer: TorchOptimizer) -> Any:
    """What the optimizer's counterpart of a loader gives."""
    if loader == "import_fp32":
        return optimizer.export_fp32()
    if loader == "import_weights":
        return export_weights(model, optimizer)
    return getattr(optimizer, {
        "load_state_dict": "state_dict", "load_full_state_dict": "full_state_dict", "load_torch_state_dict": "torch_state_dict",
    }[loader])()  # fmt: skip


def load(loader: str, model: nn.Module, optimizer: TorchOptimizer, saved: Any) -> None:
    """Give it to the loader."""
    if loader == "import_weights":
        import_weights(model, optimizer, saved)
    else:
        getattr(optimizer, loader)(saved)


def fingerprint(model: nn.Module, optimizer: TorchOptimizer) -> list[Any]:
    """Everything that a refused load could have changed, copied."""
    tensors = [*model.parameters(), *model.buffers()]
    found: list[Any] = [[x.detach().clone() for x in tensors], [(x.data_ptr(), x.stride()) for x in tensors]]
    found.append([
        {key: copied(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ])  # fmt: skip
    for key, entries in optimizer.state.items():
        where = [p is key for p in model.parameters()]
        found.append((where, {name: copied(value) for name, value in entries.items()}))
    return found


def copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def same(left: Any, right: Any) -> bool:
    """Equal in every bit."""
    if isinstance(left, Tensor):
        if not isinstance(right, Tensor) or left.dtype is not right.dtype or left.shape != right.shape:
            return False
        return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
    if left is right:
        return True
    if isinstance(left, dict):
        return isinstance(right, dict) and list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and (left == right or left != left)


# -- mutations ------------------------------------------------------------------------------------------------------------------


def deep(levels: int) -> list[Any]:
    """A list in a list in a list."""
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def cyclic() -> list[Any]:
    """A list that holds itself, twice."""
    value: list[Any] = [1]
    value += [value, value]
    return value


def wide() -> list[Any]:
    """Few lists that unfold into very many."""
    value: list[Any] = [1]
    for _ in range(31):
        value = [value, value]
    return value


def freed() -> Tensor:
    """A tensor whose storage is gone."""
    value = torch.zeros(2, 3)
    value.untyped_storage().resize_(0)
    return value


def nothing() -> Iterator[Any]:
    """A generator."""
    yield from ()


def shaped(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Callable[[], Tensor]:
    """Makes zeros."""
    return lambda: torch.zeros(shape, dtype=dtype, device=device)


def constant(value: Any) -> Callable[[], Any]:
    """Makes a value that nobody can change."""
    return lambda: value


def scalar(value: Any) -> Callable[[], Tensor]:
    """Makes a tensor of a number."""
    return lambda: torch.tensor(value)


ODD: list[Callable[[], Any]] = [
    *map(constant, [None, True, "0.1", "", -1, -0.5, 0, 5, 1.5, 0.25, math.nan, math.inf, 10**400, 2**53, -(2**62), 1 + 2j, b"bytes", int]),
    *map(constant, [(), (0.5, 0.5), (1.5, 2.0)]),
    list, dict, set, object, nothing, cyclic, wide, freed,
    lambda: [1, 2], lambda: [0.9], lambda: {"a": 1}, lambda: deep(40), lambda: deep(5000),
    shaped(2, 3), shaped(4), shaped(), shaped(0), shaped(3, 2), shaped(2, 3, device="meta"), shaped(device="meta"),
    *(shaped(2, 3, dtype=getattr(torch, name)) for name in ("float64", "float16", "bfloat16", "int16", "bool", "complex64")),
    lambda: torch.zeros(2, 3).to_sparse(), lambda: torch.zeros(2, 3).to_sparse_csr(),
    lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    lambda: torch.ones(2, 3, requires_grad=True) * 2, lambda: torch.zeros(1).expand(2, 3),
    *map(scalar, [-3, 2.5, math.nan, 4, 2**60, [3]]),
]  # fmt: skip

KEYS: list[Any] = [
    0, 1, 99, -1, None, (1, "a"), 2.5, True, frozenset({1}), "momentum", "variance", "step", "param", "inner.step", "mine", "mean",
    "exp_avg", "kept.step", "param_names", "policy", "lr", "params",
]  # fmt: skip


def containers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every dict and list in a saved tree, with its path."""
    if isinstance(value, (dict, list)):
        yield path, value
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            if len(path) < 5:
                yield from containers(value[key], (*path, key))


def mutate(saved: Any, draw: random.Random) -> Any:
    """One thing changed at random, in place if there is a place; what is returned counts."""
    if draw.random() < 0.01:
        return draw.choice(ODD)()
    # By depth first: otherwise nearly all mutations would be of single entries.
    by_depth: dict[int, list[Any]] = {}
    for path, container in containers(saved):
        by_depth.setdefault(len(path), []).append(container)
    if not by_depth:
        return saved
    container = draw.choice(by_depth[draw.choice(list(by_depth))])
    keys = list(container) if isinstance(container, dict) else list(range(len(container)))
    action = draw.choice(["replace", "replace", "replace", "noise", "noise", "delete", "add", "swap", "copy"])
    try:
        if action == "add" and isinstance(container, dict):
            container[draw.choice(KEYS)] = draw.choice(ODD)()
        elif action == "add":
            container.append(draw.choice(ODD)())
        elif keys and action == "delete":
            del container[draw.choice(keys)]
        elif keys and action == "swap":
            a, b = draw.choice(keys), draw.choice(keys)
            container[a], container[b] = container[b], container[a]
        elif keys and action == "copy" and isinstance(container, dict):
            container[draw.choice(KEYS)] = container[draw.choice(keys)]
        elif keys and action == "noise":
            key = draw.choice(keys)
            container[key] = noise(container[key], draw)
        elif keys:
            container[draw.choice(keys)] = draw.choice(ODD)()
    except RecursionError:
        pass
    return saved


def noise(value: Any, draw: random.Random) -> Any:
    """Other numbers of the same kind."""
    if (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.is_floating_point()
        and not value.is_nested
    ):
        if value.device.type == "meta":
            return value
        return torch.randn(value.shape, generator=torch.Generator().manual_seed(draw.randrange(1000))).to(value.dtype)
    if (
        isinstance(value, Tensor)
        and value.dtype in (torch.int16, torch.int8, torch.int64)
        and value.layout is torch.strided
    ):
        return torch.full(value.shape, draw.choice([-5, 0, 1, 7, 100]), dtype=value.dtype)
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return draw.choice([0.0, 0.5, 0.99, -0.1, 2.0])
    return value


def is_moderate(value: Any, depth: int = 0) -> bool:
    """Whether all numbers in a saved tree are finite, and small enough that no sum of them overflows."""
    if isinstance(value, Tensor):
        if value.is_nested or value.layout is not torch.strided or value.device.type == "meta" or value.is_complex():
            return True
        return (
            bool((value.detach().double().abs() < 1e4).all())
            if value.numel() and value.untyped_storage().nbytes()
            else True
        )
    if isinstance(value, (int, float)):
        return abs(value) < 2**54
    if depth > 8:
        return True
    if isinstance(value, dict):
        return all(is_moderate(one, depth + 1) for one in value.values())
    if isinstance(value, (list, tuple)):
        return all(is_moderate(one, depth + 1) for one in value)
    return True


# -- what has to be true ----------------------------------------------------------------------------------------------------------


def try_one(loader: str, model: Small, optimizer: TorchOptimizer, saved: Any) -> str:
    """Load something; ``"refused"`` or ``"accepted"``.

    Raises:
        AssertionError: It was refused in another way than by a ValueError or TypeError that names the place, or left something changed; or
            it was accepted, and the next step failed or gave weights that are not finite.
    """
    before = fingerprint(model, optimizer)
    moderate = is_moderate(saved)
    refused: Exception | None = None
    try:
        load(loader, model, optimizer, saved)
    except (ValueError, TypeError) as error:
        refused = error
    if refused is not None:
        message = str(refused)
        where = "weights" if loader.startswith("import") else "state_dict"
        assert message.startswith(where), f"does not name the place: {type(refused).__name__}: {message[:300]}"
        assert "_Kind" not in message
        assert len(message) < 3000, message[:300]
        assert same(before, fingerprint(model, optimizer)), f"changed something, and then: {message[:300]}"
        return "refused"
    take_step(model, optimizer, 1234)
    if moderate:
        for tensor in [*model.parameters(), *(w for group in optimizer.export_fp32() for w in group)]:
            assert bool(tensor.isfinite().all()), "accepted, and the next step gave weights that are not finite"
    optimizer.state_dict()
    return "accepted"


def run(seed: int, count: int, failed: Callable[[str], None] | None = None) -> Counter[str]:
    """``count`` cases of a seed, of up to three mutations each; how many were refused and accepted by which loader.

    Args:
        seed: Of the stream.
        count: Cases.
        failed: Told of failures, after which it goes on; None: the first is raised.

    Raises:
        AssertionError: As :func:`try_one`, with the case in the message.
    """
    draw = random.Random(seed)
    outcomes: Counter[str] = Counter()
    sources: dict[Any, Any] = {}
    targets: dict[Any, tuple[Small, TorchOptimizer]] = {}
    for number in range(count):
        kind, policy, loader = draw.choice(list(KINDS)), draw.choice(POLICIES), draw.choice(LOADERS)
        if loader == "load_torch_state_dict" and kind in ("Lion", "clipped"):
            loader = "load_full_state_dict"
        steps = draw.choice([0, 0, 3])
        key = (kind, policy)
        if (*key, loader) not in sources:
            sources[*key, loader] = saved_by(loader, *make(*key, steps=4, seed=1))
        if (*key, steps) not in targets:
            targets[*key, steps] = make(*key, steps=steps, seed=2)
        model, optimizer = targets[*key, steps]
        saved = copy.deepcopy(sources[*key, loader])
        mutations = draw.randrange(1, 4)
        for _ in range(mutations):
            saved = mutate(saved, draw)
        try:
            outcome = try_one(loader, model, optimizer, saved)
        except Exception as error:
            what = f"seed {seed}, number {number}: {loader}, {key}, {steps} steps: {error!r}"
            if failed is None:
                raise AssertionError(what) from error
            failed(what)
            outcome = "accepted"
        outcomes[f"{loader} {outcome}"] += 1
        if outcome == "accepted":
            del targets[*key, steps]
    return outcomes


if __name__ == "__main__":
    print(run(int(sys.argv[1]), int(sys.argv[2]), failed=print))  # noqa: T201
