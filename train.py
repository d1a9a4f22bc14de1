"""Does the same as `istar train`; `python train.py --help` lists the options."""

import sys

from istar.cli.main import train_main

if __name__ == "__main__":
    sys.exit(train_main(command="python train.py"))
