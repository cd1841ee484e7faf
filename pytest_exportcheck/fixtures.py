"""The fixtures. A user's conftest.py can override each of them; each does one thing.

    exportcheck_runs (module)  the model of the spec at hand, freed at the end of the module
    observed_inputs  (module)  the recorded calls of one spec, device and dtype
    export_case                one case: spec x exporter x patch mode x device x dtype (x graph)
    model_spec                 the spec of the test

The last three are parametrized, from the spec file itself or from ``@pytest.mark.exportcheck(path)``.
Imported in every pytest run: the standard library and pytest only; the rest inside the functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .handles import ExportCase, ObservedInputs, SpecRuns
    from .plan import PlannedCase
    from .spec import ModelSpec

#: The fixtures that `collection.parametrize` gives parameters to.
PARAMETRIZED = frozenset({"export_case", "observed_inputs", "model_spec"})


@pytest.fixture(scope="module")
def exportcheck_runs(request: pytest.FixtureRequest) -> Iterator[SpecRuns]:
    """The models in memory, one spec at a time; closed when the last test of the module ends."""
    from .handles import SpecRuns
    from .plugin import session_of

    session = session_of(request.config)
    runs = SpecRuns(session.options.share, session.cache_settings(), session.garbage)
    yield runs
    runs.close()


@pytest.fixture(scope="module")
def observed_inputs(request: pytest.FixtureRequest, exportcheck_runs: SpecRuns) -> ObservedInputs:
    """The calls of a spec, recorded once per worker, device and dtype; the model runs on first use."""
    from .handles import ObservedInputs
    from .plugin import session_of

    planned = _planned(request)
    _skip_unless_possible(request.config, planned)
    return ObservedInputs(session_of(request.config), exportcheck_runs, planned)


@pytest.fixture
def export_case(request: pytest.FixtureRequest, exportcheck_runs: SpecRuns) -> ExportCase:
    """One case to export and to verify."""
    from .handles import ExportCase
    from .plugin import session_of

    planned = _planned(request)
    _skip_unless_possible(request.config, planned)
    return ExportCase(session_of(request.config), exportcheck_runs, planned)


@pytest.fixture
def model_spec(request: pytest.FixtureRequest) -> ModelSpec:
    """The spec that this test is about."""
    return _planned(request).spec


def _planned(request: pytest.FixtureRequest) -> PlannedCase:
    planned: PlannedCase | None = getattr(request, "param", None)
    if planned is None:
        pytest.fail(
            f"the fixture {request.fixturename!r} needs to know a spec: put "
            '@pytest.mark.exportcheck("path/to/spec.yaml") on the test',
            pytrace=False,
        )
    return planned


def _skip_unless_possible(config: pytest.Config, planned: PlannedCase) -> None:
    from .runtest import check_device, check_requirements

    check_requirements(planned.spec)
    check_device(config, planned.case.device)
