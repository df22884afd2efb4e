"""An outer optimizer over a process group: ranks train by themselves, and meet every so many steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

import everybit as eb
from everybit.policies import PolicyOrName
from everybit_torch.ambient import in_plain_mode
from everybit_torch.optim import TorchOptimizer
from everybit_torch.torch_internals.dtensors import is_dtensor, local

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@runtime_checkable
class HasModel(Protocol):
    """A :class:`~everybit_torch.FlatStepper`."""

    model: nn.Module

    def loaded(self) -> None:
        """This rank's weights were replaced."""
        ...


class OuterOptimizer:
    """Lets every rank make ``every`` steps by itself, and then steps all of them by the mean of how far they went (DiLoCo).

    ``step()`` is called after each step of the inner optimizer. At every ``every``-th the weights' differences to where they began are
    averaged over the group, an outer optimizer steps by them, and training goes on from there; the inner optimizer keeps its state.
    There are no messages in between, so that ranks use neither DDP nor a stepper over this group.

    The weights where ranks began are kept in float32, beside the outer optimizer's state: 8 bytes a parameter with momentum. A rank sends
    an all-reduce of 4 bytes a parameter once in ``every`` steps (:attr:`bytes_reduced`): DDP reduces its gradients at
    each. With an optimizer of everybit the weights are those of full precision, residuals included, in both directions.

    Each replica may be sharded over ranks of its own, by a ``FlatStepper`` over one dimension of a mesh. The group is the ranks of the
    other dimension, which have the same shards; a rank averages, steps and keeps its own, in the host's memory. The model has to be float32
    then, since the model's tensors are exchanged.

    Args:
        optimizer: An optimizer of everybit or of torch over whole parameters, or a ``FlatStepper``. All ranks begin with the same weights.
        transform: The outer optimizer; None: SGD with Nesterov momentum, 0.7 and 0.9, as in the paper.
        every: Inner steps between two outer steps, at least 1; the paper has 500.
        group: The ranks; None: all. Without a process group one process is all ranks, and this is Lookahead with momentum.
        policy: How the outer optimizer's state is stored.

    Raises:
        TypeError: Parameters that are shards; 16-bit parameters of a ``FlatStepper``.
        ValueError: ``every`` below 1.

    Reference:
        Douillard et al. 2023, https://arxiv.org/abs/2311.08105.

    Examples:
        >>> import torch
        >>> from everybit_torch import AdamW, OuterOptimizer
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = AdamW(model.parameters(), lr=0.01)
        >>> outer = OuterOptimizer(inner, every=3)
        >>> for _ in range(6):
        ...     inner.zero_grad()
        ...     model(torch.ones(4, 2)).square().mean().backward()
        ...     inner.step()
        ...     met = outer.step()
        >>> met, outer.rounds
        (True, 2)
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | HasModel,
        transform: eb.Transform[Any] | None = None,
        *,
        every: int,
        group: ProcessGroup | None = None,
        policy: PolicyOrName = "FP32",
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every: got {every!r}; accepted is a whole number of steps, at least 1.")
        self.optimizer: Any = optimizer
        if isinstance(optimizer, HasModel):
            self._require_wide(optimizer)
        elif getattr(optimizer, "of_shards", False) or any(map(is_dtensor, self._parameters)):
            raise TypeError(
                "optimizer: got parameters that are shards; accepted are whole parameters, the same on every rank."
            )
        self.every = every
        self.group = group
        self.outer = eb.with_policy(
            eb.sgd(0.7, momentum=0.9, nesterov=True) if transform is None else transform, policy
        )
        self.count = 0
        self.start: list[Tensor] = self._read()
        self.state = self.outer.init(self.start)
        self._compared = False

    @property
    def rounds(self) -> int:
        """Outer steps made."""
        return int(self.state.step)

    @property
    def bytes_reduced(self) -> int:
        """Return the bytes that an outer step reduces; in a ring of n ranks each rank sends 2 (n - 1) / n times as many."""
        return sum(one.nbytes for one in self.start)

    def step(self) -> bool:
        """Count an inner step; at every ``every``-th make an outer one, and return True. Every rank of the group has to be here.

        Raises:
            ValueError: The ranks began with different weights; raised at the first call.
        """
        self._require_same_start()
        self.count += 1
        if self.count % self.every:
            return False
        self.synchronize()
        return True

    @in_plain_mode
    @torch.no_grad()
    def synchronize(self) -> None:
        """Make an outer step now, whatever the count. Every rank of the group has to be here."""
        self._require_same_start()
        gradient = _averaged(eb.outer_gradient(self.start, self._read()), self.group)
        self.start, self.state = self.outer.step(self.start, gradient, self.state)
        self._write(self.start)

    def state_dict(self) -> dict[str, Any]:
        """Return the state beside the inner optimizer's: tensors that are not copied, and a count."""
        return {"count": self.count, "start": list(self.start), "state": eb.state_dict(self.state)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave. The weights are loaded with the model and its optimizer, before this is made or after.

        Raises:
            ValueError: Names, shapes or dtypes differ; the state is then unchanged.
        """
        start: Sequence[Tensor] = state_dict["start"]
        eb.tree.require_same_structure(list(start), self.start, name="start", reference_name="the weights")
        state = eb.load_state_dict(self.state, state_dict["state"])
        self.start = [value.to(own, copy=True) for value, own in zip(start, self.start, strict=True)]
        self.state, self.count, self._compared = state, int(state_dict["count"]), False

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @torch.no_grad()
    def _read(self) -> list[Tensor]:
        if isinstance(self.optimizer, TorchOptimizer):
            return [one for group in self.optimizer.export_fp32() for one in group]
        if isinstance(self.optimizer, HasModel):
            return [local(p).detach().clone() for p in self.optimizer.model.parameters()]
        return [p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in self._parameters]

    def _write(self, values: Sequence[Tensor]) -> None:
        if isinstance(self.optimizer, TorchOptimizer):
            left = iter(values)
            self.optimizer.import_fp32([[next(left) for _ in group["params"]] for group in self.optimizer.param_groups])
        elif isinstance(self.optimizer, HasModel):
            for parameter, value in zip(self.optimizer.model.parameters(), values, strict=True):
                local(parameter).copy_(value)
            self.optimizer.loaded()
        else:
            for parameter, value in zip(self._parameters, values, strict=True):
                parameter.copy_(value)

    @staticmethod
    def _require_wide(stepper: HasModel) -> None:
        for name, parameter in stepper.model.named_parameters():
            if parameter.dtype not in (torch.float32, torch.float64):
                raise TypeError(
                    f"optimizer: got a FlatStepper whose parameter {name} is {parameter.dtype}; accepted is a float32 model, since its"
                    " tensors are what is exchanged."
                )

    def _require_same_start(self) -> None:
        if self._compared or _ranks(self.group) == 1:
            return
        from torch import distributed

        mark = torch.zeros((), dtype=torch.int64, device=self.start[0].device if self.start else None)
        for one in self.start:
            bits = one.reshape(-1).view(torch.int32 if one.itemsize == 4 else torch.int64).to(torch.int64)
            mark = mark * 31 + (bits * torch.arange(1, one.numel() + 1, device=one.device)).sum()
        ends = torch.stack([mark, -mark])
        distributed.all_reduce(ends, distributed.ReduceOp.MAX, group=self.group)
        if int(ends[0]) != -int(ends[1]):
            raise ValueError(
                "OuterOptimizer: the ranks began with different weights; accepted are the same on every rank of the group."
            )
        self._compared = True


def _averaged(values: Sequence[Tensor], group: ProcessGroup | None) -> list[Tensor]:
    """The means over the ranks of a group, by one all-reduce for each dtype."""
    if (ranks := _ranks(group)) == 1:
        return list(values)
    from torch import distributed

    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(one.dtype for one in values):
        mine = [number for number, one in enumerate(values) if one.dtype is dtype]
        flat = torch.cat([values[number].reshape(-1) for number in mine])
        distributed.all_reduce(flat, group=group)
        parts = torch.split(flat / ranks, [values[number].numel() for number in mine])
        found |= {number: part.view_as(values[number]) for number, part in zip(mine, parts, strict=True)}
    return [found[number] for number in range(len(values))]


def _ranks(group: ProcessGroup | None) -> int:
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size(group)
