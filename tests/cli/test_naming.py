"""Which model a name means, and with which config it answers."""

import json
from pathlib import Path

import pytest

from tpu_grpo.cli.naming import named_model
from tpu_grpo.records.errors import ConfigError


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A run of a slice that was moved here, an export of it, its adapters, and a plain model."""
    config = (
        "run: {name: r, dir: elsewhere}\nmodel: {path: base, lora: {rank: 2}}\n"
        "meshes: {trainer: {tp: 8}}\nhosts: {coordinator: 'h:1', count: 4, index: 3}\n"
        "rollout: {temperature: 0.7}\n"
    )
    for name, files in {
        "run": {"config.yaml": config},
        "model": {"tpu_grpo.yaml": config, "config.json": "{}"},
        "adapter": {
            "tpu_grpo.yaml": config,
            "adapter_config.json": json.dumps({"base_model_name_or_path": "/models/base"}),
        },
        "plain": {"config.json": "{}"},
    }.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    return tmp_path


def test_a_run_is_named_with_its_checkpoint(places: Path) -> None:
    for name, which in (("run", "latest"), ("run@best", "best"), ("run@40", "40"), ("run@initial", "initial")):
        found = named_model(str(places / name), [])
        assert (found.name, found.which) == (str(places / name), which)
        assert found.config.run_dir == places / "run"
        assert (found.config.hosts.count, found.config.meshes.trainer.tp) == (1, 1)  # of this machine
        assert (found.config.model.path, found.config.model.lora.rank) == ("base", 2)


def test_a_run_one_step_off_policy_is_named_on_one_machine(places: Path) -> None:
    """algorithm.staleness=1 needs split meshes over several hosts, which sampling does not have."""
    path = places / "run" / "config.yaml"
    path.write_text("run: {name: r}\nmeshes: {layout: split}\nalgorithm: {staleness: 1}\n")
    found = named_model(str(places / "run"), [])
    assert (found.which, found.config.meshes.layout, found.config.algorithm.staleness) == ("latest", "shared", 0)


def test_an_export_is_a_model_by_itself_or_adapters_of_its_base(places: Path) -> None:
    model = named_model(str(places / "model"), [])
    assert (model.which, model.config.model.path) == ("initial", str(places / "model"))
    assert (model.config.model.lora.rank, model.config.rollout.temperature) == (None, 0.7)
    adapter = named_model(str(places / "adapter"), [])
    assert (adapter.which, adapter.config.model.path) == ("initial", "/models/base")
    assert (adapter.config.model.lora.rank, adapter.config.model.lora.path) == (2, places / "adapter")


def test_another_model_takes_the_defaults(places: Path) -> None:
    for name in (str(places / "plain"), "builtin:addition"):
        found = named_model(name, [])
        assert (found.config.model.path, found.config.model.lora.rank, found.which) == (name, None, "initial")
    alone = named_model(str(places / "plain"), ["data.system_prompt=Be brief."])
    assert (alone.config.rollout.temperature, alone.config.data.system_prompt) == (1.0, "Be brief.")


def test_what_is_no_model_is_refused(places: Path) -> None:
    for name in ("nowhere", "run@newest", "model@40"):
        with pytest.raises(ConfigError, match=rf"a model must be the directory of a run, .* got {places}/{name}; "):
            named_model(str(places / name), [])
