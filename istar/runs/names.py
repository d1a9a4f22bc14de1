"""Names of methods and metrics, how metrics are compared and shown, and the names of measures in logs and files."""

import math

TINY = "tiny"
"""Name of istar's tiny BERT, as in conf/model/tiny.yaml."""
BASE = "base"
"""Method of runs without a penalty."""
METHOD_NAMES = {
    BASE: "Base",
    "istar": "I-STAR",
    "cosreg": "CosReg",
    "vicreg": "VICReg",
    "decorrelation": "decorrelation",
    "gor": "GOR",
    "uniformity": "uniformity",
    "kurtosis": "kurtosis",
    "simctg": "SimCTG",
    "sigreg": "SIGReg",
    "spectrum": "spectrum control",
    "random_direction": "random direction",
    "weight_decay": "weight decay",
    "dropout": "dropout",
}
"""Names of methods in tables, without their settings, by `reg.name` or `BASE`."""
BASE_LABEL = METHOD_NAMES[BASE]
"""Name of training without a penalty in tables and figures."""
_LOSSES = ("loss", "perplexity")
"""Metrics to minimize. All others are fractions or correlations to maximize."""
_CORRELATIONS = ("matthews_correlation", "pearson", "spearman")
COMBINED = "combined"
"""Name, in the place of a text's, for measures over all texts together."""
FINAL_NORM = "final_norm"
"""Name of the state after a final normalization; layer L is the state before it."""
POOLED = "pooled"
"""Name of the state that a SentenceTransformer returns for a sentence, which may be normalized."""
TRAINING, PROBE = "training", "probe"
"""Sources of a monitor's readings: the passes of the training, and batches given to `istar.Monitor.measure`."""
GRADIENT_NORM = "gradient_norm"
"""Column of a monitor's readings with the norm of the gradient with respect to a state."""
TRAJECTORY_KEYS = ("model", "revision", "step", "weights", "source", "layer")
"""Columns that identify a row of a trajectory, the file of a training's measures; all other columns are measures."""


def is_lower_better(metric: str) -> bool:
    """Return whether lower values of a metric are better; the metric may have the suffix of a validation set.

    >>> is_lower_better("perplexity"), is_lower_better("loss_held_out"), is_lower_better("accuracy")
    (True, True, False)
    """
    return metric in _LOSSES or metric.startswith(tuple(f"{name}_" for name in _LOSSES))


def merit(metric: str, value: float) -> float:
    """Return a number that is higher for better values of a metric: the value, or minus the value of a loss.

    >>> merit("accuracy", 0.8), merit("loss", 0.8)
    (0.8, -0.8)
    """
    return -value if is_lower_better(metric) else value


def scale_for_display(metric: str, value: float) -> float:
    """Return the number that tables and figures show: a fraction in percent, a loss or a perplexity as it is.

    >>> scale_for_display("accuracy", 0.8), scale_for_display("perplexity", 31.5)
    (80.0, 31.5)
    """
    return value if is_lower_better(metric) else 100 * value


def axis_label(metric: str) -> str:
    """Return the name of a metric with the unit of `scale_for_display`.

    >>> axis_label("accuracy"), axis_label("perplexity")
    ('accuracy, percent', 'perplexity')
    """
    return metric if is_lower_better(metric) else f"{metric}, percent"


def metric_range(metric: str) -> tuple[float, float]:
    """Return the smallest and the largest possible number of `scale_for_display`.

    >>> metric_range("accuracy"), metric_range("spearman"), metric_range("perplexity")
    ((0, 100), (-100, 100), (0, inf))
    """
    if is_lower_better(metric):
        return 0, math.inf
    return -100 if metric.startswith(_CORRELATIONS) else 0, 100


def isotropy_key(layer: str) -> str:
    """Return the key that logs use for IsoScore on the validation data.

    `layer` is a number, 0 for the embedding output, `final_norm`, or `union` for layers 1 to L together.

    >>> isotropy_key("0"), isotropy_key("2"), isotropy_key("union")
    ('isotropy/embeddings/isoscore', 'isotropy/layer_2/isoscore', 'isotropy/isoscore')
    """
    if layer == "union":
        return "isotropy/isoscore"
    state_names = {"0": "embeddings", FINAL_NORM: FINAL_NORM}
    return f"isotropy/{state_names.get(layer, f'layer_{layer}')}/isoscore"


def reading_key(source: str, state: str, measure: str) -> str:
    """Return the key that logs use for a measure of a state in a reading of a monitor.

    >>> reading_key(TRAINING, "layer_2", "inter_sim"), reading_key(PROBE, "embeddings", "inter_sim")
    ('geometry/layer_2/inter_sim', 'probe/embeddings/inter_sim')
    """
    return f"{'geometry' if source == TRAINING else source}/{state}/{measure}"


def format_metric(metric: str, value: float | None) -> str:
    """Format the value of a metric with two decimals, scaled by `scale_for_display`, or None as a dash."""
    return "-" if value is None else f"{scale_for_display(metric, value):.2f}"


def format_number(value: float | None, format_spec: str) -> str:
    """Format a number, None and NaN as a dash; a negative number that rounds to zero loses its minus sign.

    >>> format_number(-0.001, ".2f"), format_number(math.nan, "+.2f")
    ('0.00', '-')
    """
    if value is None or math.isnan(value):
        return "-"
    text = format(value, format_spec)
    rounds_to_zero = not text.strip("-0.")
    return text.replace("-", "+" if "+" in format_spec else "") if rounds_to_zero else text


def count_decimals(half_width: float | None) -> int:
    """Return how many decimals a number needs: two significant digits of its half-width or deviation, but at most 4.

    Without a half-width (None, NaN or 0) there are two decimals.

    >>> count_decimals(0.7), count_decimals(5.2), count_decimals(37.0), count_decimals(3.7e-9), count_decimals(None)
    (2, 1, 0, 4, 2)
    """
    if half_width is None or not half_width > 0:
        return 2
    return min(4, max(0, 1 - math.floor(math.log10(half_width))))


def format_difference(difference: float | None, low: float | None, high: float | None) -> tuple[str, str]:
    """Format a difference and its interval with equal decimals, such as `+0.6` and `-3.1 to +4.3`, None as a dash."""
    if low is None or high is None:
        return format_number(difference, "+.2f"), "-"
    format_spec = f"+.{count_decimals((high - low) / 2)}f"
    difference_text, low_text, high_text = (format_number(value, format_spec) for value in (difference, low, high))
    return difference_text, f"{low_text} to {high_text}"
