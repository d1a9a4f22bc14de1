"""The last step of a run: writes what the run leaves in its folder, `result.json` last."""

import json
import time
from dataclasses import asdict, replace
from typing import Any

from istar.drawing.rendering import render
from istar.files.outputs import run_output
from istar.files.writing import atomic_write, write_text
from istar.finetune.config.schema import to_dict
from istar.finetune.execute.assemble import CHECKPOINTS_FOLDER, Job
from istar.finetune.execute.model_card import MODEL_CARD, make_model_card
from istar.finetune.execute.provenance import describe_code, describe_hardware, installed_versions
from istar.finetune.execute.run_summary import build_isotropy_plot
from istar.finetune.tasks.evaluation import write_submission
from istar.finetune.tasks.loading import count_overlap
from istar.finetune.training.checkpoints import remove_old_checkpoints
from istar.finetune.training.final_geometry import EvaluationPasses, measure_validation_geometry
from istar.finetune.training.loggers import log_result
from istar.finetune.training.module import all_gather_object, merge_outputs
from istar.finetune.training.sharded_training import gather_weights
from istar.hidden_states.sharding import is_sharded_module
from istar.models import pretrained
from istar.runs.record import GEOMETRY, RunRecord, read_start_time, write_predictions, write_result

ISOTROPY_PICTURE = "isotropy.png"
READINGS, READINGS_PICTURE = "geometry_over_steps.csv", "geometry_over_steps.png"


def start_record(job: Job) -> RunRecord:
    """Return the record of a run before its training; its status is "failed" until `record_results` completes it."""
    return RunRecord(
        job.identity.folder.name,
        "failed",
        to_dict(job.identity.config),
        job.identity.key,
        timing={"began": read_start_time(job.identity.folder)},
        versions=installed_versions(),
        data_commit=job.prepared.data.examples.commit,
        **describe_code(),
        **describe_hardware(job.trainer.strategy.root_device, job.trainer.world_size),
    )


def record_results(job: Job, record: RunRecord, timing: dict[str, Any], start_time: float) -> RunRecord:
    """Complete the record of `start_record` after the training, and write it and all outputs into the run's folder.

    All ranks call this together; only rank 0 writes. `timing` has the seconds of the training's phases by name, and
    `start_time` is the value of `time.perf_counter()` at the start of the run.
    """
    status = "pruned" if job.tracks.history.pruned else "finished"
    record = replace(record, status=status, **_make_result_fields(job))
    _save_outputs(job, record)
    record = replace(record, timing={**record.timing, "total": time.perf_counter() - start_time, **timing})
    if not job.trainer.is_global_zero:
        return record
    if job.tracks.checkpoints is not None:
        remove_old_checkpoints(job.identity.folder / CHECKPOINTS_FOLDER, job.tracks.checkpoints.best_weights_path())
    with atomic_write(job.identity.folder / ISOTROPY_PICTURE) as file:
        file.write(render(build_isotropy_plot(record), ["png"])["png"])
    if job.tracks.watching is not None:
        job.tracks.watching.save(job.identity.folder / READINGS, job.identity.folder / READINGS_PICTURE)
    # result.json is written last, because a folder that has it counts as a finished run.
    job.tracks.metrics_file.finalize("success")
    log_result(job.trainer, asdict(record))
    write_result(record, job.identity.folder)
    return record


def _save_outputs(job: Job, record: RunRecord) -> None:
    config = job.identity.config
    if config.task.submission:
        _predict_and_write_submission(job)
    if job.trainer.is_global_zero:
        for suffix, evaluation in job.tracks.history.best_evaluations.items():
            if evaluation.predictions:  # language models have none
                name = f"predictions_{suffix}.jsonl" if suffix else "predictions.jsonl"
                write_predictions(job.identity.folder / name, evaluation.predictions)
    if config.run.save_model:
        _save_model(job, record)
    # The geometry comes last, because it is undefined for states that are not finite.
    if config.run.geometry:
        _write_geometry(job)


def _save_model(job: Job, record: RunRecord) -> None:
    """Save the model with its card on rank 0; of a sharded model, all processes gather the weights together."""
    weights = gather_weights(job.module.model)
    if not job.trainer.is_global_zero:
        return
    output = run_output(job.identity.folder)
    draft = output.make_draft()
    pretrained.save(job.module.model, job.prepared.tokenizer, draft, weights)
    penalty = job.module.penalty
    citation = penalty.penalty.citation if penalty is not None and penalty.penalty.weight else ""
    write_text(draft / MODEL_CARD, make_model_card(record, job.identity.spec, citation))
    output.write({}, {"model": draft})


def _write_geometry(job: Job) -> None:
    """Measure the model on the first validation set, and write `geometry.json`, on rank 0.

    With a sharded model, all processes compute the states together.
    """
    if not (job.trainer.is_global_zero or is_sharded_module(job.module.model)):
        return
    config, data_module = job.identity.config, job.data_module
    zeta = None if config.trainer.fast_dev_run else config.run.isotropy_zeta
    job.tracks.progress.show("measuring")
    passes = EvaluationPasses(job.trainer, job.module, data_module.collate, config.data.eval_batch_size)
    geometry = measure_validation_geometry(passes, data_module.validation[0], data_module.train, zeta, config.seed)
    if job.trainer.is_global_zero:
        write_text(job.identity.folder / GEOMETRY, json.dumps(geometry) + "\n")


def _predict_and_write_submission(job: Job) -> None:
    job.tracks.progress.show("predicting")
    outputs: Any = job.trainer.predict(job.module, datamodule=job.data_module)
    # Lightning returns a list of batches for a single test set, and a list of such lists for several.
    evaluators = job.prepared.data.test_evaluators
    outputs_by_set = outputs if len(evaluators) > 1 else [outputs]
    test_sets = zip(job.prepared.data.examples.test_sets, evaluators, outputs_by_set, strict=True)
    for split, evaluator, set_outputs in test_sets:
        evaluation = evaluator(merge_outputs(all_gather_object(merge_outputs(set_outputs))))
        if job.trainer.is_global_zero:
            write_submission(job.identity.spec, split, evaluation.predictions, job.identity.folder / "submission")


def _make_result_fields(job: Job) -> dict[str, Any]:
    spec, history, examples = job.identity.spec, job.tracks.history, job.prepared.data.examples
    best_entry = history.epochs[history.best_epoch - 1]
    metrics = best_entry["metrics"]
    examples_by_set = {split.name: rows for split, rows in zip(spec.validation, examples.validation, strict=True)}
    baseline = job.prepared.data.compute_baseline(
        spec,
        job.data_module.collate,
        job.identity.config.data.eval_batch_size,
        max(job.prepared.tokenizer.get_vocab().values()) + 1,
    )
    data: dict[str, Any] = {"validation": {name: len(rows) for name, rows in examples_by_set.items()}}
    if examples.stream is None:
        data["train"] = len(examples.train)
        data["overlap"] = {name: count_overlap(spec, examples.train, rows) for name, rows in examples_by_set.items()}
    return {
        "headline": {"metric": spec.headline, "value": metrics[spec.headline], "epoch": best_entry["epoch"]},
        "selection": {
            "set": spec.selection_set.name, "metric": spec.selection_metric, "value": metrics[spec.selection_metric]
        },
        "metrics": metrics,
        "metrics_before": history.before_training["metrics"],
        "baseline": baseline,
        "collapsed": {split.name: history.best_evaluations[split.suffix].collapsed for split in spec.validation},
        "isotropy": {
            "before": history.before_training["isotropy"],
            "after": best_entry["isotropy"],
            "points": job.tracks.isotropy.num_points,
        },
        "epochs": history.epochs,
        "skipped_steps": job.module.step_guard.num_skipped,
        "data": data,
    }  # fmt: skip
