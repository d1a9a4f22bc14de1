"""`python train.py` is `istar train`; `--help` shows the choices."""

import sys

from istar import cli

if __name__ == "__main__":
    sys.exit(cli.train(command="python train.py"))
