"""Check the parameters and policies of param groups before anything is made from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import everybit as eb
from everybit.base import DTYPES, dtype_name
from everybit.policies import AnyPolicy, describe, for_dtype, native, policies_of
from everybit_torch.label_resolution import Tree, applied, decide, resolve_parameters, tree_of
from everybit_torch.optim.state_dicts.saved_structure import shown
from everybit_torch.torch_internals.dtensors import is_dtensor

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


def names_of(number: int, group: Mapping[str, Any]) -> list[str]:
    """Return the names of a param group's parameters; those without are named by their places."""
    given: list[str] | None = group.get("param_names")
    return given or [f"param group {number}, parameter {index}" for index in range(len(group["params"]))]


def require_parameters(number: int, tensors: Sequence[Any]) -> None:
    """Refuse tensors that an optimizer cannot optimize.

    Raises:
        TypeError: Something that is no tensor, or no real floating-point tensor.
        ValueError: A tensor that comes twice, or is on a device that cannot step it.
    """
    for index, tensor in enumerate(tensors):
        where = f"param group {number}, parameter {index}"
        if not isinstance(tensor, Tensor):
            named = " model.named_parameters() gives them with their names." if isinstance(tensor, str) else ""
            raise TypeError(f"{where}: got {shown(tensor)}; accepted are tensors.{named}")
        if tensor.is_complex() or not tensor.is_floating_point():
            raise TypeError(
                f"{where}: got {tensor.dtype}; accepted are real floating-point parameters."
                + (" torch.view_as_real gives a real view of a complex one." if tensor.is_complex() else "")
            )
        require_float64(tensor.device, where)
    places: dict[int, int] = {}
    for index, tensor in enumerate(tensors):
        if (first := places.setdefault(id(tensor), index)) != index:
            raise ValueError(
                f"param group {number}: parameters {first} and {index} are the same tensor; accepted is each once."
            )


def require_float64(device: torch.device, where: str) -> None:
    """Refuse a device without float64, in which coefficients are computed.

    Raises:
        ValueError: The device has no float64; the message begins with ``where``.
    """
    if device.type == "mps":
        raise ValueError(
            f"{where}: got a parameter on {device}, a device without float64, in which a step's coefficients are computed; accepted are"
            " devices that have it, such as CPUs and CUDA devices."
        )


def policy_for(policy: AnyPolicy | None, dtype: torch.dtype, number: int, *, mixed: bool) -> AnyPolicy:
    """The policy of a group's parameters of one dtype.

    Raises:
        ValueError: There is no policy for 16-bit parameters, or it does not fit the dtype.
    """
    name = dtype_name(dtype, field=f"param group {number}")
    return native(name) if policy is None else for_dtype(policy, name, mixed=mixed)


def described(policies: Mapping[torch.dtype, AnyPolicy]) -> str:
    """The policy of a group, or those of its dtypes where they differ."""
    described = {dtype: describe(policy) for dtype, policy in policies.items()}
    if len(set(described.values())) == 1:
        return next(iter(described.values()))
    return ", ".join(f"{dtype_name(dtype, field='dtype')}: {text}" for dtype, text in described.items())


def as_lists(params: Params) -> Params:
    """Read the generators of the constructor's argument, so that it can be read twice; torch refuses values that it cannot take.

    Raises:
        TypeError: A module in the place of its parameters.
    """
    _require_no_module("params", params)
    if isinstance(params, (Tensor, Mapping, str, set)) or not isinstance(params, Iterable):
        return params
    given = list(params)
    for number, one in enumerate(given):
        if isinstance(one, dict):
            _require_no_module(f"param group {number}, 'params'", one.get("params"))
    return cast(
        Params,
        [
            {**one, "params": list(one["params"])}
            if isinstance(one, dict) and isinstance(one.get("params"), Iterator)
            else one
            for one in given
        ],
    )


def listed(given: Any) -> list[Any]:
    """The parameters of a param group as a list, maybe with their names.

    Raises:
        TypeError: A set.
    """
    if isinstance(given, set):
        raise TypeError("params: got a set, whose order differs between runs; accepted are lists and generators.")
    return [given] if isinstance(given, Tensor) else list(given)


def require_distinct(groups: Sequence[dict[str, Any]]) -> None:
    """Refuse a list in which a group comes twice, which torch steps twice.

    Raises:
        RuntimeError: One does.
    """
    if len({*map(id, groups)}) < len(groups):
        raise RuntimeError("param_groups: got a group twice; accepted is each once.")


def require_all(groups: Sequence[dict[str, Any]], count: int, has_policy: Callable[[int, Any], bool]) -> None:
    """Refuse groups that are not those that were added, and other policies in them.

    ``ZeroRedundancyOptimizer`` writes all arguments with which it makes an optimizer into its groups.

    Args:
        groups: The groups.
        count: The number of those that were added.
        has_policy: Whether a policy is that with which the group of a number is stepped.

    Raises:
        RuntimeError: They are not as many as were added.
        ValueError: Another policy was written into one.
    """
    if len(groups) != count:
        raise RuntimeError(
            f"param_groups: has {len(groups)} groups and not the {count} that were added. To step fewer parameters freeze them"
            " (requires_grad_(False)); to step others call add_param_group()."
        )
    for number, group in enumerate(groups):
        if "policy" in group and not has_policy(number, group["policy"]):
            raise ValueError(
                f"param_groups[{number}]['policy']: got {group['policy']!r}; accepted is the policy with which an optimizer is made, or"
                " that of a group that is given to it or to add_param_group(). Delete the entry; another optimizer takes a run over by"
                " load_full_state_dict()."
            )


def add_by_hand(groups: list[dict[str, Any]], count: int, add: Callable[[dict[str, Any]], None]) -> None:
    """Add the groups that were put into an optimizer's list by hand, as torch steps those, too.

    Args:
        groups: The list; what fails to be added stays in it.
        count: The number of groups that were added before.
        add: Adds a copy of a group to the end of the list.
    """
    put, groups[:] = list(groups), groups[:count]
    try:
        for group in put[count:]:
            add(group)
            # The user holds the dict that was put into the list.
            group |= groups[-1]
            groups[-1] = group
    finally:
        groups[:] = put


def named_by(params: Params, model: nn.Module) -> Params:
    """Return parameters with a model's names for them; unchanged if they have names, or if some are not the model's."""
    given: list[Any] = list(cast(Any, as_lists(params)))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    lists = [[one["params"]] if isinstance(one["params"], Tensor) else list(one["params"]) for one in groups]
    if not all(id(parameter) in names for each in lists for parameter in each):
        return given
    return [
        {**one, "params": [(names[id(parameter)], parameter) for parameter in each]}
        for one, each in zip(groups, lists, strict=True)
    ]


def _require_no_module(where: str, given: object) -> None:
    if isinstance(given, nn.Module):
        raise TypeError(
            f"{where}: write model.parameters(), or model.named_parameters(). Got a {type(given).__name__}, a module; accepted are"
            " its parameters."
        )


def tensors_of(params: Params) -> Iterator[Tensor]:
    """The tensors in what :func:`_as_lists` returned, named or in groups."""
    given = cast(Any, params)
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, dict):
        yield from tensors_of(given.get("params", []))
    elif isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str):
        yield from tensors_of(given[1])
    elif isinstance(given, (list, tuple)):
        for one in given:
            yield from tensors_of(one)


def main_gradients(
    number: int, tree: Tree, policies: Mapping[torch.dtype, AnyPolicy]
) -> list[tuple[Tensor, torch.dtype]]:
    """Return the parameters with gradients in another dtype than the model's by their policy, with that dtype.

    Raises:
        ValueError: A policy that does not fit a parameter, or a gradient that exists already, in the model's dtype; or a DTensor, to which
            FSDP2 gives gradients of its own dtype.
    """
    found = []
    known = {key: tensor for key, tensor in tree.items() if tensor.dtype in policies}  # a step refuses others
    resolved = resolve_parameters(policies, known)
    for tensor in known.values():
        main = DTYPES[resolved[id(tensor)].grads_main]
        if main is tensor.dtype or tensor.grad_dtype is None:  # who gives it gradients decides
            continue
        if is_dtensor(tensor):
            raise ValueError(
                f"param group {number}: Grads.main: got {main} for a DTensor of {tensor.dtype}, in which FSDP2 adds up its gradients."
                " Accepted are Grads(main=None), and FlatStepper(model, ..., strategy='optim_grads_params'), which keeps main gradients."
            )
        if tensor.grad is not None and tensor.grad.dtype is not main:
            raise ValueError(
                f"param group {number}: Grads.main: got {main}, but a parameter of shape {tuple(tensor.shape)} holds a"
                f" {tensor.grad.dtype} gradient already; clear it (zero_grad) before making the optimizer."
            )
        found.append((tensor, main))
    return found


def require_storable(number: int, tree: Tree, optimizers: Mapping[torch.dtype, eb.Optimizer[Any]]) -> None:
    """Refuse factored state under a format that packs several elements into one number, before the first step.

    Raises:
        ValueError: The message names the parameter and the format.
    """
    for dtype, optimizer in optimizers.items():
        if not any(policy.packs for policy in policies_of(optimizer.policy)):
            continue
        own = {key: p for key, p in tree.items() if p.dtype is dtype and not is_lazy(p)}
        seen = set()
        for (key, p), decision in zip(own.items(), decide(optimizer, tree, list(own.values())), strict=True):
            if (p.shape, decision) in seen or not p.numel():
                continue
            seen.add((p.shape, decision))
            try:
                applied(optimizer, decision).init([torch.empty(p.shape, dtype=dtype, device="meta")])
            except ValueError as error:
                raise ValueError(f"param group {number}, parameter {key!r}: {error}") from None


def named_tree(given: list[Any]) -> Tree:
    """The entries of a param group, tensors or pairs of name and tensor, as :func:`tree_of` has them."""
    named = [entry for entry in given if isinstance(entry, tuple)]
    if not named:
        return tree_of({"params": given})
    return tree_of({"params": [tensor for _, tensor in named], "param_names": [name for name, _ in named]})
