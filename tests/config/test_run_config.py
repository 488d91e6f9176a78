"""The whole config: what follows from settings, which of them exclude each other, and how all are written out."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.config.asking import SHIPPED, leaves, message
from tpu_grpo.config import AlgorithmSection, RolloutSection, RunConfig, load_config, parse_config

LENGTHS = ["data.max_prompt_tokens=28", "rollout.max_new_tokens=100"]
SIZES = [*LENGTHS, "data.prompts_per_step=6", "algorithm.group_size=5"]


@pytest.mark.parametrize(
    ("micro", "devices", "rows", "passes"),
    [
        ("6", 1, 30, 1),
        ("2", 1, 10, 3),
        ("2", 4, 12, 3),  # rounded up to fill the mesh
        ("null", 1, 4, 8),  # an eighth of 30 rows
        ("null", 8, 32, 1),  # 512 tokens for each of 8 devices are 32 rows of 128
    ],
)
def test_micro_batches(micro: str, devices: int, rows: int, passes: int) -> None:
    config = load_config(None, [*SIZES, f"algorithm.micro_batch_prompts={micro}"])
    assert (config.batch_rows, config.context_tokens, config.row_tokens) == (30, 128, 128)
    assert (config.micro_batch_rows(devices), config.micro_batches(devices)) == (rows, passes)


@pytest.mark.parametrize(
    ("mini", "micro", "rows", "passes", "updates"),
    [
        ("null", "null", 4, 8, 2),  # an eighth of 30 rows; two iterations
        ("3", "null", 4, 8, 4),  # the same passes: 15 rows are 4 of them, twice
        ("1", "null", 4, 12, 12),
        ("1", "1", 5, 6, 12),
        ("6", "2", 10, 3, 2),
    ],
)
def test_mini_batches(mini: str, micro: str, rows: int, passes: int, updates: int) -> None:
    sizes = ["algorithm.iterations=2", f"algorithm.micro_batch_prompts={micro}", f"algorithm.mini_batch_prompts={mini}"]
    config = load_config(None, [*SIZES, *sizes])
    assert (config.micro_batch_rows(1), config.micro_batches(1), config.updates_per_step) == (rows, passes, updates)
    assert config.update_rows == (30 if mini == "null" else 5 * int(mini))


def test_longer_rows_make_fewer_of_them() -> None:
    """Rows of 300 tokens hold two completions of at most 128: 10 prompts of 3 completions need 15, four of them 6."""
    sizes = ["data.prompts_per_step=10", "algorithm.group_size=3", "algorithm.micro_batch_prompts=4"]
    config = load_config(None, [*sizes, *LENGTHS, "algorithm.row_tokens=300"])
    assert (config.update_rows, config.micro_batch_rows(1), config.micro_batches(1)) == (15, 6, 3)


@pytest.mark.parametrize(
    ("overrides", "run_dir"),
    [(["run.name=x"], "runs/x"), (["run.name=x", "run.dir=/out/y"], "/out/y"), (["run.dir=~/y"], "/home/someone/y")],
)
def test_run_dir_follows_the_name_unless_it_is_set(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], run_dir: str
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert load_config(None, overrides).run_dir == Path(run_dir)


@pytest.mark.parametrize(
    ("prompt", "new", "more", "needed"),
    [
        (100, 40, "rollout.page_size=1", 142),  # 100 + 40 + 2 spare
        (100, 40, "rollout.page_size=16", 144),  # nine pages hold 144, eight only 128
        (100, 40, "rollout.page_size=71", 142),  # two pages exactly
        (100, 40, "rollout.page_size=128", 256),
        (12, 4, "rollout.page_size=1", 19),  # 7 beside the prompt
        (12, 4, "environment.name=guessing", 22),  # the last turn of a conversation of 16 tokens begins behind 15
    ],
)
def test_the_cache_holds_one_whole_request(prompt: int, new: int, more: str, needed: int) -> None:
    sizes = [f"data.max_prompt_tokens={prompt}", f"rollout.max_new_tokens={new}", more]
    page = int(more.rpartition("=")[2]) if "page" in more else 1
    assert message(*sizes, f"rollout.kv_tokens={needed - 1}") == (
        f"rollout.kv_tokens must hold one whole request: >= {needed} tokens (data.max_prompt_tokens={prompt} + "
        f"rollout.max_new_tokens={new}, 2 spare, and 7 beside a prompt, whole pages of {page}), got {needed - 1}; "
        "raise it or shorten prompts or completions"
    )
    assert load_config(None, [*sizes, f"rollout.kv_tokens={needed}"]).rollout.kv_tokens == needed


BF16 = "model.dtype=bfloat16 model.param_dtype=bfloat16"


@pytest.mark.parametrize(
    "overrides",
    [
        "run.max_steps=10 logging.profile_steps=[3,4,10]",
        "rollout.release_during_update=true",
        f"{BF16} optimizer.state=compact",
        f"{BF16} optimizer.name=adamw_8bit",
        "export.every=best",
        "export.every=best data.path=a.jsonl evaluation.path=b.jsonl",
        "export.every=last data.path=a.jsonl",
        "export.kind=adapter model.lora.rank=2",
    ],
)
def test_settings_that_do(overrides: str) -> None:
    assert load_config(None, overrides.split()) != RunConfig()


def test_an_environment_gives_the_reward_unless_others_are_named() -> None:
    assert [spec.name for spec in load_config(None, ["environment.name=calculator"]).rewards] == ["environment"]
    named = load_config(None, ["environment.name=calculator", "rewards=[{name: exact_answer}]"])
    assert [spec.name for spec in named.rewards] == ["exact_answer"]


def test_environments_by_name() -> None:
    several = load_config(None, ["environment.name={a: calculator, b: mine.py:Game}"]).environment
    assert several.names == {"a": "calculator", "b": "mine.py:Game"}
    assert RunConfig().environment.names == {}


def test_the_resolved_yaml_writes_every_setting_out() -> None:
    assert list(leaves(yaml.safe_load(RunConfig().to_yaml()))) == list(leaves(RunConfig().model_dump(mode="json")))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_round_trips(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    assert config.run.name == path.stem
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml())
    assert load_config(again) == config
    assert load_config(again).to_yaml() == config.to_yaml()


def test_there_are_shipped_configs() -> None:
    assert {"demo_cpu.yaml", "gsm8k_cpu_check.yaml"} <= {path.name for path in SHIPPED}


@pytest.mark.parametrize(
    ("algorithm", "recomputes"),
    [
        ({}, False),
        ({"iterations": 2}, True),
        ({"mini_batch_prompts": 2}, True),
        ({"mini_batch_prompts": 4}, False),  # all prompts of a step
        ({"beta": 0.1}, False),
        ({"beta": 0.1, "kl_in": "reward"}, True),
        ({"correction": "sequence", "opsm": 0.1, "top_entropy_quantile": 0.2}, False),
        ({"old_policy": "rollout", "iterations": 2}, False),
    ],
)
def test_an_only_update_needs_no_pass_for_its_old_policy(algorithm: dict[str, Any], recomputes: bool) -> None:
    given = {"data": {"prompts_per_step": 4}, "algorithm": {"old_policy": "trainer", **algorithm}}
    assert parse_config(given).recomputes_old_policy == recomputes


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({}, "rollout"),
        ({"rollout": {"weights_dtype": "int8"}}, "trainer"),
        ({"rollout": {"weights_dtype": "int8"}, "algorithm": {"group_size": 4}}, "trainer"),
        ({"rollout": {"weights_dtype": "int8"}, "algorithm": {"old_policy": "rollout"}}, "rollout"),
        ({"rollout": RolloutSection(weights_dtype="int8"), "algorithm": AlgorithmSection(group_size=4)}, "trainer"),
    ],
)
def test_rounded_weights_are_corrected_unless_the_old_policy_is_set(given: dict[str, Any], policy: str) -> None:
    config = parse_config(given)
    assert config.algorithm.old_policy == policy
    assert config.algorithm.group_size == getattr(given.get("algorithm"), "group_size", config.algorithm.group_size)
