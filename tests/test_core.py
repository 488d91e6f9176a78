"""The core stands alone: a run whose completions are single answers imports nothing of what stands on the core."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick_programs import VARIABLES
from tests.several.runs import settings, write_files
from tests.test_architecture import REPOSITORY
from tpu_grpo.config.plugins import ADDITIONS

ABOVE = {module.split(".")[1] for module in ADDITIONS.values()} | {"serving", "planning", "checking", "launching"}
RUN = """
import json, sys
import tpu_grpo

tpu_grpo.train(tpu_grpo.parse_config(json.loads(sys.argv[1])))
"""


def imported(code: str, *words: str, cwd: Path) -> set[str]:
    """The modules of this package that a fresh process has after it has run ``code``, without the package's name."""
    code += "\nimport sys\nprint(*sorted(m for m in sys.modules if m.startswith('tpu_grpo.')), sep='\\n')"
    environment = {**os.environ, **VARIABLES, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}  # one device
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=300, env=environment, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return {name.removeprefix("tpu_grpo.") for name in done.stdout.splitlines() if name.startswith("tpu_grpo.")}


def rooms(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


@pytest.mark.full
def test_the_loop_imports_nothing_that_stands_on_it(tmp_path: Path) -> None:
    found = rooms(imported("import tpu_grpo.cli.train, tpu_grpo.api, tpu_grpo.run.pipeline", cwd=tmp_path))
    assert found >= {"run", "learner", "engine", "rewards"}
    assert found & ABOVE == set()


@pytest.mark.full
def test_a_step_imports_only_what_its_config_asks_for(tmp_path: Path) -> None:
    tree = settings(tmp_path / "run", run={"max_steps": 1}, logging={"report": False})
    found = imported(RUN, json.dumps(tree), cwd=write_files(tmp_path / "files", layers=1))
    assert rooms(found) & ABOVE == set()
    assert found >= {"algorithms.grpo", "models.families.qwen"}
    assert not found & {"algorithms.gspo", "models.families.gemma2", "models.tasks.addition"}
