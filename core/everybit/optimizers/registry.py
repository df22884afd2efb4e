"""Every optimizer of this package by its name, with its slots, arguments and sources.

A new one needs a line in the table below and its name in :data:`OptimizerName`; everything else is read from the function.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_type_hints

import torch

from everybit.base import tree
from everybit.optimizers.adam import adam, adam_atan2, adamw, stable_adamw
from everybit.optimizers.adam_variants import adabelief, adan, ademamix, adopt, laprop, mars, yogi
from everybit.optimizers.layerwise import lamb, lars
from everybit.optimizers.memory import adafactor, came
from everybit.optimizers.muon import muon, normuon
from everybit.optimizers.preconditioned import dion, kron, shampoo, soap
from everybit.optimizers.schedule_free import schedule_free_adamw, schedule_free_radam, schedule_free_sgd
from everybit.optimizers.sgd import rmsprop, sgd
from everybit.optimizers.sign import lion, signum, tiger
from everybit.optimizers.torch_optim import adadelta, adagrad, adamax, asgd, nadam, radam, rprop, torch_adafactor
from everybit.policies import Policy, PolicyName, with_name_resolved
from everybit.protocol import Cut, Transform, eval_params
from everybit.stepping import with_policy
from everybit.transforms import prodigy

OptimizerName = Literal[
    "sgd", "adam", "adamw", "lion", "rmsprop", "nadam", "radam", "adagrad", "adamax", "adadelta", "torch_adafactor", "rprop", "asgd",
    "ademamix", "adopt", "schedule_free_sgd", "schedule_free_adamw", "prodigy", "lamb", "lars", "adan", "adabelief", "yogi", "laprop",
    "signum", "tiger", "stable_adamw", "mars", "schedule_free_radam", "adam_atan2", "adafactor", "came",
    "muon", "normuon", "soap", "shampoo", "kron", "dion",
]  # fmt: skip

Reductions = Literal["none", "per tensor", "over everything"]

EXAMPLE = (1024, 1024)
"""The parameter by which bytes are counted where none is given: factored state depends on shapes."""


@dataclass(frozen=True, slots=True)
class Argument:
    """A hyperparameter, as an optimizer's function has it.

    Attributes:
        name: Its name in the core; ``everybit_torch`` has torch's names.
        annotation: The types of values that are accepted.
        default: The value if the argument is not given.
    """

    name: str
    annotation: Any
    default: Any


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """An optimizer of this package; all but its title and its paper is read from its function.

    Attributes:
        name: The name of the function in ``everybit``.
        function: A function from hyperparameters to a transform.
        title: Its name in words.
        paper: Authors and year.
        link: Address of the paper.
    """

    name: OptimizerName
    function: Callable[..., Transform[Any]]
    title: str
    paper: str
    link: str

    @property
    def arguments(self) -> dict[str, Argument]:
        """Its hyperparameters by name, in order."""
        annotations = get_type_hints(self.function)
        return {
            name: Argument(name, annotations[name], one.default)
            for name, one in inspect.signature(self.function).parameters.items()
        }

    @property
    def learning_rate(self) -> float | None:
        """Return the default learning rate; None: it is computed at each step."""
        default = self.arguments["learning_rate"].default
        return None if default is None else float(default)

    @property
    def cut(self) -> Cut:
        """How finely parameters may be cut: ``"element"`` anywhere, ``"tensor"`` not at all."""
        return self.function().cut

    @property
    def reductions(self) -> Reductions:
        """Return the scope of its reductions: no reduction, each parameter, or all parameters together."""
        transform = self.function()
        if getattr(transform, "per_tensor", False):
            return "per tensor"
        return "over everything" if transform.reduces else "none"

    @property
    def has_evaluation_weights(self) -> bool:
        """Whether other weights are to be evaluated than those that are trained, such as an average of them."""
        transform, params = self.function(), _example()
        evaluated = eval_params(transform, params, transform.init(params))
        return any(a is not b for a, b in zip(tree.leaves(evaluated), tree.leaves(params), strict=True))

    def slots(self, **arguments: Any) -> tuple[str, ...]:
        """Return the names of the slots of each parameter.

        Args:
            arguments: Hyperparameters; some choose the slots, such as ``momentum`` of :func:`everybit.sgd`.
        """
        found = tree.slots(self.function(**arguments).init(_example()))
        return tuple(dict.fromkeys(name for name, _ in found))

    def state_bytes(self, policy: Policy | PolicyName, params: object = None, **arguments: Any) -> dict[str, float]:
        """Return the bytes of state per parameter, by slot, without allocating them.

        Args:
            policy: How everything is stored.
            params: A tree of tensors, on any device. None: one matrix of 1024 x 1024, in the dtype of the policy's model.
            arguments: Hyperparameters.

        Raises:
            ValueError: The policy cannot work for this optimizer; the message names the slot.

        Examples:
            >>> import everybit as eb
            >>> eb.optimizers()["ademamix"].state_bytes("LEAN_BF16")
            {'momentum': 2.0, 'slow': 4.0, 'variance': 2.0}
        """
        policy = with_name_resolved(policy)
        assert isinstance(policy, Policy)  # a name is that of a preset
        if params is None:
            params = _example(getattr(torch, policy.model_dtype))
        table = with_policy(self.function(**arguments), policy).bytes_table(params)
        elements = max(tree.size(params), 1)
        other = ("parameter", "compensation", "gradient", "counters")
        return {name: size / elements for name, size in table.items() if name not in other}


def _example(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    # With a name: some optimizers tell parameters apart by theirs.
    return {"weight": torch.empty(EXAMPLE, device="meta", dtype=dtype)}


_OPTIMIZERS: tuple[NamedOptimizer, ...] = (
    NamedOptimizer("sgd", sgd, "stochastic gradient descent", "Robbins & Monro 1951", "https://doi.org/10.1214/aoms/1177729586"),
    NamedOptimizer("adam", adam, "Adam", "Kingma & Ba 2015", "https://arxiv.org/abs/1412.6980"),
    NamedOptimizer("adamw", adamw, "AdamW", "Loshchilov & Hutter 2019", "https://arxiv.org/abs/1711.05101"),
    NamedOptimizer("lion", lion, "Lion", "Chen et al. 2023", "https://arxiv.org/abs/2302.06675"),
    NamedOptimizer("rmsprop", rmsprop, "RMSprop", "Hinton 2012; Graves 2013", "https://arxiv.org/abs/1308.0850"),
    NamedOptimizer("nadam", nadam, "Adam with Nesterov momentum", "Dozat 2016", "https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ"),
    NamedOptimizer("radam", radam, "Rectified Adam", "Liu et al. 2020", "https://arxiv.org/abs/1908.03265"),
    NamedOptimizer("adagrad", adagrad, "Adagrad", "Duchi et al. 2011", "https://jmlr.org/papers/v12/duchi11a.html"),
    NamedOptimizer("adamax", adamax, "AdaMax", "Kingma & Ba 2015", "https://arxiv.org/abs/1412.6980"),
    NamedOptimizer("adadelta", adadelta, "Adadelta", "Zeiler 2012", "https://arxiv.org/abs/1212.5701"),
    NamedOptimizer("torch_adafactor", torch_adafactor, "torch's Adafactor", "Shazeer & Stern 2018", "https://arxiv.org/abs/1804.04235"),
    NamedOptimizer("rprop", rprop, "resilient backpropagation", "Riedmiller & Braun 1993", "https://doi.org/10.1109/ICNN.1993.298623"),
    NamedOptimizer("asgd", asgd, "averaged gradient descent", "Polyak & Juditsky 1992", "https://doi.org/10.1137/0330046"),
    NamedOptimizer("ademamix", ademamix, "AdEMAMix", "Pagliardini et al. 2024", "https://arxiv.org/abs/2409.03137"),
    NamedOptimizer("adopt", adopt, "ADOPT", "Taniguchi et al. 2024", "https://arxiv.org/abs/2411.02853"),
    NamedOptimizer("schedule_free_sgd", schedule_free_sgd, "schedule-free SGD", "Defazio et al. 2024", "https://arxiv.org/abs/2405.15682"),
    NamedOptimizer(
        "schedule_free_adamw", schedule_free_adamw, "schedule-free AdamW", "Defazio et al. 2024", "https://arxiv.org/abs/2405.15682",
    ),
    NamedOptimizer("prodigy", prodigy, "Prodigy", "Mishchenko & Defazio 2023", "https://arxiv.org/abs/2306.06101"),
    NamedOptimizer("lamb", lamb, "LAMB", "You et al. 2020", "https://arxiv.org/abs/1904.00962"),
    NamedOptimizer("lars", lars, "LARS", "You et al. 2017", "https://arxiv.org/abs/1708.03888"),
    NamedOptimizer("adan", adan, "Adan", "Xie et al. 2022", "https://arxiv.org/abs/2208.06677"),
    NamedOptimizer("adabelief", adabelief, "AdaBelief", "Zhuang et al. 2020", "https://arxiv.org/abs/2010.07468"),
    NamedOptimizer("yogi", yogi, "Yogi", "Zaheer et al. 2018", "https://papers.nips.cc/paper/8186"),
    NamedOptimizer("laprop", laprop, "LaProp", "Ziyin et al. 2020", "https://arxiv.org/abs/2002.04839"),
    NamedOptimizer("signum", signum, "Signum", "Bernstein et al. 2018", "https://arxiv.org/abs/1802.04434"),
    NamedOptimizer("tiger", tiger, "Tiger", "Su 2023", "https://github.com/bojone/tiger"),
    NamedOptimizer("stable_adamw", stable_adamw, "StableAdamW", "Wortsman et al. 2023", "https://arxiv.org/abs/2304.13013"),
    NamedOptimizer("mars", mars, "MARS-AdamW", "Yuan et al. 2024", "https://arxiv.org/abs/2411.10438"),
    NamedOptimizer(
        "schedule_free_radam", schedule_free_radam, "schedule-free RAdam", "Defazio et al. 2024", "https://arxiv.org/abs/2405.15682",
    ),
    NamedOptimizer("adam_atan2", adam_atan2, "Adam-atan2", "Everett et al. 2024", "https://arxiv.org/abs/2407.05872"),
    NamedOptimizer("adafactor", adafactor, "Adafactor", "Shazeer & Stern 2018", "https://arxiv.org/abs/1804.04235"),
    NamedOptimizer("came", came, "CAME", "Luo et al. 2023", "https://arxiv.org/abs/2307.02047"),
    NamedOptimizer("muon", muon, "Muon, with AdamW", "Jordan et al. 2024", "https://kellerjordan.github.io/posts/muon/"),
    NamedOptimizer("normuon", normuon, "NorMuon, with AdamW", "Li et al. 2025", "https://arxiv.org/abs/2510.05491"),
    NamedOptimizer("soap", soap, "SOAP", "Vyas et al. 2024", "https://arxiv.org/abs/2409.11321"),
    NamedOptimizer("shampoo", shampoo, "Shampoo", "Gupta et al. 2018", "https://arxiv.org/abs/1802.09568"),
    NamedOptimizer("kron", kron, "PSGD with a Kronecker preconditioner", "Li 2015, 2024", "https://arxiv.org/abs/2402.11858"),
    NamedOptimizer("dion", dion, "Dion, with AdamW", "Ahn et al. 2025", "https://arxiv.org/abs/2504.05295"),
)  # fmt: skip

_BY_NAME: Mapping[OptimizerName, NamedOptimizer] = MappingProxyType({one.name: one for one in _OPTIMIZERS})


def optimizers() -> Mapping[OptimizerName, NamedOptimizer]:
    """Return every optimizer of this package by its name, in the order of the documentation.

    Examples:
        >>> import everybit as eb
        >>> lamb = eb.optimizers()["lamb"]
        >>> lamb.slots(), lamb.cut, lamb.reductions, lamb.learning_rate
        (('momentum', 'variance'), 'element', 'per tensor', 0.001)
        >>> sum(lamb.state_bytes("LEAN_BF16").values())
        4.0
    """
    return _BY_NAME


def optimizer_named(name: str, *, field: str = "name") -> NamedOptimizer:
    """Return the optimizer of this name.

    Args:
        name: A key of :func:`optimizers`.
        field: What messages call it.

    Raises:
        ValueError: The name is unknown; the message suggests the nearest name and lists all.
    """
    for known, one in _BY_NAME.items():
        if known == name:
            return one
    close = difflib.get_close_matches(str(name).lower().replace("-", "_"), _BY_NAME, n=1)
    meant = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(f"{field}: got {name!r}{meant}; accepted are {', '.join(_BY_NAME)}.")
