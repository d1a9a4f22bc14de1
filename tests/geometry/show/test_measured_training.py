"""The file of a monitor is read as a training: by `istar.load`, by `istar.compare`, and by the command."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from torch import nn, optim, randn

import istar
from istar.cli.main import main
from istar.errors import UserError
from istar.monitoring.monitor import DEFAULT_MEASURES

pytestmark = pytest.mark.usefixtures("blank_figures")


def watch(path: Path, width: int = 6) -> pd.DataFrame:
    """Write the readings of a short training, with one of a probe, to a file, and return their table."""
    network = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 2))
    optimizer = optim.SGD(network.parameters(), lr=0.1)
    measures = [*DEFAULT_MEASURES, "isoscore"]
    with istar.Monitor(network, 2, modules=["0", "1"], measures=measures, gradients=True) as monitor:
        for step in range(8):
            if step == 3:
                monitor.measure([randn(30, 5)])
            network(randn(40, 5)).square().mean().backward()
            optimizer.step()
            monitor.step()
    monitor.save(path)
    return monitor.table


def select(table: pd.DataFrame, state: str) -> pd.DataFrame:
    return table[(table["state"] == state) & (table["source"] == "training")].set_index("step")


def test_a_monitor_is_loaded_as_a_training(tmp_path: Path) -> None:
    table = watch(tmp_path / "run.csv")
    geometry = istar.load(tmp_path / "run.csv")
    assert geometry.states == ("0", "1")
    loaded = geometry.table
    assert loaded.index.names == ["step", "text", "state"]
    expected = table.rename(columns={"source": "text"}).set_index(["step", "text", "state"])
    pd.testing.assert_frame_equal(
        loaded.sort_index(), expected[list(loaded)].astype(float).sort_index(), check_exact=True
    )
    assert expected.columns.difference(list(loaded)).tolist() == ["sequences"]
    last = select(table, "1").iloc[-1]
    assert geometry.measurements.all_texts["1"]["inter_sim"] == last["inter_sim"]
    interval = geometry.plot("inter_sim").axes[0]
    assert interval.get_xlabel() == "step"
    assert "sequences" in geometry.findings[0]
    assert "0 directions" not in " ".join(geometry.findings)
    with pytest.raises(UserError, match="copy it"):
        geometry.save(tmp_path / "page")


def test_monitors_are_compared_over_the_steps(tmp_path: Path) -> None:
    tables = {label: watch(tmp_path / f"{label}.csv", width) for label, width in (("base", 6), ("tuned", 9))}
    comparison = istar.compare({label: tmp_path / f"{label}.csv" for label in tables})
    base, tuned = (select(table, "1").iloc[-1] for table in tables.values())
    [row] = comparison.table.query("state == '1' and measure == 'inter_sim'").to_dict("records")
    assert row["method"] == "independent"
    assert row["difference"] == pytest.approx(tuned["inter_sim"] - base["inter_sim"], rel=1e-12)
    error = np.hypot(tuned["inter_sim_error"], base["inter_sim_error"])
    # 30 points of the probe are the fewest independent ones.
    assert row["high"] - row["difference"] == pytest.approx(stats.t.ppf(0.975, 29) * error, rel=1e-9)
    axes = comparison.plot("participation_ratio", "largest_activation").axes
    for axis, name in zip(axes, ("participation_ratio", "largest_activation"), strict=False):
        lines = {line.get_label(): line for line in axis.get_lines()}
        drawn = [line for line in lines.values() if len(line.get_xdata()) == 4]
        assert len(drawn) == 2
        for line, table in zip(drawn, tables.values(), strict=True):
            values = select(table, "1")[name]
            assert line.get_xdata() == pytest.approx(values.index.to_numpy())
            assert line.get_ydata() == pytest.approx(values.to_numpy(), rel=1e-12)


def test_the_command_compares_files_of_monitors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = watch(tmp_path / "a.csv")
    watch(tmp_path / "b.csv")
    assert main(["compare", f"{tmp_path}/a.csv", f"{tmp_path}/b.csv", "--out", str(tmp_path / "page")]) == 0
    output = capsys.readouterr().out
    last = select(table, "1").iloc[-1]
    [line] = [line for line in output.splitlines() if line.startswith("│ a ")]
    assert f"{last['inter_sim']:.4g}" in line
    assert "IntraSim" not in output
    page = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    assert "standard errors over the sequences of a reading" in page
    assert "no measures.json" not in page
    assert len(pd.read_csv(tmp_path / "page" / "trajectories.csv")) == 2 * len(table)


def test_other_files_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing\.csv: there is no such file or folder; expected the measures"):
        istar.load(tmp_path / "missing.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"other\.csv cannot be read"):
        istar.load(tmp_path / "other.csv")
