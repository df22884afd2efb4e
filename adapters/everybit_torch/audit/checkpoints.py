"""An audit of a checkpoint: of the step that would come next if the next gradient were the running mean of those before it.

A checkpoint has no gradient, but common optimizers keep a running mean of it, and near a minimum the next steps add up to that mean.
It stands for the gradient, so that only checkpoints with momentum can be audited.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import everybit as eb
from everybit.stepping.entries import VERSION_KEY
from everybit_torch import drop_ins
from everybit_torch.audit.layers import LayerAudit, audit_step
from everybit_torch.optim import TorchOptimizer

MOMENTUM = ("exp_avg", "momentum_buffer", "momentum")
"""Names of the running mean of gradients: torch's, and everybit's."""

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of torch's normalization layers, which state dicts of models hold beside the parameters."""


def audit_checkpoint(
    path: str | Path,
    *,
    optimizer: str | None = None,
    policy: eb.Policy | None = None,
    model_key: str | None = None,
    optimizer_key: str | None = None,
) -> list[LayerAudit]:
    """Audit the next step of a run, from its checkpoint.

    Args:
        path: A file that ``torch.save`` wrote: a dict with the state dicts of model and optimizer, under any keys.
        optimizer: Name of a class of ``torch.optim`` or of everybit. None: AdamW or SGD, determined by the state.
        policy: Under which an optimizer of everybit was saved. None for torch's.
        model_key: The key of the model's state dict. None: the only state dict of a model.
        optimizer_key: The same of the optimizer's.

    Returns:
        One entry for each parameter that has momentum; ``step`` is the number of the next step.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The contents are of another kind, have no momentum, or do not name the parameters; the message says what can be
            read. An optimizer that was made from ``model.named_parameters()`` saves the parameters' names. Without names those of one
            shape are taken in the model's order, if there are as many in one param group as in the model.

    Examples:
        >>> import torch, tempfile, pathlib
        >>> from everybit_torch import audit_checkpoint
        >>> model = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        >>> model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "checkpoint.pt"
        >>> torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        >>> [(layer.name, layer.step) for layer in audit_checkpoint(path)]
        [('weight', 2), ('bias', 2)]
    """
    path = Path(path)
    weights, saved = _contents(path, model_key, optimizer_key)
    names = _names(path, weights, saved)
    parameters = {number: nn.Parameter(weights[name].detach().clone()) for number, name in names.items()}
    own = _optimizer(path, saved, parameters, optimizer, policy) if VERSION_KEY in saved else None
    # Formats of everybit may store codes in the place of numbers.
    state = own.full_state_dict()["state"] if isinstance(own, TorchOptimizer) else saved["state"]
    for number, parameter in parameters.items():
        mean = _momentum(state.get(number, {}))
        if mean is not None:
            if mean.shape != parameter.shape:
                raise ValueError(
                    f"{path}: momentum of {names[number]!r}: got shape {tuple(mean.shape)}; accepted is the parameter's"
                    f" {tuple(parameter.shape)}."
                )
            parameter.grad = mean.detach().to(parameter.dtype, copy=True)
    if all(parameter.grad is None for parameter in parameters.values()):
        kept = sorted({key for entries in saved["state"].values() for key in entries})
        raise ValueError(
            f"{path}: got a state of {', '.join(map(str, kept)) or 'nothing'}; accepted is a state with one of {', '.join(MOMENTUM)}, which"
            " stands for the next gradient."
        )
    made = _optimizer(path, saved, parameters, optimizer, policy) if own is None else own
    step = 1 + max((_step(entries) for entries in saved["state"].values()), default=0)
    return audit_step({id(p): names[number] for number, p in parameters.items()}, made, step)


def _contents(
    path: Path, model_key: str | None, optimizer_key: str | None
) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """The state dicts of the model and of the optimizer."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: is no file; accepted is a file that torch.save wrote.")
    try:
        contents = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch documents no list of them
        raise ValueError(f"{path}: does not load under weights_only=True ({error}).") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{path}: holds a {type(contents).__name__}; accepted is a dict of state dicts.")
    is_optimizer = {
        key: isinstance(x, Mapping) and {"state", "param_groups"} <= x.keys() for key, x in contents.items()
    }
    is_model = {
        key: not is_optimizer[key] and isinstance(x, Mapping) and any(isinstance(one, Tensor) for one in x.values())
        for key, x in contents.items()
    }
    saved = contents[_key(path, "the optimizer's state dict", "optimizer_key", optimizer_key, is_optimizer)]
    model = contents[_key(path, "the model's state dict", "model_key", model_key, is_model)]
    return {name: x for name, x in model.items() if isinstance(x, Tensor)}, saved


def _key(path: Path, what: str, argument: str, given: str | None, fits: Mapping[str, bool]) -> str:
    found = [key for key, fit in fits.items() if fit]
    if given is None and len(found) == 1:
        return found[0]
    if given is not None and fits.get(given):
        return given
    got = f"{given!r}" if given is not None else f"{len(found)} that could be it"
    accepted = ", ".join(repr(key) for key in found) or "a file that has one"
    raise ValueError(f"{path}: {argument}: got {got} for {what}; accepted is {'one of ' * (len(found) > 1)}{accepted}.")


def _names(path: Path, weights: Mapping[str, Tensor], saved: Mapping[str, Any]) -> dict[int, str]:
    """The name of each parameter, by its number in the optimizer's state dict."""
    groups = saved["param_groups"]
    if all("param_names" in group for group in groups):
        names = {n: name for group in groups for n, name in zip(group["params"], group["param_names"], strict=True)}
        missing = [name for name in names.values() if name not in weights]
        if missing:
            raise ValueError(
                f"{path}: got a parameter {missing[0]!r} that the model's state dict has not; accepted are its names."
            )
        return names
    return _names_by_shape(path, weights, saved)


def _names_by_shape(path: Path, weights: Mapping[str, Tensor], saved: Mapping[str, Any]) -> dict[int, str]:
    """Match by order among tensors of the same shape; the state gives a group for each shape, and no tensor is left over."""
    left: dict[torch.Size, list[str]] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, x in weights.items():
        tied = (x.data_ptr(), x.shape)
        if x.is_floating_point() and name.rpartition(".")[2] not in STATISTICS and tied not in seen:
            seen.add(tied)
            left.setdefault(x.shape, []).append(name)
    wanted = [
        (group, number, mean.shape)
        for group, values in enumerate(saved["param_groups"])
        for number in values["params"]
        if (mean := _momentum(saved["state"].get(number, {}))) is not None
    ]
    counts = Counter(shape for _, _, shape in wanted)
    unclear = [
        shape
        for shape, count in counts.items()
        if count != len(left.get(shape, ())) or len({group for group, _, other in wanted if other == shape}) > 1
    ]
    if unclear:
        shape = unclear[0]
        raise ValueError(
            f"{path}: got {counts[shape]} parameters of shape {tuple(shape)} in the optimizer, {len(left.get(shape, ()))} in the model, and"
            " no names in the optimizer's state dict; accepted are names, which an optimizer saves that is made from"
            " model.named_parameters(), or as many of each shape in one param group as in the model."
        )
    return {number: left[shape].pop(0) for _, number, shape in wanted}


def _momentum(entries: Mapping[str, Any]) -> Tensor | None:
    found = next((entries[name] for name in MOMENTUM if isinstance(entries.get(name), Tensor)), None)
    return found if found is not None and found.is_floating_point() else None


def _step(entries: Mapping[str, Any]) -> int:
    """The count of steps: as torch keeps it, or as everybit does."""
    return int(entries.get("step", 0))


def _optimizer(
    path: Path,
    saved: Mapping[str, Any],
    parameters: Mapping[int, nn.Parameter],
    name: str | None,
    policy: eb.Policy | None,
) -> torch.optim.Optimizer:
    """An optimizer of the saved kind, with the saved hyperparameters and state, bit for bit."""
    own = VERSION_KEY in saved
    if own and policy is None:
        raise ValueError(f"{path}: policy: got None for an optimizer of everybit; accepted is that of the run.")
    if not own and policy is not None:
        raise ValueError(f"{path}: policy: got one for a state dict of torch.optim's form; accepted is None.")
    kinds = dict(_kinds(own))
    name = _guessed(saved) if name is None else name
    if name not in kinds:
        close = difflib.get_close_matches(name, kinds, n=1)
        raise ValueError(
            f"optimizer: got {name!r}{f' (did you mean {close[0]}?)' if close else ''}; accepted are {', '.join(kinds)}."
        )
    groups = [
        {**values, "params": [parameters[number] for number in values["params"] if number in parameters]}
        for values in saved["param_groups"]
    ]
    if own:
        given = [{"params": group["params"]} for group in groups]
        made: torch.optim.Optimizer = kinds[name](given, lr=1e-3, policy=policy, compile=False, unsafe="allow")
        made.load_state_dict(dict(saved))
        return made
    made = kinds[name](list(parameters.values()), lr=1e-3)
    # torch's own load_state_dict would cast the state to the dtype of the weights.
    made.param_groups = groups
    for number, parameter in parameters.items():
        made.state[parameter] = dict(saved["state"].get(number, {}))
    return made


def _kinds(own: bool) -> Iterator[tuple[str, Any]]:
    source, base = (drop_ins, TorchOptimizer) if own else (torch.optim, torch.optim.Optimizer)
    for name, kind in sorted(vars(source).items()):
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base and not name.startswith("_"):
            yield name, kind


def _guessed(saved: Mapping[str, Any]) -> str:
    keys = {key for entries in saved["state"].values() for key in entries}
    return "AdamW" if {"exp_avg_sq", "variance"} & keys else "SGD"
