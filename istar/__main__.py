"""`python -m istar` is the command `istar`."""

import sys

from istar.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
