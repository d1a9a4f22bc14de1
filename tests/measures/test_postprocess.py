"""Post-processing against the papers' equations, row by row with sklearn's PCA, and properties of the result."""

import math

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch.testing import assert_close

from istar.errors import UserError
from istar.measures import all_but_the_top, average_cosine, centered, partition_isotropy, scaled_centered
from tests import oracles

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
PROCESSES = {
    "centered": centered,
    "scaled_centered": scaled_centered,
    "corrected": lambda w: all_but_the_top(w, 2),
    "published": lambda w: all_but_the_top(w, 2, "published"),
}


def embeddings(n=50, d=6, seed=0, shift=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(n, d, generator=generator, dtype=torch.float64) * torch.logspace(0, 1, d)
    mixing, _ = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
    return (points @ mixing + shift * torch.linspace(-1, 3, d)).to(dtype)


def test_centering_leaves_no_mean_and_is_idempotent():
    w = embeddings()
    centered_once = centered(w)
    assert_close(centered_once.numpy(), w.numpy() - w.numpy().mean(0), **CLOSE)
    assert centered_once.mean(0).abs().max() < 1e-13
    assert_close(centered(centered_once), centered_once, **CLOSE)
    assert_close(centered(w + 9), centered_once, **CLOSE)


def test_scaled_centering_is_the_papers_formula():
    w = embeddings()
    actual = scaled_centered(w)
    assert_close(actual.numpy(), oracles.scaled_centering(w.numpy()), **CLOSE)
    shares = actual / w.norm(dim=1, keepdim=True)
    assert shares.mean(0).abs().max() < 1e-14
    assert actual.mean(0).abs().max() > 1e-3
    units = w / w.norm(dim=1, keepdim=True)
    assert_close(scaled_centered(4 * units), centered(4 * units), **CLOSE)
    scales = torch.rand(50, 1, generator=torch.Generator().manual_seed(1)) + 0.1
    assert_close(scaled_centered(scales * w), scales * actual, **CLOSE)


def test_a_row_of_zeros_stays_in_scaled_centering():
    w = torch.cat([embeddings(), torch.zeros(50, 6)])
    actual = scaled_centered(w)
    assert not actual[50:].any()
    units = w[:50] / w[:50].norm(dim=1, keepdim=True)
    assert_close(actual[:50], w[:50] - w[:50].norm(dim=1, keepdim=True) * units.sum(0) / 100, **CLOSE)


@pytest.mark.parametrize("components", [1, 2, 5, 6])
def test_all_but_the_top_is_the_papers_equations_with_sklearns_pca(components):
    w = embeddings()
    corrected = all_but_the_top(w, components)
    assert_close(corrected.numpy(), oracles.top_removed(w.numpy(), components, True), **CLOSE)
    published = all_but_the_top(w, components, "published")
    assert_close(published.numpy(), oracles.top_removed(w.numpy(), components, False), **CLOSE)
    assert (published - corrected).std(0).max() < 1e-12
    assert (published - corrected).abs().max() > 0.1


@pytest.mark.parametrize("variant", ["corrected", "published"])
def test_removed_directions_have_no_variance_and_the_others_all_of_theirs(variant):
    w = embeddings()
    pca = PCA().fit(w.numpy())
    actual = all_but_the_top(w, 2, variant).numpy()
    variances = (actual @ pca.components_.T).var(0, ddof=1)
    assert variances[:2].max() < 1e-25
    np.testing.assert_allclose(variances[2:], pca.explained_variance_[2:], rtol=1e-10)
    mean = actual.mean(0)
    if variant == "corrected":
        assert np.abs(mean).max() < 1e-13
    else:
        removed_directions = pca.components_[:2]
        np.testing.assert_allclose(mean, -removed_directions.T @ (removed_directions @ w.numpy().mean(0)), atol=1e-10)


def test_of_no_components_it_is_centering_and_of_all_nothing_is_left():
    w = embeddings()
    assert_close(all_but_the_top(w, 0), centered(w), **CLOSE)
    assert all_but_the_top(w, 6).abs().max() < 1e-12


@pytest.mark.parametrize(("d", "components"), [(6, 1), (100, 1), (101, 2), (230, 3)])
def test_by_default_a_hundredth_of_the_dimensions_goes_rounded_up(d, components):
    w = embeddings(20, d)
    assert_close(all_but_the_top(w), all_but_the_top(w, components), **CLOSE)
    rank = np.linalg.matrix_rank(all_but_the_top(w).numpy())
    assert rank == min(19, d) - components


def test_a_second_time_the_next_components_go():
    w = embeddings()
    assert_close(all_but_the_top(all_but_the_top(w, 1), 1), all_but_the_top(w, 2), **CLOSE)


def test_isotropy_is_restored():
    w = embeddings(400, 6, shift=3.0) / 10
    raw_isotropy = partition_isotropy(w, "both").value
    assert (
        raw_isotropy
        < partition_isotropy(centered(w), "both").value
        < partition_isotropy(all_but_the_top(w), "both").value
    )
    assert abs(average_cosine(centered(w))) < 0.1 < average_cosine(w)


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_result_is_that_of_float64_rounded_once(process, dtype):
    w = embeddings(dtype=dtype)
    original = w.clone()
    with torch.autocast("cpu", torch.bfloat16):
        actual = process(w)
    assert actual.dtype == dtype
    assert torch.equal(actual, process(w.double()).to(dtype))
    assert torch.equal(w, original)


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
@pytest.mark.parametrize("scale", [1e-6, 1e100])
def test_scale_and_rotation_go_through(process, scale):
    w, (rotation, _) = embeddings(), torch.linalg.qr(embeddings(6, 6, seed=7))
    assert_close(process(scale * w @ rotation) / scale, process(w) @ rotation, **CLOSE)


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
def test_parameters_come_back_without_a_graph(process):
    assert not process(torch.nn.Parameter(embeddings())).requires_grad
    assert_close(process(embeddings().T.contiguous().T), process(embeddings()), **CLOSE)


WITH_NAN = embeddings()
WITH_NAN[2, 1] = math.nan
INVALID_CALLS = {
    "variant": (lambda: all_but_the_top(embeddings(), 1, "both"), UserError, "'both'; expected one of corrected, publ"),
    "negative": (lambda: all_but_the_top(embeddings(), -1), UserError, "components is -1; expected 0 to 6"),
    "too many": (lambda: all_but_the_top(embeddings(), 7), UserError, "components is 7; expected 0 to 6"),
}


@pytest.mark.parametrize(("call", "error", "message"), INVALID_CALLS.values(), ids=INVALID_CALLS)
def test_what_cannot_be_processed_is_refused_in_one_line(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
