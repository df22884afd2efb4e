"""Where a parameter's numbers lie, and who else looks at them: nothing that shared memory is taken apart, and strides are followed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import SGD, AdamW
from tests.support.small_models import Awkward, give_gradients, same_bits, train, values


def close(got: list[Tensor], expected: list[Tensor]) -> None:
    """float64: a few steps that differ by rounding."""
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# -- shared memory ----------------------------------------------------------------------------------------------------------------


def as_views() -> nn.ParameterList:
    base = torch.arange(6.0, dtype=torch.float64)
    return nn.ParameterList([nn.Parameter(base), nn.Parameter(torch.ones(4).double()), nn.Parameter(base.view(2, 3))])


def as_overlapping() -> nn.ParameterList:
    base = torch.arange(10.0, dtype=torch.float64)
    return nn.ParameterList([nn.Parameter(base[:6]), nn.Parameter(torch.ones(4).double()), nn.Parameter(base[4:])])


def as_one_in_another() -> nn.ParameterList:
    base = torch.arange(10.0, dtype=torch.float64)
    return nn.ParameterList([nn.Parameter(base), nn.Parameter(base[2:5]), nn.Parameter(base[7:9])])


@pytest.mark.parametrize("make", [as_views, as_overlapping, as_one_in_another])
@pytest.mark.parametrize("alone", [False, True], indirect=True)
@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_parameters_that_share_memory_go_on_sharing_it_as_in_torch(
    make: Callable[[], nn.ParameterList], alone: bool, kind: Any
) -> None:
    model, reference = make(), make()
    mine = kind(model.parameters(), lr=0.1)
    # torch's foreach implementation writes parameters one after the other as well; one at a time is what it is defined by.
    theirs = getattr(torch.optim, kind.__name__)(reference.parameters(), lr=0.1, foreach=False)
    addresses = [p.data_ptr() for p in model.parameters()]
    close(
        train(model, mine, 4, without=lambda step, name: name == "2" and step == 2),
        train(reference, theirs, 4, without=lambda step, name: name == "2" and step == 2),
    )
    shared = [number for number in range(3) if make is as_one_in_another or number != 1]
    assert [model[n].data_ptr() for n in shared] == [addresses[n] for n in shared]


def test_a_buffer_that_is_a_view_of_a_parameter_stays_one() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
            self.register_buffer("row", self.first.weight.detach()[0])

    torch.manual_seed(0)
    model = Model()
    reference = Model()
    reference.load_state_dict(model.state_dict())
    mine, theirs = AdamW(model.parameters()), torch.optim.AdamW(reference.parameters())
    close(train(model, mine, 3), train(reference, theirs, 3))
    assert torch.equal(model.get_buffer("row"), model.first.weight[0])


def test_a_state_dict_that_somebody_holds_follows_training_as_in_torch() -> None:
    model, reference = Awkward(), Awkward()
    held, theirs = model.state_dict(), reference.state_dict()
    train(model, AdamW(model.parameters()), 2)
    train(reference, torch.optim.AdamW(reference.parameters()), 2)
    for name, tensor in held.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-6)
        assert tensor.data_ptr() == model.get_parameter(name).data_ptr()


@pytest.mark.parametrize("name", ["EXACT_BF16", "KAHAN_BF16", "MIXED_BF16", "FLOOR_BF16"])
def test_shared_memory_and_residuals_of_its_own_is_refused_by_name(name: str) -> None:
    base = torch.arange(6.0).bfloat16()
    model = nn.ParameterList([nn.Parameter(base), nn.Parameter(base.view(2, 3))])
    optimizer = AdamW(model.parameters(), policy=eb.policies.PRESETS[name])
    before = values(model)
    give_gradients(model, 0)
    if name == "FLOOR_BF16":  # no residual: the weights are all there is
        optimizer.step()
        assert torch.equal(model[0].view(2, 3), model[1])
        return
    with pytest.raises(
        ValueError,
        match=r"param group 0, parameter 0 and param group 0, parameter 1: share memory, and .* One|be one Parameter",
    ):
        optimizer.step()
    assert same_bits(before, values(model))
    assert not optimizer.state


@pytest.mark.parametrize("alone", [False, True], indirect=True)
def test_weights_tied_after_the_first_step_stay_tied(alone: bool) -> None:
    results = []
    pairs: Any = ((SGD, {}), (torch.optim.SGD, {"foreach": False}))
    for kind, arguments in pairs:
        model = Awkward(torch.float64)
        optimizer: Any = kind(model.parameters(), lr=0.1, momentum=0.9, **arguments)
        train(model, optimizer, 2)
        with torch.no_grad():
            model.vector.data = model.matrix.data.view(-1)[:13]
        train(model, optimizer, 3, start=2)
        assert torch.equal(model.vector, model.matrix.view(-1)[:13])
        results.append(values(model))
    close(*results)


def test_weights_tied_after_the_first_step_are_refused_where_each_has_a_residual() -> None:
    model = Awkward(torch.bfloat16)
    optimizer = AdamW(model.parameters(), policy=eb.policies.LEAN_BF16)
    train(model, optimizer, 2)
    with torch.no_grad():
        model.vector.data = model.matrix.data.view(-1)[:13]
    give_gradients(model, 1)
    before = values(model)
    with pytest.raises(RuntimeError, match=r"a parameter of shape \(13,\) was given memory of another parameter"):
        optimizer.step()
    assert same_bits(before, values(model))


# -- strides ------------------------------------------------------------------------------------------------------------------------


class Square(nn.Module):
    """A square matrix, a kernel of a convolution, and something before and behind them."""

    before: nn.Parameter
    square: nn.Parameter
    kernel: nn.Parameter
    behind: nn.Parameter

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape in {"before": (3,), "square": (4, 4), "kernel": (3, 2, 3, 3), "behind": (2, 2)}.items():
            self.register_parameter(
                name, nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
            )


def transpose(model: Square) -> None:
    model.square.data = model.square.data.t()


def transpose_twice(model: Square) -> None:
    model.square.data = model.square.data.t().contiguous().t()


def channels_last(model: Square) -> None:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def every_second(model: Square) -> None:
    model.before.data = torch.stack([model.before.data, model.before.data], 1)[:, 0]
    model.square.data = torch.stack([model.square.data, model.square.data], 2)[..., 1]


def flipped(model: Square) -> None:
    model.square.data = model.square.data.t().clone()


def strided(vector: nn.Parameter) -> None:
    vector.data = torch.stack([vector.data, vector.data], 1)[:, 0]


def resized(vector: nn.Parameter) -> None:
    """The same storage at another address."""
    vector.untyped_storage().resize_(1 << 20)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("change", [strided, resized])
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.sampled(2)
def test_vectors_alone_are_followed_as_in_torch(change: Callable[[nn.Parameter], None], compile: bool) -> None:
    results = []
    for theirs in (False, True):
        model = nn.ParameterList([nn.Parameter(torch.arange(5.0).double() + n) for n in range(3)])
        mine = None if theirs else AdamW(model.parameters(), lr=0.1, compile=compile)
        optimizer = mine or torch.optim.AdamW(model.parameters(), lr=0.1)
        train(model, optimizer, 2)
        change(model[1])
        results.append(train(model, optimizer, 2))
    close(*results)


CHANGES = [transpose, transpose_twice, channels_last, every_second, flipped]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("alone", [False, True], indirect=True)
@pytest.mark.parametrize("when", [0, 2])
def test_strides_are_followed_as_in_torch(change: Callable[[Square], None], alone: bool, when: int) -> None:
    results, formats = [], []
    pairs: Any = ((SGD, {}), (torch.optim.SGD, {"foreach": False}))
    for kind, arguments in pairs:
        model = Square()
        optimizer: Any = kind(model.parameters(), lr=0.1, momentum=0.9, **arguments)
        steps: list[Tensor] = []
        for step in range(6):
            if step == when:
                change(model)
            steps += train(model, optimizer, 1, start=step, without=lambda step, name: name == "square" and step == 4)
        results.append(steps)
        formats.append([p.stride() for p in model.parameters()])
    close(*results)
    assert formats[0] == formats[1]


EAGER = [
    (name, change, False) for name in ("EXACT_BF16", "LEAN_BF16", "KAHAN_BF16", "FLOOR_BF16") for change in CHANGES[2:4]
]


@pytest.mark.parametrize(
    ("name", "change", "compile"),
    [*EAGER, pytest.param("LEAN_BF16", channels_last, True, marks=pytest.mark.exhaustive)],
)
def test_the_bits_do_not_depend_on_strides(name: str, change: Callable[[Square], None], compile: bool) -> None:
    """The same numbers in another order of memory: the same elements get the same bits."""
    results = []
    for compiled, when in ((False, 9), (compile, 2)):
        model = Square(torch.bfloat16)
        optimizer = AdamW(model.parameters(), lr=1e-2, policy=eb.policies.PRESETS[name], compile=compiled)
        for step in range(4):
            if step == when:
                change(model)
            train(model, optimizer, 1, start=step)
        state = [x.clone() for p in model.parameters() for x in optimizer.state[p].values()]
        results.append([*values(model), *optimizer.export_fp32()[0], *state])
    for other in results[1:]:
        assert same_bits(results[0], other)


@pytest.mark.parametrize("alone", [False, True], indirect=True)
@pytest.mark.parametrize("what", ["transposed", "reshaped", "narrowed"])
def test_another_shape_is_refused_by_name(alone: bool, what: str) -> None:
    model = Square()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 1)
    data = model.kernel.data
    shapes = {"transposed": data.permute(1, 0, 2, 3), "reshaped": data.view(6, 9), "narrowed": data[:2]}
    model.kernel.data = shapes[what]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = values(model)
    shape = ", ".join(map(str, shapes[what].shape))
    with pytest.raises(
        RuntimeError, match=rf"a parameter of shape \({shape}\) is .*, but was .* with shape \(3, 2, 3, 3\)"
    ):
        optimizer.step()
    assert same_bits(before, values(model))


@pytest.mark.parametrize("alone", [False, True], indirect=True)
@pytest.mark.parametrize("when", [0, 1])
def test_elements_that_are_one_place_in_memory_are_refused_by_name(alone: bool, when: int) -> None:
    model = Square()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, when)
    model.square.data = torch.ones(4, dtype=torch.float64).expand(4, 4)
    give_gradients(model, 1)
    before = values(model)
    with pytest.raises((RuntimeError, ValueError), match=r"one place in memory \(expand\)"):
        optimizer.step()
    assert same_bits(before, values(model))


# -- parameters without a shape, and without a version -------------------------------------------------------------------------------


@pytest.mark.parametrize("alone", [False, True], indirect=True)
def test_lazy_modules_may_be_given_before_they_have_shapes(alone: bool) -> None:
    results = []
    pairs: Any = ((AdamW, {}), (torch.optim.AdamW, {}))
    for kind, arguments in pairs:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2), nn.LazyLinear(3)).double()
        optimizer: Any = kind(model.parameters(), lr=0.1, **arguments)
        assert not optimizer.state_dict()["state"]
        for step in range(4):
            optimizer.zero_grad()
            # The last module is used from the third step on: its parameters have no shapes until then.
            x = torch.randn(2, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            out = model[1](model[0](x))
            torch.manual_seed(7)
            (out if step < 2 else model[2](out)).square().sum().backward()
            optimizer.step()
        results.append(values(model))
    close(*results)


def test_a_step_in_inference_mode_leaves_parameters_that_can_be_trained_on() -> None:
    results = []
    for inference in (True, False):
        model = Awkward(torch.bfloat16)
        optimizer = AdamW(model.parameters(), policy=eb.policies.LEAN_BF16)
        with torch.inference_mode(inference):
            optimizer.bytes_table()
            give_gradients(model, 0)
            optimizer.step()
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved)
            optimizer.full_state_dict()
        assert not any(p.is_inference() for p in model.parameters())
        assert not any(x.is_inference() for entries in optimizer.state.values() for x in entries.values())
        for step in (1, 2):
            optimizer.zero_grad()
            loss = sum((p.float().square().sum() * (step + 1) for p in model.parameters()), start=torch.zeros(()))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        results.append(values(model))
    assert same_bits(*results)


@pytest.mark.parametrize("alone", [False, True], indirect=True)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_whose_parameter_takes_the_originals_memory_steps_it(how: str, alone: bool) -> None:
    p = nn.Parameter(torch.zeros(256))
    optimizer = SGD([p], lr=1.0, compile=False)
    p.grad = torch.ones(256)
    optimizer.step()
    pair = (p, optimizer)
    q, other = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    q.data = p.data
    for _ in range(3):
        q.grad = torch.ones(256)
        other.step()
    assert q.tolist() == [-4.0] * 256
    assert p.tolist() == [-4.0] * 256
