"""Settings: what they default to, in which order they are set, and what is said about those that cannot work."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from tpu_grpo.config import RunConfig, SourceSpec, load_config, parse_config, settings
from tpu_grpo.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = sorted((REPOSITORY / "configs").rglob("*.yaml"))
HELP = "`--help` lists every setting with its type and default"


def value_of(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return str(caught.value)


def file_message(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return str(caught.value)


# --- where values come from ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run.name", "run"),
        ("run.dir", None),
        ("run.seed", 0),
        ("model.path", "builtin:addition"),
        ("model.dtype", "float32"),
        ("model.attention", "auto"),
        ("data.prompt_template", "{question}"),
        ("rollout.attention", "auto"),
        ("rollout.temperature", 1.0),
        ("rollout.max_new_tokens", 256),
        ("rollout.batch_paddings", None),
        ("rollout.release_during_update", False),
        ("algorithm.name", "grpo"),
        ("algorithm.options", {}),
        ("algorithm.advantage", None),
        ("algorithm.loss_aggregation", None),
        ("algorithm.group_size", 8),
        ("algorithm.beta", 0.0),
        ("algorithm.iterations", 1),
        ("algorithm.old_policy", "rollout"),
        ("optimizer.learning_rate", 1e-6),
        ("meshes.layout", "shared"),
        ("meshes.trainer.fsdp", None),
        ("meshes.trainer.tp", 1),
        ("meshes.sampler.tensor", None),
        ("meshes.sampler.shard_vocab", None),
        ("hosts.coordinator", None),
        ("hosts.count", 1),
        ("hosts.index", 0),
        ("hosts.check", "rollout"),
        ("hosts.start_timeout_seconds", 300.0),
        ("hosts.lost_timeout_seconds", 40.0),
        ("checkpoint.every", 0),
        ("checkpoint.resume", "auto"),
        ("evaluation.every", 0),
        ("logging.wandb", "off"),
    ],
)
def test_defaults(name: str, value: Any) -> None:
    assert value_of(RunConfig(), name) == value
    assert value_of(load_config(None), name) == value


def test_the_default_reward_is_an_exact_answer() -> None:
    (reward,) = RunConfig().rewards
    assert (reward.name, reward.weight, reward.options) == ("exact_answer", 1.0, {})


def test_overrides_replace_the_file_and_the_last_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("run: {name: from_file, seed: 1, max_steps: 9}\n")
    run = load_config(path, ["run.seed=2", "run.seed=3"]).run
    assert (run.name, run.seed, run.max_steps) == ("from_file", 3, 9)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("meshes.trainer.tp=4", 4),
        ("meshes.sampler.shard_vocab=false", False),
        ("meshes.sampler.shard_vocab=null", None),
        ("optimizer.learning_rate=1e-4", 1e-4),
        ("optimizer.learning_rate=3e-4", 3e-4),
        ("optimizer.learning_rate=2.5E-05", 2.5e-5),
        ("optimizer.learning_rate=0", 0.0),
        ("run.max_steps=1e2", 100),
        ("run.seed=010", 10),
        ("run.seed=4294967295", 2**32 - 1),
        ("rollout.kv_tokens=null", None),
        ("rollout.batch_paddings=[8, 16]", (8, 16)),
        ("data.shuffle=false", False),
        ("data.shuffle=no", False),
        ("data.prompt_template=a=b", "a=b"),
        ('data.prompt_template="{question}: =\'"', "{question}: ='"),
        ("data.prompt_template='{question}'", "{question}"),
        ("data.system_prompt=", ""),
        ("data.system_prompt=é 中", "é 中"),
        ("logging.wandb=off", "off"),
        ("run.name=2026-01-01", "2026-01-01"),
        ("run.name='1e5'", "1e5"),
        ("run.dir=out/x", Path("out/x")),
        ("evaluation.path=held=out.jsonl", "held=out.jsonl"),
    ],
)
def test_override_values(override: str, value: Any) -> None:
    found = value_of(load_config(None, [override]), override.partition("=")[0])
    assert found == value
    assert type(found) is type(value)


def test_a_list_is_set_whole() -> None:
    overrides = ["rewards=[{name: gsm8k, weight: 2}, {name: format, options: {limit: 1e-4}}]"]
    first, second = load_config(None, overrides).rewards
    assert (first.name, first.weight, first.options) == ("gsm8k", 2.0, {})
    assert (second.name, second.weight, second.options) == ("format", 1.0, {"limit": 1e-4})


def test_plain_yaml_in_a_file_reads_as_in_an_override(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("run: {name: 2026-01-01}\noptimizer: {learning_rate: 3e-4}\nlogging: {wandb: off}\n")
    config = load_config(path)
    assert (config.run.name, config.optimizer.learning_rate, config.logging.wandb) == ("2026-01-01", 3e-4, "off")


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("# nothing yet\n")
    assert load_config(tmp_path / "c.yaml") == RunConfig()


def test_loading_the_same_overrides_twice_gives_equal_configs() -> None:
    overrides = ["run.seed=5", "meshes.trainer.tp=2"]
    assert load_config(None, overrides) == load_config(None, overrides) != RunConfig()


def test_a_config_is_frozen() -> None:
    config = RunConfig()
    for section, key in (
        (config, "run"),
        (config.run, "seed"),
        (config.meshes.trainer, "tp"),
        (config.rewards[0], "name"),
    ):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, key, 1)
    assert config == RunConfig()


def test_sizes_that_follow_from_settings() -> None:
    config = load_config(
        None,
        [
            "data.prompts_per_step=6",
            "algorithm.group_size=5",
            "data.max_prompt_tokens=100",
            "rollout.max_new_tokens=28",
        ],
    )
    assert (config.batch_rows, config.context_tokens) == (30, 128)


@pytest.mark.parametrize(("micro", "sizes"), [("null", (6, 30, 1)), ("6", (6, 30, 1)), ("2", (2, 10, 3))])
def test_a_batch_is_one_micro_batch_unless_it_is_cut(micro: str, sizes: tuple[int, int, int]) -> None:
    overrides = ["data.prompts_per_step=6", "algorithm.group_size=5", f"algorithm.micro_batch_prompts={micro}"]
    config = load_config(None, overrides)
    assert (config.micro_batch_prompts, config.micro_batch_rows, config.micro_batches) == sizes


def test_run_dir_follows_the_name_unless_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert load_config(None, ["run.name=x"]).run_dir == Path("runs/x")
    assert load_config(None, ["run.name=x", "run.dir=/out/y"]).run_dir == Path("/out/y")
    assert load_config(None, ["run.dir=~/y"]).run_dir == Path("/home/someone/y")


# --- keys that are not settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollouts.temperature=1", "rollouts is not a setting (got {'temperature': 1}); did you mean rollout?"),
        ("rollout.temprature=1", "rollout.temprature is not a setting (got 1); did you mean rollout.temperature?"),
        ("temperature=1", "temperature is not a setting (got 1); did you mean rollout.temperature?"),
        ("meshes.trainr.fsdp=1", "meshes.trainr is not a setting (got {'fsdp': 1}); did you mean meshes.trainer?"),
        ("meshes.trainer.fsdb=1", "meshes.trainer.fsdb is not a setting (got 1); did you mean meshes.trainer.fsdp?"),
        (
            "rewards=[{name: gsm8k, wieght: 2}]",
            "rewards.0.wieght is not a setting (got 2); did you mean rewards[i].weight?",
        ),
        (
            "foo.bar=1",
            "foo is not a setting (got {'bar': 1}); known sections: run, model, data, rollout, algorithm, optimizer, "
            "meshes, hosts, checkpoint, evaluation, logging, rewards",
        ),
        (
            "hosts.zzzzzzzzz=1",
            "hosts.zzzzzzzzz is not a setting (got 1); known in hosts: coordinator, count, index, "
            "check, start_timeout_seconds, lost_timeout_seconds",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(override: str, expected: str) -> None:
    assert message(override) == expected


def test_every_wrong_setting_is_reported_at_once() -> None:
    lines = message("run.sed=1", "rollout.top_p=2", "algorithm.group_size=1").splitlines()
    assert [line.split()[0] for line in lines] == ["run.sed", "rollout.top_p:", "algorithm.group_size"]


@pytest.mark.parametrize("text", ["{1: 2}", "run: {2: 3}", "null: 1"])
def test_a_key_that_is_not_text_is_a_config_error(tmp_path: Path, text: str) -> None:
    assert "got" in file_message(tmp_path / "c.yaml", text)


# --- values that cannot work -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.seed=-1", f"run.seed: input should be greater than or equal to 0, got -1; {HELP}"),
        ("run.seed=4294967296", f"run.seed: input should be less than 4294967296, got 4294967296; {HELP}"),
        ("run.max_steps=0", f"run.max_steps: input should be greater than or equal to 1, got 0; {HELP}"),
        (
            "run.max_steps=1.5",
            "run.max_steps: input should be a valid integer, got a number with a fractional part, got 1.5; " + HELP,
        ),
        (
            "run.max_steps=many",
            "run.max_steps: input should be a valid integer, unable to parse string as an integer, got 'many'; " + HELP,
        ),
        ("run.max_steps=true", "run.max_steps must not be a switch, got true; `--help` lists what it takes"),
        ("optimizer.b1=false", "optimizer.b1 must not be a switch, got false; `--help` lists what it takes"),
        ("optimizer.learning_rate=.nan", f"optimizer.learning_rate: input should be a finite number, got nan; {HELP}"),
        ("optimizer.learning_rate=.inf", f"optimizer.learning_rate: input should be a finite number, got inf; {HELP}"),
        ("optimizer.b2=1", f"optimizer.b2: input should be less than 1, got 1; {HELP}"),
        ("rollout.top_p=0", f"rollout.top_p: input should be greater than 0, got 0; {HELP}"),
        ("model.dtype=fp16", f"model.dtype: input should be 'float32' or 'bfloat16', got 'fp16'; {HELP}"),
        ("meshes.layout=apart", f"meshes.layout: input should be 'shared' or 'split', got 'apart'; {HELP}"),
        (
            "data.shuffle=maybe",
            f"data.shuffle: input should be a valid boolean, unable to interpret input, got 'maybe'; {HELP}",
        ),
        ("run=5", "run must be a section, got 5; known in run: name, dir, seed, max_steps"),
        ("meshes.trainer=[]", "meshes.trainer must be a section, got []; known in meshes.trainer: fsdp, tp"),
        (
            "rewards=[gsm8k]",
            "rewards.0 must be a section, got 'gsm8k'; known in rewards.0: name, label, weight, options, "
            "only_if, workers, timeout, on_error, error_value, messages, recycle, memory_gb, deterministic",
        ),
        ("rewards=[{weight: 1}]", f"rewards.0.name: field required, got {{'weight': 1}}; {HELP}"),
        ("rewards=gsm8k", "rewards must be a list, got 'gsm8k'; write it in brackets: rewards='[...]'"),
        ("rewards=[]", "rewards must name at least one reward, got none; add e.g. {name: exact_answer}"),
        (
            "rollout.batch_paddings=8",
            "rollout.batch_paddings must be a list, got 8; write it in brackets: rollout.batch_paddings='[...]'",
        ),
        (
            "rollout.batch_paddings=[]",
            "rollout.batch_paddings must name a batch size, got []; leave it unset for powers of 2",
        ),
        (
            "rollout.batch_paddings=[8, 0]",
            f"rollout.batch_paddings.1: input should be greater than or equal to 1, got 0; {HELP}",
        ),
        ("run.name=7", "run.name must be text, got 7; put a text in quotes of its own: run.name='\"...\"'"),
        (
            "data.prompt_template={question}",
            "data.prompt_template must be text, got {'question': None}; put a text in quotes of its own: "
            "data.prompt_template='\"...\"'",
        ),
        (
            "algorithm.group_size=1",
            "algorithm.group_size must be >= 2, got 1; a group of one has no baseline",
        ),
        (
            "hosts.count=2",
            "hosts.count=2 needs hosts.coordinator, got none; set it to host:port of process 0",
        ),
        (
            "hosts.index=1",
            "hosts.index must be below hosts.count=1, got 1; indices start at 0",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_and_the_remedy(override: str, expected: str) -> None:
    assert message(override) == expected


@pytest.mark.parametrize("name", ["a b", "../x", ".hidden", "a/b", ""])
def test_a_run_name_is_a_plain_file_name(name: str) -> None:
    assert message(f'run.name="{name}"').startswith("run.name: string should match pattern")


@pytest.mark.parametrize("override", ["run.seed", "=1", "configs/demo_cpu.yaml", ""])
def test_an_override_needs_a_name_and_a_value(override: str) -> None:
    assert message(override) == f"an override must read section.key=value, got {override!r}; example: run.seed=1"


def test_an_override_must_be_yaml() -> None:
    found = message("data.system_prompt=[a")
    assert found.startswith("data.system_prompt: the value '[a' is not YAML (while parsing a flow sequence")
    assert found.endswith("put a text in quotes of its own: data.system_prompt='\"...\"'")


def test_an_entry_of_a_list_cannot_be_overridden_alone(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("rewards: [{name: gsm8k}]\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["rewards.0.weight=2"])
    assert str(caught.value) == (
        "rewards.0.weight: rewards is not a section; write lists whole, e.g. rewards='[{name: gsm8k}]'"
    )


# --- rules between sections ------------------------------------------------------------------------------------------


def test_micro_batches_divide_the_prompts() -> None:
    assert message("data.prompts_per_step=12", "algorithm.micro_batch_prompts=5") == (
        "algorithm.micro_batch_prompts must divide data.prompts_per_step=12, got 5; use one of [1, 2, 3, 4, 6, 12]"
    )
    config = load_config(None, ["data.prompts_per_step=12", "algorithm.micro_batch_prompts=4"])
    assert config.algorithm.micro_batch_prompts == 4


@pytest.mark.parametrize(
    ("page_size", "needed"),
    [
        (1, 142),  # 100 + 40 + 2 spare
        (16, 144),  # nine pages hold 144, eight only 128
        (71, 142),  # two pages exactly
        (128, 256),
    ],
)
def test_the_cache_holds_one_whole_request(page_size: int, needed: int) -> None:
    sizes = ["data.max_prompt_tokens=100", "rollout.max_new_tokens=40", f"rollout.page_size={page_size}"]
    assert message(*sizes, f"rollout.kv_tokens={needed - 1}") == (
        f"rollout.kv_tokens must hold one whole request: >= {needed} tokens (data.max_prompt_tokens=100 + "
        f"rollout.max_new_tokens=40, 2 spare, whole pages of {page_size}), got {needed - 1}; raise it or shorten "
        "prompts or completions"
    )
    assert load_config(None, [*sizes, f"rollout.kv_tokens={needed}"]).rollout.kv_tokens == needed


def test_releasing_memory_needs_shared_devices() -> None:
    assert message("rollout.release_during_update=true", "meshes.layout=split") == (
        "rollout.release_during_update=true needs meshes.layout=shared, got split; the engines then hold nothing on "
        "the trainer's devices: leave it false"
    )
    assert load_config(None, ["rollout.release_during_update=true"]).rollout.release_during_update


def test_native_attention_has_pages_of_one() -> None:
    assert message("rollout.attention=native", "rollout.page_size=16") == (
        "rollout.page_size must be 1 with rollout.attention=native, got 16; the library's native attention is wrong "
        "for larger pages: use gather (or flash on TPU)"
    )
    assert load_config(None, ["rollout.attention=native"]).rollout.page_size == 1
    assert load_config(None, ["rollout.attention=gather", "rollout.page_size=16"]).rollout.page_size == 16


def test_training_does_not_sample_greedily() -> None:
    assert message("rollout.temperature=0") == (
        "rollout.temperature must be > 0 for training, got 0.0; greedy completions of a group are all the same, so "
        "every advantage is zero. Try 1.0"
    )


def test_a_reward_is_listed_once() -> None:
    assert message("rewards=[{name: gsm8k}, {name: format}, {name: gsm8k, weight: 2}]") == (
        "rewards must have names of their own in the metrics, got ['gsm8k'] twice; give one of them a label"
    )


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_missing_file_lists_the_shipped_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(ConfigError) as caught:
        load_config("nosuch.yaml")
    shipped = sorted(f"configs/{path.name}" for path in (REPOSITORY / "configs").glob("*.yaml"))
    assert "configs/demo_cpu.yaml" in shipped
    assert str(caught.value) == f"config file not found: nosuch.yaml; shipped configs: {shipped}"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^config file not found: nosuch\.yaml; shipped configs: none here$"):
        load_config("nosuch.yaml")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("run: {seed: 1", "while parsing a flow mapping"),
        ("run:\n\tseed: 1\n", "found character '\\t' that cannot start any token"),
        (b"run: {name: \xff}", "codec can't decode byte 0xff"),
        ("run: {seed: 1}\nrun: {name: x}\n", "'run' is set twice; keep one of them"),
        ("run: {seed: 1, seed: 1}\n", "'seed' is set twice; keep one of them"),
        ("run: {seed: !!int one}\n", "invalid literal for int()"),
        ("run: !!python/object:os.system {}\n", "could not determine a constructor for the tag"),
    ],
)
def test_a_broken_file_is_named_with_the_reason(tmp_path: Path, text: str | bytes, reason: str) -> None:
    found = file_message(tmp_path / "c.yaml", text)
    assert found.startswith(f"config file {tmp_path / 'c.yaml'} is not readable YAML: ")
    assert reason in found


@pytest.mark.parametrize(("text", "kind"), [("- run\n- model\n", "list"), ("just words", "str"), ("5", "int")])
def test_a_file_holds_sections(tmp_path: Path, text: str, kind: str) -> None:
    assert file_message(tmp_path / "c.yaml", text) == (
        f"config file {tmp_path / 'c.yaml'} must hold sections (run:, model:, ...), got a {kind}"
    )


def test_a_directory_is_not_a_config_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not readable YAML: .*Is a directory"):
        load_config(tmp_path)


def test_there_are_shipped_configs() -> None:
    assert {"demo_cpu.yaml", "gsm8k_cpu_check.yaml"} <= {path.name for path in SHIPPED}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_round_trips(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml())
    assert load_config(again) == config
    assert load_config(again).to_yaml() == config.to_yaml()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_is_named_after_its_file(path: Path) -> None:
    assert load_config(path).run.name == path.stem


@pytest.mark.parametrize(
    "text",
    ["1e5", "010", "08", "off", "yes", "null", "~", "2026-01-01", "1:30", "<<", "a: b", "# x", " x ", "é\n\t{}", ""],
)
def test_any_text_round_trips(text: str, tmp_path: Path) -> None:
    config = parse_config({"data": {"system_prompt": text}, "rewards": [{"name": "r", "options": {"o": [text, 1e-7]}}]})
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml())
    assert load_config(again) == config
    assert yaml.safe_load(config.to_yaml())["data"]["system_prompt"] == text  # for YAML 1.1 readers too


def test_the_resolved_yaml_writes_every_setting_out() -> None:
    assert list(leaves(yaml.safe_load(RunConfig().to_yaml()))) == list(leaves(RunConfig().model_dump()))


# --- the list of settings --------------------------------------------------------------------------------------------


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Names of what a dumped config holds, in its order; options and columns are leaves, though mappings."""
    for key, value in tree.items():
        if key == "rewards" and not prefix:
            yield "rewards"
            yield from leaves(value[0], "rewards[i].")
        elif key == "sources":
            yield "data.sources"
            yield from leaves(SourceSpec(path="x").model_dump(), "data.sources[i].")
        elif isinstance(value, dict) and key not in ("options", "columns"):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def test_every_leaf_is_listed_once_with_a_meaning() -> None:
    listed = [name for name, *_ in settings()]
    assert sorted(listed) == sorted(leaves(RunConfig().model_dump()))
    assert len(listed) == len(set(listed))
    assert [name for name, _, _, meaning in settings() if len(meaning) < 10] == []


@pytest.mark.parametrize(
    ("name", "kind", "default"),
    [
        ("run.dir", "path | unset", "unset"),
        ("run.seed", "int", "0"),
        ("model.dtype", "float32 | bfloat16", "float32"),
        ("data.shuffle", "bool", "true"),
        ("rollout.batch_paddings", "list of int | unset", "unset"),
        ("rewards", "list", "['exact_answer']"),
        ("rewards[i].name", "str", "required"),
        ("rewards[i].options", "mapping", "{}"),
        ("optimizer.learning_rate", "float", "1.0e-06"),
    ],
)
def test_types_and_defaults_as_shown(name: str, kind: str, default: str) -> None:
    assert {n: (k, d) for n, k, d, _ in settings()}[name] == (kind, default)
