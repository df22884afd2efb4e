"""``python -m everybit_cli``: the same as ``everybit``."""

import sys

from everybit_cli import main

if __name__ == "__main__":
    sys.exit(main())
