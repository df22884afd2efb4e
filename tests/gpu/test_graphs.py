"""Steps in CUDA graphs: captured by hand, by Inductor's graph trees, with a whole training step, with a learning rate that changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit.testing.examples import assert_same_bits
from everybit_torch import EXACT_OPTIONS, TorchOptimizer
from tests.support.devices import captured, require_device, some

pytestmark = [
    pytest.mark.cuda,
    # torch's graph trees begin with one.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
]
require_device()

PRESETS = eb.policies.PRESETS
STEPS, WARM = 20, 3


def slow(learning_rate: eb.Hyperparameter) -> eb.Transform[Any]:
    return eb.adamw(learning_rate, b2=0.95)


def clipped(learning_rate: eb.Hyperparameter) -> eb.Transform[Any]:
    return eb.chain(eb.clip_by_global_norm(0.5), eb.adamw(learning_rate, b2=0.95))


def lion(learning_rate: eb.Hyperparameter) -> eb.Transform[Any]:
    return eb.lion(learning_rate)


def scheduled(learning_rate: float) -> eb.Transform[Any]:
    return eb.adamw(eb.linear_schedule(learning_rate, learning_rate / 10, 15), b2=0.95)


def gradient(like: Tensor, step: int) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(step)).to(like)


def trained(
    policy: str,
    factory: Callable[..., Any],
    device: torch.device,
    *,
    graph: bool,
    rates: list[float] | None = None,
    changed: bool = False,
    **options: Any,
) -> list[Tensor]:
    """All tensors after some steps, of which all but the first are replays of a captured one.

    Args:
        policy: Its name.
        factory: Of the transform.
        device: Where.
        graph: Replay.
        rates: Written to a learning rate that is a tensor.
        changed: Change a learning rate that is a float after the capture, which replays do not follow; with graphs only.
        options: Of the optimizer.
    """
    dtype = getattr(torch, PRESETS[policy].model_dtype)
    params = [
        nn.Parameter(gradient(torch.empty(shape, dtype=dtype, device=device), 1)) for shape in ((64, 65), (1111,))
    ]
    rate: Any = torch.tensor(0.01, dtype=torch.float64, device=device) if rates else 0.01
    optimizer = TorchOptimizer(params, factory, policy=PRESETS[policy], lr=rate, seed=4, **options)
    replay: Callable[[], object] | None = None
    for p in params:
        p.grad = torch.zeros_like(p)
    for step in range(STEPS):
        for p in params:
            assert p.grad is not None
            p.grad.copy_(gradient(p, 100 + step))
        if rates:
            rate.fill_(rates[step])
        if changed and step == 10 and device.type == "cuda":
            optimizer.param_groups[0]["lr"] = 0.5
            optimizer.prepare()  # which writes it to where compiled steps read it
        if not graph or step < WARM:
            optimizer.step()
        else:
            replay = replay or captured(optimizer.step, device)
            replay()
    state = [x for p in params for x in optimizer.state[p].values() if isinstance(x, Tensor)]
    return [x.detach().clone() for x in [*params, *state]]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("policy", some(PRESETS))
def test_replays_have_the_bits_of_steps(policy: str, compile: bool, device: torch.device) -> None:
    expected = trained(policy, slow, device, graph=False, compile=compile)
    assert_same_bits(trained(policy, slow, device, graph=True, compile=compile), expected, "replayed, against stepped")


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("factory", [clipped, lion, scheduled])
def test_so_have_those_of_other_transforms(factory: Any, compile: bool, device: torch.device) -> None:
    if compile and factory is scheduled and torch.__version__ < "2.13":
        pytest.skip("Dynamo of torch 2.11 does not trace what makes a schedule: a step runs uncompiled, and warns")
    expected = trained("LEAN_BF16", factory, device, graph=False, compile=compile)
    got = trained("LEAN_BF16", factory, device, graph=True, compile=compile)
    assert_same_bits(got, expected, "replayed, against stepped")


@pytest.mark.parametrize("compile", [False, True])
def test_replays_follow_a_learning_rate_that_is_a_tensor(compile: bool, device: torch.device) -> None:
    rates = [0.01 / (1 + step) for step in range(STEPS)]
    expected = trained("LEAN_BF16", slow, device, graph=False, rates=rates, compile=compile)
    got = trained("LEAN_BF16", slow, device, graph=True, rates=rates, compile=compile)
    assert_same_bits(got, expected, "replayed, against stepped")


@pytest.mark.parametrize("compile", [False, True])
def test_replays_keep_a_learning_rate_that_is_a_float(compile: bool, device: torch.device) -> None:
    expected = trained("LEAN_BF16", slow, device, graph=False, compile=compile)
    got = trained("LEAN_BF16", slow, device, graph=True, changed=True, compile=compile)
    assert_same_bits(got, expected, "replayed after a change, against stepped without it")


def test_a_whole_training_step_is_captured(device: torch.device) -> None:
    """Forward pass, backward pass and step; in float32, whose products on tensor cores are off by default."""
    results = []
    for graph in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(device)
        optimizer = TorchOptimizer(model.parameters(), slow, lr=0.01, compile=False)
        x = torch.zeros(8, 16, device=device)

        def step(model: nn.Module = model, optimizer: TorchOptimizer = optimizer, x: Tensor = x) -> None:
            optimizer.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            optimizer.step()

        stream = torch.cuda.Stream() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        replay: Callable[[], object] | None = None
        for number in range(STEPS):
            x.copy_(gradient(x, number))
            if not graph:
                step()
            elif number < WARM:
                if stream is None:
                    step()
                    continue
                # As torch asks for it: what autograd remembers of streams is then not the default one's.
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    step()
                torch.cuda.current_stream().wait_stream(stream)
            else:
                replay = replay or captured(step, device)
                replay()
        results.append([p.detach().clone() for p in model.parameters()])
    assert_same_bits(results[1], results[0], "replayed, against stepped")


@pytest.mark.parametrize("policy", some(["FP32", "LEAN_BF16", "FLOOR_BF16"]))
def test_graph_trees_take_the_cores_step(policy: str, device: torch.device) -> None:
    """``triton.cudagraphs``, which ``mode="reduce-overhead"`` sets, with the options for eager code's bits."""
    dtype = getattr(torch, PRESETS[policy].model_dtype)
    optimizer = eb.with_policy(eb.adamw(0.01, b2=0.95), PRESETS[policy])
    torch._dynamo.reset()
    fast = torch.compile(optimizer.step, fullgraph=True, options=EXACT_OPTIONS | {"triton.cudagraphs": True})
    start = gradient(torch.empty(1111, dtype=dtype, device=device), 1)
    expected = (start, optimizer.init(start))
    got: Any = (start.clone(), optimizer.init(start))
    for step in range(STEPS):
        grad = gradient(start, 100 + step)
        expected = optimizer.step(expected[0], grad, expected[1])
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        # What a graph returns lies in its own memory, which the next replay writes to.
        got = eb.tree.map(torch.clone, fast(got[0], grad, got[1]))
    assert_same_bits(list(got), list(expected), "graph trees, against eager")


def test_steps_run_as_they_are_where_graph_trees_are_asked_for_everywhere(device: torch.device) -> None:
    """``torch._inductor.config.triton.cudagraphs``: a step writes over what it is given, for which graph trees make no graph."""
    expected = trained("LEAN_BF16", slow, device, graph=False, compile=False)
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        got = trained("LEAN_BF16", slow, device, graph=False, compile=True)
    assert_same_bits(got, expected, "under graph trees, against eager")
