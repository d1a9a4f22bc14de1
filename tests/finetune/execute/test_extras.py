"""The garbage collector while libraries are imported."""

import gc

import pytest

from istar.finetune.execute.extras import fast_imports


@pytest.fixture
def collector():
    """Enable the garbage collector; afterwards, restore it, without frozen objects."""
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    gc.unfreeze()
    if not was_enabled:
        gc.disable()


def test_nothing_is_collected_within_and_what_is_there_is_set_aside(collector):
    frozen_before = gc.get_freeze_count()
    with fast_imports():
        assert not gc.isenabled()
        new_objects = [[] for _ in range(1_000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen_before + len(new_objects)
    with pytest.raises(ImportError), fast_imports():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    with fast_imports():
        pass
    assert not gc.isenabled()
