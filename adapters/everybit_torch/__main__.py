"""``python -m everybit_torch``: the same as ``everybit``."""

import sys

from everybit_torch.cli import main

if __name__ == "__main__":
    sys.exit(main())
