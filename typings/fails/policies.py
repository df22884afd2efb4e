"""Wrong policies, each a mypy error at the line that says so in its comment: code, and a piece of the message."""

from __future__ import annotations

import torch

import everybit as eb

eb.Policy(momentum=eb.Nearest("int8"))  # E: arg-type "Literal['int8']"
eb.Policy(params="kahan")  # E: arg-type "ParamFormat"
eb.Policy(variance=eb.Master())  # E: arg-type "StateFormat"
eb.Policy(momentumm=eb.Nearest("float32"))  # E: call-arg "momentumm"
eb.Policy(compute="bfloat16")  # E: arg-type "Literal['bfloat16']"
eb.Policy(grads=eb.Grads(main="int32"))  # E: arg-type "Literal['int32']"
eb.Policy(grads=eb.Grads(reduce="fp64"))  # E: arg-type "Literal['fp64']"
eb.Policy(grads="float32")  # E: arg-type "Grads"
eb.Policy("float32")  # E: call-arg "positional"
eb.Policy(params=eb.Split(12))  # E: arg-type "Literal[12]"
eb.Policy(params=eb.Kahan("int8"))  # E: arg-type "Literal['int8']"
eb.Policy(params=eb.Kahan(rounding="up"))  # E: arg-type "Literal['up']"
eb.Policy(params=eb.Stochastic("float32"))  # E: arg-type "Literal['float32']"
eb.Policy(params=eb.Nearest)  # E: arg-type "type[Nearest]"
eb.policies.FP32.params = eb.Kahan()  # E: misc "read-only"
eb.policies.LEEN_BF16  # E: attr-defined "LEEN_BF16"
eb.Policy(params=None)  # E: arg-type "None"
eb.Policy(compute=torch.float32)  # E: arg-type "dtype"
eb.Policy(grads=eb.Grads(comm="fp8"))  # E: arg-type "Literal['fp8']"
eb.Policy(slots={"mean": eb.Master()})  # E: dict-item "str: Master"
eb.Policy(slots={"mean": "bfloat16"})  # E: dict-item "str: str"
eb.Policy(params=eb.Master("bfloat16"))  # E: arg-type "Literal['float32', 'float64']"
eb.by_label("all", {"all": eb.Kahan()})  # E: dict-item "str: Kahan"
eb.policies.LEAN_BF16.slots["mean"] = eb.Nearest("float32")  # E: index "Unsupported target for indexed assignment"
eb.by_dtype({"bfloat16": eb.Split(16)})  # E: dict-item "str: Split"
eb.Policy(momentum=eb.Nearest("float32").parts)  # E: arg-type "StateFormat"


def store(for_slots: eb.StateFormat, for_parameters: eb.ParamFormat) -> None:
    """Formats for the one and for the other."""
    eb.Policy(params=for_slots)  # E: arg-type "ParamFormat"
    eb.Policy(momentum=for_parameters)  # E: arg-type "StateFormat"
