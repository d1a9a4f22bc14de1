"""`python train.py` is `istar train`; `--help` shows the choices."""

import sys

from istar.cli.main import main_of_train

if __name__ == "__main__":
    sys.exit(main_of_train(command="python train.py"))
