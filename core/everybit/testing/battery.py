"""One check per promise. See :mod:`everybit.testing` for how to use them."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from everybit import policies, tree
from everybit.hyperparameters import hyperparameters, map_hyperparameters
from everybit.optimizer import Optimizer, OptimizerState, with_policy
from everybit.policy import AnyPolicy, Policy
from everybit.scalars import Hyperparameter
from everybit.schedules import warmup_cosine_decay_schedule
from everybit.testing.examples import assert_close, assert_same_bits, example_grads, example_params, few_params
from everybit.transform import Context, Transform

Build = Callable[[Hyperparameter], Transform[Any]]
"""From a learning rate to a transform."""

LEARNING_RATE = 0.05
"""Large, so that a step is felt in every format."""

# What a stored step is tried under: all exact, and all that is lossy or random.
_STORED: tuple[tuple[torch.dtype, Policy], ...] = (
    (torch.float32, policies.FP32),
    (torch.bfloat16, policies.LEAN_BF16),
    (torch.float16, policies.TIGHT_BF16),
)


def check_pure(build: Build) -> None:
    """Nothing that is passed in changes, nothing that comes out shares its memory, and the same call gives the same bits.

    A transform may hand on the updates it was given; its state, and all that an optimizer returns, is fresh.
    """
    transform, params = build(LEARNING_RATE), example_params()
    state = transform.init(params)
    _no_shared_memory("the state from init", state, params=params)
    _all_separate("the state from init", state)
    for step in (1, 2):
        ctx, grads = _at(step), example_grads(params, step)
        with _Unchanged("update", updates=grads, state=state, params=params):
            updates, new = transform.update(grads, state, params, ctx)
        again = transform.update(grads, state, params, ctx)
        assert_same_bits((updates, new), again, "update, called twice with the same arguments")
        _no_shared_memory("the state from update", new, updates=grads, state=state, params=params)
        _no_shared_memory("the updates from update", updates, state=state, params=params)
        state = new
    for dtype, policy in _STORED:
        optimizer, params = with_policy(transform, policy), example_params(dtype)
        stored = optimizer.init(params)
        _no_shared_memory("the state from Optimizer.init", stored, params=params)
        grads = example_grads(params, 1)
        with _Unchanged("Optimizer.step", params=params, grads=grads, state=stored):
            out = optimizer.step(params, grads, stored)
        _no_shared_memory("what Optimizer.step returns", out, params=params, grads=grads, state=stored)


def check_state_is_a_fixed_point(build: Build) -> None:
    """A state keeps structure, shapes, dtypes and devices over any number of steps, and updates those of the gradients.

    Whatever the learning rate is given as, and, under a policy, whatever dtype the gradients come in.
    """
    rates: tuple[Hyperparameter, ...] = (
        LEARNING_RATE,
        torch.tensor(LEARNING_RATE),
        torch.tensor(LEARNING_RATE, dtype=torch.float64),
        warmup_cosine_decay_schedule(LEARNING_RATE, 1, 5),
    )
    for rate in rates:
        transform = build(rate)
        for dtype in (torch.float32, torch.float64):
            params = example_params(dtype)
            state = first = transform.init(params)
            for step in (1, 2, 3):
                grads = example_grads(params, step)
                updates, state = transform.update(grads, state, params, _at(step))
                _same_kind(updates, grads, f"updates of step {step}, learning rate {rate!r}")
                _same_kind(state, first, f"state after step {step}, learning rate {rate!r}")
    for dtype, policy in _STORED:
        optimizer = with_policy(build(LEARNING_RATE), policy)
        for grad_dtype in (torch.float32, torch.bfloat16, torch.float16):
            params = before = example_params(dtype)
            stored = initial = optimizer.init(params)
            for step in (1, 2, 3):
                params, stored = optimizer.step(params, example_grads(params, step, dtype=grad_dtype), stored)
                _same_kind(params, before, f"{dtype} parameters after step {step} with {grad_dtype} gradients")
                _same_kind(
                    stored, initial, f"state of {dtype} parameters after step {step} with {grad_dtype} gradients"
                )


def check_vmap(build: Build) -> None:
    """``torch.func.vmap`` over a population, each member with its own learning rate, is the loop over the population.

    To 1e-12 of the greatest magnitude in float64 (batched code may take powers from another library), and to 1e-6 in float32.
    """

    def step(rate: Tensor, params: Any, sequence: list[Any], policy: Policy) -> Any:
        optimizer = with_policy(build(rate), policy)
        state = optimizer.init(params)
        for grads in sequence:
            params, state = optimizer.step(params, grads, state)
        return optimizer.export_fp32(params, state), state

    def update(rate: Tensor, params: Any, sequence: list[Any], policy: Policy) -> Any:
        transform = build(rate)
        state = transform.init(params)
        for number, grads in enumerate(sequence, start=1):
            updates, state = transform.update(grads, state, params, _at(number))
            params = tree.map(torch.add, params, updates)
        return params, state

    for what, function, dtype, policy, relative in (
        ("update", update, torch.float64, policies.FP64, 1e-12),
        ("Optimizer.step", step, torch.float64, policies.FP64, 1e-12),
        ("Optimizer.step", step, torch.bfloat16, policies.EXACT_BF16, 1e-6),
    ):
        rates = torch.tensor([0.01, 0.03, 0.1], dtype=torch.float64)
        params = [example_params(dtype, seed=seed) for seed in range(len(rates))]
        grads = [[example_grads(member, number, seed=seed) for number in (1, 2)] for seed, member in enumerate(params)]

        # Leaves go in and out: torch's own trees have no holes, and vmap refuses None.
        def on_leaves(
            rate: Tensor,
            leaves: list[Tensor],
            function: Callable[..., Any] = function,
            example: Any = (params[0], grads[0]),
            policy: Policy = policy,
        ) -> list[Tensor]:
            return tree.leaves(function(rate, *tree.replace(example, leaves), policy))

        members = [tree.leaves(member) for member in zip(params, grads, strict=True)]
        try:
            batched = torch.func.vmap(on_leaves)(rates, _stack(members))
        except RuntimeError as error:
            raise AssertionError(f"{what} under vmap, {dtype} parameters: {error}") from error
        looped = _stack([on_leaves(rate, member) for rate, member in zip(rates, members, strict=True)])
        assert_close(batched, looped, relative, f"{what} under vmap, {dtype} parameters")


def check_differentiable(build: Build) -> None:
    """``torch.func.grad`` through several updates, by the learning rate and by the gradients, agrees with finite differences.

    In float64, to 1e-5 relative: central differences with a step of 1e-6 have an error of about 1e-12 by curvature, and of 1e-10 by
    rounding. And the derivative by the learning rate of stored weights is that of float32 weights, to a tenth: rounding differentiates as
    the identity.
    """
    params = example_params(torch.float64)
    sequence = [example_grads(params, step) for step in range(4)]
    # The learning rate, and how far the gradients are moved along a fixed direction.
    where = torch.tensor([LEARNING_RATE, 0.0], dtype=torch.float64)
    direction = [example_grads(params, step, seed=1) for step in range(4)]

    def outcome(where: Tensor) -> Tensor:
        transform, values = build(where[0]), params
        state = transform.init(values)
        for step, (grad, way) in enumerate(zip(sequence, direction, strict=True), start=1):
            moved = tree.map(lambda g, d: g + where[1] * d, grad, way)
            updates, state = transform.update(moved, state, values, _at(step))
            values = tree.map(torch.add, values, updates)
        weights = example_grads(params, 0, seed=2)
        return torch.stack(
            [(w * p).sum() for w, p in zip(tree.leaves(weights), tree.leaves(values), strict=True)]
        ).sum()

    got = torch.func.grad(outcome)(where)
    for index, name in enumerate(("the learning rate", "the gradients")):
        nudge = torch.zeros_like(where)
        nudge[index] = 1e-6
        expected = float((outcome(where + nudge) - outcome(where - nudge)) / 2e-6)
        found = float(got[index])
        if not abs(found - expected) <= 1e-5 * abs(expected) + 1e-7:
            raise AssertionError(
                f"derivative by {name}: torch.func.grad gives {found!r}, finite differences give {expected!r}."
            )
    _check_stored_derivative(build)


def _check_stored_derivative(build: Build) -> None:
    start = example_params(torch.bfloat16)

    def outcome(rate: Tensor, policy: Policy, dtype: torch.dtype) -> Tensor:
        optimizer, params = (
            with_policy(build(rate), policy, unsafe="allow"),
            tree.map(lambda leaf: leaf.to(dtype), start),
        )
        state = optimizer.init(params)
        for step in range(3):
            params, state = optimizer.step(params, example_grads(start, step), state)
        weights = zip(tree.leaves(example_grads(start, 0, seed=2)), tree.leaves(params), strict=True)
        return torch.stack([(w.float() * p.float()).sum() for w, p in weights]).sum()

    rate = torch.tensor(LEARNING_RATE, dtype=torch.float64)
    expected = float(torch.func.grad(outcome)(rate, policies.FP32, torch.float32))
    for policy in (policies.LEAN_BF16, policies.FLOOR_BF16, policies.MIXED_BF16):
        found = float(torch.func.grad(outcome)(rate, policy, torch.bfloat16))
        if not abs(found - expected) <= 0.1 * abs(expected) + 1e-7:
            raise AssertionError(
                f"derivative by the learning rate of stored weights: torch.func.grad gives {found!r}, and {expected!r} of float32 weights."
            )


def check_no_recompilation(build: Build, *, steps: int = 100) -> None:
    """One compilation serves a run whose learning rate follows a schedule and a tensor that is written to between steps."""
    compilations = 0

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        nonlocal compilations
        compilations += 1
        return module.forward

    peak = torch.tensor(LEARNING_RATE, dtype=torch.float64)
    shape = warmup_cosine_decay_schedule(1.0, 10, steps)
    optimizer = with_policy(build(lambda step: peak * shape(step)), policies.FP32)
    torch._dynamo.reset()
    compiled = torch.compile(optimizer.step, fullgraph=True, backend=backend)
    params = few_params()
    state = optimizer.init(params)
    first: list[tuple[Any, Any]] = []
    for step in range(1, steps + 1):
        peak.fill_(LEARNING_RATE / step)
        args = (params, example_grads(params, step % 5), state)
        params, state = _traced(compiled, *args)
        if compilations > 1:
            raise AssertionError(f"compiled again at step {step}; promised is one compilation for the whole run.")
        first += [(args, (params, state))] if step < 5 else []
    for step, (args, out) in enumerate(first, start=1):
        peak.fill_(LEARNING_RATE / step)
        # Not to the bit: this backend takes roots from eager torch's library, see everybit.borders.sqrt.
        assert_close(out, optimizer.step(*args), 1e-6, f"traced, against eager, at step {step}")


def check_compiled_equals_eager(
    build: Build,
    *,
    policy: AnyPolicy = policies.FP32,
    dtype: torch.dtype = torch.float32,
    params: Any = None,
    inlined: bool = False,
    steps: int = 3,
    seed: int = 0,
) -> None:
    """Compiled with default options a step gives eager code's bits, parameters and state, step after step.

    Args:
        build: From a learning rate to a transform.
        policy: How parameters and state are stored.
        dtype: Of the parameters.
        params: What to step; None: a matrix, a vector and a number.
        inlined: Compile a training step that takes loss and gradients itself, as a user's would. Its loss has gradients that are
            exact in every dtype, so that what differs is the optimizer's doing.
        steps: How many.
        seed: Of stochastic rounding.
    """
    optimizer = with_policy(build(warmup_cosine_decay_schedule(LEARNING_RATE, 1, 8)), policy, seed=seed)
    if params is None:
        params = few_params(dtype)

    def loss(params: Any, data: Any) -> Tensor:
        # Products by powers of two: no dtype rounds them, so neither does it matter whether a compiler skips a rounding.
        residuals = [p * x for p, x in zip(tree.leaves(params), tree.leaves(data), strict=True)]
        return torch.stack([(r * r).sum() for r in residuals]).sum()

    def inlining(params: Any, data: Any, state: OptimizerState[Any]) -> Any:
        grads, _ = torch.func.grad_and_value(loss)(params, data)
        return optimizer.step(params, grads, state)

    def alone(params: Any, data: Any, state: OptimizerState[Any]) -> Any:
        return optimizer.step(params, data, state)

    def powers_of_two(leaf: Tensor) -> Tensor:
        exponents = torch.arange(leaf.numel(), device=leaf.device) % 7 - 3
        return (2.0**exponents).reshape(leaf.shape).to(leaf.dtype)

    step = inlining if inlined else alone
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    eager = fast = (params, optimizer.init(params))
    for number in range(1, steps + 1):
        data = tree.map(powers_of_two, params) if inlined else example_grads(params, number)
        eager, fast = step(eager[0], data, eager[1]), _traced(compiled, fast[0], data, fast[1])
        assert_same_bits(fast, eager, f"compiled, against eager, after step {number}")


def check_flat_equals_tree(build: Build) -> None:
    """An element-scope transform gives the same bits on one flat buffer as on the tree of tensors laid end to end in it."""
    for dtype, policy in _STORED:
        optimizer = with_policy(build(LEARNING_RATE), policy)
        if optimizer.scope != "element":
            return
        params = example_params(dtype)
        flat = _flattened(params)
        state, flat_state = optimizer.init(params), optimizer.init(flat)
        for step in (1, 2, 3):
            grads = example_grads(params, step)
            params, state = optimizer.step(params, grads, state)
            flat, flat_state = optimizer.step(flat, _flattened(grads), flat_state)
            assert_same_bits(flat, _flattened(params), f"flat buffer, against the tree, after step {step}, {dtype}")
            for name, parts in _stored_slots(params, state).items():
                what = f"{name} of the flat buffer, against the tree, after step {step}, {dtype}"
                assert_same_bits(_stored_slots(flat, flat_state)[name], parts, what)


def check_scope(build: Build) -> None:
    """The transform's ``scope`` is true.

    ``"element"``: however a flat buffer is cut, the pieces do what the whole does. ``"element"`` and ``"tensor"``: what becomes of a
    tensor does not depend on another tensor's gradient.
    """
    scope = build(LEARNING_RATE).scope
    if scope not in ("element", "tensor", "tree"):
        raise AssertionError(f"scope: got {scope!r}; accepted are 'element', 'tensor', 'tree'.")
    if scope == "tree":
        return
    _check_tensors_are_independent(build)
    if scope == "element":
        for dtype, policy in _STORED:
            _check_any_cut(with_policy(build(LEARNING_RATE), policy), dtype)


def _check_tensors_are_independent(build: Build) -> None:
    transform, params = build(LEARNING_RATE), example_params(torch.float64)
    state = transform.init(params)
    _, state = transform.update(example_grads(params, 1), state, params, _at(1))
    grads = example_grads(params, 2)
    expected = tree.leaves(transform.update(grads, state, params, _at(2))[0])
    for index, path in enumerate(tree.paths(params)):
        others = [g if i == index else 3 * g + 1 for i, g in enumerate(tree.leaves(grads))]
        got = tree.leaves(transform.update(tree.replace(grads, others), state, params, _at(2))[0])
        what = f"scope {transform.scope!r}: the update at {path} depends on the gradients of other tensors"
        assert_same_bits(got[index], expected[index], what)


def _check_any_cut(optimizer: Optimizer[Any], dtype: torch.dtype) -> None:
    whole = _flattened(example_params(dtype))
    gradients = [_flattened(example_grads(example_params(dtype), step)) for step in (1, 2, 3)]

    def run(first: int, last: int) -> Tensor:
        ctx, params = Context(first_element=first), whole[first:last].clone()
        state = optimizer.init(params, ctx)
        for gradient in gradients:
            params, state = optimizer.step(params, gradient[first:last], state, ctx)
        return torch.cat([part.reshape(-1).double() for part in tree.leaves((params, state)) if part.ndim])

    size = whole.numel()
    parts = run(0, size).reshape(-1, size)
    for cuts in ((1,), (size // 2,), (5, 6, size - 1)):
        edges = [0, *cuts, size]
        pieces = [run(a, b).reshape(-1, b - a) for a, b in itertools.pairwise(edges)]
        what = (
            f"scope 'element': a flat buffer of {size} {dtype} elements cut at {cuts} does not do what the whole does"
        )
        assert_same_bits(torch.cat(pieces, dim=1), parts, what)


def check_resume_equals_continue(build: Build) -> None:
    """Saved, loaded with ``weights_only=True`` into a state freshly made, and continued: the bits of a run never interrupted."""
    for dtype, policy in _STORED:
        optimizer, params = with_policy(build(LEARNING_RATE), policy, seed=7), example_params(dtype)
        state = optimizer.init(params)
        for step in range(1, 4):
            params, state = optimizer.step(params, example_grads(params, step), state)
        file = io.BytesIO()
        torch.save({"params": tree.leaves(params), "state": tree.leaves(state)}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        resumed = with_policy(build(LEARNING_RATE), policy, seed=7)
        other_params = tree.replace(example_params(dtype, seed=1), loaded["params"])
        other = tree.replace(resumed.init(other_params), loaded["state"])
        for step in range(4, 7):
            grads = example_grads(params, step)
            params, state = optimizer.step(params, grads, state)
            other_params, other = resumed.step(other_params, grads, other)
            what = f"resumed, against continued, after step {step}, {dtype}"
            assert_same_bits((other_params, other), (params, state), what)


def check_hyperparameters_are_data(build: Build) -> None:
    """A hyperparameter may be a 0-d tensor wherever its field accepts one: the same bits as with the number, and no look at its value.

    That is how compiled steps get hyperparameters, so that another value is no other code. A transform may take a number for what it is,
    and skip what a zero makes superfluous, as long as the tensor zero gives the same bits.
    """
    numbers = build(LEARNING_RATE)
    for value in (None, 0.0):
        # Each as it is, and each at zero, where transforms like to take another way.
        given = numbers if value is None else _at_zero(numbers)
        tensors = map_hyperparameters(lambda name, x: torch.as_tensor(x, dtype=torch.float64), given)
        for dtype, policy in _STORED:
            one, other = (with_policy(x, policy, unsafe="allow") for x in (given, tensors))
            params = example_params(dtype)
            params["w"][0] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.0, 2.0])
            stepped = both = (params, one.init(params))
            grads = params
            for step in (1, 2):
                grads = example_grads(params, step)
                grads["w"][0] = 0.0
                stepped, both = one.step(stepped[0], grads, stepped[1]), other.step(both[0], grads, both[1])
                what = f"hyperparameters as tensors, against numbers{'' if value is None else ' (zero)'}, step {step}, {dtype}"
                assert_same_bits(both, stepped, what)
            shadows = tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), (params, grads, stepped[1]))
            traced = map_hyperparameters(lambda name, x: torch.empty((), dtype=torch.float64, device="meta"), given)
            try:
                with_policy(traced, policy, unsafe="allow").step(*shadows)
            except (RuntimeError, NotImplementedError, TypeError) as error:
                raise AssertionError(
                    f"hyperparameters as tensors without values: {error}; a field that decides what is computed is to be annotated with"
                    " a number's type, not Hyperparameter."
                ) from error


def _at_zero(transform: Transform[Any]) -> Transform[Any]:
    """The transform with every hyperparameter that may be zero at zero."""
    for position in range(len(hyperparameters(transform))):
        count = iter(range(position + 1))

        def zero(name: str, value: Any, count: Any = count, position: int = position) -> Any:
            return 0.0 if next(count, None) == position else value

        with suppress(ValueError):
            transform = map_hyperparameters(zero, transform)
    return transform


def check_meta_init(build: Build) -> None:
    """``init`` on meta tensors allocates nothing and tells shapes and dtypes as the real one gives them."""
    for dtype, policy in _STORED:
        optimizer, params = with_policy(build(LEARNING_RATE), policy), example_params(dtype)
        shadow = tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), params)
        with _OnlyMeta():  # type: ignore[no-untyped-call]
            planned = optimizer.init(shadow)
        made = optimizer.init(params)
        _same_kind(planned, tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), made), "state on meta tensors")


def check_no_wait(build: Build) -> None:
    """A step never asks the device for a value: it works on meta tensors, which have none."""
    for dtype, policy in _STORED:
        optimizer, params = with_policy(build(LEARNING_RATE), policy), example_params(dtype)
        grads, state = example_grads(params, 1), optimizer.init(params)
        shadows = tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), (params, grads, state))
        try:
            planned = optimizer.step(*shadows)
        except RuntimeError as error:
            raise AssertionError(f"a step on meta tensors, which have no values: {error}") from error
        _same_kind(planned, (shadows[0], shadows[2]), "what a step on meta tensors returns")


CHECKS: Mapping[str, Callable[[Build], None]] = MappingProxyType(
    {
        "pure": check_pure,
        "state is a fixed point": check_state_is_a_fixed_point,
        "vmap": check_vmap,
        "differentiable": check_differentiable,
        "no recompilation": check_no_recompilation,
        "compiled equals eager": check_compiled_equals_eager,
        "flat equals tree": check_flat_equals_tree,
        "scope": check_scope,
        "resume equals continue": check_resume_equals_continue,
        "hyperparameters are data": check_hyperparameters_are_data,
        "meta init": check_meta_init,
        "no wait": check_no_wait,
    }
)
"""Name -> check."""


def check_all(build: Build) -> None:
    """Every check in :data:`CHECKS`, the cheap ones as well as the two that compile (about ten seconds).

    Raises:
        AssertionError: From the first that fails; its note says which check that was.
    """
    for name, check in CHECKS.items():
        try:
            check(build)
        except AssertionError as error:
            error.add_note(f"everybit.testing: the check {name!r}")
            raise


def _at(step: int) -> Context:
    return Context(step=torch.tensor(step))


def _stack(members: list[Any]) -> Any:
    return tree.map(lambda *leaves: torch.stack(leaves), members[0], *members[1:])


def _flattened(values: object) -> Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in tree.leaves(values)])


def _stored_slots(params: object, state: OptimizerState[Any]) -> dict[str, list[Tensor]]:
    """Each slot's parts, and those of the parameters, laid end to end."""
    found: dict[str, list[Tensor]] = {}

    def note(name: str, slot: Any) -> Any:
        stored = [one if isinstance(one, tuple) else (one,) for one in tree.slots_of(params, slot) if one is not None]
        key = f"{name}#{len(found)}"
        found[key] = [torch.cat([part.reshape(-1) for part in parts]) for parts in zip(*stored, strict=True)]
        return slot

    note("extra", state.extra)
    tree.map_slots(note, state.inner)
    return found


def _same_kind(got: object, expected: object, what: str) -> None:
    """Same structure, shapes, dtypes and devices."""
    try:
        tree.require_same_structure(got, expected, name="got", reference_name="expected")
    except ValueError as error:
        raise AssertionError(f"{what}: {error}") from None
    for path, a, b in zip(tree.paths(got), tree.leaves(got), tree.slots_of(got, expected), strict=True):
        if a.dtype is not b.dtype or a.device != b.device:
            raise AssertionError(f"{what}: at {path}: is {a.dtype} on {a.device}, was {b.dtype} on {b.device}.")


def _no_shared_memory(what: str, out: object, **inputs: object) -> None:
    for name, values in inputs.items():
        owners = {
            _memory(leaf): f"{name}{path}" for path, leaf in zip(tree.paths(values), tree.leaves(values), strict=True)
        }
        for path, leaf in zip(tree.paths(out), tree.leaves(out), strict=True):
            if leaf.numel() and _memory(leaf) in owners:
                raise AssertionError(f"{what}, at {path or 'the tensor'}, shares memory with {owners[_memory(leaf)]}.")


def _all_separate(what: str, values: object) -> None:
    """Adapters write to a state in place: what shares memory would be one tensor."""
    seen: dict[int, str] = {}
    for path, leaf in zip(tree.paths(values), tree.leaves(values), strict=True):
        if leaf.numel() and (first := seen.setdefault(_memory(leaf), path)) != path:
            raise AssertionError(f"{what}, at {path}, shares memory with {first}.")
        if any(stride == 0 and size > 1 for stride, size in zip(leaf.stride(), leaf.shape, strict=True)):
            raise AssertionError(
                f"{what}, at {path}, overlaps itself (an expanded tensor); promised is memory for each element."
            )


def _memory(leaf: Tensor) -> int:
    return leaf.untyped_storage().data_ptr()


class _Unchanged:
    """Holds a block to leaving tensors as they are: their version counters, and, should ``.data`` go round these, their bits."""

    def __init__(self, who: str, **inputs: object) -> None:
        self.who = who
        self.inputs = inputs
        self.versions = [leaf._version for leaf in tree.leaves(list(inputs.values()))]
        self.copies = tree.map(torch.clone, inputs)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            return
        named = [f"{name}{path}" for name, values in self.inputs.items() for path in tree.paths(values)]
        after = [leaf._version for leaf in tree.leaves(list(self.inputs.values()))]
        for name, before, now in zip(named, self.versions, after, strict=True):
            if before != now:
                raise AssertionError(
                    f"{self.who} wrote to {name}, which was passed in; promised is that nothing is mutated."
                )
        assert_same_bits(self.inputs, self.copies, f"{self.who} changed what was passed in")


class _OnlyMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses every operation that makes a real tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree.leaves([out]):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                raise AssertionError(f"init on meta tensors allocates: {func} made a tensor on {leaf.device}.")
        return out


def _traced(compiled: Callable[..., Any], *args: Any) -> Any:
    """Call compiled code, and say so if the compiler could not take it whole."""
    try:
        return compiled(*args)
    except torch._dynamo.exc.TorchDynamoException as error:
        raise AssertionError(f"torch.compile(fullgraph=True) cannot trace the step: {error}") from error
