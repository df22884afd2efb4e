"""A stepper on flat buffers, for ranks that all have whole weights: parameters are pieces of the buffers, and each rank steps its share."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from everybit_torch.collectives import GroupAxis
from everybit_torch.compiled import FusedSums
from everybit_torch.flat.buffers import FlatBuffer, PartialSums, Reduced
from everybit_torch.flat.cycle import GradientCycle
from everybit_torch.flat.piece_optimizer import LabelledGroups, PieceOptimizer
from everybit_torch.flat.shard_gradient import AllGradients, ShardGradient
from everybit_torch.flat.turns import Turns
from everybit_torch.flat.validation import JudgedBuffers
from everybit_torch.segments import Memory, Places
from everybit_torch.sharded.labelling import LabelledTransform
from everybit_torch.sharded.models import synchronize_values
from everybit_torch.sharded.reports import count_nonfinite
from everybit_torch.torch_internals.autograd import at_the_end_of_the_pass


class BufferStepper(GradientCycle):
    """Steps a model on flat buffers; see :class:`~everybit_torch.FlatStepper`.

    Args:
        model: The model. Its parameters that are trained become pieces of the buffers.
        judged: The options, and the places of the parameters.

    Attributes:
        judged: The judged options.
        buffers: Weights and main gradients, in the order in which buffers are laid out.
    """

    def __init__(self, model: nn.Module, judged: JudgedBuffers) -> None:
        options = judged.options
        super().__init__(
            model, judged.parameters, judged.ranks, judged.device, judged.labelled, options.nan, compile=options.compile
        )
        self.judged, self._sharding, ranks = judged, options.sharding, judged.ranks
        synchronize_values(model, (self.outer, self.inner), tuple(judged.parameters.values()))
        fused = FusedSums(judged.device) if options.compile else None
        self.buffers = [
            FlatBuffer(buffer, self.parameters, grads, options.sharding, ranks, fused)
            for buffer, grads in zip(judged.buffers, judged.grads_under(self.labelled), strict=True)
        ]
        self._trained = [self.parameters[name] for name in self.labels]
        self._places = Places(self._trained)
        self._stepped = _stepped(self.buffers, list(self.labels))
        groups = LabelledGroups(
            self.labelled, seed=options.seed, unsafe=options.unsafe, compile=options.compile, mixed=judged.mixed
        )
        self._optimizer = PieceOptimizer(
            judged.labelled,
            self._stepped,
            groups,
            seed=options.seed,
            step=self.step,
            clear=self.zero_grad,
            replacing=self._replacing,
            watch=options.watch,
            offload=options.offload,
            places={place.spec.name: place for buffer in self.buffers for place in buffer.places},
        )
        self._counts = self.outer.rank == 0 and (options.sharding.state or self.inner.rank == 0)
        axis = GroupAxis((self.inner,) if options.sharding.state else ())
        self._optimizer.own.ranks = None if axis.has_no_peers else (axis, True)
        places = {place.spec.name: place for buffer in self.buffers for place in buffer.places}
        self._optimizer.own.number_at({self._stepped[name]: place.first for name, place in places.items()})
        self._optimizer.own.parts = set() if axis.has_no_peers else {*self._stepped.values()}
        memories = [Memory(of.own_weights, of.own) for of in self.buffers]
        self._optimizer.own.memory = {
            self._stepped[place.spec.name]: memory
            for of, memory in zip(self.buffers, memories, strict=True)
            for place in of.places
        }
        self._final = {
            place.spec.name: of.own[place.start : place.stop].view(self._stepped[place.spec.name].shape)
            for of in self.buffers
            for place in of.places
        }
        self._everyones = AllGradients(axis, self._has_nonfinite, self.inner.device)
        self._shows_parts = not axis.has_no_peers
        self._shown = {
            name: gradient if axis.has_no_peers else ShardGradient.of(gradient, self._everyones)
            for name, gradient in self._final.items()
        }
        self._parts = [(name, p, self._final[name], self._shown[name]) for name, p in self._stepped.items()]
        self._frozen = {name: p for name, p in self.parameters.items() if name not in self.labels}
        self._turns = Turns(ranks)
        self._sums: list[PartialSums | Reduced | None] = []
        self._last: bool | None = None  # whether the present pass is the last of its cycle, if somebody has said so
        self._passes, self._is_passing, self._reduces, self._next = 0, False, False, -1
        self._arrived: Counter[int] = Counter()
        self._seen: set[str] = set()  # parameters that had a gradient on this rank
        self._nonfinite: dict[str, Tensor] = {}
        self._discard()
        self._handles: list[Any] = [
            self._watch(self.parameters[place.spec.name], number, position)
            for number, buffer in enumerate(self.buffers)
            for position, place in enumerate(buffer.buffer.places)
        ]

    def _watch(self, parameter: Any, number: int, position: int) -> Any:
        # Hooks live as long as the model, and torch's collector does not see through them: they must not keep the stepper alive.
        reference = weakref.ref(self)

        def arrive(parameter: Tensor) -> None:
            stepper = reference()
            if stepper is not None:
                stepper._arrive(number, position, parameter)

        return parameter.register_post_accumulate_grad_hook(arrive)

    @property
    def stepped(self) -> Mapping[str, nn.Parameter]:
        """The tensors that the optimizer steps, by name: this rank's part of each parameter, which may be empty."""
        return self._stepped

    # -- a pass ---------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _in_pass(self, *, last: bool, reduces: bool) -> Iterator[None]:  # noqa: ARG002  # whether it does is the strategy's
        self._last = last
        try:
            self._begin_pass()
            yield
            self._end_pass()  # also where a loss reached no parameter: such a rank takes part with zeros
        finally:
            self._last = None

    @torch.no_grad()
    def _arrive(self, number: int, position: int, parameter: Tensor) -> None:
        """A gradient has come: add it in place, free it, and reduce complete buffers."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        name = self.buffers[number].buffer.places[position].spec.name
        if gradient.layout is not torch.strided:
            raise TypeError(f"{name}: got a {gradient.layout} gradient; accepted are dense gradients.")
        if not self._is_passing:
            self._begin_pass()
            at_the_end_of_the_pass(self._end_pass)
        if self._reduces and number > self._next:
            raise RuntimeError(
                f"{name}: a gradient came after those of its unit had been sent; accepted is one backward pass in a microbatch, and"
                " zero_grad() after an error in one."
            )
        sums = self._sums[number]
        if isinstance(sums, Reduced) and not sums.can_be_added_to:
            raise RuntimeError(
                f"{name}: a gradient came after the last pass of its cycle; accepted next is step() or zero_grad()."
            )
        if not isinstance(sums, PartialSums):
            sums = self._sums[number] = PartialSums(self.buffers[number], sums)
        if self._nan == "param":
            self._nonfinite[name] = self._nonfinite.get(name, 0) + count_nonfinite(gradient)
        sums.add(position, gradient.detach())
        self._arrived[number] += 1
        self._seen.add(name)
        if self._reduces:
            self._reduce(complete=True)

    def _begin_pass(self) -> None:
        if self._context is None:
            self._require_ready("backward")
        self._require_no_pass("backward")
        if self._touched is not None:
            raise RuntimeError(
                "backward: the gradients of this cycle are final; accepted next is step() or zero_grad()."
            )
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise RuntimeError(
                    f"{name}: requires_grad is True, and was False when the stepper was made, which has no place for its gradient."
                    " Make a new stepper, and carry the state over with a checkpoint."
                )
        self._require_in_place()
        self._next, self._arrived = len(self.buffers) - 1, Counter()
        self._reduces = self._sharding.grads or self._last is True
        if self._reduces:
            self._is_passing = True  # from here on other ranks wait for this one
            self._turns.begin("microbatch", last=self._last is True, number=self._passes if self._sharding.grads else 0)
        self._is_passing = True

    def _reduce(self, *, complete: bool) -> None:
        """Reduce the buffers with all their gradients, or all buffers, from the last to the first: in the same order on all ranks."""
        while self._next >= 0:
            of, sums = self.buffers[self._next], self._sums[self._next]
            if complete and self._arrived[self._next] < len(of.buffer.places):
                return
            for earlier in self._sums[self._next + 1 :]:  # so that few of them have memory at a time
                assert isinstance(earlier, Reduced)
                earlier.settle()
            partial_sums = sums if isinstance(sums, PartialSums) else PartialSums(of, sums)
            self._sums[self._next] = partial_sums.reduce(self.judged.divisor if self._last else None)
            self._next -= 1

    @torch.no_grad()
    def _end_pass(self) -> None:
        if self._reduces:
            self._reduce(complete=False)
            for sums in self._sums:
                assert isinstance(sums, Reduced)
                sums.wait()
        self._is_passing, self._passes = False, self._passes + 1

    def _recover(self) -> None:
        """Take part to its end in a pass that was interrupted, for which other ranks may wait."""
        if self._is_passing and self._reduces and not self._turns.apart:
            with suppress(Exception):  # a rank may be gone; the next collective says so
                for number in range(self._next, -1, -1):
                    self._sums[number] = PartialSums(self.buffers[number]).reduce(None)
                for sums in self._sums:  # in the order of all ranks: some sums are gathered when they are there
                    assert isinstance(sums, Reduced)
                    sums.wait()
        for parameter in self._trained:
            parameter.grad = None  # one that had come, and was not added yet
        self._is_passing = self._turns.apart = False
        if self._context is None:
            self._last = None

    # -- a cycle --------------------------------------------------------------------------------------------------------------------

    def _complete(self) -> set[str]:
        self._require_no_pass("step")
        self._require_in_place()
        number = self._passes if self._sharding.grads else 0
        flags = self._turns.begin("step", number=number, flags=[name in self._seen for name in self.labels])
        touched = {name for name, here in zip(self.labels, flags, strict=True) if here}
        if len(touched) < len(self.labels):
            self._require_same_parameters()
        if not all(isinstance(sums, Reduced) for sums in self._sums):  # on no rank, as all had the same passes
            self._next, self._last = len(self.buffers) - 1, True
            self._reduce(complete=False)
            self._last = None
        for sums in self._sums:
            assert isinstance(sums, Reduced)
            sums.finish(self.judged.divisor)
        self._everyones.forget()
        for name, parameter, _, shown in self._parts:
            parameter.grad = shown if name in touched else None
        return touched

    def _gradients(self) -> dict[str, Tensor]:
        """The final gradients of this rank's parts where they lie; others that somebody has put in their place are copied there."""
        found: dict[str, Tensor] = {}
        for name, parameter, own, shown in self._parts:
            gradient = parameter.grad
            if gradient is shown or gradient is own:
                found[name] = own
            elif gradient is not None:
                found[name] = own.copy_(gradient)
                parameter.grad = shown
            elif name in (self._touched or ()):
                own.zero_()
        return found

    def _give_to_optimizer(self, gradients: Mapping[str, Tensor]) -> None:
        if self._shows_parts:
            for name, gradient in gradients.items():
                self._stepped[name].grad = gradient

    def _flat_gradients(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:  # noqa: ARG002  # parts of these
        """Return main gradients as they lie, with zeros in padding and for parameters without a gradient."""
        return [of.own for of in self.buffers] if self._counts else []

    def _counted(self, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return gradients if self._counts else {}

    def _has_nonfinite(self) -> Tensor:
        """1 if a main gradient has an element that is not finite, else 0: int32, 0-d, on the device."""
        # The largest magnitude is infinite or NaN exactly if an element is.
        largest = [torch.linalg.vector_norm(of.own, torch.inf).double() for of in self.buffers if of.own.numel()]
        if not largest:
            return torch.zeros((), dtype=torch.int32, device=self._device)
        return (~torch.isfinite(torch.stack(largest))).any().to(torch.int32)

    def _require_no_pass(self, name: str) -> None:
        if self._is_passing:
            raise RuntimeError(
                f"{name}: inside a microbatch or a backward pass, or one ended in an error; accepted is after it, or zero_grad(), on every"
                " rank."
            )

    def _require_in_place(self) -> None:
        """Refuse parameters that are no pieces of the buffers any more.

        Raises:
            RuntimeError: The message names the first.
        """
        if self._places.hold(self._trained):
            return
        name = [*self.labels][next(self._places.moved(self._trained))]
        raise RuntimeError(
            f"{name}: is not where the stepper has put it (model.to(), load_state_dict(assign=True), or p.data = ...?); accepted is to"
            " change the model before the stepper is made, and to copy values into its parameters after it."
        )

    def _require_same_parameters(self) -> None:
        """Refuse a model that has other parameters than were laid out, which get the gradients.

        Raises:
            RuntimeError: The message names the first.
        """
        there = dict(self.model.named_parameters())
        for name, parameter in zip(self.labels, self._trained, strict=True):
            if there.get(name) is not parameter:
                raise RuntimeError(
                    f"{name}: is another parameter than when the stepper was made (load_state_dict(assign=True)?); accepted is a new"
                    " stepper after such a change."
                )

    def _own_nonfinite(self) -> Mapping[str, Tensor]:
        return self._nonfinite

    def _discard(self) -> None:
        for ranks in (self.outer, self.inner):
            ranks.drain()
        self._sums = [None] * len(self.buffers)
        self._seen, self._nonfinite, self._passes = set(), {}, 0

    @property
    def _has_gradients(self) -> bool:
        return any(sums is not None for sums in self._sums)

    def _send_by(self, labelled: Mapping[str, LabelledTransform]) -> Callable[[], None]:
        changed, before = self.judged.grads_under(labelled), [of.grads for of in self.buffers]
        for of, grads in zip(self.buffers, changed, strict=True):
            of.grads = grads

        def undo() -> None:
            for of, grads in zip(self.buffers, before, strict=True):
                of.grads = grads

        return undo

    def _hand_out(self) -> None:
        for of in self.buffers:
            of.hand_out()

    # -- what one sees --------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove every hook."""
        self._recover()
        self._forget()
        self._turns.close()
        for handle in self._handles:
            handle.remove()
        self.completeness.is_closed = True

    @property
    def described(self) -> str:
        """A description in one line."""
        outer = f" x {self.outer.size} outer" if self.outer.size > 1 else ""
        buffers = self.judged.buffers
        filled = sum(place.numel for buffer in buffers for place in buffer.places)
        padding = sum(buffer.numel for buffer in buffers) - filled
        return (
            f"strategy={self._sharding.strategy!r} over {self.inner.size}{outer}, {len(buffers)} buffers, {filled} elements and"
            f" {padding} of padding"
        )

    @property
    def shares_pieces(self) -> bool:
        """Whether the inner ranks have different plain tensors of the parameters."""
        return self._sharding.state


def _stepped(buffers: list[FlatBuffer], names: list[str]) -> dict[str, nn.Parameter]:
    """This rank's part of each parameter: a vector over the memory of its share, the whole tensor, or an empty vector."""
    found: dict[str, nn.Parameter] = {}
    for of in buffers:
        for place in of.places:
            part = of.own_weights[place.start : place.stop]
            if place.spec.is_whole:
                part = part.view(place.spec.shape if place.numel else (0, *place.spec.shape[1:]))
            one = found[place.spec.name] = nn.Parameter(part)
            one.grad_dtype = None  # a step has the main gradient's dtype
    return {name: found[name] for name in names}
