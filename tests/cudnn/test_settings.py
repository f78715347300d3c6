"""The handle for a limit that a caller states has all other settings of the handle that was created or adopted."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.address_backend import AddressBackend
from tests.support.every_setting import FIELDS, partly, set_variables
from tests.support.problems import make_problem
from ucudnn.cudnn.handles import MicroHandle
from ucudnn.handle import Handle
from ucudnn.profiles.measurement import Effort
from ucudnn.settings import Settings

PROBLEM = make_problem()


@given(st.sets(st.sampled_from(FIELDS)))
def test_every_setting_of_a_handle_holds_for_its_limits(fields):
    settings = partly(fields)
    with pytest.MonkeyPatch.context() as patch:
        set_variables(patch, {"slabs"})  # the environment does not matter
        micro = MicroHandle(Handle.from_settings(settings, backend=AddressBackend()), fixed=False)
        limit = 0 if "total_workspace_bytes" in fields else 12345
        micro.register(SimpleNamespace(problem=PROBLEM), limit)
        limited = micro.handle_for(PROBLEM)
    assert limited is not micro.handle
    assert limited.backend is micro.handle.backend
    total = 0 if "total_workspace_bytes" in fields else None
    assert limited.settings == replace(settings, workspace_limit_bytes=limit, total_workspace_bytes=total)


def test_an_adopted_handle_without_a_database_and_slabs(monkeypatch, tmp_path):
    monkeypatch.setenv("UCUDNN_DATABASE", str(tmp_path / "kept.db"))
    effort = Effort(repeats=1, time_limit_ms=1, warmup=0)
    handle = Handle(backend=AddressBackend(), database="off", slabs=False, policy="undivided", effort=effort)
    micro = MicroHandle(handle, fixed=True)
    micro.register(SimpleNamespace(problem=PROBLEM), 0)
    limited = micro.handle_for(PROBLEM)
    limited.optimize()
    assert limited.report().kernels[0].workspace_bytes == 0
    assert limited.settings == Settings(
        backend="auto", database="off", slabs=False, policy=handle.settings.policy, workspace_limit_bytes=0
    )
    assert not [*tmp_path.iterdir()]
