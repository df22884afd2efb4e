"""``optimizer.state``: the optimizer's entries for each parameter, as views of its memory, and the entries of other code.

In ``torch.optim`` the state of a parameter is a dict that belongs to everybody: the optimizer looks up its tensors there at every step,
and wrappers such as Lookahead read them, replace them, and add entries of their own. Here the optimizer's tensors lie in segments, and
the dict shows them. So the dict itself has to know which entries are the optimizer's: an assignment to such an entry writes into the
segment's memory, its removal is refused, and every other entry is kept.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.stepping.entries import INNER, STEP, WEIGHTS
from everybit_torch.torch_internals.dtensors import local

KEPT = "kept."
"""The prefix of other code's entries in a state dict, where the name could be one of the optimizer's own."""

_RESET = (
    "To begin anew, make a new optimizer, or load a state dict without state:"
    " optimizer.load_state_dict(optimizer.state_dict() | {'state': {}})."
)


def is_own_name(name: object) -> bool:
    """Whether an optimizer of this library may give an entry this name, for whatever transform."""
    if not isinstance(name, str) or name.startswith(KEPT):
        return False
    stem = name.split(".")[0].split("#")[0].split("[")[0]
    return stem in (STEP, WEIGHTS, INNER) or stem in eb.tree.registered_slots()


class ParameterState(dict[Any, Any]):
    """The entries of one parameter's state.

    Reading, iterating and comparing are a dict's. Assigning a tensor to an entry of the optimizer writes its values into the memory
    that is stepped; deleting it is refused. torch's names (``exp_avg``) stand for the entries that torch's optimizer of the same name
    calls so, in lookups and assignments; iteration shows each entry once, under its own name.
    """

    __slots__ = ("_alias", "_own")

    def __init__(self, entries: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = ()) -> None:
        super().__init__(entries)
        self._own: frozenset[str] = frozenset()
        self._alias: Mapping[str, str] = {}

    @property
    def own(self) -> dict[str, Tensor]:
        """The entries that the optimizer made, by name."""
        return {name: value for name, value in self.items() if name in self._own}

    @property
    def kept(self) -> dict[Any, Any]:
        """The entries that other code added, by name."""
        return {name: value for name, value in self.items() if name not in self._own}

    def packed(self, own: Mapping[Any, Any] | None = None) -> dict[Any, Any]:
        """Return the entries as a state dict holds them: a plain dict, with names that tell the owner of an entry.

        Args:
            own: Entries in place of the optimizer's; None: the present entries.
        """
        kept = {KEPT + name if is_own_name(name) else name: value for name, value in self.kept.items()}
        return {**(self.own if own is None else own), **kept}

    def publish(self, own: Mapping[str, Tensor], torch_names: Mapping[str, str]) -> None:
        """Show ``own`` as the optimizer's entries, in the place of those that were.

        Args:
            own: Tensors by name: views of the memory that is stepped.
            torch_names: Names of entries, and what torch's optimizer calls them.
        """
        for name in self._own - own.keys():
            super().pop(name, None)
        super().update(own)
        self._own = frozenset(own)
        self._alias = {theirs: ours for ours, theirs in torch_names.items() if ours in own}

    def drop_torch_names(self) -> None:
        """Remove entries under torch's names, whose values the optimizer has taken over."""
        for name in self._alias:
            super().pop(name, None)

    def keep(self, entries: Mapping[Any, Any]) -> None:
        """Let these be everybody else's entries, in the place of those that were."""
        for name in self.kept.keys() - entries.keys():
            super().__delitem__(name)
        super().update(entries)

    # -- reading --------------------------------------------------------------------------------------------------------------

    def __missing__(self, key: Any) -> Any:
        name = self._alias.get(key) if isinstance(key, str) else None
        if name is None:
            raise KeyError(key)
        if self._in_parts(name):
            raise KeyError(f"{key}: {self._parts_message(name)}")
        return self[name]

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        return isinstance(key, str) and key in self._alias and not self._in_parts(self._alias[key])

    def get(self, key: Any, default: Any = None) -> Any:
        """Return an entry, or ``default``, as a dict does."""
        return self[key] if key in self else default  # noqa: SIM401 (that would be this function)

    # -- writing --------------------------------------------------------------------------------------------------------------

    def __setitem__(self, key: Any, value: Any) -> None:
        name = self._alias.get(key, key) if isinstance(key, str) else key
        if name in self._own:
            self._write(name, value)
        else:
            super().__setitem__(key, value)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Add an entry unless it exists, and return it, as a dict does."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Assign several entries, as a dict does."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> ParameterState:  # type: ignore[misc]
        self.update(other)
        return self

    def replace(self, entries: Mapping[Any, Any]) -> None:
        """Take over other entries in the place of all that are here; the optimizer's own have to be among them.

        Raises:
            RuntimeError: One of the optimizer's entries is not.
        """
        given = {self._alias.get(key, key) if isinstance(key, str) else key: value for key, value in entries.items()}
        self._require_none_gone(self._own - given.keys())
        for name in self._own:
            self._write(name, given[name])
        for name in self.kept.keys() - given.keys():
            super().__delitem__(name)
        super().update({name: value for name, value in given.items() if name not in self._own})

    def _write(self, name: str, value: Any) -> None:
        held: Tensor = dict.__getitem__(self, name)
        if value is held:
            return
        if not isinstance(value, Tensor) or local(value).shape != local(held).shape:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"state[{name!r}]: got {got}; accepted is a tensor of shape {tuple(held.shape)}, whose values are written into the"
                " optimizer's own."
            )
        whole = local(held)
        new = local(value).detach().to(whole.device, whole.dtype)
        if torch.equal(new, whole):
            return
        if whole.dtype is torch.int64 and not whole.ndim:
            raise RuntimeError(
                f"state[{name!r}]: parameters that are stepped together share one count, so that of a single parameter cannot be set;"
                " load_state_dict sets the counts of all."
            )
        if self._in_parts(name):
            raise RuntimeError(f"state[{name!r}]: {self._parts_message(name)}")
        with torch.no_grad():
            whole.copy_(new)

    def _in_parts(self, name: str) -> bool:
        """Whether several tensors stand for the entry's number."""
        stem = name.rpartition(".")[0]
        return stem in self._own or any(other.startswith(f"{name}.") for other in self._own)

    @staticmethod
    def _parts_message(name: str) -> str:
        return (
            f"this policy stores {name.split('.')[0]!r} in several tensors, and writing one of them would change what the others stand for;"
            " load_full_state_dict takes values in full precision. Accepted here are policies that store it in one tensor."
        )

    # -- taking away ----------------------------------------------------------------------------------------------------------

    def _require_none_gone(self, names: Iterable[str]) -> None:
        if gone := sorted(names):
            raise RuntimeError(
                f"state: {', '.join(map(repr, gone))}: the optimizer steps with what it keeps there. {_RESET}"
            )

    def __delitem__(self, key: Any) -> None:
        self._require_none_gone({key} & self._own if isinstance(key, str) else ())
        super().__delitem__(key)

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove and return an entry that is not the optimizer's, as a dict does."""
        self._require_none_gone({key} & self._own if isinstance(key, str) else ())
        return super().pop(key, *default)

    def popitem(self) -> tuple[Any, Any]:
        """Remove and return the last entry that is not the optimizer's, as a dict does."""
        for key in reversed(self):
            if key not in self._own:
                return key, super().pop(key)
        self._require_none_gone(self._own)
        return super().popitem()

    def clear(self) -> None:
        """Remove all entries, unless the optimizer has entries here."""
        self._require_none_gone(self._own)
        super().clear()

    # -- copying --------------------------------------------------------------------------------------------------------------

    def copy(self) -> dict[Any, Any]:
        """A plain dict of the same tensors."""
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class States(defaultdict[Any, Any]):
    """The state of all parameters, by parameter; and whatever others keep under keys of their own."""

    def __init__(
        self,
        default_factory: Callable[[], Any] | None = None,  # noqa: ARG002  # copies are made with it, as of any defaultdict
        entries: Mapping[Any, Any] | Iterable[Any] = (),
        *,
        torch_names: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(ParameterState)
        self.torch_names = torch_names or {}
        for key, value in dict(entries).items():
            self[key] = value

    # -- for the optimizer ----------------------------------------------------------------------------------------------------

    def replaced(self, entries: Mapping[Any, Any]) -> States:
        """Other entries, under the same torch names."""
        return States(None, entries, torch_names=self.torch_names)

    # -- for everybody --------------------------------------------------------------------------------------------------------

    def __setitem__(self, key: Any, value: Any) -> None:
        held = super().get(key)
        if isinstance(held, ParameterState) and held.own and held is not value:
            if not isinstance(value, Mapping):
                raise TypeError(f"state: got {value!r} for a parameter; accepted is a mapping of entries.")
            held.replace(value)
        elif isinstance(key, Tensor) and isinstance(value, Mapping) and not isinstance(value, ParameterState):
            super().__setitem__(key, ParameterState(value))
        else:
            super().__setitem__(key, value)

    def _require_not_own(self, keys: Iterable[Any]) -> None:
        held = [self.get(key) for key in keys]
        if any(isinstance(one, ParameterState) and one.own for one in held):
            raise RuntimeError(f"state: the optimizer steps with what it keeps for its parameters there. {_RESET}")

    def __delitem__(self, key: Any) -> None:
        self._require_not_own([key])
        super().__delitem__(key)

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove and return the value of a key that is no parameter of the optimizer."""
        self._require_not_own([key])
        return super().pop(key, *default)

    def popitem(self) -> tuple[Any, Any]:
        """Remove and return the last item, if its key is no parameter of the optimizer."""
        self._require_not_own(list(self)[-1:])
        return super().popitem()

    def clear(self) -> None:
        """Remove all items, as long as the optimizer keeps no state here."""
        self._require_not_own(list(self))
        super().clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return States, (None, dict(self))


def keeps_frozen_remainder(states: States, parameter: Tensor) -> bool:
    """Whether a parameter is frozen, and its state has a part of its weights."""
    held = None if parameter.requires_grad else states.get(parameter)
    return isinstance(held, ParameterState) and any(name.split(".")[0] == WEIGHTS for name in held.own)


def state_replaced() -> RuntimeError:
    """Return the error for an optimizer with a ``state`` that was replaced after its first step."""
    return RuntimeError(
        "optimizer.state was replaced, and the optimizer steps with what it kept in the one before. "
        + _RESET
        + " Assigning to the entries of optimizer.state[parameter] writes to them."
    )
