"""How far implementations of one optimizer are from each other: the table of docs/optimizers.md, section "Where implementations disagree".

python benchmarks/disagreements.py

Each answer to a question is an option of everybit, which tests compare with the implementation that it stands for. So the options stand for
the implementations here: each takes the same 200 steps from the same weights with the same gradients, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

import everybit as eb

STEPS = 200
RATE = 0.01
SHAPES: Mapping[str, tuple[int, ...]] = {"matrix": (4, 3), "vector": (5,), "scalar": ()}

MATRICES: Mapping[str, tuple[int, ...]] = {"tall": (6, 4), "wide": (3, 5)}


@dataclass(frozen=True, slots=True)
class Answer:
    """What some implementations do, and a transform that does it; None where everybit has none."""

    text: str
    who: str
    transform: eb.Transform[Any] | None = None


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A question to an optimizer that implementations answer differently, and the argument that chooses."""

    optimizer: str
    question: str
    argument: str
    answers: tuple[Answer, ...]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: SHAPES)


def _averaged(transform: eb.Transform[Any]) -> eb.Transform[Any]:
    """A preconditioner as an optimizer."""
    return eb.chain(transform, eb.scale_by_learning_rate(RATE))


def _muon(**options: Any) -> Any:
    """Muon whose iteration is in float64, where nothing else is asked: what differs is then the option alone."""
    return _in_float64(eb.muon, options)


def _normuon(**options: Any) -> Any:
    """NorMuon, likewise."""
    return _in_float64(eb.normuon, options)


def _in_float64(make: Any, options: dict[str, Any]) -> Any:
    of_iteration = {one.name for one in fields(eb.NewtonSchulz)}
    iteration = {"arithmetic": "float64"} | {key: options[key] for key in options if key in of_iteration}
    others = {key: options[key] for key in options if key not in of_iteration}
    return make(RATE, iteration=eb.NewtonSchulz(**iteration), **others)


def _halves(path: str, parameter: Tensor) -> str:  # noqa: ARG001  # what labels are called with
    return "matrix" if "matrix" in path else "other"


def _decaying(step: Tensor) -> Tensor:
    return RATE / (1 + step.double() / 50)


DISAGREEMENTS = (
    Disagreement(
        "Adam",
        "Of which squares does AMSGrad take the maximum?",
        "`amsgrad`",
        (
            Answer("of the running mean as it is", "torch", eb.adam(RATE, amsgrad=True)),
            Answer("of the mean after its bias is corrected", "optax", eb.adam(RATE, amsgrad="corrected")),
        ),
    ),
    Disagreement(
        "AdamW",
        "Does weight decay follow the learning rate?",
        "`fully_decoupled`",
        (
            Answer("yes", "torch, optax", eb.adamw(_decaying, weight_decay=0.001)),
            Answer(
                "its schedule, not its size",
                "paper, torch-optimi's `decouple_lr`",
                eb.adamw(_decaying, weight_decay=0.001, fully_decoupled=True, max_learning_rate=RATE),
            ),
        ),
    ),
    Disagreement(
        "RMSprop",
        "Where is `eps`?",
        "`eps_inside_root`",
        (
            Answer("outside of the root", "torch", eb.rmsprop(RATE, eps=1e-4)),
            Answer("inside", "optax, TensorFlow", eb.rmsprop(RATE, eps=1e-4, eps_inside_root=True)),
        ),
    ),
    Disagreement(
        "NAdam",
        "How does its momentum begin?",
        "`momentum_decay`",
        (
            Answer("it rises from half of `b1` (Dozat's schedule)", "torch", eb.nadam(RATE)),
            Answer("it is `b1` from the first step on", "optax", eb.nadam(RATE, momentum_decay=1e6)),
        ),
    ),
    Disagreement(
        "RAdam",
        "From which length of the second moment on is it rectified?",
        "`threshold`",
        (
            Answer("above 5", "torch, optax", eb.radam(RATE)),
            Answer("above 4", "paper", eb.radam(RATE, threshold=4.0)),
        ),
    ),
    Disagreement(
        "RAdam",
        "Where is `eps`?",
        "`eps_after_correction`",
        (
            Answer("added before the bias of the root is corrected", "torch", eb.radam(RATE)),
            Answer("after it", "optax", eb.radam(RATE, eps_after_correction=True)),
        ),
    ),
    Disagreement(
        "Adagrad",
        "Where is `eps`, and where does the sum begin?",
        "`eps_inside_root`, `initial_accumulator_value`",
        (
            Answer("outside of the root; 0", "torch", eb.adagrad(RATE)),
            Answer(
                "inside; 0.1",
                "optax",
                eb.adagrad(RATE, eps=1e-7, eps_inside_root=True, initial_accumulator_value=0.1),
            ),
        ),
    ),
    Disagreement(
        "Rprop",
        "By which gradient does a step go?",
        "none: as torch",
        (
            Answer("by this step's", "torch", eb.rprop(RATE)),
            Answer("by the one before, so that the first update is zero", "optax"),
        ),
    ),
    Disagreement(
        "ADOPT",
        "How are normalized gradients limited?",
        "`clip_power`",
        (
            Answer("by t^(1/4)", "authors, optax", eb.adopt(RATE)),
            Answer("by t^(1/3)", "timm", eb.adopt(RATE, clip_power=1 / 3)),
            Answer("not at all", "Algorithm 1", eb.adopt(RATE, clip_power=None)),
        ),
    ),
    Disagreement(
        "ADOPT",
        "Does weight decay act at the first update, which moves nothing else?",
        "`decay_at_first`",
        (
            Answer("no", "authors, timm", eb.adopt(RATE, weight_decay=0.1)),
            Answer("yes", "optax", eb.adopt(RATE, weight_decay=0.1, decay_at_first=True)),
        ),
    ),
    Disagreement(
        "Adan",
        "What is the weight of the gradients' differences?",
        "`look_ahead`",
        (
            Answer("0.92", "paper, authors, timm", eb.adan(RATE)),
            Answer("0.08", "optax, at the same arguments", eb.adan(RATE, look_ahead=0.08)),
        ),
    ),
    Disagreement(
        "Adan",
        "How do weights decay?",
        "`proximal`",
        (
            Answer("by a proximal step", "paper, timm", eb.adan(RATE, weight_decay=0.1)),
            Answer("as in AdamW", "timm's `no_prox`, optax", eb.adan(RATE, weight_decay=0.1, proximal=False)),
        ),
    ),
    Disagreement(
        "LAMB",
        "Is the global norm of gradients limited?",
        "`max_grad_norm`",
        (
            Answer("no", "paper, optax", eb.lamb(RATE)),
            Answer("to 1", "timm", eb.lamb(RATE, max_grad_norm=1.0)),
        ),
    ),
    Disagreement(
        "LAMB",
        "Is the trust ratio used where weights do not decay?",
        "`always_adapt`",
        (
            Answer("yes", "paper, optax", eb.lamb(RATE, weight_decay=0.0)),
            Answer("no", "timm", eb.lamb(RATE, weight_decay=0.0, always_adapt=False)),
        ),
    ),
    Disagreement(
        "LARS",
        "Which norm is divided by?",
        "`joint_norm`",
        (
            Answer("the sum of both norms", "paper, timm", eb.lars(1.0, weight_decay=0.1, trust_coefficient=0.01)),
            Answer(
                "the norm of the sum",
                "optax",
                eb.lars(1.0, weight_decay=0.1, trust_coefficient=0.01, joint_norm=True),
            ),
        ),
    ),
    Disagreement(
        "LARS",
        "Where is a learning rate that changes?",
        "`rate_inside`",
        (
            Answer("after momentum", "timm", eb.lars(_decaying, trust_coefficient=1.0)),
            Answer("before momentum", "paper, optax", eb.lars(_decaying, trust_coefficient=1.0, rate_inside=True)),
        ),
    ),
    Disagreement(
        "MARS",
        "What is the gradient before the first?",
        "`zero_before`",
        (
            Answer("the first itself", "timm", eb.mars(RATE)),
            Answer("zero", "authors", eb.mars(RATE, zero_before=True)),
        ),
    ),
    Disagreement(
        "Adafactor",
        "Where is `eps1`?",
        "`torch_adafactor` is torch's",
        (
            Answer(
                "added to squares before their means are taken",
                "paper, Hugging Face, optax, timm",
                eb.adafactor(eb.relative_step_schedule(RATE), eps1=1e-2),
            ),
            Answer("the larger of both after it", "torch", eb.torch_adafactor(RATE, eps1=1e-2)),
        ),
    ),
    Disagreement(
        "Adafactor",
        "Over which dimensions is a tensor factored?",
        "`dimensions`",
        (
            Answer("the last two", "paper, Hugging Face, torch", eb.adafactor(RATE)),
            Answer("the two largest", "optax, timm", eb.adafactor(RATE, dimensions="largest")),
        ),
        {"kernel": (4, 2, 3)},
    ),
    Disagreement(
        "Adafactor",
        "From which size of both on?",
        "`min_size_to_factor`",
        (
            Answer("any", "paper, Hugging Face, torch", eb.adafactor(RATE)),
            Answer("16", "timm", eb.adafactor(RATE, min_size_to_factor=16)),
            Answer("128", "optax", eb.adafactor(RATE, min_size_to_factor=128)),
        ),
    ),
    Disagreement(
        "Adafactor",
        "What is a step?",
        "`learning_rate`, `scale_parameter`",
        (
            Answer("min(0.01, 1/sqrt(t)) of the weights' root mean square", "paper", eb.adafactor()),
            Answer("`learning_rate` of it", "optax, Hugging Face's `relative_step=False`", eb.adafactor(0.001)),
            Answer(
                "`learning_rate` itself", "Hugging Face's Trainer, timm", eb.adafactor(0.001, scale_parameter=False)
            ),
        ),
    ),
    Disagreement(
        "Adafactor",
        "What does a momentum average where the learning rate changes?",
        "`momentum_of`",
        (
            Answer("steps", "authors' code, Hugging Face, optax", eb.adafactor(_decaying, b1=0.9)),
            Answer("directions", "timm", eb.adafactor(_decaying, b1=0.9, momentum_of="directions")),
        ),
    ),
    Disagreement(
        "Adafactor",
        "What is weight decay multiplied by?",
        "`decay_by`",
        (
            Answer("the step, with the weights' size", "Hugging Face", eb.adafactor(RATE, weight_decay=0.01)),
            Answer("the learning rate", "torch, timm", eb.adafactor(RATE, weight_decay=0.01, decay_by="learning_rate")),
            Answer("nothing", "optax", eb.adafactor(RATE, weight_decay=0.01, decay_by="alone")),
        ),
    ),
    Disagreement(
        "Adafactor",
        "Which limit has the decay rate of squares?",
        "`b2_cap`",
        (
            Answer("none", "paper, Hugging Face, optax", eb.adafactor(RATE, beta2_decay=-1.5)),
            Answer("0.999", "timm", eb.adafactor(RATE, beta2_decay=-1.5, b2_cap=0.999)),
        ),
    ),
    Disagreement(
        "Adafactor",
        "To what is the direction clipped?",
        "`clip_threshold`",
        (
            Answer("a root mean square of 1", "paper, Hugging Face, optax, torch", eb.adafactor(RATE)),
            Answer("not at all", "timm", eb.adafactor(RATE, clip_threshold=None)),
        ),
    ),
    Disagreement(
        "Adam-atan2",
        "Which factor has the angle?",
        "`a`",
        (
            Answer("1.27", "adam-atan2-pytorch", eb.adam_atan2(RATE)),
            Answer("none", "paper", eb.adam_atan2(RATE, a=1.0)),
        ),
    ),
    Disagreement(
        "Schedule-free RAdam",
        "What happens until the second moment is trusted?",
        "`sgd_phase`",
        (
            Answer("no step", "schedulefree's default", eb.schedule_free_radam(RATE)),
            Answer(
                "steps along gradients", "RAdam, `silent_sgd_phase=False`", eb.schedule_free_radam(RATE, sgd_phase=True)
            ),
        ),
    ),
    Disagreement(
        "Prodigy",
        "Is the step corrected for the bias of the moments?",
        "`bias_correction`",
        (
            Answer("no", "prodigyopt's default", eb.prodigy(d0=1e-2)),
            Answer("yes", "optax", eb.prodigy(d0=1e-2, bias_correction=True)),
        ),
    ),
    Disagreement(
        "Prodigy",
        "Over what are the sums of the estimate taken?",
        "none",
        (
            Answer("over all that share the step", "everybit", eb.prodigy(d0=1e-2)),
            # Two processes that each have a part of the weights, and do not know of each other.
            Answer(
                "over the parameters of a process, over all ranks only where FSDP1 is found",
                "prodigyopt",
                eb.partition(dict.fromkeys(("matrix", "other"), eb.prodigy(d0=1e-2)), _halves),
            ),
        ),
    ),
    Disagreement(
        "Muon",
        "What is its momentum?",
        "`average`",
        (
            Answer("a running mean", "torch, Keller Jordan", _muon()),
            Answer("a decaying sum", "Moonlight, Dion", _muon(averaged=False)),
        ),
        MATRICES,
    ),
    Disagreement(
        "Muon",
        "Is it Nesterov's by default?",
        "`nesterov`",
        (
            Answer("yes", "torch, Keller Jordan, Moonlight, optax", _muon()),
            Answer("no", "Dion, Emerging-Optimizers, timm", _muon(nesterov=False)),
        ),
        MATRICES,
    ),
    Disagreement(
        "Muon",
        "Is the bias of the momentum corrected?",
        "none",
        (
            Answer("no", "torch, Keller Jordan", _muon()),
            Answer("yes, of which Nesterov's mix alone is left", "optax"),
        ),
        MATRICES,
    ),
    Disagreement(
        "Muon",
        "Which factor has an update of r rows and c columns?",
        "`scale`",
        (
            Answer("sqrt(max(1, r/c))", "torch, Keller Jordan, for 2-d parameters", _muon()),
            Answer("0.2 sqrt(max(r, c))", "Moonlight, timm, torch's and Dion's option", _muon(scale="match_rms_adamw")),
            Answer("sqrt(r/c)", "Dion", _muon(scale="spectral_unclamped")),
        ),
        MATRICES,
    ),
    Disagreement(
        "Muon",
        "By which polynomials?",
        "`iteration`: `coefficients`, `steps`",
        (
            Answer("Keller Jordan's, five times", "torch, optax, Moonlight", _muon()),
            Answer("Polar Express, of five steps", "Dion, nanochat", _muon(coefficients="polar_express")),
            Answer("eight steep and two that converge", "DeepSeek", _muon(coefficients="deepseek", steps=10)),
        ),
        MATRICES,
    ),
    Disagreement(
        "Muon",
        "What is a matrix divided by?",
        "`iteration`: `normalization`",
        (
            Answer("its norm", "torch, Keller Jordan, Dion", _muon()),
            Answer("1.01 times its norm", "nanochat, modded-nanogpt", _muon(normalization="polar_express")),
        ),
        MATRICES,
    ),
    Disagreement(
        "Muon",
        "In which dtype is the iteration?",
        "`iteration`: `arithmetic`",
        (
            Answer("bfloat16", "torch, Keller Jordan, Dion, Moonlight", _muon(arithmetic="bfloat16")),
            Answer("float32", "optax, Emerging-Optimizers", _muon(arithmetic="float32")),
        ),
        MATRICES,
    ),
    Disagreement(
        "Muon",
        "How do weights decay?",
        "`decay_kind`",
        (
            Answer("as in AdamW", "torch, Keller Jordan, Moonlight, Dion", _muon()),
            Answer(
                "only where this points the way of the update", "nanochat, Dion's option", _muon(decay_kind="cautious")
            ),
            Answer(
                "by a share that does not follow the learning rate's size",
                "Emerging-Optimizers' option",
                _muon(decay_kind="independent", max_learning_rate=RATE),
            ),
        ),
        MATRICES,
    ),
    Disagreement(
        "MuonEq",
        "What has the same length before the iteration?",
        "`before`",
        (
            Answer("rows", "its authors", _muon(before="rows")),
            Answer("both, at once", "its authors' option", _muon(before="both")),
            Answer("columns", "its authors' option", _muon(before="columns")),
        ),
        MATRICES,
    ),
    Disagreement(
        "Muon+",
        "What has the same length after it?",
        "`after`",
        (
            Answer("columns, then rows", "its authors", _muon(after="columns_then_rows")),
            Answer("rows, then columns", "its authors' option", _muon(after="rows_then_columns")),
            Answer("rows", "its authors' option", _muon(after="rows")),
        ),
        MATRICES,
    ),
    Disagreement(
        "NorMuon",
        "What has a mean square?",
        "`side`",
        (
            Answer("rows", "its authors, Dion, pytorch_optimizer", _normuon()),
            Answer("rows, or columns if there are more", "modded-nanogpt", _normuon(side="longer")),
        ),
        MATRICES,
    ),
    Disagreement(
        "NorMuon",
        "Which norm does it leave a matrix?",
        "`norm`",
        (
            Answer(
                "that of the iteration's result",
                "its authors' code, Dion, modded-nanogpt",
                _normuon(scale="match_rms_adamw"),
            ),
            Answer(
                "0.2 sqrt(rc)", "its paper, pytorch_optimizer's option", _normuon(norm="exact", scale="match_rms_adamw")
            ),
        ),
        MATRICES,
    ),
    Disagreement(
        "NorMuon",
        "Is the bias of the mean squares corrected?",
        "`after`: `scale_by_normuon(debias=)`",
        (
            Answer("no", "its authors, Dion", _normuon()),
            Answer(
                "yes, which the norm takes out again",
                "Dion at first",
                _muon(after=partial(eb.scale_by_normuon, debias=True), weight_decay=0.0),
            ),
        ),
        MATRICES,
    ),
    Disagreement(
        "Yogi",
        "Where does the mean begin?",
        "`initial_mean`",
        (
            Answer("at 0", "paper", eb.yogi(RATE)),
            Answer("at 1e-6", "optax", eb.yogi(RATE, initial_mean=1e-6)),
        ),
    ),
    Disagreement(
        "Schedule-free",
        "Which weights are in the parameters?",
        "none: `eval_params`",
        (
            Answer("those where gradients are taken", "optax, everybit", eb.schedule_free_adamw(RATE)),
            Answer("one of two, by a mode", "schedulefree"),
        ),
    ),
    Disagreement(
        "Cautious",
        "What makes up for the updates that are masked?",
        "`rescale`",
        (
            Answer(
                "1 / max(share that is kept, 1e-3)", "authors' code, timm", _averaged(eb.cautious(eb.scale_by_adam()))
            ),
            Answer("n / (number that is kept + 1)", "paper", _averaged(eb.cautious(eb.scale_by_adam(), "count"))),
        ),
    ),
    Disagreement(
        "Adaptive clipping",
        "What is a unit?",
        "`units`",
        (
            Answer("an index of the first dimension", "timm", _averaged(eb.clip_by_unit_norm(0.1))),
            Answer("of the last", "optax", _averaged(eb.clip_by_unit_norm(0.1, units="last"))),
        ),
    ),
    Disagreement(
        "SOAP",
        "Does the first gradient move weights?",
        "none",
        (
            Answer("no, it finds the bases for the second", "authors, pytorch_optimizer", eb.soap(RATE)),
            Answer("yes, in a basis made of itself", "Emerging-Optimizers"),
        ),
        MATRICES,
    ),
    Disagreement(
        "SOAP",
        "When do weights decay?",
        "`decay_moved`",
        (
            Answer("after they have moved", "authors, pytorch_optimizer", eb.soap(RATE, weight_decay=0.1)),
            Answer("before, as in AdamW", "Emerging-Optimizers", eb.soap(RATE, weight_decay=0.1, decay_moved=False)),
        ),
        MATRICES,
    ),
    Disagreement(
        "SOAP",
        "Of what are the products that the bases belong to?",
        "`correction`",
        (
            Answer("of gradients", "authors, pytorch_optimizer", eb.soap(RATE)),
            Answer(
                "of gradients divided by the root of the other side's matrix",
                "KL-Shampoo, Emerging-Optimizers' option",
                eb.soap(RATE, correction="kl"),
            ),
        ),
        MATRICES,
    ),
    Disagreement(
        "SOAP",
        "Where is `eps`?",
        "none",
        (
            Answer("added before the bias is corrected", "authors, pytorch_optimizer", eb.soap(RATE)),
            Answer("after it", "Emerging-Optimizers"),
        ),
        MATRICES,
    ),
    Disagreement(
        "Shampoo",
        "What is kept of the products?",
        "`b2`",
        (
            Answer("their mean, corrected for its bias", "Meta's", eb.shampoo(RATE)),
            Answer("their sum", "paper, pytorch_optimizer's `Shampoo`", eb.shampoo(RATE, b2=None)),
        ),
        MATRICES,
    ),
    Disagreement(
        "Shampoo",
        "Where is `eps`?",
        "`damping`",
        (
            Answer("added to eigenvalues before their root", "Meta's", eb.shampoo(RATE, eps=1e-4)),
            Answer(
                "in the matrices at the start",
                "paper, pytorch_optimizer",
                eb.shampoo(RATE, eps=1e-4, damping="start"),
            ),
        ),
        MATRICES,
    ),
    Disagreement(
        "Shampoo",
        "Whose size have its steps?",
        "`graft`",
        (
            Answer("Adam's", "Meta's option", eb.shampoo(RATE)),
            Answer("RMSprop's", "Anil et al.'s option", eb.shampoo(RATE, graft=eb.Grafting(of="rmsprop"))),
            Answer("their own", "paper, pytorch_optimizer's `Shampoo`", eb.shampoo(RATE, graft=eb.Grafting(of="none"))),
        ),
        MATRICES,
    ),
    Disagreement(
        "Shampoo",
        "Of what is its momentum?",
        "`b1`, `momentum`",
        (
            Answer("of gradients, a mean", "Meta's", eb.shampoo(RATE)),
            Answer("of steps, a sum", "Anil et al.", eb.shampoo(RATE / 10, b1=None, momentum=0.9)),
        ),
        MATRICES,
    ),
    Disagreement(
        "Kron",
        "How often are the factors fitted?",
        "`period`",
        (
            Answer("at each step", "an option of kron_torch and timm", eb.kron(RATE)),
            Answer(
                "ever less often: at each of the first 500 steps, at each 33rd from the 4000th on",
                "kron_torch, timm, heavyball",
            ),
            Answer("at each 33rd", "their schedule from the 4000th step on", eb.kron(RATE, period=33)),
        ),
        MATRICES,
    ),
    Disagreement(
        "Kron",
        "To what are the factors fitted?",
        "`of_momentum`",
        (
            Answer("to the mean of gradients", "kron_torch, timm", eb.kron(RATE)),
            Answer("to gradients", "timm's option", eb.kron(RATE, of_momentum=False)),
        ),
        MATRICES,
    ),
    Disagreement(
        "Dion",
        "How is the left factor made orthonormal?",
        "none",
        (
            Answer("by QR", "the authors' short version", eb.dion(RATE)),
            Answer("by a randomized Cholesky decomposition", "their long one"),
        ),
        MATRICES,
    ),
)


def drawn(seed: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Normal numbers in float64."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def trained(
    transform: eb.Transform[Any], shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights before the first step and after the last; gradients are noise around 1/2."""
    optimizer = eb.with_policy(transform, eb.policies.FP64)
    params = first = drawn(0, shapes)
    state = optimizer.init(params)
    for step in range(1, STEPS + 1):
        grads = {name: value + 0.5 for name, value in drawn(step, shapes).items()}
        params, state = optimizer.step(params, grads, state)
    return first, params


def apart(one: eb.Transform[Any], other: eb.Transform[Any], shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> float:
    """The distance of two ends of training, over the distance of the first from the beginning (Euclidean)."""
    (first, a), (_, b) = trained(one, shapes), trained(other, shapes)

    def distance(x: dict[str, Tensor], y: dict[str, Tensor]) -> float:
        return math.hypot(*(float((x[name] - y[name]).norm()) for name in x))

    return distance(a, b) / distance(a, first)


HEAD = "| Optimizer | Question | Answers | Apart after 200 steps | Argument |\n|---|---|---|---|---|"


def row(one: Disagreement) -> str:
    """A line of the table, in Markdown. The distances are those of the other answers from the first."""
    base, *others = one.answers
    if base.transform is None:
        raise ValueError(f"{one.optimizer}, {one.question}: the first answer has no transform")
    answers = "; ".join(f"{answer.text}: {answer.who}" for answer in one.answers)
    found = ", ".join(_percent(base.transform, other.transform, one.shapes) for other in others)
    return f"| {one.optimizer} | {one.question} | {answers} | {found} | {one.argument} |"


def _percent(base: eb.Transform[Any], other: eb.Transform[Any] | None, shapes: Mapping[str, tuple[int, ...]]) -> str:
    if other is None:
        return "not offered"
    percent = 100 * apart(base, other, shapes)
    if percent < 1e-9:
        return "nothing but rounding"
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def rows() -> Iterator[str]:
    """The lines of the table, one after the other."""
    yield HEAD
    yield from map(row, DISAGREEMENTS)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    for line in rows():
        print(line, flush=True)


if __name__ == "__main__":
    main()
