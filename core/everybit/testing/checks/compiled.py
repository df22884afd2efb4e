"""A compiled step: the bits of eager code, and one compilation for a whole run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from everybit.base import tree
from everybit.policies import AnyPolicy
from everybit.policies import presets as policies
from everybit.schedules import warmup_cosine_decay_schedule
from everybit.stepping import OptimizerState, with_policy
from everybit.testing.examples import LEARNING_RATE, Build, assert_close, assert_same_bits, example_grads, few_params


def check_no_recompilation(build: Build, *, steps: int = 100) -> None:
    """Check that one compilation serves a run with a scheduled learning rate and a tensor that is written to between steps."""
    compilations = 0

    def backend(module: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        nonlocal compilations
        compilations += 1
        return module.forward

    peak = torch.tensor(LEARNING_RATE, dtype=torch.float64)
    shape = warmup_cosine_decay_schedule(1.0, 10, steps=steps)
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
        # Not to the bit: this backend takes roots from eager torch's library, see everybit.base.barriers.sqrt.
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
    options: Mapping[str, Any] | None = None,
) -> None:
    """Compiled with default options a step gives eager code's bits, parameters and state, step after step.

    Args:
        build: A function from a learning rate to a transform.
        policy: How parameters and state are stored.
        dtype: The dtype of the parameters.
        params: What to step; None: a matrix, a vector and a number.
        inlined: Compile a training step that takes loss and gradients itself, as a user's would. Its loss has gradients that are
            exact in every dtype, so that what differs is the optimizer's doing.
        steps: How many.
        seed: The seed of stochastic rounding.
        options: Options of ``torch.compile``, in the place of the default, which rounds otherwise than eager code on a GPU.
    """
    optimizer = with_policy(build(warmup_cosine_decay_schedule(LEARNING_RATE, 1, steps=8)), policy, seed=seed)
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
    compiled = torch.compile(step, fullgraph=True, options=None if options is None else dict(options))
    eager = fast = (params, optimizer.init(params))
    for number in range(1, steps + 1):
        data = tree.map(powers_of_two, params) if inlined else example_grads(params, number)
        eager, fast = step(eager[0], data, eager[1]), _traced(compiled, fast[0], data, fast[1])
        assert_same_bits(fast, eager, f"compiled, against eager, after step {number}")


def _traced(compiled: Callable[..., Any], *args: Any) -> Any:
    """Call compiled code, and say so if the compiler could not take it whole."""
    # Takes a while to import, and most checks do not compile.
    from torch._dynamo.exc import TorchDynamoException

    try:
        return compiled(*args)
    except TorchDynamoException as error:
        raise AssertionError(f"torch.compile(fullgraph=True) cannot trace the step: {error}") from error
