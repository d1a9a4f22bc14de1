"""Draw `images/watching_healthy.svg` and `images/watching_collapse.svg`: two trainings of `examples/watch_loop.py`.

Run `python docs/draw_watching.py` from the root of the repository. On a CPU core, it takes less than a minute.
"""

import contextlib
import runpy
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl

SCRIPT = Path(__file__).parents[1] / "examples" / "watch_loop.py"
PICTURES = {"healthy": [], "collapse": ["--without-negatives"]}
"""Options of the script, by the end of the picture's name."""


def main() -> None:
    """Write the pictures."""
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "istar"})
    for name, options in PICTURES.items():
        sys.argv = [str(SCRIPT), *options]
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            monitor = runpy.run_path(str(SCRIPT), run_name="__main__")["monitor"]
        figure = monitor.plot("inter_sim", "participation_ratio")
        path = Path(__file__).parent / "images" / f"watching_{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        path.write_text(path.read_text(encoding="utf-8").replace(" \n", "\n"), encoding="utf-8")


if __name__ == "__main__":
    main()
