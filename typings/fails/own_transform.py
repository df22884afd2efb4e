"""A transform of one's own that does not keep the protocol."""

from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor

import everybit as eb

P = TypeVar("P")


@dataclass(frozen=True)
class NoPromises:
    def init(self, params: P) -> tuple[()]:
        return ()

    def update(self, updates: P, state: tuple[()], params: P, ctx: eb.Context) -> tuple[P, tuple[()]]:
        return updates, state


@dataclass(frozen=True)
class MisspeltCut:
    cut: ClassVar[eb.Cut] = "elements"  # E: assignment "type Literal['elements']"
    reduces: ClassVar[bool] = False

    def init(self, params: P) -> tuple[()]:
        return ()

    def update(self, updates: P, state: tuple[()], params: P, ctx: Any = None) -> tuple[P, tuple[()]]:
        return updates, state


@dataclass(frozen=True)
class ForgetsItsState:
    cut: ClassVar[eb.Cut] = "element"
    reduces: ClassVar[bool] = False

    def init(self, params: P) -> tuple[()]:
        return ()

    def update(self, updates: P, state: tuple[()], params: P, ctx: Any = None) -> P:
        return updates


@dataclass(frozen=True)
class OnlyForDicts:
    cut: ClassVar[eb.Cut] = "element"
    reduces: ClassVar[bool] = False

    def init(self, params: dict[str, Tensor]) -> tuple[()]:
        return ()

    def update(
        self, updates: dict[str, Tensor], state: tuple[()], params: dict[str, Tensor], ctx: Any = None
    ) -> tuple[dict[str, Tensor], tuple[()]]:
        return updates, state


eb.chain(NoPromises())  # E: arg-type "incompatible type NoPromises"
eb.chain(ForgetsItsState())  # E: arg-type "incompatible type ForgetsItsState"
eb.chain(OnlyForDicts())  # E: arg-type "incompatible type OnlyForDicts"
eb.with_policy(NoPromises(), eb.policies.FP32)  # E: arg-type "incompatible type NoPromises"
eb.masked(ForgetsItsState(), True)  # E: arg-type "incompatible type ForgetsItsState"
eb.SlotDecay("momentum", "0.9")  # E: arg-type "expected"
eb.with_policy(eb.adamw(), eb.policies.FP32, seed=0.5)  # E: arg-type "float"
