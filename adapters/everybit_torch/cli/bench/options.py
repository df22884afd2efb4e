"""The options of ``everybit bench``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from everybit_torch.cli.output import Output

DEFAULT_POLICIES = ("FP32", "EXACT_BF16", "LEAN_BF16", "FLOOR_BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(Output):
    """Time the optimizer's step here, for your model: torch's fused and foreach AdamW, and AdamW under several policies, with bytes.

    Or another optimizer under several policies, beside torch's fused AdamW and torch's optimizer of the same name.

    Only the parameters' shapes are taken from the model; weights and gradients are random numbers. Each optimizer steps in turn with torch
    fused in float32, in one process. Steps of everybit are compiled, with gradients in one flat buffer. Writes bench.json and bench.png to
    --out, if it is given.
    """

    model: str = "small"
    """One of everybit compare's (tiny, mini, small, medium, large), a known model (llama-3.2-1b, ...), the folder or config.json of a
    Hugging Face model (needs transformers), or module:function, which is called and returns a torch.nn.Module."""

    optimizer: str = "adamw"
    """A name of everybit.optimizers(), with hyperparameters if they are wanted, such as sgd,momentum=0.9."""

    policies: tuple[str, ...] = DEFAULT_POLICIES
    """Names of presets of everybit.policies, .toml, .json and .yaml files."""

    device: str = "cpu"
    """Where to step: cpu, cuda or cuda:N."""

    seconds: float = 60.0
    """Seconds of timing in all, without compilation."""

    threads: int = 0
    """CPU threads; 0: torch's default."""

    compile: bool = True
    """Whether everybit's steps are compiled."""

    out: Path | None = None
    """Folder for bench.json and bench.png; created if it does not exist."""
