"""The four strategies: which of state, gradients and parameters are replicated on every rank, and which are sharded.

And the options of a stepper that are plain data, which configurations have too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from everybit.base import require_word
from everybit.stepping import Unsafe
from everybit_torch.segments import Offload, WatchedDType
from everybit_torch.sharded.reports import NanCheck

Strategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
OuterStrategy = Literal["no_shard", "optim"]

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainOptions:
    """The options of a stepper that are plain data.

    Args:
        strategy: The tensors that the (inner) ranks shard: ``"no_shard"``, ``"optim"``, ``"optim_grads"``, ``"optim_grads_params"``.
        outer: The tensors that the outer ranks of a two-dimensional mesh shard as well: ``"no_shard"``, or ``"optim"`` with
            ``"optim_grads_params"``.
        divisor: The number that divides the sum of gradients. None: the number of ranks, which gives the mean of the ranks' gradients;
            1 for losses that are sums, or divided by the number of tokens already.
        nan: ``"off"``; ``"step"``: skip a step, on all ranks, if any gradient is not finite; ``"param"``: also report which, on which
            rank and in which phase, by counting in every gradient.
        compile: Compile the step; the results are the same bits.
        seed: The seed of stochastic rounding; the same on every rank.
        unsafe: The treatment of a policy under which a slot of the state would stop moving; see :func:`everybit.with_policy`.
        watch: The dtype in which changes of weights are noted, for ``take_changed()``; see :class:`~everybit_torch.TorchOptimizer`.
        offload: ``"state"``: state lies in the host's memory, and is stepped on the device; see there.
    """

    strategy: Strategy = "optim"
    outer: OuterStrategy = "no_shard"
    divisor: float | None = None
    nan: NanCheck = "off"
    compile: bool = False
    seed: int = 0
    unsafe: Unsafe = "refuse"
    watch: WatchedDType | None = None
    offload: Offload | None = None


@dataclass(frozen=True, slots=True)
class Sharding:
    """The buffers that are sharded over the ranks of a group.

    ====================  =====  =====  ======  =====================================================
    strategy              state  grads  params  also known as
    ====================  =====  =====  ======  =====================================================
    no_shard                                    data parallel, DDP
    optim                 yes                   ZeRO-1
    optim_grads           yes    yes            ZeRO-2
    optim_grads_params    yes    yes    yes     ZeRO-3, FSDP
    ====================  =====  =====  ======  =====================================================

    Attributes:
        strategy: The strategy of the inner dimension.
        outer: The strategy of the outer dimension of a two-dimensional mesh: ``"no_shard"`` keeps copies of the inner ranks' shards
            (HSDP); ``"optim"`` shards the optimizer's state further (HFSDP).
    """

    strategy: Strategy
    outer: OuterStrategy = "no_shard"

    @property
    def state(self) -> bool:
        """Whether main parameters and optimizer state are sharded."""
        return self.strategy != "no_shard"

    @property
    def grads(self) -> bool:
        """Whether main gradients are sharded. If not, they are accumulated locally and reduced once, in place."""
        return self.strategy in ("optim_grads", "optim_grads_params")

    @property
    def params(self) -> bool:
        """Whether the model's own parameters are sharded, by FSDP2."""
        return self.strategy == "optim_grads_params"

    def shares(self, inner: int) -> int:
        """Into how many parts of different ranks flat buffers are cut; other ranks have copies of them."""
        return inner if self.state else 1


def sharding(strategy: Strategy | int, outer: OuterStrategy = "no_shard") -> Sharding:
    """The sharding of this name, or this ZeRO stage.

    Raises:
        ValueError: The strategy is unknown; or the outer dimension shards tensors that the inner dimension does not.
    """
    if isinstance(strategy, int) and not isinstance(strategy, bool) and 0 <= strategy < len(STRATEGIES):
        strategy = STRATEGIES[strategy]
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: got {strategy!r}; accepted are {', '.join(map(repr, STRATEGIES))}, or 0 to 3.")
    require_word("outer", outer, OuterStrategy)
    if outer == "optim" and strategy != "optim_grads_params":
        raise ValueError(
            f"outer: got 'optim' with strategy={strategy!r}; it cuts the shards of an inner dimension further, and is accepted with"
            " strategy='optim_grads_params'."
        )
    return Sharding(strategy, outer)
