"""What the kernels need on GPUs that are not here: they compile, do not spill where they must not,
fit the shared memory, and use the tensor cores.

`python tests/kernels/compiling.py` writes budgets.json; a change that needs more shows it there.
"""

import json
from pathlib import Path

import pytest

BUDGETS = json.loads((Path(__file__).parent / "budgets.json").read_text(encoding="utf-8"))


def rows():
    """The budgets as parameters; what would take minutes is slow."""
    for name, budget in BUDGETS.items():
        arch, kernel, size = name.split()
        quick = arch == "sm_90" or (kernel in ("state", "out") and size == "D128")
        yield pytest.param(
            name, budget, id=name.replace(" ", "-"), marks=() if quick else pytest.mark.slow
        )


@pytest.mark.parametrize(("name", "budget"), list(rows()))
def test_a_kernel_stays_within_its_budget(name, budget):
    import compiling

    arch, kernel, size = name.split()
    found = compiling.measured(kernel, arch, int(size[1:]))
    assert found["spills"] <= budget["spills"]
    assert found["shared"] <= min(budget["shared"], compiling.SHARED_BYTES[arch])
    assert found["tensor_cores"] > 0
    if arch == "sm_90":
        assert found["spills"] == 0


def test_every_kernel_has_a_budget_for_every_architecture():
    import compiling

    assert list(BUDGETS) == compiling.names()
