"""What a stepper promises and refuses: non-finite gradients, loss scales, phases, dtypes on the wire, messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import everybit as eb
from everybit_torch import MixedPrecision, plan
from everybit_torch.sharded.reports import NanCheck, NonFinite
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import STRATEGIES, Strategy
from tests.support.exact_models import whole_of
from tests.support.programs import FLAT, Addend, Block, Network, data, network, on_a_mesh, on_buffers, weights_of
from tests.support.ranks import run
from tests.support.weights import Weights, equal

# -- gradients that are not finite --------------------------------------------------------------------------------------------------


def nonfinite(strategy: Strategy, nan: NanCheck, mesh: Any = None) -> tuple[bool, tuple[NonFinite, ...], bool, bool]:
    model = network()
    stepper = FlatStepper(model, eb.adamw(1e-2), strategy=strategy, units=[Block], nan=nan, mesh=mesh)
    with stepper.microbatch(last=True):
        model(data(0, 0, 0, torch.float32)).square().mean().backward()
    stepper.step()
    before = weights_of(stepper)
    if dist.get_rank() == 1:
        block = cast(Block, model.blocks[1])

        def spoil(grad: Tensor) -> Tensor:
            grad = grad.clone()
            grad[0, :2] = torch.nan
            grad[1, 0] = torch.inf
            return grad

        handle = block.inner.weight.register_hook(spoil)  # type: ignore[no-untyped-call]
    with stepper.microbatch(last=False):
        model(data(1, 0, 0, torch.float32)).square().mean().backward()
    with stepper.microbatch(last=True):
        model(data(1, 0, 1, torch.float32)).square().mean().backward()
    report = stepper.step()
    kept = equal(before, weights_of(stepper))
    if dist.get_rank() == 1:
        handle.remove()  # type: ignore[possibly-undefined]
    with stepper.microbatch(last=True):
        model(data(2, 0, 0, torch.float32)).square().mean().backward()
    after = stepper.step()
    moved = not after.skipped and not equal(before, weights_of(stepper))
    return report.skipped, report.nonfinite, kept, moved


@pytest.mark.parametrize("strategy", FLAT)
@pytest.mark.parametrize("nan", ["step", "param"])
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_on_all_ranks(strategy: Strategy, nan: NanCheck) -> None:
    for skipped, found, kept, moved in run(3, nonfinite, strategy, nan):
        assert skipped
        assert kept
        assert moved  # and the next one is not
        if nan == "param":
            # Two microbatches of three elements each.
            assert found == (NonFinite("blocks.1.inner.weight", 1, 6, "backward"),)
            assert str(found[0]) == "blocks.1.inner.weight: 6 non-finite gradient elements on rank 1, before it"


def test_ranks_are_numbered_over_both_dimensions() -> None:
    for _, found, _, _ in run(4, on_a_mesh, nonfinite, 2, 2, "optim_grads", "param"):
        assert [(one.name, one.rank) for one in found] == [("blocks.1.inner.weight", 1)]


def test_an_overflow_of_the_sum_is_told_from_one_of_the_gradient() -> None:
    model = Addend((2,))
    stepper = FlatStepper(model, eb.sgd(0.1), nan="param")
    model.number = 1
    with stepper.microbatch(last=True):
        model(torch.zeros(())).backward()
    on_buffers(stepper).buffers[0].main[0] = torch.inf  # as a sum over ranks might
    report = stepper.step()
    assert report.skipped
    assert report.nonfinite == (NonFinite("parts.0", 0, 1, "reduction"),)
    assert "after the reduction" in str(report.nonfinite[0])


def test_large_finite_gradients_are_not_taken_for_infinite_ones() -> None:
    """The square of 1e30 is infinite in float32, and a norm of such gradients with it."""
    for nan in ("step", "param"):
        model = Addend((4,))
        stepper = FlatStepper(model, eb.sgd(1e-30), nan=nan)
        model.number = 1e30  # type: ignore[assignment]
        with stepper.microbatch(last=True):
            model(torch.zeros(())).backward()
        assert not stepper.step().skipped


# -- loss scales ----------------------------------------------------------------------------------------------------------------------


def scaled(strategy: Strategy, scale: float) -> Weights:
    model = network()
    stepper = FlatStepper(model, eb.adamw(1e-2), strategy=strategy, units=[Block], nan="step")
    for step in range(3):
        with stepper.microbatch(last=True):
            (model(data(step, dist.get_rank(), 0, torch.float32)).square().mean() * scale).backward()
        stepper.step(loss_scale=scale)
    return weights_of(stepper)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_scale_of_a_power_of_two_changes_nothing(strategy: Strategy) -> None:
    assert equal(run(2, scaled, strategy, 1.0)[0], run(2, scaled, strategy, 2.0**14)[0])


def grad_scaler(strategy: Strategy) -> tuple[Weights, list[float]]:
    model = network()
    stepper = FlatStepper(model, eb.adamw(1e-2), strategy=strategy, units=[Block])
    optimizer, scaler = stepper.as_optimizer(), ShardedGradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        with stepper.microbatch(last=True):
            loss = model(data(step, dist.get_rank(), 0, torch.float32)).square().mean()
            if step == 2 and dist.get_rank() == 1:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(float(scaler.get_scale()))
    return weights_of(stepper), scales


def without_scaler(strategy: Strategy) -> Weights:
    model = network()
    stepper = FlatStepper(model, eb.adamw(1e-2), strategy=strategy, units=[Block])
    for step in (0, 1, 3):
        with stepper.microbatch(last=True):
            model(data(step, dist.get_rank(), 0, torch.float32)).square().mean().backward()
        stepper.step()
    return weights_of(stepper)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_torchs_sharded_grad_scaler(strategy: Strategy) -> None:
    (expected, _) = run(2, without_scaler, strategy)
    for weights, scales in run(2, grad_scaler, strategy):
        assert scales == [256.0, 256.0, 128.0, 128.0]
        assert equal(weights, expected)


# -- phases ---------------------------------------------------------------------------------------------------------------------------


def small(**arguments: Any) -> tuple[Addend, FlatStepper]:
    model = Addend((3,))
    return model, FlatStepper(model, eb.sgd(0.1), **arguments)


@pytest.mark.parametrize("strategy", FLAT)
def test_what_would_count_a_gradient_twice_is_an_error(strategy: Strategy) -> None:
    model, stepper = small(strategy=strategy)
    with stepper.microbatch(last=True):
        model(torch.zeros(())).backward()
    with (
        pytest.raises(RuntimeError, match=r"accepted next is step\(\) or zero_grad\(\)"),
        stepper.microbatch(last=True),
    ):
        pass
    with pytest.raises(
        RuntimeError, match=r"^backward: the gradients of this cycle are final; accepted next is step\(\)"
    ):
        model(torch.zeros(())).backward()
    stepper.zero_grad()
    with stepper.microbatch(last=True):
        model(torch.zeros(())).backward()
    assert not stepper.step().skipped


def test_contexts_do_not_nest_and_steps_come_after_them() -> None:
    _, stepper = small()
    with stepper.microbatch(last=False):
        with pytest.raises(RuntimeError, match=r"^microbatch: inside microbatch\(\)"), stepper.microbatch(last=True):
            pass
        with (
            pytest.raises(RuntimeError, match=r"^no_sync: inside microbatch\(\)"),
            stepper.no_sync(),
        ):
            pass
        with pytest.raises(RuntimeError, match=r"^step: inside microbatch\(\)"):
            stepper.step()


def test_a_step_without_any_gradient_moves_nothing() -> None:
    _, stepper = small()
    before = weights_of(stepper)
    report = stepper.step()
    assert report.untouched == ("parts.0",)
    assert equal(before, weights_of(stepper))


def test_parameters_that_are_unfrozen_later_are_named() -> None:
    model = Addend((3,), (2,))
    model.parts[0].requires_grad_(False)
    stepper = FlatStepper(model, eb.sgd(0.1))
    model.parts[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"parts\.0: requires_grad is True, and was False when the stepper was made"):
        model(torch.zeros(())).backward()
    stepper.zero_grad()


# -- the wire's dtype may change ----------------------------------------------------------------------------------------------------------


def changing(strategy: Strategy) -> tuple[list[str], str]:
    model = network(torch.bfloat16)
    policy = MixedPrecision()
    stepper = FlatStepper(model, eb.adamw(1e-2), policy=policy, strategy=strategy, units=[Block])
    seen = []

    def once(last: bool = True) -> None:
        with stepper.microbatch(last=last):
            model(data(0, 0, 0, torch.bfloat16)).float().square().mean().backward()

    for dtype in (None, "float16", "bfloat16"):
        with stepper.grad_comm(dtype):
            once()
            seen.append(str(on_buffers(stepper).buffers[0].grads.inner.dtype))
            stepper.step()
    seen.append(str(on_buffers(stepper).buffers[0].grads.inner.dtype))
    stepper.set_grad_comm("float16", reduce="float32")
    seen.append(
        f"{on_buffers(stepper).buffers[0].grads.inner.dtype} {on_buffers(stepper).buffers[0].grads.inner.exact}"
    )
    once()
    try:
        stepper.set_grad_comm("bfloat16")
    except RuntimeError as error:
        return seen, str(error)
    return seen, ""


@pytest.mark.parametrize("strategy", FLAT)
def test_the_wires_dtype_changes_between_steps_only(strategy: Strategy) -> None:
    """In the seed the guard was the wrong way round, and its test went through both ways."""
    for seen, refused in run(2, changing, strategy):
        assert seen == ["torch.float32", "torch.float16", "torch.bfloat16", "torch.float32", "torch.float16 True"]
        assert "accepted before the first backward pass" in refused


# -- three dtypes -------------------------------------------------------------------------------------------------------------------------

F = torch.float32
B = torch.bfloat16
D = torch.float64
H = torch.float16
# main_params, main_grads, grad_comm -> dtype of main weights (None: the model's own), of main gradients, of the wire; by model dtype.
TABLE: list[tuple[tuple[Any, Any, Any], dict[torch.dtype, tuple[Any, Any, Any]]]] = [
    (("float32", "float32", None), {B: (F, F, F), H: (F, F, F), F: (None, F, F), D: ("refused",) * 3}),
    (("float32", "float32", "bfloat16"), {B: (F, F, B), F: (None, F, B)}),
    (("float32", "float32", "float16"), {B: (F, F, H), F: (None, F, H)}),
    (("float32", None, None), {B: (F, B, B), F: (None, F, F)}),
    (("float32", None, "float32"), {B: (F, B, F), F: (None, F, F)}),
    ((None, "float32", None), {B: (None, F, F), F: (None, F, F), D: (None, F, F)}),
    ((None, "float32", "bfloat16"), {B: (None, F, B)}),
    ((None, None, None), {B: (None, B, B), F: (None, F, F), D: (None, D, D)}),
    ((None, None, "float16"), {B: (None, B, H), F: (None, F, H)}),
    (("float64", None, None), {B: (D, B, B), F: (D, F, F), D: (None, D, D)}),
    (("float64", "float32", "float16"), {B: (D, F, H), F: (D, F, H), D: (None, F, H)}),
    (("float64", "float64", None), {F: (D, D, D)}),
    (("bfloat16", "float32", None), {B: (None, F, F), F: ("refused",) * 3}),
]


@pytest.mark.parametrize("strategy", FLAT)
@pytest.mark.parametrize("row", range(len(TABLE)))
def test_the_three_dtypes_mean_what_the_table_says(row: int, strategy: Strategy) -> None:
    (main_params, main_grads, grad_comm), expected = TABLE[row]
    precision = MixedPrecision(main_params=main_params, main_grads=main_grads, grad_comm=grad_comm)
    for dtype, (main, gradients, wire) in expected.items():
        model = network(dtype)
        if main == "refused":
            with pytest.raises(ValueError, match=r"MixedPrecision.main_params: got '\w+' for"):
                FlatStepper(model, eb.adamw(1e-2), policy=precision, strategy=strategy)
            continue
        stepper = FlatStepper(model, eb.adamw(1e-2), policy=precision, strategy=strategy)
        with stepper.microbatch(last=True):
            model(data(0, 0, 0, dtype)).square().mean().backward()
        before = weights_of(stepper)
        stepper.step()
        assert not equal(before, weights_of(stepper))
        assert {buffer.main.dtype for buffer in on_buffers(stepper).buffers} == {gradients}
        assert {buffer.grads.inner.dtype for buffer in on_buffers(stepper).buffers} == {wire}
        state = [entries for entries in stepper.as_optimizer().state.values() if entries]
        assert all(
            ("param.main" in entries) == (main is not None) for entries in state
        )  # no second copy of what is the same
        assert main is None or {entries["param.main"].dtype for entries in state} == {main}


def test_the_defaults_are_the_seeds() -> None:
    assert MixedPrecision() == MixedPrecision(main_params="float32", main_grads="float32", grad_comm=None)
    with pytest.raises(
        ValueError,
        match=r"MixedPrecision\.grad_comm: got 'int8'; accepted are 'float64'",
    ):
        MixedPrecision(grad_comm="int8")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_main_weights_in_float64_train_as_float64_does(dtype: Any) -> None:
    """Five steps against torch's AdamW in float64, with the same gradients."""
    torch.manual_seed(0)
    start = torch.randn(50).to(getattr(torch, dtype))
    policy = MixedPrecision(main_params="float64", main_grads="float64").policy(dtype)
    optimizer = eb.with_policy(eb.adamw(1e-2), policy)
    params, state = [start.clone()], optimizer.init([start])
    reference = nn.Parameter(start.double())
    other = torch.optim.AdamW([reference], lr=1e-2)
    for _ in range(5):
        gradient = torch.randn(50, dtype=torch.float64)
        params, state = optimizer.step(params, [gradient], state)
        reference.grad = gradient
        other.step()
    # Both round each of some ten operations a step by 2**-53 of numbers below 4.
    torch.testing.assert_close(
        optimizer.export_fp32(params, state)[0], reference.detach(), rtol=0, atol=5 * 10 * 2**-51
    )
    assert torch.equal(params[0], reference.detach().float().to(params[0].dtype))


# -- what is refused --------------------------------------------------------------------------------------------------------------------


def meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(2, 2)


REFUSALS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: small(strategy="zero"), ValueError, r"strategy: got 'zero'; accepted are 'no_shard'.*or 0 to 3"),
    (lambda: small(strategy=4), ValueError, r"strategy: got 4"),
    (lambda: small(outer="all"), ValueError, r"outer: got 'all'; accepted are 'no_shard', 'optim'"),
    (lambda: small(outer="optim"), ValueError, r"accepted with\s+strategy='optim_grads_params'"),
    (lambda: small(outer="optim", strategy=3), ValueError, r"accepted with it is a DeviceMesh of two dimensions"),
    (lambda: small(nan="always"), ValueError, r"nan: got 'always'; accepted are 'off', 'step', 'param'"),
    (lambda: small(divisor=0), ValueError, r"divisor: got 0; accepted is a finite number above zero"),
    (lambda: small(mesh="all"), TypeError, r"mesh: got 'all'; accepted are a DeviceMesh, a process group, or None"),
    (lambda: small(units=[Block]), ValueError, r"units: the model has no Block; its modules are Addend, ParameterList"),
    (lambda: small(units=Block), TypeError, r"units: got <class 'tests\.support\.programs\.Block'>; accepted is a list of modules"),
    (lambda: small(units=["Block"]), TypeError, r"units: got 'Block'; accepted are modules"),
    (lambda: small(policy="bf16"), ValueError, r"policy: got 'bf16'; accepted are 'FP64'"),
    (lambda: small(policy=16), TypeError, r"policy: got 16; accepted are a Policy"),
    (lambda: small(policy=eb.policies.KAHAN_BF16), ValueError, r"parts\.0: Policy\.params: Kahan splits a number"),
    (lambda: small(labels=lambda name, p: "x"), ValueError, r"labels: got a function with a single transform"),
    (lambda: FlatStepper(Addend((2,)), {"a": eb.sgd(0.1)}), ValueError, r"labels: got None with several transforms"),
    (
        lambda: FlatStepper(Addend((2,)), {"a": eb.sgd(0.1)}, labels=lambda name, p: "b"),
        ValueError,
        r"labels: parts\.0 is labelled 'b'; there are transforms for 'a'",
    ),
    (lambda: FlatStepper(Addend((2,)), eb.adamw), TypeError, r"transform: call it, adamw\(\.\.\.\)"),  # type: ignore[arg-type]
    (lambda: FlatStepper(Addend((2,)), "adamw"), TypeError, r"transform: call the function of that name, everybit\.adamw\("),  # type: ignore[arg-type]
    (lambda: FlatStepper(eb.sgd(0.1), Addend((2,))), TypeError, r"model: got a Chain; accepted is a module, before the transform"),  # type: ignore[arg-type]
    (
        lambda: FlatStepper(nn.Sequential(nn.LazyLinear(4)), eb.sgd(0.1)),
        ValueError,
        r"model: call it once with a batch, model\(batch\), and then make the stepper\. 0\.weight belongs to a lazy module",
    ),
    (
        lambda: FlatStepper(Addend((2,)), {"a": eb.sgd(0.1), "b": eb.sgd(0.2)}, labels=lambda name, p: "a"),
        ValueError,
        r"labels: no parameter is labelled 'b'; the labels given are 'a'\. Drop the transform, or mend the labels\.",
    ),
    (lambda: FlatStepper(nn.Module(), eb.sgd(0.1)), ValueError, r"model: has no parameters"),
    (lambda: FlatStepper(meta(), eb.sgd(0.1)), ValueError, r"model: is on the meta device.*everybit plan"),
    (
        lambda: FlatStepper(Addend((2,)).bfloat16(), eb.adamw(1e-3), policy=eb.policies.PURE_BF16),
        ValueError,
        r"Policy\.variance: got Nearest\(dtype='bfloat16'\); 'variance' has a decay rate of",
    ),
    (lambda: FlatStepper(Addend((2,)).bfloat16(), eb.adamw(1e-3)), ValueError, r"parameters are bfloat16, and without a policy"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSALS)))
def test_what_cannot_work_is_refused_by_name(number: int) -> None:
    call, kind, message = REFUSALS[number]
    with pytest.raises(kind, match=message):
        call()


def test_a_lazy_module_is_stepped_once_it_was_called() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="belongs to a lazy module"):
        plan(model, eb.sgd(0.1), ranks=2)
    model(torch.ones(2, 3))
    stepper = FlatStepper(model, eb.sgd(0.1))
    with stepper.microbatch(last=True):
        model(torch.ones(2, 3)).sum().backward()
    assert not stepper.step().skipped


def test_a_label_of_frozen_parameters_alone_has_a_transform_for_when_they_are_trained() -> None:
    model = Addend((2,), (3,))
    model.parts[1].requires_grad_(False)
    FlatStepper(model, {"0": eb.sgd(0.1), "1": eb.sgd(0.2)}, labels=lambda name, p: name[-1])


def test_sparse_gradients_are_refused_by_name() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    stepper = FlatStepper(model, eb.sgd(0.1))
    with pytest.raises(TypeError, match=r"weight: got a torch\.sparse_coo gradient; accepted are dense gradients"):
        model(torch.tensor([1])).sum().backward()
    stepper.zero_grad()


def test_param_groups_cannot_be_added() -> None:
    _, stepper = small()
    with pytest.raises(RuntimeError, match="a stepper's parameters are settled"):
        stepper.as_optimizer().add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_the_stepper_tells_what_it_is() -> None:
    model = Network()
    text = repr(FlatStepper(model, eb.adamw(1e-2), strategy="optim_grads", units=[Block]))
    assert text.startswith("FlatStepper(strategy='optim_grads' over 1, 3 buffers, 195 elements and 0 of padding)")
    assert "ScaleByAdam" in text


def broadcast() -> Weights:
    model = network(seed=dist.get_rank())
    model.register_buffer("seen", torch.full((2,), float(dist.get_rank())))
    FlatStepper(model, eb.adamw(1e-2), strategy="optim_grads_params", units=[Block])
    return {name: whole_of(x).clone() for name, x in model.state_dict().items()}


def test_all_ranks_begin_as_the_first() -> None:
    expected = dict(network(seed=0).state_dict()) | {"seen": torch.zeros(2)}
    for weights in run(3, broadcast):
        assert equal(weights, expected)
