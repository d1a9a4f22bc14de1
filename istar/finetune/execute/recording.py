"""The last step of a run: writes what the run leaves in its folder, `result.json` last."""

import json
import time
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from istar.drawing.rendering import render
from istar.files.outputs import run_output
from istar.files.writing import atomic_write, write_text
from istar.finetune.config.schema import to_dict
from istar.finetune.execute.assemble import CHECKPOINTS_FOLDER, Job
from istar.finetune.execute.model_card import MODEL_CARD, make_model_card
from istar.finetune.execute.provenance import describe_code, describe_hardware, installed_versions
from istar.finetune.execute.run_summary import build_geometry_plot, build_isotropy_plot
from istar.finetune.tasks.evaluation import write_submission
from istar.finetune.tasks.loading import count_overlap
from istar.finetune.training import merge_outputs
from istar.finetune.training.checkpoints import remove_old_checkpoints
from istar.finetune.training.final_geometry import (
    EvaluationPasses,
    compute_isoscore_star_by_layer,
    measure_validation_geometry,
)
from istar.finetune.training.loggers import log_result
from istar.finetune.training.module import all_gather_object
from istar.finetune.training.sharded_training import gather_weights
from istar.hidden_states.sharding import is_sharded_module
from istar.models import pretrained
from istar.runs.record import (
    GEOMETRY,
    RunRecord,
    read_start_time,
    write_predictions,
    write_result,
)

ISOTROPY_PICTURE = "isotropy.png"
GEOMETRY_PICTURE = "geometry_over_steps.png"


def start_record(job: Job) -> RunRecord:
    """Return the record of a run before its training, with the status "failed"."""
    return RunRecord(
        job.folder.name,
        "failed",
        to_dict(job.config),
        job.identity.key,
        timing={"began": read_start_time(job.folder)},
        versions=installed_versions(),
        data_commit=job.data.examples.commit,
        **describe_code(),
        **describe_hardware(job.trainer.strategy.root_device, job.trainer.world_size),
    )


def record_results(job: Job, record: RunRecord, timing: dict[str, Any], start_time: float) -> RunRecord:
    """Complete the record of `start_record` after the training, and write it and all outputs into the run's folder.

    All ranks call this together; only rank 0 writes. `timing` has the seconds of the training's phases by name, and
    `start_time` is the value of `time.perf_counter()` at the start of the run.
    """
    status = "pruned" if job.history.pruned else "finished"
    record = replace(record, status=status, **_make_result_fields(job))
    _save_outputs(job, record)
    record = replace(record, timing={**record.timing, "total": time.perf_counter() - start_time, **timing})
    if not job.trainer.is_global_zero:
        return record
    if job.checkpoints is not None:
        remove_old_checkpoints(job.folder / CHECKPOINTS_FOLDER, job.checkpoints.best_weights_path())
    plot_by_name = {ISOTROPY_PICTURE: build_isotropy_plot(record)}
    if job.config.trainer.measure_every_n_steps is not None:
        plot_by_name[GEOMETRY_PICTURE] = build_geometry_plot(job.metrics_file.read_rows())
    for name, plot in plot_by_name.items():
        with atomic_write(job.folder / name) as file:
            file.write(render(plot, ["png"])["png"])
    # result.json is written last, because a folder that has it counts as a finished run.
    job.metrics_file.finalize("success")
    log_result(job.trainer, asdict(record))
    write_result(record, job.folder)
    return record


def _save_outputs(job: Job, record: RunRecord) -> None:
    """Write the predictions of the best epoch and, if requested, the submission, the geometry and the model."""
    if job.config.task.submission:
        _predict_and_write_submission(job)
    # Of a sharded model, all processes gather the weights and compute the states together.
    weights = gather_weights(job.module.model) if job.config.run.save_model else None
    if job.trainer.is_global_zero:
        _write_predictions_and_model(job, record, weights)
    # The geometry comes last, because it is undefined for states that are not finite.
    takes_part = job.trainer.is_global_zero or is_sharded_module(job.module.model)
    geometry = _measure_geometry(job) if takes_part and job.config.run.geometry else None
    if geometry is not None and job.trainer.is_global_zero:
        write_text(job.folder / GEOMETRY, json.dumps(geometry) + "\n")


def _write_predictions_and_model(job: Job, record: RunRecord, weights: dict[str, Tensor] | None) -> None:
    for suffix, evaluation in job.history.best_evaluations.items():
        if not evaluation.predictions:
            continue  # language models have none
        path = job.folder / (f"predictions_{suffix}.jsonl" if suffix else "predictions.jsonl")
        write_predictions(path, evaluation.predictions)
    if job.config.run.save_model:
        output = run_output(job.folder)
        draft = output.make_draft()
        pretrained.save(job.module.model, job.tokenizer, draft, weights)
        penalty = job.module.penalty
        citation = penalty.penalty.citation if penalty is not None and penalty.penalty.weight else ""
        write_text(draft / MODEL_CARD, make_model_card(record, job.spec, citation))
        output.write({}, {"model": draft})


def _measure_geometry(job: Job) -> dict[str, Any]:
    """Return the geometry of the model on the first validation set, as `geometry.json` stores it."""
    config, validation = job.config, job.data.validation[0]
    job.progress.show("measuring")
    passes = EvaluationPasses(job.trainer, job.module, job.data_module.collate, config.data.eval_batch_size)
    geometry = measure_validation_geometry(passes, validation)
    if config.run.isotropy_zeta is not None and not config.trainer.fast_dev_run:
        geometry["isoscore_star"] = compute_isoscore_star_by_layer(
            passes, validation, job.data.train, config.run.isotropy_zeta, config.seed
        )
    return geometry


def _predict_and_write_submission(job: Job) -> None:
    job.progress.show("predicting")
    outputs: Any = job.trainer.predict(job.module, datamodule=job.data_module)
    # Lightning returns a list of batches for a single test set, and a list of such lists for several.
    evaluators = job.data.test_evaluators
    outputs_by_set = outputs if len(evaluators) > 1 else [outputs]
    test_sets = zip(job.data.examples.test_sets, evaluators, outputs_by_set, strict=True)
    for split, evaluator, set_outputs in test_sets:
        evaluation = evaluator(merge_outputs(all_gather_object(merge_outputs(set_outputs))))
        if job.trainer.is_global_zero:
            write_submission(job.spec, split, evaluation.predictions, job.folder / "submission")


def _make_result_fields(job: Job) -> dict[str, Any]:
    """Return the fields of `RunRecord` that are known only after training, by name."""
    spec, history, examples = job.spec, job.history, job.data.examples
    train_examples, best_entry = examples.train, history.epochs[history.best_epoch - 1]
    examples_by_set = {split.name: rows for split, rows in zip(spec.validation, examples.validation, strict=True)}
    baseline = job.data.compute_baseline(
        spec,
        job.data_module.collate,
        job.config.data.eval_batch_size,
        max(job.tokenizer.get_vocab().values()) + 1,
    )
    data: dict[str, Any] = {
        "validation": {name: len(rows) for name, rows in examples_by_set.items()},
    }
    if examples.stream is None:
        data["train"] = len(train_examples)
        data["overlap"] = {name: count_overlap(spec, train_examples, rows) for name, rows in examples_by_set.items()}
    return {
        "headline": {
            "metric": spec.headline,
            "value": best_entry["metrics"][spec.headline],
            "epoch": best_entry["epoch"],
        },
        "selection": {
            "set": spec.selection_set.name,
            "metric": spec.selection_metric,
            "value": best_entry["metrics"][spec.selection_metric],
        },
        "metrics": best_entry["metrics"],
        "metrics_before": history.before_training["metrics"],
        "baseline": baseline,
        "collapsed": {split.name: history.best_evaluations[split.suffix].collapsed for split in spec.validation},
        "isotropy": {
            "before": history.before_training["isotropy"],
            "after": best_entry["isotropy"],
            "points": job.geometry.num_points,
        },
        "epochs": history.epochs,
        "skipped_steps": job.module.step_guard.num_skipped,
        "data": data,
    }
