"""What torch's own suites check of its optimizers (test_optim.py, test_swa_utils.py), checked here of ours, over torch's table of inputs.

Written anew: the suites are not in torch's wheel, and where they compare implementations of torch's with one another, these compare
with torch. What is refused on purpose is at the end, and listed in docs/programs.md.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn

import everybit_torch
from everybit_torch import SGD, AdamW, TorchOptimizer

pytest.importorskip("expecttest", reason="torch.testing._internal needs it")
from torch.testing._internal.common_optimizers import optim_db

NAMES = ("AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "Adafactor")
OURS: dict[str, type[TorchOptimizer]] = {name: getattr(everybit_torch, name) for name in NAMES}


Case = tuple[Any, Any, dict[str, Any]]
CASES: list[Case] = [
    (OURS[info.optim_cls.__name__], info.optim_cls, case.kwargs)
    for info in cast(list[Any], optim_db)
    if info.optim_cls.__name__ in OURS
    for case in info.optim_inputs_func(device="cpu")
]
every_case = pytest.mark.parametrize(
    ("ours", "theirs", "arguments"), CASES, ids=[f"{a.__name__}-{','.join(map(str, k))}" for a, _, k in CASES]
)


def copies(arguments: dict[str, Any]) -> dict[str, Any]:
    """Tensor hyperparameters are the caller's, and schedulers write to them."""
    return copy.deepcopy(arguments)


def close(got: list[Tensor], expected: list[Tensor]) -> None:
    """float64: steps that differ by rounding."""
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


class Affine(nn.Module):
    """A matrix, a vector and their loss; the numbers do not lie in a row if ``strided``."""

    def __init__(self, *, strided: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)

        def draw(*shape: int) -> Tensor:
            if strided:
                return torch.randn(*shape, 2, generator=generator, dtype=torch.float64)[..., 0]
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.weight, self.bias = nn.Parameter(draw(10, 5)), nn.Parameter(draw(10))
        self.input = torch.randn(5, generator=generator, dtype=torch.float64)

    def loss(self) -> Tensor:
        return (self.weight.mv(self.input) + self.bias).pow(2).sum()


def closure_of(model: Affine, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return closure


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def primed(kind: Any, arguments: dict[str, Any], steps: int = 3, **how: Any) -> tuple[Affine, Any]:
    model = Affine(**how)
    optimizer = kind(model.parameters(), **copies(arguments))
    for _ in range(steps):
        optimizer.step(closure_of(model, optimizer))
    return model, optimizer


# -- steps ------------------------------------------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("alone", [False, True], indirect=True)
def test_the_loss_goes_where_it_should_and_where_torchs_goes(
    ours: Any, theirs: Any, arguments: dict[str, Any], strided: bool, alone: bool
) -> None:
    model, optimizer = Affine(strided=strided), None
    optimizer = ours(model.parameters(), **copies(arguments))
    before = model.loss()
    returned: Any = None
    for _ in range(20):
        returned = optimizer.step(closure_of(model, optimizer))
    reference, _ = primed(theirs, arguments, 20, strided=strided)
    close(values(model), values(reference))
    assert torch.is_tensor(returned)
    if arguments.get("lr", 1.0) != 0:
        assert (model.loss() > before) == bool(arguments.get("maximize", False))


SCHEDULES: list[list[Callable[[Any], Any]]] = [
    [lambda o: schedulers.StepLR(o, gamma=0.9, step_size=10)],
    [
        lambda o: schedulers.LinearLR(o, start_factor=0.4, total_iters=4),
        lambda o: schedulers.ExponentialLR(o, gamma=0.9),
    ],
    [
        lambda o: schedulers.ReduceLROnPlateau(o, patience=2),
        lambda o: schedulers.PolynomialLR(o, power=0.9, total_iters=12),
    ],
]


@every_case
@pytest.mark.parametrize("which", range(len(SCHEDULES)))
def test_groups_with_numbers_of_their_own_and_schedulers_together(
    ours: Any, theirs: Any, arguments: dict[str, Any], which: int
) -> None:
    results = []
    for kind in (ours, theirs):
        model = Affine()
        # A learning rate that is a tensor is written to by the schedulers, of all groups at once.
        given = {name: float(x) if isinstance(x, Tensor) else x for name, x in arguments.items()}
        groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "lr": 1e-2}]
        optimizer = kind(groups, **given)
        made = [make(optimizer) for make in SCHEDULES[which]]
        for _ in range(12):
            loss = optimizer.step(closure_of(model, optimizer)).detach()
            for one in made:
                one.step(loss) if isinstance(one, schedulers.ReduceLROnPlateau) else one.step()
        results.append([*values(model), torch.tensor([group["lr"] for group in optimizer.param_groups])])
    close(*results)


@every_case
def test_the_valley_of_rosenbrock(ours: Any, theirs: Any, arguments: dict[str, Any]) -> None:
    """One coordinate's gradient at a time, as torch's suite descends it."""
    results = []
    for kind in (ours, theirs):
        point = nn.Parameter(torch.tensor([1.5, 1.5], dtype=torch.float64))
        optimizer = kind([point], **copies(arguments | {"lr": 1e-5}))
        for step in range(30):
            x, y = point.detach()
            full = torch.stack((-400 * x * (y - x**2) - 2 * (1 - x), 200 * (y - x**2)))
            point.grad = full * torch.tensor([step % 2, 1 - step % 2])
            optimizer.step()
        results.append([point.detach()])
    close(*results)


@every_case
def test_without_gradients_nothing_moves_and_zeros_move_only_what_decays(
    ours: Any, theirs: Any, arguments: dict[str, Any]
) -> None:
    frozen = [torch.randn(2, 3) for _ in range(2)]
    before = [x.clone() for x in frozen]
    optimizer = ours(frozen, **copies(arguments))
    assert optimizer.step(lambda: torch.tensor([1.0])) == torch.tensor([1.0])
    assert all(torch.equal(a, b) for a, b in zip(frozen, before, strict=True))
    results = []
    for kind in (ours, theirs):
        point = nn.Parameter(torch.ones(5, 1, dtype=torch.float64))
        point.grad = torch.zeros_like(point)
        kind([point], **copies(arguments)).step(lambda: torch.tensor([1.0]))
        results.append([point.detach()])
    close(*results)


@pytest.mark.parametrize(("ours", "theirs"), [(kind, getattr(torch.optim, name)) for name, kind in OURS.items()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rate", [0.0, 1e-2])
def test_a_learning_rate_in_a_tensor_is_the_number_in_it(
    ours: Any, theirs: Any, dtype: torch.dtype, rate: float
) -> None:
    results = []
    tensor = torch.tensor(rate, dtype=dtype)
    for kind, lr in ((ours, tensor), (theirs, float(tensor)), (ours, float(tensor))):
        model = Affine()
        optimizer = kind(model.parameters(), lr=lr)
        for step in range(6):
            if isinstance(lr, Tensor):
                tensor.fill_(rate / (1 + step))
            else:
                optimizer.param_groups[0]["lr"] = float(torch.tensor(rate / (1 + step), dtype=dtype))
            optimizer.step(closure_of(model, optimizer))
        tensor.fill_(rate)
        results.append(values(model))
    close(results[0], results[1])
    # Bit for bit the number's; the tensor is the user's, and still that.
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[2], strict=True))


# -- what one sees --------------------------------------------------------------------------------------------------------------------


@every_case
def test_it_is_printed_copied_and_has_state(ours: Any, theirs: Any, arguments: dict[str, Any]) -> None:
    _, optimizer = primed(ours, arguments)
    public = {name for name in vars(optimizer) if not name.startswith("_")}
    assert public == {name for name in vars(copy.deepcopy(optimizer)) if not name.startswith("_")}
    assert all(len(entries) > 0 for entries in optimizer.state.values())
    for name in arguments:
        assert name in repr(optimizer) or name in ("foreach", "fused", "capturable", "differentiable")


@every_case
def test_a_state_dict_is_deterministic_and_continues(ours: Any, theirs: Any, arguments: dict[str, Any]) -> None:
    model, optimizer = primed(ours, arguments, 10)
    other = copy.deepcopy(model)
    twin = ours(other.parameters(), **copies(arguments))
    saved = copy.deepcopy(optimizer.state_dict())
    twin.load_state_dict(saved)
    assert_same(saved, optimizer.state_dict())  # what was loaded is as it was
    for _ in range(10):
        optimizer.step(closure_of(model, optimizer))
        twin.step(closure_of(other, twin))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert_same(optimizer.state_dict(), twin.state_dict())


def assert_same(left: Any, right: Any) -> None:
    if isinstance(left, Tensor):
        assert left.dtype is right.dtype
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    else:
        assert left == right


@every_case
def test_it_is_the_same_through_a_file_with_weights_only(ours: Any, theirs: Any, arguments: dict[str, Any]) -> None:
    for named in (False, True):
        model = Affine()
        optimizer = ours(model.named_parameters() if named else model.parameters(), **copies(arguments))
        for _ in range(3):
            optimizer.step(closure_of(model, optimizer))
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        assert_same(torch.load(file, weights_only=True), optimizer.state_dict())


@every_case
def test_an_older_state_dict_without_todays_flags_loads(ours: Any, theirs: Any, arguments: dict[str, Any]) -> None:
    model, optimizer = primed(ours, arguments)
    old = copy.deepcopy(optimizer.state_dict())
    for group in old["param_groups"]:
        for flag in (
            "maximize",
            "foreach",
            "fused",
            "differentiable",
            "capturable",
            "fully_decoupled",
            "max_learning_rate",
        ):
            group.pop(flag, None)
    optimizer.load_state_dict(old)
    optimizer.step(closure_of(model, optimizer))


@every_case
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_names_of_parameters_are_kept_if_one_of_the_two_has_them(
    ours: Any, theirs: Any, arguments: dict[str, Any], first: bool, second: bool
) -> None:
    found = []
    for kind in (ours, theirs):
        model = Affine()
        optimizers = [
            kind(model.named_parameters() if named else model.parameters(), **copies(arguments))
            for named in (first, second)
        ]
        optimizers[0].step(closure_of(model, optimizers[0]))
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        optimizers[1].step(closure_of(model, optimizers[1]))
        found.append(optimizers[1].state_dict()["param_groups"][0].get("param_names"))
    assert found[0] == found[1]
    assert found[0] == (["weight", "bias"] if first or second else None)


@every_case
def test_a_step_that_is_no_tensor_loads(ours: Any, theirs: Any, arguments: dict[str, Any]) -> None:
    model, optimizer = primed(ours, arguments)
    twin_model, twin = copy.deepcopy((model, optimizer))
    saved = copy.deepcopy(optimizer.state_dict())
    for entries in saved["state"].values():
        entries["step"] = entries["step"].item()
    optimizer.load_state_dict(saved)
    optimizer.step(closure_of(model, optimizer))
    twin.step(closure_of(twin_model, twin))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin_model.parameters(), strict=True))


# -- hooks ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*OURS.values(), torch.optim.AdamW])
def test_hooks_of_state_dicts(kind: Any) -> None:
    """torch's optimizer is among them: what is asserted is its behaviour."""
    optimizer = kind([torch.rand(2, 3, requires_grad=True)])

    def note(optimizer: Any) -> None:
        optimizer.state["test"] = 1

    def take(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict | {"seen": state_dict["state"].pop("test", None)}

    handle = optimizer.register_state_dict_post_hook(take)
    assert optimizer.state_dict()["seen"] is None
    optimizer.register_state_dict_pre_hook(note)
    saved = optimizer.state_dict()
    assert saved["seen"] == 1
    assert "test" not in saved["state"]
    handle.remove()
    assert optimizer.state_dict()["state"]["test"] == 1

    def two(optimizer: Any, state_dict: dict[str, Any]) -> None:
        state_dict["param_groups"][0]["lr"] = 0.002

    def three(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        replaced = copy.deepcopy(state_dict)
        replaced["param_groups"][0]["lr"] = 0.003
        return replaced

    def after(optimizer: Any) -> None:
        optimizer.state["after"] = optimizer.param_groups[0]["lr"]

    optimizer.register_load_state_dict_post_hook(after)
    optimizer.register_load_state_dict_pre_hook(two)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state["after"] == 0.002
    last = optimizer.register_load_state_dict_pre_hook(three)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state["after"] == 0.003
    last.remove()
    optimizer.register_load_state_dict_pre_hook(three, prepend=True)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.002


@pytest.mark.parametrize("kind", [*OURS.values(), torch.optim.AdamW])
def test_hooks_of_steps_come_in_torchs_order_and_go(kind: Any) -> None:
    params = [torch.tensor([1.0, 1.0])]
    optimizer, other = kind(params), torch.optim.SGD(params)
    seen: list[int] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append(0)),
        register_optimizer_step_post_hook(lambda *_: seen.append(5)),
        *(one.register_step_pre_hook(lambda *_: seen.append(1)) for one in (optimizer, other)),
        *(one.register_step_post_hook(lambda *_: seen.append(2)) for one in (optimizer, other)),
    ]
    try:
        for one in (optimizer, other, optimizer):
            one.step()
        assert seen == [0, 1, 2, 5] * 3
    finally:
        for handle in handles:
            handle.remove()
    optimizer.step()
    assert len(seen) == 12


def test_a_hook_before_the_step_may_replace_its_arguments() -> None:
    results = []
    for kind in (SGD, torch.optim.SGD):
        model = Affine()
        optimizer: Any = kind(model.parameters(), lr=0.1)

        def give(optimizer: Any, args: Any, kwargs: Any, model: Affine = model) -> tuple[Any, Any]:
            return (args[0], closure_of(model, optimizer)), {}

        optimizer.register_step_pre_hook(give)
        assert optimizer.step() is not None
        results.append(values(model))
    close(*results)


# -- schedulers ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AdamW, torch.optim.AdamW])
def test_a_scheduler_that_is_stepped_first_warns_and_in_order_does_not(kind: Any) -> None:
    model = Affine()
    optimizer = kind(model.parameters())
    scheduler = schedulers.StepLR(optimizer, 3)
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\).* before `optimizer.step\(\)`"):
        scheduler.step()
    optimizer = kind(model.parameters())
    scheduler = schedulers.StepLR(optimizer, 3)
    optimizer.step(closure_of(model, optimizer))
    scheduler.step()  # pytest turns warnings into errors
    # And after the two went through a pickle.
    optimizer, scheduler = pickle.loads(pickle.dumps((optimizer, scheduler)))
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    scheduler.step()


RESUMED: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 1e-2, total_steps=12),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 1e-3, 1e-2, step_size_up=3),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1), schedulers.ExponentialLR(o, 0.9)], milestones=[3]
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning:torch.optim.lr_scheduler")
@pytest.mark.parametrize("name", list(RESUMED))
@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_a_scheduler_and_its_optimizer_go_on_together_from_a_file(name: str, kind: Any) -> None:
    def make() -> tuple[Affine, Any, Any]:
        model = Affine()
        optimizer = kind([{"params": [model.weight]}, {"params": [model.bias], "lr": 5e-3}], lr=1e-2)
        return model, optimizer, RESUMED[name](optimizer)

    def steps(model: Affine, optimizer: Any, scheduler: Any, count: int) -> None:
        for _ in range(count):
            optimizer.step(closure_of(model, optimizer))
            scheduler.step()

    model, optimizer, scheduler = make()
    steps(model, optimizer, scheduler, 4)
    file = io.BytesIO()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, file
    )
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, resumed, again = make()
    other.load_state_dict(saved["model"])
    again.load_state_dict(saved["scheduler"])
    resumed.load_state_dict(saved["optimizer"])
    steps(model, optimizer, scheduler, 4)
    steps(other, resumed, again, 4)
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in resumed.param_groups]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_group_that_is_added_later_is_scheduled_as_torch_schedules_it() -> None:
    results = []
    for kind in (AdamW, torch.optim.AdamW):
        model = Affine()
        optimizer: Any = kind([model.weight], lr=1e-2)
        scheduler = schedulers.ExponentialLR(optimizer, 0.9)
        for step in range(6):
            if step == 3:
                optimizer.add_param_group({"params": [model.bias], "lr": 1e-3, "initial_lr": 1e-3})
                scheduler.base_lrs.append(1e-3)
            optimizer.step(closure_of(model, optimizer))
            scheduler.step()
        results.append([*values(model), torch.tensor(scheduler.get_last_lr())])
    close(*results)


# -- averaged weights ---------------------------------------------------------------------------------------------------------------------


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(), nn.BatchNorm2d(5, momentum=0.3), nn.Conv2d(5, 2, 3)).double()


# torch cannot take the plain mean of a buffer of whole numbers, which batch norms have.
@pytest.mark.parametrize(
    ("average", "buffers"), [("swa", False), ("ema", False), ("ema", True), ("function", False), ("function", True)]
)
@pytest.mark.parametrize("alone", [False, True], indirect=True)
def test_averages_follow_the_weights_as_they_follow_torchs(average: str, buffers: bool, alone: bool) -> None:
    results = []
    for kind, how in ((SGD, {}), (torch.optim.SGD, {})):
        model = network()
        optimizer: Any = cast(Any, kind)(model.parameters(), lr=0.1, momentum=0.9, **how)
        functions: dict[str, dict[str, Any]] = {
            "swa": {"multi_avg_fn": get_swa_multi_avg_fn()},  # type: ignore[no-untyped-call]
            "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},  # type: ignore[no-untyped-call]
            "function": {"avg_fn": lambda averaged, p, count: 0.9 * averaged + 0.1 * p},
        }
        averaged = AveragedModel(model, use_buffers=buffers, **functions[average])
        other = AveragedModel(model, use_buffers=buffers, **functions[average])
        for step in range(6):
            x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            averaged.update_parameters(model)
        other.load_state_dict(averaged.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(averaged.parameters(), other.parameters(), strict=True))
        loader = [(torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(9), dtype=torch.float64),)]
        update_bn(loader, averaged.module)
        update_bn(loader, model)
        pickle.dumps(AveragedModel(model))
        results.append(
            [*values(averaged), *values(model), *(b.double() for b in [*averaged.buffers(), *model.buffers()])]
        )
    close(*results)


# -- what is refused on purpose --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(OURS.values()))
def test_what_is_refused_on_purpose_is_refused_with_the_reason(kind: Any) -> None:
    real = [nn.Parameter(torch.ones(2, 3))]
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: kind([torch.ones(2, dtype=torch.complex64, requires_grad=True)]), r"view_as_real"),
        (lambda: kind(real, lr=torch.tensor([0.1])), r"lr: got a tensor of shape \(1,\).* 0-d"),
        (
            lambda: kind(real, lr=torch.tensor(0.1, dtype=torch.float16)),
            r"lr: got a tensor .*a lower precision would round it",
        ),
        (lambda: kind(real, differentiable=True), r"differentiable: got True; .*everybit.with_policy"),
        (lambda: kind(real * 2), r"parameters 0 and 1 are the same tensor"),
    ]
    for use, message in refused:
        with pytest.raises((TypeError, ValueError), match=message):
            use()
    embedding = nn.Embedding(3, 2, sparse=True)
    optimizer = kind(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"got a torch.sparse_coo gradient; accepted are dense gradients .*SparseAdam"):
        optimizer.step()


def test_half_precision_needs_a_policy() -> None:
    """torch steps a 16-bit model without a word, and its updates are rounded away."""
    with pytest.raises(ValueError, match=r"policy: parameters are bfloat16, .* Choose one"):
        AdamW([nn.Parameter(torch.ones(2, dtype=torch.bfloat16))])
