"""Models by name, on the meta device, with the classes of their blocks."""

from __future__ import annotations

import difflib
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from everybit_cli.compare.model import SIZES, Block, Transformer
from everybit_cli.errors import OptionError
from everybit_torch.sharded.shapes import BLOCKS, SHAPES


def build(name: str, dtype: torch.dtype | None) -> tuple[nn.Module, list[type[nn.Module]]]:
    """A model on the meta device, and which classes its blocks are of.

    Raises:
        OptionError: There is no such model, or it cannot be built; the message says why.
    """
    if name in SHAPES:
        model = SHAPES[name].build()
        return (model if dtype is None else model.to(dtype)), [
            one for one in BLOCKS if any(isinstance(module, one) for module in model.modules())
        ]
    if name in SIZES:
        with torch.device("meta"):
            demo: nn.Module = Transformer(next(size for key, size in SIZES.items() if key == name))
        return (demo if dtype is None else demo.to(dtype)), [Block]
    path = Path(name)
    if path.exists():
        built = _hugging_face(path)
        wanted: set[str] = set(getattr(built, "_no_split_modules", None) or ())
        blocks_found = {type(module) for module in built.modules() if type(module).__name__ in wanted}
        return (built if dtype is None else built.to(dtype)), sorted(blocks_found, key=lambda kind: kind.__name__)
    if ":" in name:
        built = _imported(name)
        return (built if dtype is None else built.to(dtype)), []
    if "/" in name or path.suffix:
        raise OptionError(
            "--model", f"{name}, and there is no such file or folder", "a folder or config.json of a Hugging Face model"
        )
    known = ", ".join([*SHAPES, *SIZES])
    close = difflib.get_close_matches(name.lower(), [*SHAPES, *SIZES], n=1, cutoff=0.5)
    meant = f" (did you mean {close[0]}?)" if close else ""
    raise OptionError(
        "--model", f"{name}{meant}", f"{known}, a folder or config.json of a Hugging Face model, or module:function"
    )


def _hugging_face(path: Path) -> nn.Module:
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise OptionError("--model", f"{path}, and transformers is not installed", "pip install transformers") from None
    file = path / "config.json" if path.is_dir() else path
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
        with torch.device("meta"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:  # of transformers' own making, of many kinds
        raise OptionError("--model", f"{path} ({_said(error)})", "the config.json of a causal language model") from None
    return model


def _imported(name: str) -> nn.Module:
    where, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # as for `python -m`; the installed command has its own folder there
        sys.path.insert(0, here)
    try:
        function: Callable[[], object] = getattr(importlib.import_module(where), attribute)
    except Exception as error:  # importing a module runs it
        raise OptionError("--model", f"{name} ({error})", "module:function, importable from here") from None
    try:
        with torch.device("meta"):
            model = function()
    except Exception as error:
        got = f"{name}, which raised {_said(error)}"
        raise OptionError(
            "--model", got, "a function that returns a torch.nn.Module when it is called with nothing"
        ) from None
    if not isinstance(model, nn.Module):
        raise OptionError(
            "--model", f"{name}, which returned a {type(model).__name__}", "a function that returns a torch.nn.Module"
        )
    return model


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
