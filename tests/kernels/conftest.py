"""Which kernel tests run here. TRITON_INTERPRET is read when a kernel is decorated, so a process can
either interpret kernels or compile them:

    TRITON_INTERPRET=1 pytest tests/kernels     on the CPU, against the definition
    TRITON_INTERPRET=0 pytest tests/kernels     for GPUs that are not here, against budgets.json
"""

import os

import pytest

PROCESS = {"1": "interpreted", "0": "compiled"}.get(os.environ.get("TRITON_INTERPRET"), "plain")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what 3.9 does, and warns about

if PROCESS == "interpreted":
    import interpreter

    interpreter.repair()


def pytest_collection_modifyitems(items):
    for item in items:
        for name, value in (("interpreted", "1"), ("compiled", "0")):
            if item.path.stem.startswith(f"test_{name}") and name != PROCESS:
                item.add_marker(
                    pytest.mark.skip(reason=f"runs with TRITON_INTERPRET={value} (see conftest.py)")
                )


@pytest.fixture
def forced(monkeypatch):
    """The kernels, or an error."""
    monkeypatch.setenv("LINEARIZE_KERNELS", "triton")
