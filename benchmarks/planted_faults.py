"""In how many planted faults the diagnosis names the right step, node or module; the wrong ones are listed.

python benchmarks/planted_faults.py

The faults are those of ``tests/diagnose``: a test plants one and asks for the step, node and module by name.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = ("test_faults.py", "test_more_faults.py", "test_other_faults.py")

#: Nothing is planted there: it must be said that nothing is wrong.
SOUND = "test_a_right_export_is_not_blamed"


class Table:
    """Collects the outcome of every fault."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, bool, float]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            name = report.nodeid.partition("::")[2]
            self.rows.append((name, report.passed, report.duration))


def main() -> int:
    """Print the table and the counts; 1 if one is wrong."""
    table = Table()
    files = [str(ROOT / "tests" / "diagnose" / name) for name in FILES]
    pytest.main(
        [*files, "-o", "addopts=", "-q", "--tb=no", "-p", "no:cacheprovider", f"--rootdir={ROOT}"],
        plugins=[table],
    )
    print("| planted | named | seconds |\n| --- | --- | --- |")
    for name, right, seconds in table.rows:
        text = name.removeprefix("test_").replace("_", " ")
        print(f"| {text} | {'right' if right else 'WRONG'} | {seconds:.1f} |")
    faults = [row for row in table.rows if row[0] != SOUND]
    if not faults:
        sys.exit("no fault was planted")
    right = sum(row[1] for row in faults)
    wrong = ", ".join(row[0] for row in faults if not row[1])
    print(f"\n{right} of {len(faults)} faults named; wrong: {wrong or 'none'}")
    return int(not all(row[1] for row in table.rows))


if __name__ == "__main__":
    sys.exit(main())
