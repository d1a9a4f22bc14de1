"""The catalogue of all measures: what each one is, how it is computed, what it costs and what it does not see.

In the costs, n is the number of points, d the number of dimensions, and "types" the size of the vocabulary. Memory is
what an accumulator holds beyond the points of a batch, in numbers.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from istar.errors import UserError, did_you_mean

Subject = Literal["layers", "matrices", "final_norm"]


@dataclass(frozen=True)
class Measure:
    """The description of a measure in the catalogue of all measures.

    Attributes:
        name: key in `measures.json`.
        subject: what is measured: hidden states of the `layers`, rows of the embedding `matrices`, or the gain and bias
            of the `final_norm`. A name may occur once for each subject.
        title: name in texts and figures.
        formula: formula in words and symbols.
        paper: source of the definition.
        range: smallest and largest value.
        convention: what papers differ in: whether points are centered, what a point is, which average or logarithm.
        cost: time and memory.
        blind_to: what the value does not show, or is distorted by.
        function: public function or accumulator that computes it.
    """

    name: str
    subject: Subject
    title: str
    formula: str
    paper: str
    range: str
    convention: str
    cost: str
    blind_to: str
    function: str


_SPECTRUM_COST = "time O(n d² + d³), memory O(d²), from Moments"
_PASS_COST = "time O(n d), memory O(d)"
_TIMKEY = "Timkey and van Schijndel (2021)"
_ETHAYARAJH = "Ethayarajh (2019)"
_MACHINA = "Machina and Mercer (2024)"
_BIS = "Biś, Podkorytov and Liu (2021)"

_LAYER_MEASURES = (
    Measure(
        "tokens",
        "layers",
        "tokens",
        "number n of tokens",
        "",
        "≥ 0",
        "without padding",
        "time O(1), memory O(1)",
        "how many of the tokens are independent",
        "istar.measures.moments.Moments",
    ),
    Measure(
        "isoscore",
        "layers",
        "IsoScore*, ζ = 0",
        "(tr(S)² / ‖S‖²_F - 1) / (d - 1), S the covariance",
        "Rudman et al. (2022); Rudman and Eickhoff (2024), Algorithm 1",
        "[0, 1]",
        "centered; tokens",
        "time O(n d²), memory O(d²), from Moments",
        "a common direction (the mean); too small for fewer than about 10 d points",
        "istar.measures.isoscore.isoscore",
    ),
    Measure(
        "isoscore_unbiased",
        "layers",
        "unbiased IsoScore",
        "IsoScore with unbiased estimates of tr(S²) and tr(S)²",
        "Himeno and Yamada (2014)",
        "[0, ∞)",
        "centered; tokens",
        "time O(n d²), memory O(d²), from FourthMoments",
        "a common direction; the dependence of tokens of one text",
        "istar.measures.isoscore.isoscore_unbiased",
    ),
    Measure(
        "isoscore_by_sentence",
        "layers",
        "IsoScore by sentence",
        "IsoScore with estimates of tr(S²) and tr(S)² from points of different documents",
        "after Himeno and Yamada (2014)",
        "(-∞, ∞); at most slightly outside of [0, 1] for many documents",
        "centered; tokens; a document is a sentence, of a longer document its first block; not with packed documents",
        "time O(n d² + n t d) for documents of t tokens, memory O(d²), from SentenceMoments",
        "a common direction; the dependence of documents; fewer than 4 documents have no score",
        "istar.measures.sentences.isoscore_by_sentence",
    ),
    Measure(
        "inter_sim",
        "layers",
        "InterSim",
        "mean cosine of all pairs of different points",
        f"{_MACHINA}, equations 5 to 7; {_ETHAYARAJH}",
        "[-1/(n-1), 1]",
        "not centered; tokens; all pairs, not a sample",
        _PASS_COST,
        "anisotropy that is symmetric about the origin; a single large dimension can dominate it",
        "istar.measures.cosine.average_cosine",
    ),
    Measure(
        "mean_direction_norm",
        "layers",
        "norm of the mean direction",
        "norm of the mean of the unit vectors",
        f"after {_MACHINA}",
        "[0, 1]",
        "not centered; tokens",
        _PASS_COST,
        "the same as InterSim, of which it is a function",
        "istar.measures.cosine.AverageCosine",
    ),
    Measure(
        "average_norm",
        "layers",
        "average norm",
        "mean of ‖x‖",
        f"{_BIS}, Table 1",
        "≥ 0, in the units of the points",
        "not centered; tokens",
        _PASS_COST,
        "directions; a few very long tokens can dominate it",
        "istar.measures.norms.norm_summary",
    ),
    Measure(
        "mean_vector_norm",
        "layers",
        "norm of the mean vector",
        "norm of the mean of the points",
        f"{_BIS}, Table 1",
        "[0, average norm]",
        "not centered; tokens",
        _PASS_COST,
        "short tokens, which have little weight",
        "istar.measures.norms.norm_summary",
    ),
    Measure(
        "norm_ratio",
        "layers",
        "norm ratio",
        "norm of the mean vector / average norm",
        f"{_BIS}, Table 1",
        "[0, 1]",
        "not centered; tokens",
        _PASS_COST,
        "short tokens, which have little weight",
        "istar.measures.norms.norm_summary",
    ),
    Measure(
        "effective_rank",
        "layers",
        "effective rank",
        "exp of the entropy of s / Σs, s the singular values",
        "Roy and Vetterli (2007)",
        "[1, d]",
        "centered; singular values, not variances; natural logarithm",
        _SPECTRUM_COST,
        "a common direction; sensitive to many small values, and so to noise",
        "istar.measures.spectrum.effective_rank",
    ),
    Measure(
        "rank_me",
        "layers",
        "RankMe",
        "exp of the entropy of s / Σs + 1e-7, s the singular values",
        "Garrido et al. (2023), equation 1",
        "[1, d], apart from the effect of the constant, about 0.1 %",
        "not centered; natural logarithm; tokens, where the paper has one vector for each image",
        _SPECTRUM_COST,
        "whether a low value comes from the mean or from the spectrum about it; few points lower it",
        "istar.measures.spectrum.rank_me",
    ),
    Measure(
        "participation_ratio",
        "layers",
        "participation ratio",
        "(Σλ)² / Σλ², λ the variances of the principal components",
        "Gao et al. (2017)",
        "[1, d]",
        "centered; tokens",
        _SPECTRUM_COST,
        "small variances; equals 1 + (d - 1) IsoScore",
        "istar.measures.spectrum.participation_ratio",
    ),
    Measure(
        "nesum",
        "layers",
        "NESum",
        "Σλ / largest λ, λ the variances of the principal components",
        "He and Ozay (2022)",
        "[1, d]",
        "centered; tokens",
        _SPECTRUM_COST,
        "the shape of the spectrum below its largest value",
        "istar.measures.spectrum.nesum",
    ),
    Measure(
        "alpha_req",
        "layers",
        "alpha-ReQ",
        "minus the least-squares slope of log λ over log rank",
        "Agrawal et al. (2022)",
        "≥ 0",
        "centered; ranks 11 to 100, at most d - 1, equal weights; any base of the logarithm",
        _SPECTRUM_COST,
        "the ranks outside of the range; whether the spectrum is a power law at all (see R²)",
        "istar.measures.spectrum.alpha_req",
    ),
    Measure(
        "alpha_req_r_squared",
        "layers",
        "R² of alpha-ReQ",
        "share of the variance of log λ over the ranks that the power law explains",
        "Agrawal et al. (2022) for the fit",
        "[0, 1]",
        "of the fit of alpha-ReQ: ranks 11 to 100, at most d - 1, equal weights; none with fewer than 10 ranks",
        _SPECTRUM_COST,
        "the ranks outside of the range; smooth curves that are no power law can have a value near 1",
        "istar.measures.spectrum.alpha_req",
    ),
    Measure(
        "largest_variance_share",
        "layers",
        "largest share of variance",
        "largest variance of a dimension / sum of all variances",
        "Rudman et al. (2023)",
        "[1/d, 1]",
        "centered; dimensions of the basis, not principal components",
        _PASS_COST,
        "directions that are not along the basis",
        "istar.measures.spectrum.variance_shares",
    ),
    Measure(
        "top_5_variance_share",
        "layers",
        "share of variance of the top 5 dimensions",
        "sum of the 5 largest variances of dimensions / sum of all",
        f"after {_TIMKEY}",
        "[5/d, 1]",
        "centered; dimensions of the basis, not principal components",
        _PASS_COST,
        "directions that are not along the basis; dimensions with a large mean but a small variance",
        "istar.measures.spectrum.top_share",
    ),
    *(
        Measure(
            f"top_{k}_cosine_share",
            "layers",
            f"share of InterSim of the top {dimensions}",
            f"sum of the {k} largest contributions CC(f) / InterSim",
            _TIMKEY,
            f"≥ {k}/d; above 1 if other contributions are negative; undefined if InterSim ≤ 0",
            "not centered; all pairs, not a sample",
            _PASS_COST,
            "anisotropy that is symmetric about the origin; means nothing if InterSim is near 0",
            "istar.measures.contributions.CosineContributions",
        )
        for k, dimensions in ((1, "dimension"), (5, "5 dimensions"))
    ),
    Measure(
        "sample_inter_sim",
        "layers",
        "InterSim of the sample",
        "InterSim of one occurrence of each type of a random sample of token types",
        _TIMKEY,
        "[-1/(m-1), 1]",
        "not centered; each type of the sample once, unlike InterSim, where each token counts",
        "time O(m d), memory O(m d) for a sample of m points",
        "how often types occur; it is there to compare the following measures with",
        "istar.measures.cosine.average_cosine",
    ),
    *(
        Measure(
            f"sample_inter_sim_without_top_{k}",
            "layers",
            f"InterSim of the sample without the top {dimensions}",
            f"InterSim after the {dimensions} with the largest contributions CC(f) are removed",
            _TIMKEY,
            "[-1/(m-1), 1]",
            "not centered; on the sample of `sample_inter_sim`, which also chooses the dimensions",
            "time O(m d), memory O(m d) for a sample of m points",
            "a common direction that a few dimensions carry; other directions than along the basis",
            "istar.measures.contributions.cosine_without_dimensions",
        )
        for k, dimensions in ((1, "dimension"), (5, "5 dimensions"))
    ),
    Measure(
        "sample_inter_sim_standardized",
        "layers",
        "InterSim of the sample after z-scoring",
        "InterSim of (x - mean) / standard deviation, by dimension",
        _TIMKEY,
        "[-1/(m-1), 1]",
        "centered and scaled by dimension; on the sample of `sample_inter_sim`, with its moments",
        "time O(m d), memory O(m d) for a sample of m points",
        "any common direction, which centering removes; correlations between dimensions",
        "istar.measures.contributions.standardized_cosine",
    ),
    Measure(
        "outlier_dimensions",
        "layers",
        "outlier dimensions",
        "number of dimensions whose |mean| exceeds 5 times the median standard deviation",
        f"after Kovaleva et al. (2021) and {_TIMKEY}",
        "[0, d]",
        "rule `median` with k = 5; one of several definitions",
        _PASS_COST,
        "dimensions with a large variance but a small mean",
        "istar.measures.spectrum.outlier_dimensions",
    ),
    Measure(
        "largest_kurtosis",
        "layers",
        "largest kurtosis of a dimension",
        "largest n M₄ / M₂² - 3 over dimensions",
        "Pébay (2008) for the merges",
        "≥ -2",
        "excess, not corrected for bias; over the tokens of one dimension",
        _PASS_COST,
        "dimensions that are large for all tokens alike",
        "istar.measures.spectrum.DimensionMoments",
    ),
    Measure(
        "mean_kurtosis",
        "layers",
        "mean kurtosis of the dimensions",
        "mean of n M₄ / M₂² - 3 over dimensions",
        "Pébay (2008) for the merges",
        "≥ -2",
        "excess, not corrected for bias; dimensions that never vary are left out",
        _PASS_COST,
        "dimensions that are large for all tokens alike",
        "istar.measures.spectrum.DimensionMoments",
    ),
    Measure(
        "token_kurtosis",
        "layers",
        "kurtosis of the tokens",
        "mean over tokens of the kurtosis of their d coordinates, minus 3",
        "Elhage et al. (2023)",
        "[-2, d - 5 + 1/(d-1)]",
        "excess (the paper does not subtract 3); each token about the mean of its own coordinates",
        "time O(n d), memory O(1)",
        "which dimensions are large, and whether they are the same for all tokens",
        "istar.measures.activations.TokenKurtosis",
    ),
    Measure(
        "largest_token_kurtosis",
        "layers",
        "largest kurtosis of a token",
        "largest kurtosis of the d coordinates of a token, minus 3",
        "after Elhage et al. (2023)",
        "[-2, d - 5 + 1/(d-1)]",
        "excess; each token about the mean of its own coordinates",
        "time O(n d), memory O(1)",
        "all tokens but one",
        "istar.measures.activations.TokenKurtosis",
    ),
    Measure(
        "massive_activations",
        "layers",
        "massive activations",
        "number of coordinates with |x| > 100 and |x| > 1,000 · median |x|",
        "Sun et al. (2024)",
        "[0, n d]",
        "not centered; median over all tokens and dimensions, rounded down to 8 significant bits",
        "time O(n d), memory O(2¹⁵ + capacity)",
        "layers of a small scale, because of the absolute limit of 100",
        "istar.measures.activations.MassiveActivations",
    ),
    Measure(
        "largest_activation_ratio",
        "layers",
        "largest activation in units of the median",
        "largest |x| / median |x|",
        "after Sun et al. (2024)",
        "≥ 1",
        "not centered; over all tokens and dimensions; the median is rounded down to 8 significant bits",
        "time O(n d), memory O(2¹⁵ + capacity)",
        "how many activations are large",
        "istar.measures.activations.MassiveActivations",
    ),
    Measure(
        "intra_sim",
        "layers",
        "IntraSim",
        "mean cosine of all pairs of occurrences of one token type, averaged over types",
        f"{_MACHINA}, section 3.6.2; the self-similarity of {_ETHAYARAJH}",
        "[-1, 1]",
        "not centered; pairs of different occurrences; types have equal weight",
        "time O(n d), memory O(types · d)",
        "a common direction of all tokens, which raises it: compare it with InterSim",
        "istar.measures.cosine.IntraSim",
    ),
    Measure(
        "adjusted_intra_sim",
        "layers",
        "IntraSim - InterSim",
        "IntraSim minus the mean cosine of all pairs of tokens",
        f"{_ETHAYARAJH}, anisotropy-adjusted self-similarity",
        "[-2, 2]",
        "not centered; the baseline is InterSim over all pairs, not a sample",
        "time O(n d), memory O(types · d)",
        "differences between layers whose InterSim is near 1, which leaves no room",
        "istar.measures.cosine.adjusted_intra_sim",
    ),
    Measure(
        "norm_by_position",
        "layers",
        "norm by position",
        "average norm of the tokens at positions 0, 1, 2-3, 4-7, ...",
        "Xiao et al. (2024); Sun et al. (2024)",
        "≥ 0, in the units of the points",
        "not centered; position in the block that the model reads",
        "time O(n d), memory O(d log(length))",
        "differences between tokens at the same position",
        "istar.measures.point_groups.GroupedPoints",
    ),
    Measure(
        "inter_sim_by_position",
        "layers",
        "InterSim by position",
        "InterSim among the tokens at positions 0, 1, 2-3, 4-7, ...",
        "after Xiao et al. (2024)",
        "[-1/(n-1), 1]",
        "not centered; pairs within a bin",
        "time O(n d), memory O(d log(length))",
        "cosines between positions; at position 0, equal tokens (a CLS or BOS token) give 1 in any causal model",
        "istar.measures.point_groups.GroupedPoints",
    ),
    Measure(
        "norm_by_frequency",
        "layers",
        "norm by frequency",
        "average norm of the tokens whose type occurs 1, 2-3, 4-7, ... times",
        "after Gao et al. (2019)",
        "≥ 0, in the units of the points",
        "not centered; counts in the measured text; each occurrence counts",
        "time O(n d), memory O(types · d), or O(d) with counts that are known before",
        "what a type is: frequent types are often function words and punctuation",
        "istar.measures.point_groups.GroupedPoints",
    ),
    Measure(
        "inter_sim_by_frequency",
        "layers",
        "InterSim by frequency",
        "InterSim among the tokens whose type occurs 1, 2-3, 4-7, ... times",
        "after Gao et al. (2019)",
        "[-1/(n-1), 1]",
        "not centered; counts in the measured text; pairs within a bin, including those of one type",
        "time O(n d), memory O(types · d), or O(d) with counts that are known before",
        "cosines between bins; bins of few frequent types are dominated by their IntraSim",
        "istar.measures.point_groups.GroupedPoints",
    ),
    Measure(
        "two_nn",
        "layers",
        "TwoNN",
        "slope of -log(1 - F(μ)) over log μ, μ the ratio of the distances to neighbours 2 and 1",
        "Facco et al. (2017)",
        "> 0",
        "least squares without the largest tenth of the ratios; on a sample; natural logarithm",
        "time O(m² d), memory O(m d) for a sample of m points",
        "dimensions above about 10, which it underestimates; scales above the nearest neighbours",
        "istar.measures.dimension.two_nn",
    ),
    Measure(
        "two_nn_error",
        "layers",
        "standard error of TwoNN",
        "standard deviation of TwoNN over bootstrap samples of the ratios",
        "Facco et al. (2017) for the estimate",
        "≥ 0",
        "assumes independent points",
        "time O(200 m log m) for a sample of m points",
        "the bias of the estimate in high dimensions",
        "istar.measures.dimension.two_nn_with_error",
    ),
    Measure(
        "gride",
        "layers",
        "Gride",
        "maximum likelihood of d, given the ratios of the distances to neighbours 2 k and k; k = 1, 2, 4, ...",
        "Denti et al. (2022)",
        "> 0",
        "(n - 1) log d in the likelihood, as in DADApy; on a sample; natural logarithm",
        "time O(m² d), memory O(m (d + k)) for a sample of m points",
        "dimensions above about 10, which it underestimates; its error neglects that neighbourhoods overlap",
        "istar.measures.dimension_scales.gride_scales",
    ),
)

_MATRIX_MEASURES = (
    Measure(
        "partition_isotropy_as_computed",
        "matrices",
        "I(W), signs as computed",
        "min Z(c) / max Z(c), Z(c) = Σ exp(cᵀw), c over the eigenvectors of WᵀW",
        f"Arora et al. (2016); Mu and Viswanath (2018); {_BIS}, equations 7 and 8",
        "[0, 1]",
        "signs of the eigenvectors as the solver returns them; rows of a matrix",
        "time O(n d² + d³), memory O(d²)",
        "scale: short rows give 1; depends on the LAPACK build",
        "istar.measures.partition.partition_isotropy",
    ),
    Measure(
        "partition_isotropy_both",
        "matrices",
        "I(W), both signs",
        "min Z(c) / max Z(c) over the eigenvectors c and -c",
        f"after {_BIS}",
        "[0, 1]",
        "both signs; rows of a matrix",
        "time O(n d² + d³), memory O(d²)",
        "scale: short rows give 1",
        "istar.measures.partition.partition_isotropy",
    ),
    Measure(
        "average_norm",
        "matrices",
        "average norm",
        "mean of ‖w‖ over rows",
        f"{_BIS}, Table 1",
        "≥ 0, in the units of the rows",
        "rows have equal weight, whatever their frequency",
        "time O(n d), memory O(d)",
        "directions",
        "istar.measures.norms.norm_summary",
    ),
    Measure(
        "mean_vector_norm",
        "matrices",
        "norm of the mean vector",
        "norm of the mean of the rows",
        f"{_BIS}, Table 1",
        "[0, average norm]",
        "rows have equal weight, whatever their frequency",
        "time O(n d), memory O(d)",
        "short rows, which have little weight",
        "istar.measures.norms.norm_summary",
    ),
    Measure(
        "norm_ratio",
        "matrices",
        "norm ratio",
        "norm of the mean vector / average norm",
        f"{_BIS}, Table 1",
        "[0, 1]",
        "rows have equal weight, whatever their frequency",
        "time O(n d), memory O(d)",
        "short rows, which have little weight",
        "istar.measures.norms.norm_summary",
    ),
    Measure(
        "singular_values",
        "matrices",
        "singular values",
        "singular values of W",
        f"{_BIS}, section 4.1",
        "≥ 0, in the units of the rows",
        "not centered: the mean adds one large value",
        "time O(n d²), memory O(n d)",
        "the basis: it does not change under rotation",
        "istar.measures.spectrum.singular_values",
    ),
)

_FINAL_NORM_MEASURES = (
    Measure(
        "gain",
        "final_norm",
        "size of the gain",
        "‖g‖ / √d",
        f"{_MACHINA}, equation 8",
        "≥ 0",
        "of the last normalization",
        "time O(d), memory O(d)",
        "single dimensions",
        "istar.measures.norms.layer_norm_summary",
    ),
    Measure(
        "bias",
        "final_norm",
        "size of the bias",
        "‖b‖ / √d",
        _MACHINA,
        "≥ 0",
        "of the last normalization; 0 for RMSNorm",
        "time O(d), memory O(d)",
        "single dimensions",
        "istar.measures.norms.layer_norm_summary",
    ),
    Measure(
        "ratio",
        "final_norm",
        "bias / gain",
        "‖b‖ / ‖g‖",
        _MACHINA,
        "≥ 0",
        "small in isotropic models",
        "time O(d), memory O(d)",
        "single dimensions",
        "istar.measures.norms.layer_norm_summary",
    ),
    Measure(
        "bias_over_gain",
        "final_norm",
        "sum of bias / gain",
        "Σ bᵢ / gᵢ over dimensions with gᵢ ≠ 0",
        f"{_MACHINA}, equation 9",
        "(-∞, ∞)",
        "not 0: all outputs lie on one side of a hyperplane",
        "time O(d), memory O(d)",
        "dimensions with gain 0, with which the argument does not hold",
        "istar.measures.norms.layer_norm_summary",
    ),
    Measure(
        "zero_gains",
        "final_norm",
        "dimensions with gain 0",
        "number of dimensions with gᵢ = 0",
        "",
        "[0, d]",
        "exactly 0",
        "time O(d), memory O(d)",
        "gains that are nearly 0",
        "istar.measures.norms.layer_norm_summary",
    ),
    Measure(
        "outlier_gains",
        "final_norm",
        "outlier gains",
        "dimensions whose gain is more than 3 standard deviations from the mean gain",
        "Kovaleva et al. (2021)",
        "list of dimensions",
        "rule `sigma`, k = 3",
        "time O(d), memory O(d)",
        "several outliers, which hide each other",
        "istar.measures.norms.layer_norm_summary",
    ),
    Measure(
        "outlier_biases",
        "final_norm",
        "outlier biases",
        "dimensions whose bias is more than 3 standard deviations from the mean bias",
        "Kovaleva et al. (2021)",
        "list of dimensions",
        "rule `sigma`, k = 3",
        "time O(d), memory O(d)",
        "several outliers, which hide each other",
        "istar.measures.norms.layer_norm_summary",
    ),
)

_MEASURES_WITH_ERROR = (
    "isoscore",
    "isoscore_unbiased",
    "isoscore_by_sentence",
    "inter_sim",
    "average_norm",
    "mean_vector_norm",
    "norm_ratio",
    "effective_rank",
    "participation_ratio",
    "nesum",
    "alpha_req",
)
"""Names of the measures of layers that have a standard error."""
_ERROR_MEASURES = tuple(
    Measure(
        f"{measure.name}_error",
        "layers",
        f"standard error of {measure.title}",
        "√((G-1)/G Σ (θ₍g₎ - mean)²), θ₍g₎ the measure without group g of G groups of documents",
        "Tukey (1958); Kott (2001)",
        "≥ 0",
        "delete-a-group jackknife; tokens of one document may depend on each other; G - 1 degrees of freedom",
        "memory O(G d)" if measure.name in ("inter_sim", "average_norm") else "memory O(G d²)",
        "the bias of the measure; dependence between documents",
        "istar.measures.jackknife.jackknife_error",
    )
    for measure in _LAYER_MEASURES
    if measure.name in _MEASURES_WITH_ERROR
)

MEASURES: tuple[Measure, ...] = (*_LAYER_MEASURES, *_ERROR_MEASURES, *_MATRIX_MEASURES, *_FINAL_NORM_MEASURES)
"""All measures: those of the layers, then those of the embedding matrices, then those of the final normalization."""


def find_measure(name: str, subject: Subject = "layers") -> Measure:
    """Return the description of a measure.

    Raises:
        UserError: if there is no measure of this name for this subject; the message suggests the most similar name.

    >>> find_measure("inter_sim").title
    'InterSim'
    """
    for measure in MEASURES:
        if (measure.name, measure.subject) == (name, subject):
            return measure
    names = [measure.name for measure in MEASURES if measure.subject == subject]
    raise UserError(f"{subject} have no measure {name!r}{did_you_mean(name, names)}; istar measure --list shows all")


def catalogue_rows(subject: Subject | None = None, columns: Sequence[str] | None = None) -> list[dict[str, str]]:
    """Return the catalogue of measures as rows, one for each measure, with the attributes of `Measure` as columns.

    Args:
        subject: "layers", "matrices" or "final_norm"; None returns the measures of all three.
        columns: attributes of `Measure` to return, in this order; None returns all.

    Raises:
        UserError: for another subject or column.

    >>> catalogue_rows(columns=["name", "range"])[1]
    {'name': 'isoscore', 'range': '[0, 1]'}
    """
    if subject not in (None, *get_args(Subject)):
        raise UserError(f"the subject is {subject!r}; expected one of {', '.join(get_args(Subject))}")
    all_columns = list(Measure.__dataclass_fields__)
    columns = all_columns if columns is None else columns
    for column in columns:
        if column not in all_columns:
            raise UserError(
                f"there is no column {column!r}{did_you_mean(column, all_columns)}; expected {', '.join(all_columns)}"
            )
    rows = [asdict(measure) for measure in MEASURES if subject in (None, measure.subject)]
    return [{column: row[column] for column in columns} for row in rows]
