"""Bounds of measures from a file and from calls, and the lines on what is beyond them."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import scipy.stats

from istar.errors import UserError
from istar.geometry.checks import read_checks
from istar.geometry.geometry import Geometry
from tests.geometry.synthetic import make_measurements

LOW, HIGH = (0.2 + sign * scipy.stats.t.ppf(0.975, 9) * 0.01 for sign in (-1, 1))
"""The 95% interval of the IsoScore 0.2 of layer 1, from the standard error 0.01 of 10 groups."""


def make_geometry(**measures: float) -> Geometry:
    """Return the geometry of one text, in which these measures of layer 1 have these values."""
    measured = make_measurements(texts=["text"])
    measured.sources["text"]["layer_1"] |= {"isoscore": 0.2, "isoscore_error": 0.01, **measures}
    return Geometry(measured)


@pytest.mark.parametrize(
    ("bounds", "trips"),
    [
        ((HIGH + 1e-6, None), True),
        ((HIGH - 1e-6, None), False),
        ((None, LOW - 1e-6), True),
        ((None, LOW + 1e-6), False),
        ((HIGH - 1e-6, HIGH + 1), False),
        ((-1, 1), False),
    ],
)
def test_a_bound_trips_only_if_the_whole_interval_is_beyond_it(bounds: Any, trips: bool) -> None:
    violations = make_geometry().check(isoscore=bounds, states="layer_1")
    assert len(violations) == trips
    for violation in violations:
        assert (violation.measure, violation.state, violation.value) == ("isoscore", "layer_1", 0.2)
        assert (violation.low, violation.high) == pytest.approx((LOW, HIGH), rel=1e-12)
        assert violation.bounds == bounds


def test_the_lines() -> None:
    geometry = make_geometry(rank_me=3.0, nesum=math.nan)
    lines = [str(violation) for violation in geometry.check({"isoscore": (0.5, 0.75)}, states="layer_1")]
    assert lines == [
        f"isoscore of layer_1 is 0.2, with a 95% interval from {LOW:.4g} to {HIGH:.4g}; expected at least 0.5 and at "
        "most 0.75"
    ]
    [line] = geometry.check(rank_me=(4, None), states="layer_1")
    assert str(line) == "rank_me of layer_1 is 3, without a standard error; expected at least 4"
    [line] = geometry.check(nesum=(None, 1e9), states="layer_1")
    assert str(line) == "nesum of layer_1 is undefined; expected at most 1e+09"
    several = Geometry(make_measurements()).check(isoscore=(9, None), states=["layer_1", "final_*"])
    assert [violation.state for violation in several] == [
        *("news, layer_1", "talk, layer_1", "combined, layer_1"),
        *("news, final_norm", "talk, final_norm", "combined, final_norm"),
    ]


def test_checks_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "checks.yaml"
    path.write_text("layer_*: {isoscore: [0.25, null], inter_sim: [null, 0.5]}\nfinal_norm:\n  isoscore: [1, 2]\n")
    checks = read_checks(path)
    assert checks == {
        "layer_*": {"isoscore": (0.25, None), "inter_sim": (None, 0.5)}, "final_norm": {"isoscore": (1.0, 2.0)},
    }  # fmt: skip
    violations = make_geometry().check(checks)
    assert [(item.measure, item.state) for item in violations] == [("isoscore", "layer_1"), ("isoscore", "final_norm")]
    with pytest.raises(UserError, match="bounds by state do not go with other bounds"):
        make_geometry().check(checks, states="layer_1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the content is None; expected .*, such as"),
        ("- 1", r"the content is \[1\]; expected .*, such as"),
        ("layer_1: 3", "layer_1 is 3; expected .*, such as"),
        ("layer_1: {isocore: [0, 1]}", "no measure 'isocore'; did you mean isoscore"),
        ("layer_1: {partition_isotropy_both: [0, 1]}", "no measure 'partition_isotropy_both'"),
        ("layer_1: {1: [0, 1]}", "no measure '1'"),
        *(
            (f"layer_1: {{isoscore: {bounds}}}", "the bounds of isoscore are .*; expected the smallest and the largest")
            for bounds in ("[1]", "[0, 1, 2]", "[2, 1]", "[null, null]", "[.nan, 1]")
        ),
        *((f"layer_1: {{isoscore: {bounds}}}", "expected .*float") for bounds in ("0.5", "[a, 1]", "[true, 2]", "ab")),
        ("a: [", "not YAML"),
    ],
)
def test_a_malformed_file_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "checks.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as error:
        read_checks(tmp_path / "checks.yaml")
    assert "\n" not in str(error.value)
    assert str(tmp_path / "checks.yaml") in str(error.value)


@pytest.mark.parametrize(
    ("bounds", "states", "message"),
    [
        ({"isocore": (0, 1)}, "*", r"isocore was not measured; did you mean isoscore\?$"),
        ({"isoscore_error": (0, 1)}, "*", "isoscore_error was not measured"),
        ({"isoscore": 1}, "*", "the bounds of isoscore are 1; expected"),
        ({"isoscore": (0, 1)}, "layr_*", r"no state matches 'layr_\*'; did you mean layer_2\?; expected one of embedd"),
    ],
)
def test_a_wrong_call_is_one_line(bounds: Any, states: str, message: str) -> None:
    with pytest.raises(UserError, match=re.compile(message)):
        make_geometry().check(bounds, states=states)
