"""Everything in the registry keeps every promise; every preset keeps its bits under the compiler; and liars are caught."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch
from torch import Tensor

import everybit as eb
from everybit import testing
from everybit.protocol import ALONE, accepting, fields_of, transforms_in
from everybit.testing import CHECKS, REGISTRY
from everybit.testing.examples import Build, Stored, assert_same_bits, example_grads, example_params, few_params

P = TypeVar("P")

# torch's code generator says so of itself wherever both meet in one loop, as a float16 model's bfloat16 moments do.
pytestmark = pytest.mark.filterwarnings("ignore:bf16 and fp16 are mixed in the scheduler node:UserWarning")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ANY_DTYPE = {"PURE_BF16", "ANYPRECISION"}
"""Presets that store parameters in whatever the model has, to nearest."""


def accepted_dtypes(preset: str) -> set[str]:
    if preset in ANY_DTYPE:
        return set(DTYPES)
    return {"FP64": set(), "FP32": {"float32"}}.get(preset, {"bfloat16", "float16"})


def slow_variance_adamw(learning_rate: eb.Hyperparameter) -> eb.Transform[Any]:
    """AdamW whose second moment decays fast enough for every preset."""
    return eb.adamw(learning_rate, b2=0.95)


COMPILED = ("compiled equals eager", "no recompilation")
SAMPLED = ("lion",)
TWINS = (
    "adam", "sgd dampening", "rmsprop eps inside", "adamw fully decoupled", "adopt unclipped", "prodigy limited", "lambc", "lars joint",
    "adan as optax", "tiger", "mars lion", "adafactor momentum", "adafactor directions",
    "schedule-free radam sgd", "adam amsgrad corrected", "muon equalized", "soap corrected", "shampoo of sums", "kron of gradients",
)  # fmt: skip
"""Entries that are another one with an argument more; the other one is checked by default."""

IN_FULL = (
    "sgd momentum", "adamw", "lion", "rmsprop", "named chain", "clipped", "masked", "partition", "accumulate", "averaged",
    "apply if finite",
)  # fmt: skip
"""Entries that go through all checks but the compiling ones by default; the others only through the quick ones."""
LEAN: Stored = ((torch.bfloat16, eb.policies.LEAN_BF16),)
QUICK: dict[str, Callable[[Build], None]] = {
    "pure": testing.check_pure,
    "state is a fixed point": partial(testing.check_state_is_a_fixed_point, stored=LEAN),
    "flat equals tree": testing.check_flat_equals_tree,
    "cut": testing.check_cut,
    "shards equal whole": partial(testing.check_shards_equal_whole, stored=LEAN),
    "resume equals continue": partial(testing.check_resume_equals_continue, stored=LEAN),
    "hyperparameters are data": partial(testing.check_hyperparameters_are_data, stored=LEAN),
}
"""The checks that other entries go through by default, under the policy with most to keep: split weights, stochastic rounding, two kinds of
slots. Under the other policies they are exhaustive."""


def is_exhaustive(name: str, check: str) -> bool:
    return name not in IN_FULL or (check in COMPILED and name not in SAMPLED)


@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param(name, check, marks=pytest.mark.exhaustive if is_exhaustive(name, check) else ())
        for name in REGISTRY
        for check in CHECKS
    ],
)
@pytest.mark.sampled(3)
def test_registry_entry_keeps_the_promise(name: str, check: str) -> None:
    CHECKS[check](REGISTRY[name])


@pytest.mark.parametrize("check", QUICK)
@pytest.mark.parametrize("name", [name for name in REGISTRY if name not in (*IN_FULL, *TWINS)])
@pytest.mark.sampled(8)
def test_registry_entry_keeps_the_promise_under_one_policy(name: str, check: str) -> None:
    QUICK[check](REGISTRY[name])


FEW_BITS: dict[str, Callable[..., None]] = {
    "state is a fixed point": testing.check_state_is_a_fixed_point,
    "shards equal whole": testing.check_shards_equal_whole,
    "resume equals continue": testing.check_resume_equals_continue,
    "hyperparameters are data": testing.check_hyperparameters_are_data,
}
FACTORED = (
    "adafactor", "adafactor directions", "adafactor momentum", "came",
    "muon after", "normuon", "shampoo of sums", "torch adafactor",
)  # fmt: skip
"""Entries whose second moments have shapes of their own, which two codes in a byte would not have."""


@pytest.mark.parametrize(
    ("name", "preset", "check"),
    [
        pytest.param(
            name, preset, check, marks=() if (name, preset) == ("adamw", "LEAN_4BIT") else pytest.mark.exhaustive
        )
        for name in REGISTRY
        for preset in ("LEAN_8BIT", "LEAN_4BIT")
        for check in FEW_BITS
    ],
)
def test_registry_entry_keeps_the_promise_in_few_bits(name: str, preset: str, check: str) -> None:
    stored: Stored = ((torch.bfloat16, eb.policies.PRESETS[preset]),)
    if name in FACTORED and preset == "LEAN_4BIT":
        with pytest.raises(ValueError, match="accepted are formats whose first part has the value's shape"):
            FEW_BITS[check](REGISTRY[name], stored=stored)
        return
    FEW_BITS[check](REGISTRY[name], stored=stored)


GRID = [
    pytest.param(preset, dtype, id=f"{preset}-{dtype}")
    for preset in eb.policies.PRESETS
    for dtype in DTYPES
    if dtype in accepted_dtypes(preset)
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("preset", "dtype"), GRID)
def test_every_preset_compiles_to_eager_bits(preset: str, dtype: str) -> None:
    params = torch.linspace(-2, 2, 203).to(DTYPES[dtype])
    testing.check_compiled_equals_eager(
        slow_variance_adamw, policy=eb.policies.PRESETS[preset], dtype=DTYPES[dtype], params=params
    )


@pytest.mark.parametrize(
    ("preset", "dtype"),
    [(preset, dtype) for preset in eb.policies.PRESETS for dtype in DTYPES if dtype not in accepted_dtypes(preset)],
)
def test_a_preset_that_cannot_store_a_dtype_refuses_it(preset: str, dtype: str) -> None:
    optimizer = eb.with_policy(slow_variance_adamw(1e-3), eb.policies.PRESETS[preset])
    with pytest.raises(ValueError, match=r"^params\['w'\]: Policy\.params: .*[Aa]ccepted"):
        optimizer.init({"w": torch.ones(3, dtype=DTYPES[dtype])})


INLINED = {
    "FP64": torch.float64,
    "FP32": torch.float32,
    "MIXED_BF16": torch.bfloat16,
    "EXACT_BF16": torch.float16,
    "LEAN_BF16": torch.bfloat16,
    "KAHAN_BF16": torch.bfloat16,
    "TIGHT_BF16": torch.float16,
    "FLOOR_BF16": torch.bfloat16,
    "PURE_BF16": torch.float16,
    "ANYPRECISION": torch.bfloat16,
    "LEAN_8BIT": torch.bfloat16,
    "FLOOR_8BIT": torch.float16,
    "LEAN_4BIT": torch.bfloat16,
}


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(preset, marks=() if preset == "EXACT_BF16" else pytest.mark.exhaustive)
        for preset in eb.policies.PRESETS
    ],
)
@pytest.mark.slow
def test_every_preset_keeps_its_bits_inside_a_users_own_compiled_function(preset: str) -> None:
    dtype = INLINED[preset]
    testing.check_compiled_equals_eager(
        slow_variance_adamw,
        policy=eb.policies.PRESETS[preset],
        dtype=dtype,
        params=torch.linspace(-2, 2, 203).to(dtype),
        inlined=True,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("dtype", "policy"),
    [
        (
            torch.bfloat16,
            eb.Policy(params=eb.Kahan("float16", "stochastic"), momentum=eb.Kahan("float32"), variance=eb.Split(8)),
        ),
        (
            torch.float16,
            eb.Policy(
                params=eb.Stochastic(), momentum=eb.Kahan("float16"), variance=eb.Kahan("bfloat16", "stochastic")
            ),
        ),
    ],
)
def test_formats_that_no_preset_uses_compile_to_eager_bits(dtype: torch.dtype, policy: eb.Policy) -> None:
    testing.check_compiled_equals_eager(
        eb.adamw, policy=policy, dtype=dtype, params=torch.linspace(-2, 2, 203).to(dtype)
    )


def test_vmap_over_the_step_itself_draws_each_members_own_bits() -> None:
    optimizer = eb.with_policy(eb.adamw(0.05), eb.policies.FLOOR_BF16)
    members = [testing.example_params(torch.bfloat16, seed=seed)["w"] for seed in range(3)]
    grads = [testing.example_grads(member, 1, seed=seed) for seed, member in enumerate(members)]
    states = [optimizer.init(member) for member in members]
    # One member is a step ahead: its bits are those of its own step.
    members[1], states[1] = optimizer.step(members[1], grads[1], states[1])
    population = [eb.tree.map(lambda *leaves: torch.stack(leaves), *values) for values in (members, grads, states)]
    params, state = torch.func.vmap(optimizer.step)(*population)
    for index, (member, grad, before) in enumerate(zip(members, grads, states, strict=True)):
        expected = optimizer.step(member, grad, before)
        got = eb.tree.map(lambda leaf, index=index: leaf[index], (params, state))
        testing.assert_same_bits(got, expected, f"member {index}")


# Liars. Each breaks one promise.


@eb.state
class Memory(Generic[P]):
    memory: eb.Slot[P]


@dataclass(frozen=True)
class Liar:
    """Does nothing wrong by itself: gradient descent by a fixed step."""

    cut: ClassVar[eb.Cut] = "element"

    reduces: ClassVar[bool] = False

    def init(self, params: P) -> Any:
        return Memory(eb.tree.zeros_like(params))

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        return eb.tree.map(lambda u: -0.1 * u, updates), Memory(eb.tree.map(torch.add, state.memory, updates))


class MutatesItsInput(Liar):
    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        return eb.tree.map(lambda u: u.mul_(-0.1), updates), state


class MutatesBehindTheCountersBack(Liar):
    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        eb.tree.map(lambda p: p.data.mul_(0.9), params)
        return super().update(updates, state, params)


class KeepsTheGradientItself(Liar):
    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        return eb.tree.map(lambda u: -0.1 * u, updates), Memory(updates)


class KeepsTheParametersThemselves(Liar):
    def init(self, params: P) -> Any:
        return Memory(params)


class RollsHiddenDice(Liar):
    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        return eb.tree.map(lambda u: u * torch.rand_like(u), updates), Memory(eb.tree.map(torch.clone, state.memory))


class DriftsToDouble(Liar):
    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        scaled, state = super().update(updates, state, params)
        return scaled, eb.tree.map(lambda leaf: leaf.double(), state)


class DriftsForNumbers(Liar):
    """A float64 coefficient promotes what is 0-d, and only that."""

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        factor = torch.tensor(-0.1, dtype=torch.float64)
        return eb.tree.map(lambda u: factor * u, updates), super().update(updates, state, params)[1]


class LosesALeaf(Liar):
    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        return super().update(updates, state, params)[0], Memory(None)


class ForksOnAValue(Liar):
    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        return super().update(
            eb.tree.map(lambda u: u if not u.numel() or u.sum() > 0 else 2 * u, updates), state, params
        )


class CutsTheGraph(Liar):
    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        return super().update(eb.tree.map(lambda u: u * u.detach(), updates), state, params)


class LooksAtTheTensor(Liar):
    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        return super().update(eb.tree.map(lambda u: u / (1 + u.abs().sum()), updates), state, params)


class LooksAtTheTree(Liar):
    cut = "tensor"

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        norm = 1 + eb.tree.norm(updates)
        return super().update(eb.tree.map(lambda u: u / norm.to(u.dtype), updates), state, params)


class KnowsItsPlace(Liar):
    """Treats a tensor's first element otherwise: neither tensors nor elements are confused, but a flat buffer is."""

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        def first_doubled(u: Tensor) -> Tensor:
            place = torch.arange(u.numel()).reshape(u.shape)
            return torch.where(place == 0, 2 * u, u)

        return super().update(eb.tree.map(first_doubled, updates), state, params)


class NeedsWholeTensorsAndReduces(Liar):
    """Says that it may be cut anywhere; but it divides by each tensor's own magnitude, which a piece of the tensor does not know."""

    reduces = True

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        def scaled(square: Tensor) -> tuple[P, Any]:
            norm = 1 + square.sqrt()
            own = eb.tree.elementwise(lambda u: u / (norm * (1 + u.abs().sum())), updates)
            return Liar.update(self, own, state, params)

        return ctx.request(eb.SumOfSquares(updates), scaled)


class LooksAtItsShardOnly(Liar):
    """A global norm that is not taken over the axis."""

    reduces = True

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        norm = 1 + eb.tree.norm(updates)
        return super().update(eb.tree.elementwise(lambda u: u / norm, updates), state, params)


class AsksOnlyIfItHasSomething(Liar):
    """A rank without elements does not join the reduction: the others would wait for it."""

    reduces = True

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        if not eb.tree.size(updates):
            return super().update(updates, state, params)
        return ReducesThreeTimes().update(updates, state, params, ctx)


class AsksForEachTensorItHas(Liar):
    reduces = True

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        large = [u for u in eb.tree.leaves(updates) if u.numel() > 3]

        def request(number: int) -> tuple[P, Any]:
            if number == len(large):
                return Liar.update(self, eb.tree.map(lambda u: u / (1 + number), updates), state, params)
            return ctx.request(eb.Sum(large[number].square().sum()), lambda _: request(number + 1))

        return request(0)


@eb.state
class Estimate(Generic[P]):
    largest: Tensor
    memory: eb.Slot[P]


class EstimatesByItself(Liar):
    """An estimate beside the slots that goes its own way on each rank, though no update shows it yet."""

    def init(self, params: P) -> Any:
        return Estimate(torch.zeros((), dtype=torch.int64), eb.tree.zeros_like(params))

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        largest = torch.stack([(u.abs() > 1).sum() for u in eb.tree.leaves(updates)]).sum()
        return eb.tree.map(lambda u: -0.1 * u, updates), Estimate(torch.maximum(state.largest, largest), updates)


class ReducesThreeTimes(Liar):
    """Reduces twice, the second time over what it computed, and beside that works element by element."""

    reduces = True

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        owned = ctx.owned(updates)

        def by_norm(square: Tensor) -> tuple[P, Any]:
            norm = 1 + square.sqrt()
            scaled = eb.tree.elementwise(lambda u: u / norm, updates)

            def by_mean(mean: Tensor) -> tuple[P, Any]:
                def by_ends(ends: Tensor) -> tuple[P, Any]:
                    factor = 1 + mean.abs() + ends.sum()
                    return Liar.update(self, eb.tree.elementwise(lambda u: u / factor, scaled), state, params)

                flat = torch.cat([torch.zeros(1), *(u.reshape(-1) for u in eb.tree.leaves(owned))])
                return ctx.request(eb.Max(torch.stack([flat.max(), (-flat).max()])), by_ends)

            signed = [u.sum() for u in eb.tree.leaves(ctx.owned(scaled))]
            return ctx.request(eb.Sum(torch.stack(signed).sum()), by_mean)

        return ctx.request(eb.SumOfSquares(updates), by_norm)


class ReducesLeafByLeaf(Liar):
    """Reduces as many numbers as there are tensors in its tree, of which a piece of a flat buffer is one."""

    reduces = True

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        def scaled(largest: Tensor) -> tuple[P, Any]:
            most = largest.max()
            return Liar.update(self, eb.tree.elementwise(lambda u: u / (1 + most), updates), state, params)

        owned = eb.tree.leaves(ctx.owned(updates))
        return ctx.request(eb.Max(torch.stack([u.abs().max() if u.numel() else u.sum() for u in owned])), scaled)


class WorksAgainstTheAnswer(Liar):
    """Does something else where the host has decided."""

    def periods(self) -> tuple[int, ...]:
        return (2,)

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        factor = 0.5 if ctx.due else 1.0
        return super().update(eb.tree.map(lambda u: factor * u, updates), state, params)


class EvaluatesByTheLeaf(Liar):
    """Its weights for evaluation depend on how parameters are cut."""

    def eval_params(self, params: P, state: Any) -> P:
        return eb.tree.map(lambda p: p * p.numel(), params)


class InventsACut(Liar):
    cut: ClassVar[Any] = "galaxy"


@dataclass(frozen=True)
class CountsInPython(Liar):
    """Its count is no part of its state: the compiler takes it for a constant, and a resumed run begins at zero."""

    calls: tuple[list[int], ...] = ()

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        self.calls[0][0] += 1
        factor = -0.1 / self.calls[0][0]
        return eb.tree.map(lambda u: factor * u, updates), super().update(updates, state, params)[1]


class LooksFromTheHost(Liar):
    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        scale = 1.0 + max(float(leaf.abs().max()) for leaf in eb.tree.leaves(updates) if leaf.numel())
        return eb.tree.map(lambda u: -u / scale, updates), super().update(updates, state, params)[1]


class TellsTheWorld(Liar):
    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        logging.getLogger("liar").warning("a step")
        return super().update(updates, state, params)


class LosesTheDevice(Liar):
    def init(self, params: P) -> Any:
        return Memory(eb.tree.map(lambda p: torch.zeros(p.shape, dtype=p.dtype), params))


@dataclass(frozen=True)
class BranchesOnItsRate(Liar):
    rate: eb.Hyperparameter = 0.5

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        assert isinstance(self.rate, (int, float, Tensor))
        return super().update(updates if self.rate > 0 else params, state, params)


@dataclass(frozen=True)
class DividesByASingle(Liar):
    """A float32 number over a number is float32, and over a float64 tensor it is float64: the two round otherwise."""

    rate: eb.Hyperparameter = 0.7

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        sums = [leaf.float().abs().sum() for leaf in eb.tree.leaves(updates)]
        factor = torch.stack(sums).nansum() / self.rate  # type: ignore[operator]
        return super().update(eb.tree.map(lambda u: (u * factor).to(u.dtype), updates), state, params)


@dataclass(frozen=True)
class SkipsItsZero(Liar):
    """As a weight decay that is skipped at zero: zero times infinity is NaN where it is not."""

    rate: eb.Hyperparameter = 0.1

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        if isinstance(self.rate, float) and self.rate == 0:
            return super().update(updates, state, params)
        decayed = eb.tree.elementwise(lambda u, p: u + self.rate * p, updates, params)
        return super().update(decayed, state, params)


class NaiveKahan(Liar):
    """Keeps a sum in bfloat16 with its error, by a round trip that compilers delete: the error is then zero."""

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        def residual(u: Tensor, memory: Tensor) -> Tensor:
            total = memory + u
            return total - total.to(torch.bfloat16).float()

        return eb.tree.map(lambda u: -0.1 * u, updates), Memory(eb.tree.map(residual, updates, state.memory))


LIARS = [
    ("pure", MutatesItsInput, r"update wrote to updates\['w'\], which was passed in"),
    (
        "pure",
        MutatesBehindTheCountersBack,
        r"update changed what was passed in: at \['params'\]\['w'\]: 35 of 35 elements",
    ),
    ("pure", KeepsTheGradientItself, r"the state from update, at \.memory\['w'\], shares memory with updates\['w'\]"),
    (
        "pure",
        KeepsTheParametersThemselves,
        r"the state from init, at \.memory\['w'\], shares memory with params\['w'\]",
    ),
    ("pure", RollsHiddenDice, r"update, called twice with the same arguments: at \[0\]\['w'\]"),
    (
        "state is a fixed point",
        DriftsToDouble,
        r"state after step 1.*\.memory\['w'\]: is torch\.float64 on cpu, was torch\.float32",
    ),
    ("state is a fixed point", DriftsForNumbers, r"updates of step 1.*\['scale'\]: is torch\.float64"),
    ("state is a fixed point", LosesALeaf, r"state after step 1.*no tensor at got\.memory\['w'\]"),
    ("vmap", ForksOnAValue, r"update under vmap, torch\.float64 parameters"),
    (
        "differentiable",
        CutsTheGraph,
        r"derivative by the gradients: torch\.func\.grad gives .*, finite differences give",
    ),
    (
        "shards equal whole",
        LooksAtTheTensor,
        r"cut 'element': 58 torch\.float32 elements on shards that begin at \(0, 1, 29, .*, step 1: against the whole: parameters",
    ),
    ("shards equal whole", LooksAtTheTree, r"cut 'tensor': 58 torch\.float32 elements .* against the whole"),
    ("shards equal whole", KnowsItsPlace, r"cut 'element': 58 .* against the whole: parameters"),
    (
        "shards equal whole",
        NeedsWholeTensorsAndReduces,
        r"cut 'element' and reduces: 58 .*, step 1: against the whole: parameters",
    ),
    (
        "shards equal whole",
        LooksAtItsShardOnly,
        r"cut 'element' and reduces: 58 .*, step 1: against the whole: parameters",
    ),
    (
        "shards equal whole",
        AsksOnlyIfItHasSomething,
        r"6 of 7 ranks make request 1, .* also one that has no elements",
    ),
    ("shards equal whole", AsksForEachTensorItHas, r"2 of 7 ranks make request 1"),
    ("shards equal whole", EstimatesByItself, r"step 1: against the whole: what is no slot: at \[1\]"),
    ("cut", LooksAtTheTree, r"cut 'tensor': the update at \['w'\] depends on the gradients of other tensors"),
    ("cut", InventsACut, r"cut: got 'galaxy'; accepted are 'element', 'tensor'"),
    ("flat equals tree", LooksAtTheTensor, r"flat buffer, against the tree, after step 1"),
    ("flat equals tree", KnowsItsPlace, r"flat buffer, against the tree, after step 1"),
    ("no recompilation", CountsInPython, r"compiled again at step 2"),
    ("no recompilation", TellsTheWorld, r"torch\.compile\(fullgraph=True\) cannot trace the step"),
    ("no wait", LooksFromTheHost, r"a step on meta tensors, which have no values: .*item"),
    ("shards equal whole", EvaluatesByTheLeaf, r"step 1: weights for evaluation"),
    ("periodic work", WorksAgainstTheAnswer, r"decided on the host, against the device, step 1"),
    ("shards equal whole", ReducesLeafByLeaf, r"reduction 1: the max over the shards is"),
    ("resume equals continue", CountsInPython, r"resumed, against continued, after step 4"),
    ("meta init", LosesTheDevice, r"init on meta tensors allocates: aten\.zeros"),
    (
        "hyperparameters are data",
        BranchesOnItsRate,
        r"hyperparameters as tensors without values: .*that decides what is computed",
    ),
    ("hyperparameters are data", DividesByASingle, r"hyperparameters as tensors, against numbers, step 1"),
    ("hyperparameters are data", SkipsItsZero, r"hyperparameters as tensors, against numbers \(zero\), step 1"),
    ("compiled equals eager", NaiveKahan, r"compiled, against eager, after step 1: at \[1\].*memory"),
]


@pytest.mark.parametrize(
    ("check", "liar", "message"),
    [
        pytest.param(*one, id=f"{one[0]}-{one[1].__name__}", marks=pytest.mark.slow if one[1] is NaiveKahan else ())
        for one in LIARS
    ],
)
@pytest.mark.sampled(3)
def test_the_battery_catches(check: str, liar: type[Liar], message: str) -> None:
    def build(learning_rate: eb.Hyperparameter) -> eb.Transform[Any]:
        return CountsInPython(([0],)) if liar is CountsInPython else liar()

    with pytest.raises(AssertionError, match=message):
        CHECKS[check](build)


def numbers_only(transform: object) -> list[str]:
    """The fields that hold a float and accept no tensor, written ``Class.field``: for another value a compiler makes other code."""
    return [
        f"{type(node).__name__}.{field.name}"
        for node in transforms_in(transform)
        for field in fields_of(node)
        if type(getattr(node, field.name)) is float and field.name not in accepting(type(node))
    ]


@pytest.mark.parametrize("name", REGISTRY)
def test_every_number_of_a_registered_optimizer_may_be_a_tensor(name: str) -> None:
    """Else compiled code would be made anew for each value, or not at all."""
    assert numbers_only(REGISTRY[name](0.05)) == []


def test_the_battery_clears_the_honest() -> None:
    for name in (
        "pure",
        "state is a fixed point",
        "vmap",
        "cut",
        "flat equals tree",
        "shards equal whole",
        "resume equals continue",
        "meta init",
        "hyperparameters are data",
    ):
        CHECKS[name](lambda lr: Liar())


def test_reductions_of_any_kind_and_number_are_answered_over_all_shards() -> None:
    testing.check_shards_equal_whole(lambda lr: ReducesThreeTimes())


def test_masks_below_a_reduction_are_asked_of_the_whole_parameters() -> None:
    """A piece of a matrix is a vector, and still decays."""
    testing.check_shards_equal_whole(
        lambda lr: eb.chain(
            eb.clip_by_global_norm(1.0),
            eb.accumulate(eb.masked(eb.add_decayed_weights(0.1), where=lambda path, leaf: leaf.ndim > 1), 2),
            eb.partition(
                {"w": eb.trace(0.9), "other": eb.identity()}, lambda path, leaf: "w" if "w" in path else "other"
            ),
            eb.scale_by_learning_rate(lr),
        )
    )


class DividesByItsTensor(Liar):
    cut = "tensor"

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        return super().update(eb.tree.map(lambda u: u / (1 + u.abs().sum()), updates), state, params)


def test_a_part_that_sees_whole_tensors_gets_them_also_below_a_reduction() -> None:
    testing.check_shards_equal_whole(lambda lr: DividesByItsTensor())
    testing.check_shards_equal_whole(lambda lr: eb.chain(eb.clip_by_global_norm(1.0), DividesByItsTensor()))


def test_same_bits_tells_minus_zero_from_zero_and_one_nan_from_another() -> None:
    with pytest.raises(
        AssertionError,
        match=r"^signs: at the tensor: 1 of 2 elements differ, the first at \(1,\): got -0\.0, expected 0\.0",
    ):
        testing.assert_same_bits(torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0]), "signs")
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    testing.assert_same_bits(nan, nan.clone(), "one")
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(nan[:1], nan[1:], "another")


def test_examples_lie_on_the_default_device_with_the_same_values_on_all() -> None:
    with torch.device("meta"):
        params = example_params()
        few = few_params()
        grads = example_grads(params, 1)
    assert all(leaf.is_meta for leaf in eb.tree.leaves((params, few, grads)))
    with torch.device("cpu"):
        there = example_params()
    assert_same_bits(there, example_params(), "with a default device, against without")
