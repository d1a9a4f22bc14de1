"""Draw `images/isotropy.png`: three clouds with their IsoScore, and how I-STAR enters the loss.

Run `python docs/draw_isotropy.py` from the root of the repository.
"""

from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from istar.measures import isoscore

PICTURE = Path(__file__).parent / "images" / "isotropy.png"
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#5b6470"
CLOUDS = (("all directions alike", 1.0), ("one direction stronger", 0.45), ("nearly one direction", 0.06))
"""Caption of each cloud, and its standard deviation along the second direction; that along the first is 1."""
STATIONS = (
    ("text", "a batch of\nsentences"),
    ("model", "hidden states of\nall layers"),
    ("union X", "every token of\nevery layer"),
    ("IsoScore*", "covariance of X,\nshrunk towards $\\Sigma_S$"),
    ("loss", "task loss +\n$\\lambda\\,(1 - $IsoScore*$)$"),
)


def draw_cloud(axes: Axes, caption: str, deviation: float) -> None:
    """Draw 400 points with the given standard deviation along the second direction, turned by 30 degrees."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(400, 2, generator=generator, dtype=torch.float64)
    points = (points - points.mean(0)) @ torch.linalg.inv(torch.linalg.cholesky(points.T.cov())).T
    points *= torch.tensor([1.0, deviation])
    angle = torch.tensor(torch.pi / 6)
    turned = points @ torch.stack([angle.cos(), angle.sin(), -angle.sin(), angle.cos()]).reshape(2, 2).double()
    axes.scatter(*turned.T, s=5, color=BLUE, alpha=0.55, linewidths=0)
    axes.set(xlim=(-3.3, 3.3), ylim=(-2.6, 2.6), aspect="equal")
    axes.axis("off")
    axes.set_title(f"IsoScore {isoscore(turned).item():.2f}", fontsize=12, fontweight="bold")
    axes.text(0.5, -0.02, caption, transform=axes.transAxes, ha="center", va="top", fontsize=9.5, color=GREY)


def draw_stations(axes: Axes) -> None:
    """Draw the road from a text to the loss as a row of boxes with arrows between them."""
    axes.set(xlim=(0, len(STATIONS)), ylim=(0, 1))
    axes.axis("off")
    for index, (name, detail) in enumerate(STATIONS):
        color = ORANGE if index >= len(STATIONS) - 2 else BLUE
        box = {"boxstyle": "round,pad=0.45", "facecolor": "white", "edgecolor": color, "linewidth": 1.6}
        axes.text(index + 0.5, 0.74, name, ha="center", va="center", fontsize=10.5, fontweight="bold", bbox=box)
        axes.text(index + 0.5, 0.5, detail, ha="center", va="top", fontsize=9, color=GREY, linespacing=1.3)
        if index:
            arrow = {"arrowstyle": "-|>", "color": GREY, "linewidth": 1.3}
            axes.annotate("", (index + 0.11, 0.74), (index - 0.11, 0.74), arrowprops=arrow)


def main() -> None:
    """Write the picture."""
    mpl.rcParams["font.family"] = "DejaVu Sans"
    figure = plt.figure(figsize=(8.2, 3.7), facecolor="white")
    clouds, road = figure.subfigures(2, 1, height_ratios=(2.1, 1))
    for axes, (caption, deviation) in zip(clouds.subplots(1, 3), CLOUDS, strict=True):
        draw_cloud(axes, caption, deviation)
    clouds.subplots_adjust(left=0.02, right=0.98, bottom=0.1, top=0.88, wspace=0.05)
    draw_stations(road.subplots())
    road.subplots_adjust(left=0.0, right=1.0, bottom=0.0, top=1.0)
    figure.savefig(PICTURE, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
