"""Executes a run in five steps: identify, prepare, assemble, train and record.

Each step takes what the step before it returns. A finished run ends after the first step. The other steps are in
`istar.finetune.execute.execute`, because they import Lightning and transformers, which takes seconds.
"""

import logging
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict

from rich.console import Console

from istar.drawing.terminal import with_wide_text
from istar.finetune.config import Config, WandbConfig
from istar.finetune.execute.extras import fast_imports
from istar.finetune.execute.identify import RunIdentity, identify, read_finished_run
from istar.finetune.execute.run_summary import build_run_table, describe_penalty
from istar.finetune.processes.ranks import find_rank
from istar.runs.record import RunRecord


def run(config: Config, console: Console | None = None, trial: str | None = None) -> RunRecord:
    """Train and evaluate a model as the config describes, and return the record of the results.

    If a run of an equal config is finished, its record is returned without training. An interrupted run resumes from
    its last checkpoint, with the same results as without the interruption.

    `result.json`, `config.yaml`, `predictions.jsonl`, `geometry.json`, `metrics.csv`, `model/` and `checkpoints/` are
    written into `<run.root>/<name>/`, but nothing is written before the data, the tokenizer and the model are loaded.

    Args:
        config: settings of the run, as `istar.finetune.config.schema.load` returns them.
        console: console that prints the table of results; None prints nothing.
        trial: address of the Optuna trial that may prune the run, as in `sweep.trial`; None outside of a search.

    Raises:
        UserError: for any mistake in the config, the data or the model that the user can correct, and if the hub
            refuses the upload of the finished run's model.
        StoppedError: if a signal has stopped the run; its checkpoints are kept.
    """
    start_time = time.perf_counter()
    if find_rank(os.environ):
        # Only rank 0 logs and prints, because all ranks would write the same.
        logging.getLogger("istar").setLevel(logging.ERROR)
        console = None
    identity = identify(config)
    if console is not None:
        console.print(describe_penalty(identity.key), soft_wrap=True)
    record = read_finished_run(identity.folder, identity.config)
    if record is None:
        with nullcontext() if "istar.finetune.execute.execute" in sys.modules else fast_imports():
            from istar.finetune.execute.execute import execute
        record, is_new = execute(identity, console, trial, start_time)
        if is_new:
            _push(identity, console)
            return record
    if isinstance(identity.config.logger, WandbConfig) and "WANDB_SWEEP_ID" in os.environ:
        from istar.finetune.training.wandb_logger import log_result_to_sweep_agent

        log_result_to_sweep_agent(identity.config, asdict(record), identity.folder)
    if console is not None:
        console.print(with_wide_text(build_run_table(record)))
        console.print(f"{identity.folder} is finished; run.overwrite=true runs it again", soft_wrap=True)
    _push(identity, console)
    return record


def _push(identity: RunIdentity, console: Console | None) -> None:
    name = identity.config.run.push_to_hub
    if name is None or find_rank(os.environ):
        return
    from istar.finetune.execute.model_card import push_to_hub

    address = push_to_hub(identity.folder / "model", name)
    if console is not None:
        console.print(address, soft_wrap=True)
