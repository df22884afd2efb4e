"""What `import everybit_torch` costs beyond `import torch`: seconds of processor time in fresh processes, with bytecode cached."""

from __future__ import annotations

import argparse
import subprocess
import sys
from statistics import median

MODULES = ("torch", "everybit", "everybit_torch")


def import_seconds(module: str) -> float:
    """Processor time of one import in a process of its own."""
    program = f"import time; begin = time.process_time(); import {module}; print(time.process_time() - begin)"
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    for module in MODULES:
        import_seconds(module)  # caches bytecode
    # In turns, so that a machine that becomes slower does so for all.
    seconds = list(zip(*([import_seconds(module) for module in MODULES] for _ in range(repeats)), strict=True))
    for module, times in zip(MODULES, seconds, strict=True):
        ratio = median(times) / median(seconds[0])
        print(f"{module:16} median {median(times):.2f} s, lowest {min(times):.2f} s, {ratio:.2f} of torch")


if __name__ == "__main__":
    main()
