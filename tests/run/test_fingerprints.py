"""Each thing that hosts must agree on changes its own fingerprint; what differs from the run that goes on is named."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.goldens import labelled
from tests.models.random_checkpoint import write_random_qwen3
from tpu_grpo.config import RunConfig, load_config, parse_config
from tpu_grpo.run import fingerprints as module
from tpu_grpo.run.fingerprints import (
    Change,
    changed_settings,
    changed_sources,
    fingerprints,
    model_fingerprints,
    sources,
)

LABELLED = Path(__file__).with_name("labelled.txt")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    write_random_qwen3(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"question": "1", "answer": "2"}\n' * 3)
    (tmp_path / "held.jsonl").write_text('{"question": "3", "answer": "4"}\n')
    (tmp_path / "mine.py").write_text("def score(completions):\n    return [0.0] * len(completions)\n")
    (tmp_path / "algorithm.py").write_text("first")
    return tmp_path


def config(files: Path, **sections: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "model": {"path": str(files / "model")},
        "data": {"path": str(files / "train.jsonl")},
        "evaluation": {"path": str(files / "held.jsonl")},
        "rewards": [{"name": f"{files}/mine.py:score"}, {"name": "tpu_grpo.models.tasks.addition:forgot_carry"}],
    }
    return parse_config(tree | sections)


def differing(first: dict[str, str], second: dict[str, str]) -> set[str]:
    return {name for name in first.keys() | second.keys() if first.get(name) != second.get(name)}


def rewrite(name: str, text: str) -> Callable[[Path], None]:
    def write(files: Path) -> None:
        (files / name).write_text(text)

    return write


def flip_a_byte(files: Path) -> None:
    path = next((files / "model").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (flip_a_byte, "model file model.safetensors"),
        (rewrite("model/config.json", "{}"), "model file config.json"),
        (rewrite("model/tokenizer.json", "{} "), "model file tokenizer.json"),
        (rewrite("model/added.txt", "x"), "model file added.txt"),
        (rewrite("train.jsonl", '{"question": "1", "answer": "3"}\n'), "data file of data.path"),
        (rewrite("held.jsonl", '{"question": "3", "answer": "5"}\n'), "data file of evaluation.path"),
        (rewrite("mine.py", "def score(completions): ..."), "source of reward {files}/mine.py:score"),
        (rewrite("algorithm.py", "second"), "source of algorithm {files}/algorithm.py:Mine"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_differs_is_named(files: Path, change: Callable[[Path], None], name: str) -> None:
    own = {"algorithm": {"name": f"{files}/algorithm.py:Mine"}}
    before = fingerprints(config(files, **own))
    change(files)
    assert differing(before, fingerprints(config(files, **own))) == {name.format(files=files)}
    assert "source of reward tpu_grpo.models.tasks.addition:forgot_carry" in before


def test_every_source_of_a_mixture_is_compared(files: Path) -> None:
    folder = files / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a.arrow").write_bytes(b"a")
    mixed = [
        {"path": str(files / "train.jsonl")},
        {"path": str(folder)},
        {"path": f"{files}/mine.py:problems"},
        {"path": "tpu_grpo.models.tasks.addition:problems"},
        {"path": "reasoning_gym:chain_sum"},  # what is made or fetched is compared as prompts, by run/parts.py
        {"path": "hf:openai/gsm8k"},
    ]
    found = fingerprints(config(files, data={"sources": mixed}))
    assert [name for name in found if name.startswith(("data file", "source of data"))] == [
        "data file of data.sources.0.path",
        "data file sub/a.arrow of data.sources.1.path",
        "source of data.sources.2.path",
        "source of data.sources.3.path",
        "data file of evaluation.path",
    ]
    (folder / "sub" / "a.arrow").write_bytes(b"b")
    (files / "mine.py").write_text("def problems(): return []")
    assert differing(found, fingerprints(config(files, data={"sources": mixed}))) == {
        "data file sub/a.arrow of data.sources.1.path",
        "source of data.sources.2.path",
        f"source of reward {files}/mine.py:score",
    }


def test_rewards_of_the_evaluation_are_compared(files: Path) -> None:
    rewards = {"path": str(files / "held.jsonl"), "rewards": [{"name": f"{files}/mine.py:other"}]}
    assert f"source of reward {files}/mine.py:other" in fingerprints(config(files, evaluation=rewards))


OTHERS = """run.seed=7 run.max_steps=7 model.dtype=bfloat16 model.remat=block data.prompts_per_step=3 data.shuffle=false
data.prompt_template={question}? rollout.temperature=0.5 rollout.top_k=5 rollout.top_p=0.5 rollout.min_p=0.5
rollout.max_new_tokens=7 rollout.page_size=4 rollout.prefix_cache=false algorithm.group_size=3 algorithm.beta=0.5
algorithm.iterations=2 algorithm.old_policy=trainer algorithm.clip_low=0.1 algorithm.advantage=rloo
optimizer.learning_rate=0.5 optimizer.schedule=cosine meshes.trainer.tp=2 checkpoint.every=3 evaluation.prompts=3"""


@pytest.mark.full
def test_a_setting_that_differs_is_named(files: Path) -> None:
    (files / "run.yaml").write_text(config(files).to_yaml())
    before = fingerprints(config(files))
    for word in OTHERS.split():
        changed = fingerprints(load_config(files / "run.yaml", [word.replace("={", "='{").replace("}?", "}?'")]))
        assert differing(before, changed) == {f"setting {word.partition('=')[0]}"}


def test_a_variable_or_a_version_that_differs_is_named(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprints(config(files))
    for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64"):
        with monkeypatch.context() as patched:
            patched.setenv(variable, "something")
            assert differing(before, fingerprints(config(files))) == {f"environment variable {variable}"}
    monkeypatch.setattr(module, "versions", lambda: {"jax": "0.0"})
    assert "version of jax" in differing(before, fingerprints(config(files)))


def test_what_is_a_hosts_own_does_not_matter(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprints(config(files))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("HOSTNAME", "other")
    own = config(files, run={"dir": str(files / "elsewhere")}, hosts={"coordinator": "a:1", "count": 2, "index": 1})
    assert differing(before, fingerprints(own)) == {"setting hosts.coordinator", "setting hosts.count"}


def test_a_copy_elsewhere_is_the_same_model(files: Path) -> None:
    shutil.copytree(files / "model", files / "copy")
    assert model_fingerprints(files / "copy") == model_fingerprints(files / "model")
    assert model_fingerprints(files / "copy").items() <= fingerprints(config(files)).items()


def test_a_file_that_is_missing_is_a_value_too(files: Path) -> None:
    before = fingerprints(config(files))
    (files / "mine.py").unlink()
    after = fingerprints(config(files))
    assert differing(before, after) == {f"source of reward {files}/mine.py:score"}
    assert after[f"source of reward {files}/mine.py:score"] == "not readable: FileNotFoundError"


# --- between one start and the next ----------------------------------------------------------------------------------


def sources_of(config: RunConfig) -> dict[str, dict[str, str]]:
    return sources(config.plugins, config.model, config.algorithm)


def shown(before: RunConfig, now: RunConfig) -> list[str]:
    return [str(change) for change in changed_settings(before.values(), now.values())]


@pytest.mark.parametrize(("before", "now", "expected"), labelled(LABELLED, "differences"))
def test_a_difference_is_named_with_both_values(before: list[str], now: list[str], expected: str) -> None:
    assert shown(load_config(None, before), load_config(None, now)) == [expected]


def test_equal_configs_do_not_differ() -> None:
    words = ["rewards=[{name: gsm8k}, {name: format}]", "data.sources=[{path: a.jsonl}]"]
    assert shown(load_config(None, words), load_config(None, words)) == []


def test_an_entry_that_was_added_shows_all_of_it() -> None:
    before, now = (load_config(None, [f"rewards=[{{name: gsm8k}}{more}]"]) for more in ("", ", {name: format}"))
    changed = changed_settings(before.values(), now.values())
    assert str(changed[0]) == "rewards.1.name: absent -> format"
    assert {change.name.rpartition(".")[0] for change in changed} == {"rewards.1"}
    assert all(change.is_in(["rewards"]) and not change.is_in(["rewards.0", "reward"]) for change in changed)
    assert shown(now, before)[0] == "rewards.1.name: format -> absent"


def test_long_values_are_cut_where_they_still_differ() -> None:
    before, now = (Change("a", "x" * 100 + tail, "y" * 100, "none") for tail in "ab")
    assert str(before) == f"a: {'x' * 60}... -> {'y' * 60}..."
    same_start = Change("a", "x" * 100 + "1", "x" * 100 + "2", "none")
    assert str(same_start) == f"a: {'x' * 100}1 -> {'x' * 100}2"
    assert before != now


def test_the_content_of_files_counts(files: Path) -> None:
    given = config(files, evaluation={"rewards": [{"name": f"{files}/mine.py:score"}]})
    before = sources_of(given)
    assert set(before) == {"rewards.0.name", "rewards.1.name", "evaluation.rewards.0.name", "model.path"}
    assert changed_sources(before, sources_of(given)) == []
    (files / "mine.py").write_text("def score(completions): return 0")
    (files / "model" / "added.txt").write_text("x")
    changed = changed_sources(before, sources_of(given))
    assert [change.name for change in changed] == ["rewards.0.name", "evaluation.rewards.0.name", "model.path"]
    assert all(change.effect == "results" for change in changed)
    assert str(changed[0]).startswith("rewards.0.name: mine.py sha256 ")
    assert changed[2].old == "added.txt absent"


def test_weights_are_read_whole_only_for_a_reference(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpu_grpo.run.fingerprints.WEIGHTS_BYTES", 50)
    size = (files / "model" / "model.safetensors").stat().st_size
    assert sources_of(config(files))["model.path"]["model.safetensors"] == f"{size} bytes"
    found = sources_of(config(files, algorithm={"beta": 0.1}))["model.path"]["model.safetensors"]
    assert found.startswith("sha256 ")


def test_a_setting_that_names_another_file_now_is_no_changed_file(files: Path) -> None:
    assert (
        changed_sources(sources_of(config(files)), sources_of(config(files, rewards=[{"name": "exact_answer"}]))) == []
    )
