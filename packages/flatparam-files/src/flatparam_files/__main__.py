"""`python -m flatparam_files`: the command `flatparam ckpt` where only this package is installed."""

import sys

from flatparam_files.command import main

if __name__ == "__main__":
    sys.exit(main())
