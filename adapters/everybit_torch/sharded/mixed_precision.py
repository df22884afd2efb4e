"""Mixed precision in three dtypes, as in Megatron-FSDP, and its translation to a policy.

==================  ===============  ====================================================================================
field               default          None means
==================  ===============  ====================================================================================
``main_params``     float32          the model's own weights are the main weights
``main_grads``      float32          gradients are accumulated in the model's dtype
``grad_comm``       None             gradients are sent as they are accumulated
==================  ===============  ====================================================================================

Where ``main_params`` is the model's own dtype there is no second copy: a float32 model with these defaults has no main weights beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

import everybit as eb
from everybit.base import FLOAT_DTYPES, FloatDType, dtype_name, settle_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecision:
    """The dtypes of main weights, of main gradients, and in which gradients are sent.

    Args:
        main_params: dtype of the weights that the optimizer works on. None: the model's own.
        main_grads: dtype in which gradients are summed. None: the model's.
        grad_comm: dtype in which gradients are sent. None: ``main_grads``.
        reduce: ``"float32"``: gradients that are sent in 16 bits are summed at the receiver, in full precision.

    Raises:
        ValueError: Not the name of a dtype; the message names the field.
    """

    main_params: FloatDType | None = "float32"
    main_grads: FloatDType | None = "float32"
    grad_comm: FloatDType | None = None
    reduce: Literal["native", "float32"] = "native"

    def __post_init__(self) -> None:
        for name in ("main_params", "main_grads", "grad_comm"):
            if getattr(self, name) is not None:
                settle_dtype(self, name, FLOAT_DTYPES, field=f"MixedPrecision.{name}")
        settle_dtype(self, "reduce", ("native", "float32"), field="MixedPrecision.reduce")

    def policy(self, model: FloatDType | torch.dtype) -> eb.Policy:
        """The policy for parameters of one dtype; state is in the precision of the main weights, float32 at least.

        Raises:
            ValueError: Main weights of fewer bits than the model's, or of another 16-bit format.
        """
        dtype = dtype_name(model, field="model") if isinstance(model, torch.dtype) else model
        grads = eb.Grads(main=self.main_grads, comm=self.grad_comm, reduce=self.reduce)
        wide: Literal["float32", "float64"] = "float64" if "float64" in (dtype, self.main_params) else "float32"
        params: eb.ParamFormat
        if self.main_params is None or self.main_params == dtype:
            params = eb.Nearest(dtype)
        elif self.main_params == "float32" and dtype in ("bfloat16", "float16"):
            params = eb.Master("float32")
        elif self.main_params == "float64":
            params = eb.Master("float64")
        else:
            raise ValueError(
                f"MixedPrecision.main_params: got {self.main_params!r} for {dtype} parameters; accepted are {dtype!r}, None, and formats"
                " that hold all of its values."
            )
        return eb.Policy(
            compute=wide,
            params=params,
            momentum=eb.Nearest(wide),
            variance=eb.Nearest(wide),
            state=eb.Nearest(wide),
            grads=grads,
        )
