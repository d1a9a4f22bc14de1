"""The mutations of `make mutants` fit the product: each changes text that occurs exactly once."""

import pytest

from tests.mutants.table import MUTATIONS, REPOSITORY, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.mistake)
def test_the_original_text_is_there_once_and_is_changed(mutation: Mutation) -> None:
    text = (REPOSITORY / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.original) == 1
    assert mutation.broken != mutation.original
