"""The handle for a limit that a caller states has all other settings of the handle that was created or adopted."""

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.address_backend import AddressBackend
from tests.support.every_setting import FIELDS, partly, set_variables
from tests.support.problems import make_problem
from ucudnn.cudnn.handles import MicroHandle, create
from ucudnn.errors import BackendUnavailableError
from ucudnn.handle import Handle

PROBLEM = make_problem()


@given(st.sets(st.sampled_from(FIELDS)), st.booleans())
def test_every_setting_of_a_handle_holds_for_its_limits(fields, adopted):
    settings = partly(fields)
    with pytest.MonkeyPatch.context() as patch:
        set_variables(patch, {"slabs"})  # the environment does not matter
        micro = MicroHandle(Handle.from_settings(settings, backend=AddressBackend()), fixed=adopted)
        total = 0 if "total_workspace_bytes" in fields else None
        limit = 0 if adopted or total == 0 else 12345
        micro.register(SimpleNamespace(problem=PROBLEM), limit)
        limited = micro.handle_for(PROBLEM)
    assert limited is not micro.handle
    assert limited.backend is micro.handle.backend
    assert limited.settings == replace(settings, workspace_limit_bytes=limit, total_workspace_bytes=total)


@pytest.mark.parametrize(
    ("named", "opened"),
    [("cpu", "cudnn"), ("replay:h200", "cudnn"), ("auto", "cudnn"), ("cudnn", "cudnn"), ("cudnn:best", "cudnn:best")],
)
def test_a_backend_that_has_no_effect_is_warned_of(monkeypatch, named, opened):
    def without_gpu(settings):
        raise BackendUnavailableError(settings.backend)

    monkeypatch.setenv("UCUDNN_BACKEND", named)
    monkeypatch.setattr(Handle, "from_settings", without_gpu)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(BackendUnavailableError, match=f"^{opened}$"):
            create()
    told = [str(each.message).partition(",")[0] for each in seen]
    assert told == (
        [f"UCUDNN_BACKEND={named} has no effect on ucudnn.cudnn"] if named in ("cpu", "replay:h200") else []
    )
