"""Estimates of a sweep's duration from finished runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from istar.finetune.sweeps.sweep_plan import estimate_duration, read_finished_runs
from istar.runs.record import RunRecord, write_result
from tests.finished_runs import make_finished_record


def make_timed_record(config: Any, seconds: float, examples: int = 100, status: str = "finished") -> RunRecord:
    record = make_finished_record("r", config, data={"train": examples}, timing={"total": seconds})
    return replace(record, status=status)


def test_the_most_alike_count(composed: Any) -> None:
    rte = composed("task=rte", "trainer.max_epochs=2")
    mrpc, cola = (replace(rte, task=replace(rte.task, name=name)) for name in ("mrpc", "cola"))
    base = composed("task=rte", "reg=none", "trainer.max_epochs=4")
    finished_runs = [
        make_timed_record(rte, 20), make_timed_record(rte, 40), make_timed_record(rte, 1000),
        make_timed_record(base, 8), make_timed_record(mrpc, 999999),
    ]  # fmt: skip
    # The median of RTE is 40 s for 2 x 100: 0.2 s per example and epoch. Without a penalty it is 8 s for 4 x 100.
    assert estimate_duration([(rte, 50), (base, 200)], finished_runs)[0] == pytest.approx(0.2 * 2 * 50 + 0.02 * 4 * 200)
    assert estimate_duration([(rte, 50)], finished_runs)[1] == "by finished runs of the same model, task and method"
    # There is no run with CosReg, so the estimate uses the runs of the task with other methods.
    cosreg = composed("task=rte", "reg=cosreg", "trainer.max_epochs=1")
    rates = sorted([0.1, 0.2, 5.0, 0.02])
    cosreg_estimate = estimate_duration([(cosreg, 10)], finished_runs)
    assert cosreg_estimate[0] == pytest.approx(10 * (rates[1] + rates[2]) / 2)
    assert cosreg_estimate[1] == "by finished runs of the same model and task"
    cola_estimate = estimate_duration([(cola, 10)], finished_runs)
    assert cola_estimate[1] == "by finished runs of the same model"


def test_nothing_known(composed: Any) -> None:
    rte = composed("task=rte")
    albert = replace(rte, model=replace(rte.model, name="albert"))
    assert estimate_duration([(rte, 10)], [])[0] is None
    assert estimate_duration([(rte, 10)], [make_timed_record(albert, 5)])[0] is None
    assert estimate_duration([], [])[0] == 0


def test_only_finished_runs_are_known(composed: Any, tmp_path: Path) -> None:
    config = composed("task=rte")
    for name, status, seconds in (("a", "finished", 3.0), ("b", "failed", 3.0), ("c", "pruned", 3.0)):
        write_result(make_timed_record(config, seconds, status=status), tmp_path / name)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "result.json").write_text("{")
    assert [record.status for record in read_finished_runs(tmp_path)] == ["finished"]
