import gc

import pytest

from istar.runs.importing import fast_imports


@pytest.fixture
def collector():
    """As it was before, with nothing set aside."""
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    gc.unfreeze()
    if not was_enabled:
        gc.disable()


def test_nothing_is_collected_within_and_what_is_there_is_set_aside(collector):
    before = gc.get_freeze_count()
    with fast_imports():
        assert not gc.isenabled()
        kept = [[] for _ in range(1_000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(kept)


def test_a_failed_import_leaves_the_collector_on(collector):
    with pytest.raises(ImportError), fast_imports():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off(collector):
    gc.disable()
    with fast_imports():
        pass
    assert not gc.isenabled()
