"""Rules of the layout that import-linter cannot say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kvstore", "compute", "gateway", "services")


def test_import_contracts_hold():
    lint = Path(sys.executable).parent / "lint-imports"
    result = subprocess.run([lint], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_tests_are_not_packages():
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_says_what_it_is(package):
    silent = [
        str(path.relative_to(ROOT))
        for path in (ROOT / package).rglob("*.py")
        if path.stat().st_size and not path.read_text(encoding="utf-8").startswith('"""')
    ]
    assert silent == []


@pytest.mark.parametrize(
    "module", ["gateway.engine", "services.gateway.__main__", "kvstore.manager"]
)
def test_serving_processes_other_than_compute_load_no_torch(module):
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'numba'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
