"""Which broken ONNX models are caught, and at which stage; which harmless changes are let through.

python benchmarks/mutations.py [MODEL ...]
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.mutations.breaks import BREAKS, HARMLESS
from tests.mutations.judge import judges, table


def main() -> int:
    """Print both tables and the counts; 1 if a verdict is wrong."""
    warnings.simplefilter("ignore")
    wrong = 0
    with tempfile.TemporaryDirectory() as folder, judges(Path(folder)) as made:
        names = sys.argv[1:] or list(made)
        for title, mutations in (("broken", BREAKS), ("harmless", HARMLESS)):
            verdicts = {
                (mutation, name): (found := made[name].judge(change)) and found[0]
                for name in names
                for mutation, change in mutations.items()
            }
            judged = [verdict for verdict in verdicts.values() if verdict]
            caught = sum(verdict != "pass" for verdict in judged)
            wrong += len(judged) - caught if mutations is BREAKS else caught
            print(*table(verdicts), sep="\n")
            print(f"{title}: {caught} of {len(judged)} caught\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
