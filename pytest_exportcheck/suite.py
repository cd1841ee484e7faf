"""The built-in tests of a spec, and the helpers they consist of, which a user's own tests call as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .handles import ExportCase, ObservedInputs

__all__ = ["BUILTIN_TESTS", "assert_dynamic_shapes", "assert_export"]


def assert_dynamic_shapes(observed_inputs: ObservedInputs) -> None:
    """Observe the model's calls and compare the inferred dynamic shapes with the accepted ones.

    With ``--update-shapes`` a difference is proposed as the new golden instead of failing.

    Raises
    ------
    LoadError, ObserveError, ShapesError
        At the stage that failed.
    """
    observed_inputs.check_shapes()


def assert_export(export_case: ExportCase) -> None:
    """Export the case's program, run it on every observed call and on other sizes, compare with eager.

    Raises
    ------
    ExportCheckError
        The subclass of the stage that failed.
    """
    export_case.run_stages()


# One line each: their code objects are copied into every spec, where their only line is a line of the YAML.
# fmt: off
def test_dynamic_shapes(observed_inputs: ObservedInputs) -> None: assert_dynamic_shapes(observed_inputs)
def test_export(export_case: ExportCase) -> None: assert_export(export_case)
# fmt: on

#: What a spec file is collected as.
BUILTIN_TESTS = (test_dynamic_shapes, test_export)
