"""The parameters of models, by their shapes alone."""

from __future__ import annotations

from collections.abc import Mapping

Shape = tuple[int, ...]


def gpt(width: int, layers: int) -> list[Shape]:
    """The blocks of a GPT with biases: twelve tensors a layer."""
    block: list[Shape] = [
        (width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,),
        (width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,),
    ]  # fmt: skip
    return block * layers


def opt_125m() -> list[Shape]:
    """OPT-125m (Zhang et al. 2022): 12 layers of width 768, vocabulary 50272, 2048 positions and two; head and embedding are tied."""
    width = 768
    block: list[Shape] = []
    for _ in range(4):
        block += [(width, width), (width,)]
    block += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,), (width,), (width,)]
    return [(50272, width), (2050, width), *block * 12, (width,), (width,)]


def llama_3_8b_layer() -> list[Shape]:
    """One of Llama-3-8B's 32 layers (Grattafiori et al. 2024): width 4096, 8 key-value heads of 128, feed-forward 14336."""
    width, keys, hidden = 4096, 1024, 14336
    return [(width, width), (keys, width), (keys, width), (width, width), (hidden, width), (hidden, width), (width, hidden),
            (width,), (width,)]  # fmt: skip


MODELS: Mapping[str, list[Shape]] = {
    "one-20M": [(20_000_000,)],
    "gpt-0.6M": gpt(64, 12),
    "small-10000": [(16 + i % 49,) for i in range(10_000)],
    "opt-125m": opt_125m(),
    "llama-3-8b-layer": llama_3_8b_layer(),
}
