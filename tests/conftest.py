"""What all tests share, set before anything uses jax: four virtual CPU devices, so that meshes are real, and the user's
cache of compiled programs and taught models, as the commands have it.

Commands sum over such devices with gloo, over sockets, as several processes do. Here XLA adds up in memory, which takes
a quarter less of a run's CPU time; what is to equal the results of several processes is computed by a command.
"""

import gc
import os
import re
import sys
from collections import Counter
from pathlib import Path

if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):  # as in containers: every process would compile all sources anew
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(Path(__file__).parents[1] / ".pytest_cache" / "bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

import pytest
from hypothesis import HealthCheck, settings

# --hypothesis-profile=default draws other examples every time; no test fails because the machine is slow
settings.register_profile("suite", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # jax's own cache takes a damaged file for a program
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4").strip()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
gc.set_threshold(50_000, 20, 100)  # imports and tracing make much that lives on: by default, collections take over 5 %

from tests import quick_programs, shapes  # noqa: E402

shapes.install()  # before the package is imported, as by the conftest.py of a room

LONG = re.compile(
    r"tests/(several|launching/test_training|tunix_loop/test_tunix_learner|learner/test_learner"
    r"|engine/test_(families|launches|turn_scheduler)|test_pipeline|cli/test_(evaluate|dry_run|plan)"
    r"|run/test_partial_groups|examples/test_notebooks|planning/test_compiled)"
)
"""Files of a minute and more. They begin first, so that no worker is left alone with one at the end."""
QUICKLY_COMPILED = re.compile(
    r"tests/(?!models/test_builtin|engine/test_(launches|replicas|sampling)|learner/test_compact|run/test_engines)"
    r"(algorithms|checking|cli/test_(evaluate|sample|serve)|engine|learner|models|run|test_pipeline|tunix_loop)"
)
"""Tests that compile more than they compute, and compare within a tolerance, or what one program gives twice. Those
that compare bits of several programs, that teach a model, and all commands compile as a run does."""

FAMILIES = re.compile(
    r"tests/(algorithms/test_(distill|objectives|penalties)|cli/test_(environment|output|plan)"
    r"|engine/test_(engine|experts|sampling)|environments/test_(agents|faults|pool)|launching/test_(gcloud|kubectl|watching)"
    r"|learner/test_(checkpoints|compact|conversations|loss|optimizers|output_head|trained|update)"
    r"|models/test_(builtin|families|gemma|lora|peft|tunix_model)|observe/test_(live_report|run_log)"
    r"|rewards/test_(early|reward_call|reward_workers)|run/test_exporting|weights/test_(adapters|meshes|sync)"
    r"|workers/test_supervisor)"
)
"""Files in which every case of a parametrized test compiles, or starts processes, anew: the first case of each such
test is a default test, and the others are ``full``."""
LEFT_OUT = ("full", "slow", "several_hosts", "slices", "torch", "browser")
"""Tests with one of these marks are no default tests, see ``addopts`` in pyproject.toml."""
EVERYTHING_ELSE = "(full or slices or several_hosts or browser) and not slow and not torch"
"""What ``-m full`` selects: with the default tests, all that a change must pass."""


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "full":
        config.option.markexpr = EVERYTHING_ELSE
    if config.option.numprocesses and not hasattr(config, "workerinput"):
        return  # who only hands out tests to workers needs neither jax nor programs
    from tpu_grpo.hosts import Hosts, keep_programs
    from tpu_grpo.hosts.joining import choose_threads

    quick_programs.install()
    choose_threads(1)
    keep_programs(Hosts())


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: Counter[str] = Counter()
    for item in items:
        if FAMILIES.match(item.nodeid) and not any(map(item.get_closest_marker, LEFT_OUT)):
            cases[item.nodeid.partition("[")[0]] += 1
            if cases[item.nodeid.partition("[")[0]] > 1:
                item.add_marker("full")
    items.sort(key=lambda item: (LONG.match(item.nodeid) is None, QUICKLY_COMPILED.match(item.nodeid) is None))
    gc.freeze()  # else every full collection looks through all that is imported by now
    for name in ("freeze", "unfreeze", "set_threshold"):  # a run would give back at its end all that is frozen here
        setattr(gc, name, lambda *_: None)


@pytest.fixture(scope="module", autouse=True)
def _compilation(request: pytest.FixtureRequest) -> None:
    """Leave out what XLA's optimizations cost where that is more than they bring. jax would give a later file the
    programs that an earlier one has compiled in the other way."""
    import jax

    quickly = bool(QUICKLY_COMPILED.match(request.node.nodeid))
    if jax.config.read("jax_disable_most_optimizations") != quickly:
        jax.clear_caches()
        jax.config.update("jax_disable_most_optimizations", quickly)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Let every test of several hosts begin with empty caches, too: who fills them needs the others, or keeps them."""
    if metafunc.definition.get_closest_marker("several_hosts"):
        metafunc.fixturenames.append("caches")
        variants = [pytest.param(False, id="kept"), pytest.param(True, id="empty_caches", marks=pytest.mark.slow)]
        metafunc.parametrize("caches", variants, indirect=True)


@pytest.fixture
def caches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory):
    """Give what the test starts the caches of the suite, or a directory without models and programs."""
    if request.param:
        monkeypatch.setenv("TPU_GRPO_CACHE", str(tmp_path_factory.mktemp("cache")))
