"""`python -m flatparam`: the command line."""

import sys

from flatparam.command import main

if __name__ == "__main__":
    sys.exit(main())
