"""Run a script or a module with these optimizers' names: for programs that have no place for an import.

    python -m everybit_torch.names.run trainer train.py --optim everybit_adamw --optim_args policy=LEAN_BF16
    accelerate launch -m everybit_torch.names.run trainer -m trl.scripts.sft --optim everybit_adamw ...

The first argument says whose names: those of ``trainer``, ``timm`` or ``lightning``, or several with commas between them.
"""

from __future__ import annotations

import runpy
import sys
from importlib import import_module
from pathlib import Path

PROGRAMS = ("lightning", "timm", "trainer")


def run(arguments: list[str]) -> None:
    """Import names, and run a program as Python's command line does, with the arguments that follow it.

    Raises:
        SystemExit: Arguments that name no program or no script.
    """
    names, is_module = arguments[0].split(",") if arguments else [], arguments[1:2] == ["-m"]
    program = arguments[2 if is_module else 1 :]
    if not program or not set(names) <= set(PROGRAMS):
        got = " ".join(arguments) or "nothing"
        raise SystemExit(f"run: got {got}; accepted is {', '.join(PROGRAMS)}, then script.py or -m module.")
    for name in names:
        import_module(f"everybit_torch.names.{name}")
    sys.argv = program
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program[0]).resolve().parent)
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    run(sys.argv[1:])
