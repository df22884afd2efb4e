"""Arguments: torch's at the values that choose nothing, everybody's under the names that they gave, and a sentence for each mistake."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from torch import nn

import everybit as eb
import everybit_torch
from everybit_torch import SGD, Adam, AdamW, AnyPrecisionAdamW, Lion, RMSprop, TorchOptimizer
from everybit_torch import arguments as arguments_module
from everybit_torch.drop_ins.creating import CLASSES
from tests.support.small_models import Awkward, same_bits, train, values

DROP_INS: list[Any] = [AdamW, Adam, SGD, Lion, RMSprop]
NEUTRAL = {"foreach": False, "fused": None, "capturable": False, "differentiable": False}


def close(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """float64: a few steps that differ by rounding."""
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# -- torch's own arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DROP_INS)
def test_torchs_arguments_are_accepted_where_they_choose_nothing(kind: Any) -> None:
    model, reference = Awkward(), Awkward()
    optimizer = kind(model.parameters(), **NEUTRAL)
    plain = kind(reference.parameters())
    assert optimizer.defaults.keys() == plain.defaults.keys()
    assert same_bits(train(model, optimizer, 2), train(reference, plain, 2))
    kind(Awkward().parameters(), foreach=None, fused=False)
    kind([{"params": Awkward().parameters(), "foreach": False, "mine": 1}])


@pytest.mark.parametrize(("kind", "decoupled"), [(AdamW, True), (Adam, False)])
def test_adams_too(kind: Any, decoupled: bool) -> None:
    model, reference = Awkward(torch.float64), Awkward(torch.float64)
    # Positionally, as in torch.
    mine = kind(model.parameters(), 1e-2, (0.9, 0.99), 1e-8, 0.1, False, decoupled_weight_decay=decoupled)
    theirs = getattr(torch.optim, kind.__name__)(reference.parameters(), 1e-2, (0.9, 0.99), 1e-8, 0.1, False)
    close(train(model, mine, 3), train(reference, theirs, 3))
    other = "Adam has the L2 penalty|AdamW is Adam with decoupled decay"
    with pytest.raises(
        ValueError, match=rf"{kind.__name__}: decoupled_weight_decay: got {not decoupled}; accepted is .*({other})"
    ):
        kind(model.parameters(), decoupled_weight_decay=not decoupled)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("differentiable", r"differentiable: got True; accepted is False: everybit.with_policy"),
    ],
)
def test_where_they_would_choose_they_are_refused_with_what_to_use(name: str, message: str) -> None:
    kinds: list[Any] = [AdamW, Adam]
    for kind in kinds:
        with pytest.raises(ValueError, match=rf"{kind.__name__}: {message}"):
            kind(Awkward().parameters(), **{name: True})
        with pytest.raises(ValueError, match=rf"{kind.__name__}: {message}"):
            kind([{"params": Awkward().parameters(), name: True}])
    with pytest.raises(ValueError, match=rf"TorchOptimizer: {message}"):
        TorchOptimizer(Awkward().parameters(), eb.adamw, lr=0.1, **{name: True})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["foreach", "fused"])
def test_an_implementation_that_is_chosen_in_a_pasted_line_is_told_once_to_have_no_effect(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments_module, "_NOTICED", set())
    model, reference = Awkward(), Awkward()
    chosen: dict[str, Any] = {name: True, "capturable": True, "differentiable": False}
    with pytest.warns(UserWarning, match=rf"^AdamW: {name}=True has no effect: .*compile=True.*said once"):
        optimizer = AdamW(model.parameters(), **chosen)
    AdamW([{"params": Awkward().parameters(), name: True}], **chosen)  # no second warning, which would be an error
    assert same_bits(train(model, optimizer, 2), train(reference, AdamW(reference.parameters()), 2))


@pytest.mark.parametrize("kind", [*CLASSES.values(), Lion])
def test_what_every_optimizer_takes_stands_in_its_signature_and_its_arguments(kind: Any) -> None:
    names = ("policy", "average", "compile", "metrics", "seed")
    parameters = inspect.signature(kind).parameters
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in names)
    assert all(f"        {name}: " in (kind.__doc__ or "") for name in names)


def test_a_factory_of_ones_own_may_have_an_argument_of_that_name() -> None:
    def factory(learning_rate: float, amsgrad: bool = False) -> eb.Transform[Any]:
        return eb.chain(
            eb.scale_by_adam(), eb.scale(-1.0 if amsgrad else 1.0), eb.scale_by_learning_rate(learning_rate)
        )

    optimizer = TorchOptimizer(Awkward().parameters(), factory, lr=0.1, amsgrad=True)
    assert optimizer.param_groups[0]["amsgrad"] is True


# -- names --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (
            AdamW,
            {"learning_rate": 0.1},
            r"AdamW: learning_rate: got 0.1; accepted is lr, torch's name for it, which schedulers change",
        ),
        (AdamW, {"b1": 0.5}, r"AdamW: b1: got 0.5; accepted is betas=\(b1, b2\), torch's name for it"),
        (RMSprop, {"decay": 0.5}, r"RMSprop: decay: got 0.5; accepted is alpha, torch's name for it"),
        (
            AdamW,
            {"beta": (0.5, 0.5)},
            r"AdamW: beta: adamw has no such argument, did you mean 'betas'\? accepted are lr, betas, eps, ",
        ),
        (
            Lion,
            {"polcy": "FP32"},
            r"Lion: polcy: lion has no such argument, did you mean 'policy'\? accepted are lr, betas",
        ),
        (SGD, {"betas": (0.5, 0.5)}, r"SGD: betas: sgd has no such argument; accepted are lr, momentum, dampening, "),
    ],
)
def test_an_argument_under_another_name_is_told_the_right_one(
    kind: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        kind(Awkward().parameters(), **arguments)
    if "no such" not in message:  # a key that means nothing is the user's own, as in torch
        with pytest.raises(TypeError, match=message):
            kind([{"params": Awkward().parameters(), **arguments}])


def test_a_transform_in_the_place_of_what_makes_one_is_told_what_to_write() -> None:
    wrong: list[Any] = [eb.adamw(1e-3), eb.with_policy(eb.adamw(1e-3), eb.policies.FP32), "adamw", None]
    for factory in wrong:
        with pytest.raises(TypeError, match=r"factory: got .*TorchOptimizer\(params, everybit.adamw, lr=1e-3\), not"):
            TorchOptimizer(Awkward().parameters(), factory)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (SGD, {"momentum": 5.0}, r"SGD, param group 0: momentum: got 5.0; accepted is a finite number in \[0, 1\]"),
        (SGD, {"momentum": 0.9, "dampening": 5.0}, r"dampening: got 5.0; accepted"),
        (AdamW, {"betas": (1.5, 0.9)}, r"betas\[0\]: got 1.5; accepted"),
        (AdamW, {"betas": (0.9, 1.5)}, r"betas\[1\]: got 1.5; accepted"),
        (RMSprop, {"alpha": 5.0}, r"alpha: got 5.0; accepted"),
        (RMSprop, {"alpha": 0.5, "momentum": 5.0}, r"momentum: got 5.0; accepted"),
        (AdamW, {"lr": 10**400}, r"lr: got a whole number of 1329 bits; accepted is a finite number"),
        (
            AdamW,
            {"lr": torch.tensor([0.1])},
            r"lr: got a tensor of shape \(1,\) and torch.float32; a tensor hyperparameter is 0-d",
        ),
        (AdamW, {"maximize": "no"}, r"AdamW: maximize: got 'no'; accepted are True and False"),
        (SGD, {"nesterov": 1, "momentum": 0.9}, r"SGD: nesterov: got 1; accepted are True and False"),
        (RMSprop, {"centered": None}, r"RMSprop: centered: got None; accepted are True and False"),
        (AdamW, {"fully_decoupled": "yes"}, r"fully_decoupled: got 'yes'; accepted are True and False"),
        (Lion, {"max_learning_rate": 0.1}, r"max_learning_rate: got 0.1 without fully_decoupled=True"),
    ],
)
def test_errors_are_about_the_argument_that_was_given(kind: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        kind(Awkward().parameters(), **arguments)
    optimizer = kind(Awkward().parameters())
    optimizer.param_groups[0].update(arguments)
    with pytest.raises((TypeError, ValueError), match=message):
        optimizer.step()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    "rate", [np.float64(0.125), np.float32(0.125), np.int64(1), np.array(0.125), Fraction(1, 8), np.float16(0.125)]
)
@pytest.mark.sampled(6)
def test_numbers_of_numpy_are_numbers(rate: Any) -> None:
    compile = type(rate) is np.float32
    results = []
    for given in (rate, float(rate)):
        model = Awkward()
        groups = [{"params": model.parameters(), "lr": given}]
        optimizer: TorchOptimizer = (
            SGD(groups, momentum=cast(Any, np.float32(0.5)), compile=True)
            if compile
            else AdamW(groups, betas=cast(Any, (np.float32(0.5), 0.9)))
        )
        train(model, optimizer, 1)
        optimizer.param_groups[0]["lr"] = given
        optimizer.param_groups[0]["maximize"] = np.bool_(True)
        train(model, optimizer, 1, start=1)
        results.append(values(model))
    assert same_bits(*results)


# -- parameters -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (["weight"], r"param group 0, parameter 0: got 'weight'; accepted are tensors"),
        ([torch.ones(2), None], r"param group 0, parameter 1: got None; accepted are tensors"),
        ([("name", "weight")], r"param group 0, parameter 0: got 'weight'; accepted are tensors"),
        ([{"params": {torch.ones(2)}}], r"params: got a set, whose order differs between runs"),
        ([nn.Linear(2, 2)], r"param group 0, parameter 0: got a Linear; accepted are tensors"),
    ],
)
def test_what_is_no_parameter_is_refused_by_name(params: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        AdamW(params)


def test_a_group_that_was_refused_leaves_nothing_behind() -> None:
    model, reference = Awkward(), Awkward()
    optimizer = TorchOptimizer([model.matrix], eb.sgd, lr=0.1)
    with pytest.raises(ValueError, match=r"param group 1: lr: got -1\.0"):
        optimizer.add_param_group({"params": [model.vector], "lr": -1.0})
    assert len(optimizer.param_groups) == 1
    other = TorchOptimizer([reference.matrix], eb.sgd, lr=0.1)
    assert same_bits(train(model, optimizer, 2), train(reference, other, 2))


@dataclass(frozen=True, slots=True)
class Trust:
    """Scales each tensor by its own norm."""

    cut: ClassVar[eb.Cut] = "tensor"

    reduces: ClassVar[bool] = False

    def init(self, params: Any) -> Any:
        return eb.identity().init(params)

    def update(self, updates: Any, state: Any, params: Any, ctx: eb.Context = eb.Context()) -> tuple[Any, Any]:  # noqa: B008
        return eb.tree.map(lambda u: u / u.norm(), updates), state


# -- fully decoupled decay ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AdamW, Lion])
@pytest.mark.parametrize("maximum", [None, 0.5])
@pytest.mark.parametrize("maximize", [False, True])
def test_fully_decoupled_decay_shrinks_by_the_decay_alone(kind: Any, maximum: float | None, maximize: bool) -> None:
    """Against the same optimizer without decay, whose weights are shrunk by hand before each step."""
    model, reference = Awkward(torch.float64), Awkward(torch.float64)
    mine = kind(
        model.parameters(),
        lr=0.1,
        weight_decay=0.01,
        fully_decoupled=True,
        max_learning_rate=maximum,
        maximize=maximize,
    )
    plain = kind(reference.parameters(), lr=0.1, weight_decay=0.0, maximize=maximize)
    for step in range(4):
        rate = 0.1 * (step + 1)
        for network, optimizer in ((model, mine), (reference, plain)):
            optimizer.param_groups[0]["lr"] = rate
            before = values(network)
            train(network, optimizer, 1, start=step)
            if optimizer is plain:
                shrink = 0.01 * (1.0 if maximum is None else rate / maximum)
                with torch.no_grad():
                    for parameter, old in zip(network.parameters(), before, strict=True):
                        parameter.sub_(shrink * old)
    close(values(model), values(reference))


def test_torch_cannot_be_given_a_fully_decoupled_run() -> None:
    model = Awkward()
    optimizer = AdamW(model.parameters(), fully_decoupled=True)
    train(model, optimizer, 1)
    with pytest.raises(
        ValueError, match=r"param group 0, 'fully_decoupled': got True, which torch.optim.AdamW does not have"
    ):
        optimizer.torch_state_dict()
    plain = AdamW(Awkward().parameters())
    assert "fully_decoupled" not in plain.torch_state_dict()["param_groups"][0]


def test_any_precision_has_it_too() -> None:
    results = []
    pairs: Any = ((AnyPrecisionAdamW, {"variance_dtype": torch.float32}), (AdamW, {}))
    for kind, arguments in pairs:
        model = Awkward()
        optimizer = kind(model.parameters(), weight_decay=0.1, fully_decoupled=True, max_learning_rate=0.1, **arguments)
        results.append(train(model, optimizer, 3))
    assert same_bits(*results)


# -- a policy in a param group ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1])
def test_a_policy_that_is_written_into_a_group_is_refused_and_changes_nothing(steps: int) -> None:
    model, reference = Awkward(torch.bfloat16), Awkward(torch.bfloat16)
    optimizer, expected = (AdamW(one.parameters(), lr=1e-2, policy="FLOOR_BF16") for one in (model, reference))
    train(model, optimizer, steps)
    optimizer.param_groups[0]["policy"] = eb.policies.LEAN_BF16
    for use in (
        lambda: train(model, optimizer, 1),
        optimizer.state_dict,
        optimizer.bytes_table,
        optimizer.full_state_dict,
    ):
        with pytest.raises(
            ValueError, match=r"param_groups\[0\]\['policy'\]: got .*; accepted is the policy with which"
        ):
            use()
    assert "FLOOR_BF16" in repr(optimizer)
    if steps:
        del optimizer.param_groups[0]["policy"]
    else:
        optimizer.param_groups[0]["policy"] = "FLOOR_BF16"  # its own, as ZeroRedundancyOptimizer writes it there
    assert same_bits(train(model, optimizer, 3, start=steps), train(reference, expected, steps + 3))


def test_messages_call_policies_by_their_presets() -> None:
    policy = eb.Policy(params=eb.Split(16), momentum=eb.Nearest("float32"), variance=eb.Stochastic("bfloat16"))
    assert "; LEAN_BF16 with momentum=Nearest('float32')" in repr(
        AdamW(Awkward(torch.bfloat16).parameters(), policy=policy)
    )


SHARED_WITH_TORCH = [
    (name, module)
    for module in (torch.optim, torch.optim.lr_scheduler, torch.optim.swa_utils, nn.utils)
    for name in sorted(set(everybit_torch.__all__) & set(dir(module)))
]


def test_drop_ins_have_names_of_torchs() -> None:
    assert {"AdamW", "SGD", "Adagrad", "Adafactor"} <= {name for name, _ in SHARED_WITH_TORCH}


@pytest.mark.parametrize(("name", "module"), SHARED_WITH_TORCH)
def test_what_has_a_name_of_torchs_takes_by_position_what_torch_takes_there(name: str, module: Any) -> None:
    def positions(function: Any) -> list[str]:
        parameters = inspect.signature(function).parameters.values()
        return [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]

    own = positions(getattr(everybit_torch, name))
    assert own == positions(getattr(module, name))[: len(own)]
