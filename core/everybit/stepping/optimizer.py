"""The terminal step: a transform, and a policy for how everything it touches is stored."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from everybit.base import (
    DTYPES,
    FirstElement,
    is_dense,
    is_parameter,
    once,
    remember,
    require_seed,
    tree,
)
from everybit.combinators import needs_whole_tensors, zero_step
from everybit.policies import (
    AnyPolicy,
    ByLabel,
    Policy,
    PolicyOrName,
    Resolved,
    draws_bits,
    policies_of,
    resolve_tree,
    with_name_resolved,
)
from everybit.policies.checks import problems
from everybit.policies.checks import undeclared as undeclared_slots
from everybit.protocol import (
    Context,
    Cut,
    Pending,
    Transform,
    Unwritten,
    advance,
    any_draws,
    any_per_tensor,
    common,
    decays,
    enter,
    eval_params,
    periods,
    require_cut,
    require_state,
    require_transform,
    separated,
    then,
)
from everybit.protocol.context import undeclared
from everybit.protocol.transform import squares
from everybit.stepping.layout import Layout, widened, widened_param

P = TypeVar("P")
S = TypeVar("S")

Unsafe = Literal["refuse", "warn", "allow"]
"""How a policy that cannot work for a transform is handled: it is refused, or a warning is given, or it is accepted."""


@tree.state
class OptimizerState(Generic[S]):
    """All that an optimizer keeps between steps.

    Attributes:
        step: Calls done, int64, 0-d.
        extra: For each parameter the tuple of its parts except the first, which is the model's own tensor.
        inner: The transform's state, each slot in its policy's format: a tensor, or a tuple of parts.
    """

    step: Tensor
    extra: Any
    inner: S


class StepTrace(NamedTuple):
    """A step with its intermediate results, which metrics are computed from; returned by :meth:`Optimizer.step_traced`.

    Attributes:
        params: The new parameters, as stored.
        state: The new state.
        before: The weights before the step. This and the following are trees in the compute dtype, with the parameters' structure.
        grads: The gradients.
        updates: The transform's updates.
        after: The weights after the step, before they are rounded.
    """

    params: Any
    state: OptimizerState[Any]
    before: Any
    grads: Any
    updates: Any
    after: Any


class Lists(NamedTuple):
    """The tensors of a step.

    Attributes:
        layout: How they are stored.
        leaves: The parameters.
        grads: The gradients, in the compute dtype.
        extra: The parts of the parameters that the model does not hold.
        inner: The transform's state.
    """

    layout: Layout
    leaves: list[Tensor]
    grads: list[Tensor]
    extra: list[Tensor]
    inner: list[Tensor]


@dataclass(frozen=True, slots=True)
class Optimizer(Generic[S]):
    """A transform under a policy: ``params, state = step(params, grads, state)``. Made by :func:`with_policy`.

    ``step`` decodes the stored tensors, runs the transform in the compute dtype, adds the update and encodes: one rounding per tensor and
    step, and the moments just computed are used unrounded. It mutates no tensor. It comes last, and is not a :class:`Transform` that could
    be chained.

    Attributes:
        transform: What computes updates.
        policy: How everything is stored.
        seed: Of the bits that stochastic rounding draws.
        unsafe: What is done about a policy that cannot work for the transform.
        cut: How finely the parameters may be cut.
        reduces: Whether a step makes requests.
        per_tensor: Whether a step uses ``ctx.per_tensor``.
        needs_whole: Whether the transform, or one inside it, must see whole tensors; see :func:`~everybit.combinators.needs_whole_tensors`.
        draws: Whether the transform draws random bits, beside those by which formats round.
        draws_bits: Whether a step needs the elements' indices: the policy rounds stochastically, or the transform draws.
        periods: The periods of the work that is done every few steps only, in ascending order.
        common: Names of the numbers in the transform's state that all parameters of one optimizer share.
    """

    transform: Transform[S]
    policy: AnyPolicy
    seed: int | Tensor = 0
    unsafe: Unsafe = field(default="allow", compare=False, repr=False)
    cut: Cut = field(init=False, compare=False, repr=False)
    reduces: bool = field(init=False, compare=False, repr=False)
    per_tensor: bool = field(init=False, compare=False, repr=False)
    needs_whole: bool = field(init=False, compare=False, repr=False)
    draws: bool = field(init=False, compare=False, repr=False)
    draws_bits: bool = field(init=False, compare=False, repr=False)
    periods: tuple[int, ...] = field(init=False, compare=False, repr=False)
    common: tuple[str, ...] = field(init=False, compare=False, repr=False)
    found: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Results of :func:`~everybit.base.memo.once`."""

    def __post_init__(self) -> None:
        found: dict[str, Any] = {
            "cut": "tensor" if isinstance(self.policy, ByLabel) else self.transform.cut,
            "reduces": self.transform.reduces,
            "per_tensor": any_per_tensor([self.transform]),
            "needs_whole": needs_whole_tensors(self.transform),
            "draws": any_draws([self.transform]),
            "periods": periods(self.transform),
            "common": common(self.transform),
        }
        found["draws_bits"] = found["draws"] or draws_bits(self.policy)
        for name, value in found.items():
            object.__setattr__(self, name, value)

    def due(self, step: int) -> tuple[tuple[int, bool], ...]:
        """Decide on the host which periodic work is due at an update, for the ``due`` of :class:`~everybit.Context`.

        Code is compiled once for each result, and does the work where it is due and not elsewhere.

        Args:
            step: Number of the update, 1 at the first: ``int(state.step) + 1`` before it, which a training loop knows without a wait.

        Raises:
            ValueError: ``step`` is below 1.

        Examples:
            >>> import torch, everybit as eb
            >>> opt = eb.with_policy(eb.adamw(1e-3), eb.policies.FP32)
            >>> opt.due(1)  # AdamW has no periodic work
            ()
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            raise ValueError(f"step: got {step!r}; accepted is the number of an update, a whole number, at least 1.")
        return tuple((period, (step - 1) % period == 0) for period in self.periods)

    def formats(self, params: object) -> list[Resolved]:
        """Return how each leaf of ``params`` and its state are stored, in order.

        Raises:
            TypeError: A leaf that is no floating-point tensor.
            ValueError: A leaf that the policy cannot store. Messages name the path.
        """

        def resolved() -> list[Resolved]:
            return resolve_tree(self.policy, params, squares(self.transform))

        leaves = tree.leaves(params)
        if isinstance(self.policy, ByLabel) or not all(is_dense(leaf) for leaf in leaves):
            return resolved()
        return once(self, tuple(leaf.dtype for leaf in leaves), resolved)

    def init(self, params: P, ctx: Context | None = None) -> OptimizerState[S]:
        """The state before the first step. Works on meta tensors, for planning.

        Raises:
            TypeError: A parameter that is not a floating-point tensor, or a state that a policy cannot store, because it is not registered
                with ``@eb.state`` or has tensors outside of slots.
            ValueError: A parameter that the policy cannot store, or a slot of which the transform does not say how slowly it moves though
                the policy needs to know. All messages name the path.
        """
        formats, leaves, step = self.formats(params), tree.leaves(params), zero_step(params)
        weights = [widened_param(leaf, one) for leaf, one in zip(leaves, formats, strict=True)]
        inner = self.transform.init(tree.replace(params, weights))
        require_state(self.transform, inner, params)
        require_cut(self.transform, inner, params)
        self._require_declared(inner)
        layout = Layout.of(params, formats, inner)
        draws = layout.draws(leaves, self.seed, step, _first(ctx))
        _, extra, packed = layout.encode(leaves, weights, layout.open.leaves(inner), draws)
        return separated(OptimizerState(step, extra, packed), params)

    def _require_declared(self, inner: S) -> None:
        """Require the decay rates of slots in formats that cannot follow every rate."""
        if self.unsafe == "allow":
            return
        slots = [name for name, _ in tree.slots(inner)]
        for policy in policies_of(self.policy):
            for name in undeclared_slots(policy, slots, decays(self.transform)):
                _object(
                    f"state.{name}: {type(self.transform).__name__} does not say how slowly it moves, and"
                    f" {policy.field_of(name)} = {policy.slot(name)} rounds it to nearest, where slow averages stop moving."
                    f" Accepted is a transform that says so: def decays(self): return (eb.SlotDecay({name!r}, rate),), where"
                    " rate is the share that a step keeps (0.0 for what each step replaces); or a format that follows every"
                    " rate, such as Stochastic('bfloat16') or Nearest('float32').",
                    self.unsafe,
                    stacklevel=4,
                )

    def step(
        self, params: P, grads: P, state: OptimizerState[S], ctx: Context | None = None
    ) -> tuple[P, OptimizerState[S]]:
        """Compute one update of all parameters.

        Args:
            params: The model's tensors, as stored.
            grads: Same structure and shapes; any floating dtype not above the compute dtype.
            state: The state of ``init`` or of the step before.
            ctx: What else is known; see :class:`~everybit.Context`.

        Returns:
            New parameters, of the same dtypes, and new state. No argument is changed. Under ``Context(pending=True)`` a
            step with requests returns :class:`everybit.Pending`; :func:`everybit.fulfil` makes it this pair.

        Raises:
            TypeError: A gradient that is complex, sparse or no floating-point tensor.
            ValueError: Structures, shapes or formats that do not fit; the message names the path.
        """
        found: Any = self.step_traced(params, grads, state, ctx)
        if isinstance(found, Pending):
            return then(found, lambda trace: (trace.params, trace.state))
        return found.params, found.state

    def step_traced(
        self,
        params: P,
        grads: P,
        state: OptimizerState[S],
        ctx: Context | None = None,
        *,
        layout: Layout | None = None,
    ) -> StepTrace:
        """Compute a step as :meth:`step` does, and return its intermediate results too.

        Args:
            params: The parameters, as for :meth:`step`.
            grads: The gradients, as for :meth:`step`.
            state: The state, as for :meth:`step`.
            ctx: The context, as for :meth:`step`.
            layout: That of these parameters and this state, which nothing is then compared with: compiled code takes no time to find it.
        """
        lists = self._lists(params, grads, state) if layout is None else _lists_by(layout, params, grads, state)
        _warn_of_growing_graphs(lists.leaves, params)
        with _without_autocast(lists.leaves[0]) if lists.leaves else nullcontext():
            return self._stepped(lists, state.step + 1, ctx)

    def _lists(self, params: P, grads: P, state: OptimizerState[S]) -> Lists:
        """The tensors of a step as lists. A structure with dtypes and shapes that a step had before needs no look at each tensor."""
        (leaves, *of_params), (given, *of_grads), (extra, *of_extra), (inner, *of_inner) = map(
            tree.flatten, (params, grads, state.extra, state.inner)
        )
        kind: Any = None
        if not torch.compiler.is_compiling() and of_params == of_grads and not isinstance(self.policy, ByLabel):
            kind = (*of_params, *of_extra, *of_inner, *map(_kind, [*leaves, *given, *extra, *inner]))
            known: Layout | None = None
            try:
                known = self.found.get(kind)
            except TypeError:  # lengths that are traced are no numbers
                kind = None
            if known is not None:
                wide = known.wide_gradients(given, leaves)
                if wide is not None:
                    return Lists(known, leaves, wide, extra, inner)
        formats = self.formats(params)
        layout = Layout.of(params, formats, state.inner, state.extra)
        if kind is not None and of_extra == [layout.extra.spec] and of_inner == [layout.packed.spec]:
            remember(self, kind, layout)
        wide = tree.leaves(widened(grads, params, formats))
        return Lists(layout, leaves, wide, layout.extra.leaves(state.extra), layout.packed.leaves(state.inner))

    def _stepped(self, lists: Lists, step: Tensor, ctx: Context | None) -> StepTrace:
        layout = lists.layout
        weights = layout.decode_weights(lists.leaves, lists.extra)
        stored = layout.decode_state(lists.leaves, lists.inner)
        before, wide_grads, inner = (
            layout.params.tree(weights),
            layout.params.tree(lists.grads),
            layout.open.tree(stored),
        )
        ctx = Context() if ctx is None else ctx
        draws = layout.draws(lists.leaves, self.seed, step, ctx.first_element)
        unwritten = Unwritten({"grads": lists.grads, "state": stored, "params": weights})

        def applied(updates: Any, changed: S) -> StepTrace:
            unwritten.require(self.transform, grads=wide_grads, state=inner, params=before)
            try:
                moves, values = layout.params.leaves(updates), layout.open.leaves(changed)
            except ValueError as error:
                tree.require_same_structure(
                    updates, before, name="updates", reference_name="params"
                )  # which says where
                raise ValueError(
                    f"{type(self.transform).__name__}.update: returned a state of another structure: {error}"
                ) from None
            if [getattr(u, "shape", None) for u in moves] != [x.shape for x in weights]:
                tree.require_same_structure(updates, before, name="updates", reference_name="params")
            if len(values) != len(layout.state):
                raise ValueError(
                    f"{type(self.transform).__name__}.update: returned a state of {len(values)} tensors; accepted is as many as it was"
                    f" given: {len(layout.state)}."
                )
            after = [x + u for x, u in zip(weights, moves, strict=True)]
            new, extra, packed = layout.encode(lists.leaves, after, values, draws)
            return StepTrace(new, OptimizerState(step, extra, packed), before, wide_grads, updates, after)

        inside = replace(ctx, seed=self.seed, numbering=draws.numbering if self.draws else ()).at(step)
        return enter(self.transform, wide_grads, inner, before, inside, applied)

    def ask(
        self,
        params: P,
        grads: P,
        state: OptimizerState[S],
        ctx: Context,
        *,
        totals: Sequence[Tensor] = (),
        holds_wholes: bool = False,
        layout: Layout | None = None,
    ) -> Pending | None:
        """Run a step up to the first request without a total, and return that; None if all have totals.

        No result is kept: the driver steps again when it has the totals.

        Args:
            params: The parameters, as for :meth:`step`.
            grads: The gradients, as for :meth:`step`.
            state: The state, as for :meth:`step`.
            ctx: A context with ``pending=True``.
            totals: The totals of the first requests, in order.
            holds_wholes: See :func:`~everybit.protocol.requests.advance`.
            layout: See :meth:`step_traced`.

        Raises:
            TypeError: The transform requests numbers of each parameter, and does not say so.
        """
        wholes = holds_wholes and self.per_tensor
        found: Any = advance(self.step_traced(params, grads, state, ctx, layout=layout), totals, holds_wholes=wholes)
        if not isinstance(found, Pending):
            return None
        if found.request.each and not self.per_tensor:
            raise TypeError(undeclared("ctx.per_tensor", "per_tensor"))
        return found

    def export_fp32(self, params: P, state: OptimizerState[S]) -> P:
        """Return the weights with all the precision that parameters and state hold together, in the compute dtype (float32).

        Raises:
            ValueError: ``state`` does not belong to ``params`` under this policy.
        """
        layout = Layout.of(params, self.formats(params), state.inner, state.extra)
        found = layout.decode_weights(tree.leaves(params), layout.extra.leaves(state.extra))
        weights: P = layout.params.tree([x.clone() for x in found])
        return weights

    def eval_params(self, params: P, state: OptimizerState[S]) -> P:
        """The weights for evaluation, in the compute dtype (float32): those that the transform says, else those that are trained.

        Raises:
            ValueError: ``state`` does not belong to ``params`` under this policy.
        """
        found = eval_params(self.transform, *self._decoded(params, state))
        tree.require_same_structure(found, params, name="eval_params", reference_name="params")
        return tree.map(torch.clone, found)

    def import_fp32(
        self, weights: P, params: P, state: OptimizerState[S] | None = None, ctx: Context | None = None
    ) -> tuple[P, OptimizerState[S]]:
        """Store full-precision ``weights``: the model's tensors get the rounded values, the residuals get the rest.

        Args:
            weights: float32 (or better) tensors, with the structure and shapes of ``params``.
            params: The model's tensors, which tell how weights are stored; their values do not matter.
            state: Its step and moments are kept. None: a fresh one.
            ctx: Its ``first_element`` is that of the tree, for formats that draw random bits.

        Returns:
            New parameters and state.

        Raises:
            ValueError: Structures or shapes differ; the message names the path.
        """
        tree.require_same_structure(weights, params, name="weights", reference_name="params")
        fresh = self.init(params, ctx) if state is None else state
        new, extra, _ = self._encoded(weights, params, None, fresh.step, ctx)
        return new, OptimizerState(fresh.step, extra, fresh.inner)

    def decode(self, params: P, state: OptimizerState[S]) -> tuple[P, OptimizerState[S]]:
        """Return the weights, and a state without extra parts, all decoded to the compute dtype (float32).

        Together with :meth:`encode` of another optimizer with the same transform this carries a run from one policy to another.

        Raises:
            ValueError: ``state`` does not belong to ``params`` under this policy.
        """
        weights, inner = self._decoded(params, state)
        nothing = tree.map(lambda _: (), params)
        return weights, OptimizerState(state.step.clone(), nothing, inner)

    def encode(
        self, weights: P, state: OptimizerState[S], params: P, ctx: Context | None = None
    ) -> tuple[P, OptimizerState[S]]:
        """Store what :meth:`decode` gave, under this policy: everything is rounded once, as a step would round it.

        Args:
            weights: float32 (or better) tensors, with the structure and shapes of ``params``.
            state: A state in the compute dtype; its ``extra`` is not read.
            params: The model's tensors, which tell how weights are stored; their values do not matter.
            ctx: The context, as for :meth:`step`.

        Returns:
            New parameters and state.

        Raises:
            ValueError: Structures, shapes or dtypes differ; the message names the path.
        """
        new, extra, inner = self._encoded(weights, params, state.inner, state.step, ctx)
        return new, OptimizerState(state.step.clone(), extra, tree.map(torch.clone, inner))

    def _decoded(self, params: P, state: OptimizerState[S]) -> tuple[P, S]:
        """Copies of the weights and of the transform's state, in the compute dtype."""
        layout, leaves = Layout.of(params, self.formats(params), state.inner, state.extra), tree.leaves(params)
        weights = layout.decode_weights(leaves, layout.extra.leaves(state.extra))
        values = layout.decode_state(leaves, layout.packed.leaves(state.inner))
        return layout.params.tree([x.clone() for x in weights]), layout.open.tree([x.clone() for x in values])

    def _encoded(self, weights: P, params: P, inner: S | None, step: Tensor, ctx: Context | None) -> tuple[P, Any, Any]:
        """What is stored of weights, and of a transform's state in the compute dtype."""
        formats, leaves = self.formats(params), tree.leaves(params)
        layout = Layout.of(params, formats, inner)
        wide = tree.leaves(widened(weights, params, formats, name="weights"))
        values = layout.open.leaves(inner)
        return layout.encode(leaves, wide, values, layout.draws(leaves, self.seed, step, _first(ctx)))

    def bytes_table(self, params: object) -> dict[str, int]:
        """Return the bytes that persist between steps for these parameters, by use, without allocating them.

        Keys: ``parameter``, ``compensation`` (parts of parameters beside the model's tensor), ``gradient``, each slot by name, and
        ``counters``. A slot called ``gradient``, as that of :func:`everybit.accumulate`, is counted with the gradients.
        """
        formats = self.formats(params)
        shadow = tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), params)
        state = self.init(shadow)
        table = {"parameter": nbytes(shadow)}
        if extra := nbytes(state.extra):
            table["compensation"] = extra
        table["gradient"] = sum(
            leaf.numel() * DTYPES[one.grads_main].itemsize
            for leaf, one in zip(tree.leaves(shadow), formats, strict=True)
        )
        for use, size in state_bytes(state.inner, counters=state.step.nbytes).items():
            table[use] = table.get(use, 0) + size
        return table


def with_policy(
    transform: Transform[S],
    policy: PolicyOrName,
    *,
    seed: int | Tensor = 0,
    unsafe: Unsafe = "refuse",
) -> Optimizer[S]:
    """Make an optimizer of a transform, with parameters and state stored as ``policy`` says.

    Args:
        transform: What computes updates.
        policy: How everything is stored: a :class:`Policy`, the name of one in :mod:`everybit.policies`, or several by
            :func:`by_label`.
        seed: Of the bits that stochastic rounding draws: a whole number of at most 64 bits, or an int64 tensor, 0-d. Under
            ``torch.func.vmap`` a tensor gives each member of a population bits of its own; a number gives all of them the same bits.
        unsafe: What to do about a policy that cannot work for this transform, such as a bfloat16 second moment rounded to nearest at
            ``b2=0.999``, which never decays: refuse it, warn and go on, or go on.

    Raises:
        TypeError: ``transform`` is no transform, or ``policy`` no policy.
        ValueError: The policy cannot work; the message names the field, its value and values that would work.

    Examples:
        >>> import torch, everybit as eb
        >>> opt = eb.with_policy(eb.adamw(1e-3), eb.policies.KAHAN_BF16)
        >>> params = {"w": torch.ones(3, dtype=torch.bfloat16)}
        >>> state = opt.init(params)
        >>> params, state = opt.step(params, {"w": torch.ones(3, dtype=torch.bfloat16)}, state)
        >>> opt.export_fp32(params, state)["w"]
        tensor([0.9990, 0.9990, 0.9990])
    """
    require_transform(transform, who="with_policy")
    policy = with_name_resolved(policy)
    if not isinstance(policy, (Policy, ByLabel)):
        raise TypeError(
            f"policy: got {policy!r}; accepted are a Policy, such as everybit.policies.LEAN_BF16, its name, or by_label(...)."
        )
    require_seed(seed)
    if unsafe not in ("refuse", "warn", "allow"):
        raise ValueError(f"unsafe: got {unsafe!r}; accepted are 'refuse', 'warn', 'allow'.")
    if unsafe != "allow":
        for problem in dict.fromkeys(
            found for one in policies_of(policy) for found in problems(one, decays(transform))
        ):
            _object(problem, unsafe, stacklevel=3)
    return Optimizer(transform, policy, seed, unsafe)


def _object(problem: str, unsafe: Unsafe, *, stacklevel: int) -> None:
    if unsafe == "refuse":
        raise ValueError(f"{problem} (unsafe='warn' runs it all the same.)")
    warnings.warn(problem, stacklevel=stacklevel)


def _warn_of_growing_graphs(leaves: Sequence[Tensor], params: object) -> None:
    """A parameter of a module requires gradients, so that outside of ``no_grad`` a step becomes part of the graph of the next."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    for index, leaf in enumerate(leaves):
        if leaf.requires_grad and is_parameter(leaf):
            warnings.warn(
                f"params{tree.paths(params)[index]}: got an nn.Parameter while gradients are enabled; what a step returns then"
                " keeps the graph of all steps before it, and memory grows. Step inside of `with torch.no_grad():`, or pass"
                " p.detach(). To differentiate through steps, pass plain tensors.",
                stacklevel=4,
            )
            return


def _kind(x: Any) -> object:
    """What of a tensor decides on a layout; of something else, that is refused, itself."""
    return (x.dtype, x.shape, x.layout) if isinstance(x, Tensor) else type(x)


def _lists_by(layout: Layout, params: object, grads: object, state: OptimizerState[Any]) -> Lists:
    leaves, given, extra, inner = map(tree.leaves, (params, grads, state.extra, state.inner))
    wide = layout.wide_gradients(given, leaves)
    if wide is None:
        wide = tree.leaves(widened(grads, params, layout.formats))  # which refuses it by name
    return Lists(layout, leaves, wide, extra, inner)


def _without_autocast(leaf: Tensor) -> AbstractContextManager[Any]:
    """Compute in the dtypes of the inputs: inside, autocast is off for the device of ``leaf``."""
    kind = leaf.device.type
    known = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if known else nullcontext()


def _first(ctx: Context | None) -> FirstElement:
    return 0 if ctx is None else ctx.first_element


def nbytes(values: object) -> int:
    """Bytes of all the tensors in a tree."""
    return sum(leaf.numel() * leaf.dtype.itemsize for leaf in tree.leaves(values))


def state_bytes(inner: object, *, counters: int = 0) -> dict[str, int]:
    """Bytes of a transform's state by slot name, and of everything else as ``counters``."""
    table: dict[str, int] = {}
    for name, slot in tree.slots(inner):
        table[name] = table.get(name, 0) + nbytes(slot)
    table["counters"] = counters + nbytes(inner) - sum(table.values())
    return table
