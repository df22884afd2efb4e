"""The terminal step: a transform, and a policy for how everything it touches is stored."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from everybit import rounding, tree
from everybit.checks import problems, undeclared
from everybit.combinators.chain import zero_step
from everybit.contracts import Unwritten, require_state, separated, updated
from everybit.dtypes import FLOAT_DTYPES, torch_dtype
from everybit.formats import BUILT_IN, Format, Parts, PartSpec
from everybit.policy import AnyPolicy, ByLabel, Policy, Resolved, policies_of, resolve_tree
from everybit.random_bits import Key, Lane, require_seed, stream
from everybit.transform import Context, Cut, Transform, decays, require_transform, squares

P = TypeVar("P")
S = TypeVar("S")

Unsafe = Literal["refuse", "warn", "allow"]
"""How a policy that cannot work for a transform is handled: it is refused, or a warning is given, or it is accepted."""

# The two moments of one optimizer are rounded with the two halves of one word.
_HALVES: dict[str, Literal[0, 1]] = {"momentum": 0, "variance": 1}


@tree.state
@dataclass(frozen=True, slots=True)
class OptimizerState(Generic[S]):
    """All that an optimizer keeps between steps.

    Attributes:
        step: Calls done, int64, 0-d.
        extra: For each parameter the tuple of its parts but the first, which is the model's own tensor.
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
        after: The weights after the step, before they are rounded to what is stored.
    """

    params: Any
    state: OptimizerState[Any]
    before: Any
    grads: Any
    updates: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Optimizer(Generic[S]):
    """A transform under a policy: ``params, state = step(params, grads, state)``. Made by :func:`with_policy`.

    ``step`` decodes what is stored, runs the transform in the compute dtype, adds the update and encodes: one rounding per tensor and
    step, and the moments just computed are used unrounded. It mutates nothing. It is the last word, not a :class:`Transform`: there is
    nothing to chain after it.
    """

    transform: Transform[S]
    policy: AnyPolicy
    seed: int | Tensor = 0
    unsafe: Unsafe = field(default="allow", compare=False, repr=False)

    @property
    def cut(self) -> Cut:
        """How finely the parameters may be cut."""
        return "tensor" if isinstance(self.policy, ByLabel) else self.transform.cut

    @property
    def reduces(self) -> bool:
        """Whether a step asks ``ctx.axis`` for anything."""
        return self.transform.reduces

    def formats(self, params: object) -> list[Resolved]:
        """Return how each leaf of ``params`` and its state are stored, in order.

        Raises:
            TypeError: A leaf that is no floating-point tensor.
            ValueError: A leaf that the policy cannot store. Messages name the path.
        """
        return resolve_tree(self.policy, params, squares(self.transform))

    def init(self, params: P, ctx: Context | None = None) -> OptimizerState[S]:
        """The state before the first step. Works on meta tensors, for planning.

        Raises:
            TypeError: A parameter that is not a floating-point tensor, or a state that a policy cannot store, because it is not registered
                with ``@eb.state`` or has tensors outside of slots.
            ValueError: A parameter that the policy cannot store, or a slot of which the transform does not say how slowly it moves though
                the policy needs to know. All messages name the path.
        """
        formats = self.formats(params)
        step = zero_step(params)
        layout = _Layout.of(params, formats, self.seed, step, _first(ctx))
        values = [_widened_param(leaf, one) for leaf, one in zip(tree.leaves(params), formats, strict=True)]
        extra = [parts[1:] for parts in layout.encode_params(values)]
        inner = self.transform.init(tree.replace(params, values))
        require_state(self.transform, inner, params)
        self._require_declared(inner)
        return separated(OptimizerState(step, tree.replace(params, extra), layout.encode_state(inner)), params)

    def _require_declared(self, inner: S) -> None:
        """Ask for the decay rates of slots whose format cannot follow every rate."""
        if self.unsafe == "allow":
            return
        slots: list[str] = []
        tree.map_slots(lambda name, slot: slots.append(name), inner)
        for policy in policies_of(self.policy):
            for name in undeclared(policy, slots, decays(self.transform)):
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
        """One update.

        Args:
            params: The model's tensors, as stored.
            grads: Same structure and shapes; any floating dtype not above the compute dtype.
            state: From ``init`` or the step before.
            ctx: What else is known; see :class:`~everybit.Context`.

        Returns:
            New parameters, of the same dtypes, and new state. Nothing that was passed in is changed.

        Raises:
            TypeError: A gradient that is complex, sparse or no floating-point tensor.
            ValueError: Structures, shapes or formats that do not fit; the message names the path.
        """
        trace = self.step_traced(params, grads, state, ctx)
        return trace.params, trace.state

    def step_traced(self, params: P, grads: P, state: OptimizerState[S], ctx: Context | None = None) -> StepTrace:
        """As :meth:`step`, and return the intermediate results too."""
        _warn_of_growing_graphs(params)
        formats = self.formats(params)
        step = state.step + 1
        layout = _Layout.of(params, formats, self.seed, step, _first(ctx))
        values = layout.decode_params(state.extra)
        before = tree.replace(params, values)
        wide_grads = _widened(grads, params, formats)
        inner = layout.decode_state(state.inner)

        unwritten = Unwritten(grads=wide_grads, state=inner, params=before)
        updates, inner = updated(self.transform, wide_grads, inner, before, (ctx or Context()).at(step))
        unwritten.require(self.transform)
        moves = tree.leaves(updates)
        if len(moves) != len(values) or any(u.shape != x.shape for u, x in zip(moves, values, strict=True)):
            tree.require_same_structure(updates, params, name="updates", reference_name="params")

        after = [x + u for x, u in zip(values, moves, strict=True)]
        parts = layout.encode_params(after)
        new_state = OptimizerState(step, tree.replace(params, [p[1:] for p in parts]), layout.encode_state(inner))
        return StepTrace(tree.replace(params, [p[0] for p in parts]), new_state, before, wide_grads, updates, after)

    def ask(
        self,
        params: P,
        grads: P,
        state: OptimizerState[S],
        ctx: Context,
        *,
        reads: Collection[str] | None = None,
    ) -> None:
        """Run a step's update for what it asks of ``ctx.axis``; what it computes is dropped, and nothing is stored.

        Args:
            params: As for :meth:`step`.
            grads: As for :meth:`step`.
            state: As for :meth:`step`.
            ctx: With an axis that takes note of what it is asked.
            reads: From which slots, and whether from the weights (``"params"``), the answers are computed: what is not named is not
                decoded, and zeros stand for it. None: from all.
        """
        formats = resolve_tree(self.policy, params)
        step = state.step + 1
        layout = _Layout.of(params, formats, self.seed, step, _first(ctx))
        if reads is None or "params" in reads:
            values = layout.decode_params(state.extra)
        else:
            values = [_zeros(leaf, one) for leaf, one in zip(tree.leaves(params), formats, strict=True)]
        inner = layout.decode_state(state.inner, reads)
        self.transform.update(_widened(grads, params, formats), inner, tree.replace(params, values), ctx.at(step))

    def export_fp32(self, params: P, state: OptimizerState[S]) -> P:
        """The weights with all the precision that parameters and state hold together, in the compute dtype (float32).

        Raises:
            ValueError: ``state`` does not belong to ``params`` under this policy.
        """
        layout = _Layout.of(params, self.formats(params), self.seed, state.step, 0)
        return tree.replace(params, [value.clone() for value in layout.decode_params(state.extra)])

    def import_fp32(self, weights: P, params: P, state: OptimizerState[S] | None = None) -> tuple[P, OptimizerState[S]]:
        """Store full-precision ``weights``: the model's tensors get the rounded values, the residuals get the rest.

        Args:
            weights: float32 (or better) tensors, with the structure and shapes of ``params``.
            params: The model's tensors, which tell how weights are stored; their values do not matter.
            state: Its step and moments are kept. None: a fresh one.

        Returns:
            New parameters and state.

        Raises:
            ValueError: Structures or shapes differ; the message names the path.
        """
        tree.require_same_structure(weights, params, name="weights", reference_name="params")
        formats = self.formats(params)
        fresh = self.init(params) if state is None else state
        layout = _Layout.of(params, formats, self.seed, fresh.step, 0)
        wide = _widened(weights, params, formats, name="weights")
        parts = layout.encode_params(tree.leaves(wide))
        stored = OptimizerState(fresh.step, tree.replace(params, [p[1:] for p in parts]), fresh.inner)
        return tree.replace(params, [p[0] for p in parts]), stored

    def decode(self, params: P, state: OptimizerState[S]) -> tuple[P, OptimizerState[S]]:
        """Decode what is stored: return the weights, and a state without extra parts, all in the compute dtype (float32).

        With :meth:`encode` of another optimizer of the same transform this carries a run from one policy to another.

        Raises:
            ValueError: ``state`` does not belong to ``params`` under this policy.
        """
        layout = _Layout.of(params, self.formats(params), self.seed, state.step, 0)
        weights = [value.clone() for value in layout.decode_params(state.extra)]
        inner = tree.map(torch.clone, layout.decode_state(state.inner))
        nothing = tree.replace(params, [()] * len(weights))
        return tree.replace(params, weights), OptimizerState(state.step.clone(), nothing, inner)

    def encode(
        self, weights: P, state: OptimizerState[S], params: P, ctx: Context | None = None
    ) -> tuple[P, OptimizerState[S]]:
        """Store what :meth:`decode` gave, under this policy: everything is rounded once, as a step would round it.

        Args:
            weights: float32 (or better) tensors, with the structure and shapes of ``params``.
            state: In the compute dtype; its ``extra`` is not looked at.
            params: The model's tensors, which tell how weights are stored; their values do not matter.
            ctx: As for :meth:`step`.

        Returns:
            New parameters and state.

        Raises:
            ValueError: Structures, shapes or dtypes differ; the message names the path.
        """
        formats = self.formats(params)
        layout = _Layout.of(params, formats, self.seed, state.step, _first(ctx))
        wide = _widened(weights, params, formats, name="weights")
        parts = layout.encode_params(tree.leaves(wide))
        inner = tree.map(torch.clone, layout.encode_state(state.inner))
        stored = OptimizerState(state.step.clone(), tree.replace(params, [p[1:] for p in parts]), inner)
        return tree.replace(params, [p[0] for p in parts]), stored

    def bytes_table(self, params: object) -> dict[str, int]:
        """Bytes that persist between steps for these parameters, by use; nothing is allocated.

        Keys: ``parameter``, ``compensation`` (parts of parameters beside the model's tensor), ``gradient``, each slot by name, and
        ``counters``.
        """
        formats = self.formats(params)
        shadow = tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), params)
        state = self.init(shadow)
        table = {"parameter": nbytes(shadow)}
        if extra := nbytes(state.extra):
            table["compensation"] = extra
        table["gradient"] = sum(
            leaf.numel() * torch_dtype(one.grads_main).itemsize
            for leaf, one in zip(tree.leaves(shadow), formats, strict=True)
        )
        return table | state_bytes(state.inner, counters=state.step.nbytes)


def with_policy(
    transform: Transform[S],
    policy: AnyPolicy,
    *,
    seed: int | Tensor = 0,
    unsafe: Unsafe = "refuse",
) -> Optimizer[S]:
    """Put ``transform`` under ``policy``.

    Args:
        transform: What computes updates.
        policy: How everything is stored: a :class:`Policy`, or several by :func:`by_label`.
        seed: Of the bits that stochastic rounding draws: a whole number of at most 64 bits, or an int64 tensor, 0-d. Under
            ``torch.func.vmap`` a tensor gives each member of a population bits of its own; a number gives all of them the same bits.
        unsafe: What to do about a policy that cannot work for this transform, such as a bfloat16 second moment rounded to nearest at
            ``b2=0.999``, which never decays: refuse it, warn and go on, or go on.

    Raises:
        TypeError: ``transform`` is no transform, or ``policy`` no policy.
        ValueError: The policy cannot work; the message names the field, what it holds and what would work.

    Example:
        >>> import torch, everybit as eb
        >>> opt = eb.with_policy(eb.adamw(1e-3), eb.policies.KAHAN_BF16)
        >>> params = {"w": torch.ones(3, dtype=torch.bfloat16)}
        >>> state = opt.init(params)
        >>> params, state = opt.step(params, {"w": torch.ones(3, dtype=torch.bfloat16)}, state)
        >>> opt.export_fp32(params, state)["w"]
        tensor([0.9990, 0.9990, 0.9990])
    """
    require_transform(transform, who="with_policy")
    if not isinstance(policy, (Policy, ByLabel)):
        raise TypeError(
            f"policy: got {policy!r}; accepted are a Policy, such as everybit.policies.LEAN_BF16, or by_label(...)."
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


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout of one step: the stored parts and the random bits of each leaf."""

    params: Any
    formats: list[Resolved]
    seed: int | Tensor
    step: Tensor
    first: int | Tensor
    drawn: list[list[Tensor]]

    @staticmethod
    def of(params: object, formats: list[Resolved], seed: int | Tensor, step: Tensor, first: int | Tensor) -> _Layout:
        """No random bits drawn yet."""
        return _Layout(params, formats, seed, step, first, [[] for _ in formats])

    def keys(self, name: str) -> list[Key]:
        """A key per leaf. Elements are numbered through the leaves of one dtype, in order, as they lie in a flat buffer.

        Each dtype has streams of its own, because elements of two dtypes may have one number.
        """
        keys = []
        half = _HALVES.get(name)
        # Once for each dtype and not for each leaf: names are hashed in Python, which a compiler traces letter by letter.
        models = dict.fromkeys(one.model for one in self.formats)
        offsets = dict.fromkeys(models, 0)
        streams = {model: stream(f"{name}:{model}") for model in models}
        shared = {} if half is None else {model: stream(f"moments:{model}") for model in models}
        for leaf, one, drawn in zip(tree.leaves(self.params), self.formats, self.drawn, strict=True):
            lane = None if half is None else Lane(shared[one.model], half, drawn)
            keys.append(Key(self.seed, self.step, streams[one.model], self.first + offsets[one.model], lane))
            offsets[one.model] += leaf.numel()
        return keys

    def decode_params(self, extra: object) -> list[Tensor]:
        leaves = tree.leaves(self.params)
        try:
            extras = tree.flatten_up_to(self.params, extra)
        except ValueError as error:
            raise ValueError(f"state.extra: structure differs from params: {error}") from None
        values = []
        for index, (leaf, rest, one) in enumerate(zip(leaves, extras, self.formats, strict=True)):
            parts = (leaf, *rest) if isinstance(rest, tuple) else (leaf, rest)
            _require_parts(parts, one.params, leaf, lambda index=index: f"params{tree.paths(self.params)[index]}")  # type: ignore[misc]
            values.append(one.params.decode(parts, leaf.shape, one.policy.compute))
        return values

    def encode_params(self, values: Sequence[Tensor]) -> list[Parts]:
        return [
            _encoded(one.params, x, key, lambda index=index: f"params{tree.paths(self.params)[index]}")  # type: ignore[misc]
            for index, (x, one, key) in enumerate(zip(values, self.formats, self.keys("params"), strict=True))
        ]

    def decode_state(self, inner: S, wanted: Collection[str] | None = None) -> S:
        def decode(leaf: Tensor, name: str, one: Resolved, key: None, stored: Any, where: Callable[[], str]) -> Tensor:
            if wanted is not None and name not in wanted:
                return _zeros(leaf, one)
            format = one.slot(name)
            parts: Parts = stored if isinstance(stored, tuple) else (stored,)
            _require_parts(parts, format, leaf, where)
            return format.decode(parts, leaf.shape, one.policy.compute)

        return self._map_slots(decode, inner, keys=lambda name: [None] * len(self.formats))

    def encode_state(self, inner: S) -> S:
        def encode(leaf: Tensor, name: str, one: Resolved, key: Key, value: Tensor, where: Callable[[], str]) -> Any:
            if value.shape != leaf.shape:
                raise ValueError(
                    f"{where()}: got the shape {tuple(value.shape)}; accepted is that of its parameter, {tuple(leaf.shape)}."
                )
            if value.dtype is not torch_dtype(one.policy.compute):
                raise ValueError(f"{where()}: got {value.dtype}; accepted before encoding is {one.policy.compute}.")
            parts = _encoded(one.slot(name), value, key, where)
            return parts if len(parts) > 1 else parts[0]

        return self._map_slots(encode, inner, keys=self.keys)

    def _map_slots(self, function: Callable[..., Any], inner: S, *, keys: Callable[[str], Sequence[Key | None]]) -> S:
        seen: dict[str, int] = {}
        leaves = tree.leaves(self.params)

        def one_slot(name: str, slot: Any) -> Any:
            # A name that comes twice in a chain draws two streams.
            count = seen[name] = seen.get(name, 0) + 1
            own_keys = keys(name if count == 1 else f"{name}#{count}")
            try:
                found = tree.flatten_up_to(self.params, slot)
            except ValueError as error:
                raise ValueError(f"state.{name}: structure differs from params: {error}") from None
            return tree.replace(
                self.params,
                [
                    None
                    if value is None
                    else function(
                        leaf, name, one, key, value, lambda index=index: f"state.{name}{tree.paths(self.params)[index]}"
                    )
                    for index, (leaf, value, one, key) in enumerate(
                        zip(leaves, found, self.formats, own_keys, strict=True)
                    )
                ],
            )

        return tree.map_slots(one_slot, inner)


def _warn_of_growing_graphs(params: object) -> None:
    """A parameter of a module requires gradients, so that outside of ``no_grad`` a step becomes part of the graph of the next."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    for index, leaf in enumerate(tree.leaves(params)):
        if isinstance(leaf, torch.nn.Parameter) and leaf.requires_grad:
            warnings.warn(
                f"params{tree.paths(params)[index]}: got an nn.Parameter while gradients are enabled; what a step returns then"
                " keeps the graph of all steps before it, and memory grows. Step inside of `with torch.no_grad():`, or pass"
                " p.detach(). To differentiate through steps, pass plain tensors.",
                stacklevel=4,
            )
            return


def _first(ctx: Context | None) -> int | Tensor:
    return 0 if ctx is None else ctx.first_element


def _zeros(leaf: Tensor, one: Resolved) -> Tensor:
    """Return a placeholder for a value in the compute dtype that nobody reads: of its shape, without its memory."""
    return torch.zeros((), dtype=torch_dtype(one.policy.compute), device=leaf.device).expand(leaf.shape)


def _widened_param(leaf: Tensor, one: Resolved) -> Tensor:
    """A parameter as stored, in the compute dtype; never the parameter itself, which a transform might keep in its state.

    A module's parameter is detached, or the state would keep a graph; a plain tensor is not: a start may be differentiated by.
    """
    plain = leaf.detach() if isinstance(leaf, torch.nn.Parameter) else leaf
    value = plain.to(torch_dtype(one.policy.compute))
    return value.clone() if value.dtype is leaf.dtype else value


def nbytes(values: object) -> int:
    """Bytes of all the tensors in a tree."""
    return sum(leaf.numel() * leaf.dtype.itemsize for leaf in tree.leaves(values))


def state_bytes(inner: object, *, counters: int = 0) -> dict[str, int]:
    """Bytes of a transform's state by slot name, and of everything else as ``counters``."""
    table: dict[str, int] = {}

    def count(name: str, slot: Any) -> Any:
        table[name] = table.get(name, 0) + nbytes(slot)
        return slot

    tree.map_slots(count, inner)
    table["counters"] = counters + nbytes(inner) - sum(table.values())
    return table


def _widened(grads: P, params: P, formats: list[Resolved], *, name: str = "grads") -> P:
    """``grads`` in the compute dtype, after a look at each."""
    tree.require_same_structure(grads, params, name=name, reference_name="params")
    wide = []
    # By the parameters' order: the keys of a dict may come in another.
    for index, (grad, one) in enumerate(zip(tree.flatten_up_to(params, grads), formats, strict=True)):
        compute = one.policy.compute
        accepted = FLOAT_DTYPES if compute == "float64" else FLOAT_DTYPES[1:]
        if grad.layout is not torch.strided or not any(grad.dtype is torch_dtype(dtype) for dtype in accepted):
            path = f"{name}{tree.paths(params)[index]}"
            kind = f"a {grad.layout} tensor" if grad.layout is not torch.strided else str(grad.dtype)
            raise TypeError(
                f"{path}: got {kind} with Policy.compute={compute!r}; accepted are dense, real floating-point tensors:"
                f" {', '.join(accepted)}."
            )
        wide.append(_as_stored(grad).to(torch_dtype(compute)))
    return tree.replace(params, wide)


def _as_stored(grad: Tensor) -> Tensor:
    """``grad`` in at least float32, with the rounding that its dtype stands for.

    A user's compiled function may round a gradient to 16 bits and step in one graph; the compiler would then fold the two casts and hand
    on the number as it was before the rounding. In eager code a cast is a cast, and can be differentiated.
    """
    if torch.compiler.is_compiling() and grad.dtype is torch.bfloat16:
        return (grad.view(torch.int16).to(torch.int32) << 16).view(torch.float32)
    if torch.compiler.is_compiling() and grad.dtype is torch.float16:
        return rounding.nearest(grad.float(), "float16")
    return grad if grad.dtype.itemsize >= 4 else grad.float()


def _encoded(format: Format, x: Tensor, key: Key, where: Callable[[], str]) -> Parts:
    """The parts that a format made; of one of the user's own, after a look at whether they are what it says of them."""
    parts = format.encode(x, key)
    if type(format) in BUILT_IN:
        return parts
    specs = format.parts()
    if not isinstance(parts, tuple) or not _fits(parts, specs, x.shape):
        raise ValueError(
            f"{where()}: {format}.encode returned [{_listed(parts)}] for a value of shape {tuple(x.shape)}; accepted is what its parts()"
            f" say, [{_named(specs, x.shape)}]."
        )
    return parts


def _fits(parts: Sequence[object], specs: Sequence[PartSpec], shape: torch.Size) -> bool:
    return len(parts) == len(specs) and all(
        isinstance(part, Tensor) and part.dtype is spec.dtype and part.shape == spec.shape(shape)
        for part, spec in zip(parts, specs, strict=True)
    )


def _listed(parts: object) -> str:
    listed = parts if isinstance(parts, tuple) else (parts,)
    return ", ".join(f"{p.dtype} {tuple(p.shape)}" if isinstance(p, Tensor) else repr(p) for p in listed)


def _named(specs: Sequence[PartSpec], shape: torch.Size) -> str:
    return ", ".join(f"{spec.name} ({spec.dtype} {spec.shape(shape)})" for spec in specs)


def _require_parts(parts: Parts, format: Format, leaf: Tensor, where: Callable[[], str]) -> None:
    """Refuse stored parts that another format made, or that belong to a tensor of another shape."""
    specs = format.parts()
    if not _fits(parts, specs, leaf.shape):
        raise ValueError(
            f"{where()}: stored as [{_listed(parts)}], but {format} stores {_named(specs, leaf.shape)}: this state was made under another"
            " policy, or for other parameters. export_fp32 and import_fp32 carry weights from one policy to another."
        )
