"""The model card of a run, `model/README.md`, and the upload of the model to the Hugging Face hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from istar.drawing.page_tables import make_markdown_table
from istar.errors import UserError, shorten
from istar.models.hub import explain_refusal, find_hub_problem, is_hub_id
from istar.runs.labels import shorten_model_name
from istar.runs.names import axis_label, format_metric
from istar.runs.record import RunRecord
from istar.runs.tasks import TaskSpec

MODEL_CARD = "README.md"
_PIPELINES = {
    "classification": ("text-classification", "AutoModelForSequenceClassification"),
    "regression": ("text-classification", "AutoModelForSequenceClassification"),
    "span": ("question-answering", "AutoModelForQuestionAnswering"),
    "causal_lm": ("text-generation", "AutoModelForCausalLM"),
    "masked_lm": ("fill-mask", "AutoModelForMaskedLM"),
}
"""Pipeline of the hub and class of transformers, by kind of task."""
_HYPERPARAMETERS = ("optim.name", "optim.lr", "data.batch_size", "trainer.precision", "trainer.max_epochs", "seed")
_CITATION = """@software{istar,
  title = {istar: fine-tuning with, and measuring of, the geometry of language-model representations},
  author = {{The istar maintainers}}
}"""


def make_model_card(record: RunRecord, spec: TaskSpec, citation: str) -> str:
    """Return the model card of a finished run: its task, penalty, scores and isotropy, and how to load the model.

    The metadata contain the scores as evaluation results, with the data set and the split that they are from.
    `citation` is the BibTeX entry of the penalty's paper, or empty.
    """
    config = record.config
    pipeline, model_class = _PIPELINES[spec.kind]
    base, first_split = config["model"]["name"], spec.validation[0]
    is_from_hub = spec.hub is not None and config["task"].get("data_dir") is None
    base_model = base if config["model"]["pretrained"] and is_hub_id(base) else None
    name = f"{shorten_model_name(base)}-{spec.name}"
    library = "peft" if config["model"]["lora"] else "transformers"
    data_set, configuration = (spec.hub if is_from_hub else None) or (spec.name, None)
    results = []
    for metric, value in record.metrics.items():
        suffixed = (split for split in spec.validation if split.suffix and metric.endswith(split.suffix))
        split = next(suffixed, first_split)
        results.append(
            EvalResult(
                task_type=pipeline, dataset_type=data_set, dataset_name=spec.name, dataset_config=configuration,
                dataset_split=split.name, dataset_revision=record.data_commit,
                metric_type=metric.removesuffix(f"_{split.suffix}"), metric_value=value,
            )
        )  # fmt: skip
    data = ModelCardData(
        base_model=base_model,
        datasets=[data_set] if is_from_hub else None,
        eval_results=results,
        library_name=library,
        metrics=list(dict.fromkeys(result.metric_type for result in results)),
        model_name=name,
        pipeline_tag=pipeline,
        tags=["istar", "isotropy", *([str(config["reg"]["name"])] if citation else [])],
    )
    layers = {"0": "embeddings", "union": "all layers together"}
    before, after = record.isotropy["before"], record.isotropy["after"]
    source = f"data set `{data_set}`" if is_from_hub else "local or generated data"
    start = f"`{base_model or shorten_model_name(base)}`" if config["model"]["pretrained"] else "random weights"
    # peft lacks a class for masked language models; transformers loads their adapters itself.
    loader = "transformers" if spec.kind == "masked_lm" else library
    auto_class = f"AutoPeft{model_class.removeprefix('Auto')}" if loader == "peft" else model_class
    parts = [
        f"# {name}",
        f"Trained on the task {spec.name} ({source}) from {start} by istar {record.versions.get('istar', '')}. "
        f"Penalty on the hidden states: {record.key.label}.",
        "## Scores",
        f"Validation split `{first_split.name}`, epoch {record.headline['epoch']}, which was chosen by "
        f"{record.selection['metric']} on `{record.selection['set']}`.",
        make_markdown_table(
            [("metric", "score", "without the input")]
            + [
                (axis_label(metric), format_metric(metric, value), format_metric(metric, record.baseline.get(metric)))
                for metric, value in record.metrics.items()
            ]
        ),
        "## Isotropy",
        f"IsoScore of {record.isotropy['points']:,} tokens of the same split: 1 if the hidden states vary equally in "
        "all directions, 0 if they vary in one.",
        make_markdown_table(
            [("layer", "before training", "after")]
            + [(layers.get(layer, layer), f"{before[layer]:.4f}", f"{after[layer]:.4f}") for layer in after]
        ),
        "## Use",
        f"```python\nfrom transformers import AutoTokenizer\nfrom {loader} import {auto_class}\n\n"
        f'model = {auto_class}.from_pretrained("<this model>")\n'
        'tokenizer = AutoTokenizer.from_pretrained("<this model>")\n```',
        "## Training",
        make_markdown_table([("setting", "value"), *_list_settings(record)]),
        "## Citations",
        "\n\n".join(f"```bibtex\n{entry}\n```" for entry in (_CITATION, citation) if entry),
    ]
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"))


def _list_settings(record: RunRecord) -> Iterator[tuple[str, str]]:
    for name, value in record.config["reg"].items():
        if value is not None:
            yield f"`reg.{name}`", str(value)
    for key in _HYPERPARAMETERS:
        group, _, name = key.rpartition(".")
        yield f"`{key}`", str((record.config[group] if group else record.config)[name])
    size = f", {record.data['train']:,} examples" if "train" in record.data else ""  # unknown for a stream
    yield "`data`", f"fingerprint {record.key.data[:12]}{size}"
    for name, version in record.versions.items():
        yield name, version


def check_login(name: str) -> None:
    """Raise a `UserError` unless a model can be uploaded: a valid repository name, and a token that the hub accepts."""
    with _explain_errors(name):
        validate_repo_id(name)
        HfApi().whoami()


def push_to_hub(folder: Path, name: str, *, private: bool = True) -> str:
    """Upload the folder of a saved model to a repository of the hub, created if absent, and return its address.

    Raises a `UserError` if the folder lacks a model card, or the hub cannot be reached or refuses the upload.
    """
    if not (folder / MODEL_CARD).is_file():
        raise UserError(f"{folder} has no {MODEL_CARD}; expected the model of a finished run with run.save_model=true")
    with _explain_errors(name):
        api = HfApi()
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message="Model trained by istar")
    return str(address)


@contextmanager
def _explain_errors(name: str) -> Iterator[None]:
    if problem := find_hub_problem():
        raise UserError(f"{name}: nothing can be uploaded, because {problem}")
    try:
        yield
    except HFValidationError as error:
        raise UserError(f"{name}: expected the name of a repository, such as <user>/<model>") from error
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError) as error:
        log_in = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"
        reason = explain_refusal(error, name, "model") or f"{shorten(error)}; {log_in}"
        raise UserError(f"{name}: the hub refuses the upload: {reason}") from error
