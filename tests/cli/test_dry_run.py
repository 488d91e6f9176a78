"""A dry run refuses what a run would: configs are changed at random, and those that pass it are built."""

import random
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.models.test_builtin import tiny
from tpu_grpo.algorithms import SHIPPED as ALGORITHMS, open_algorithm
from tpu_grpo.cli.dry_run import check
from tpu_grpo.config import RunConfig, load_config, settings
from tpu_grpo.engine.options import EngineOptions
from tpu_grpo.hosts import Hosts
from tpu_grpo.learner import Learner
from tpu_grpo.observe.run_log import open_run_log
from tpu_grpo.records.errors import (
    CallbackError,
    CheckpointError,
    ConfigError,
    DataError,
    EpisodeError,
    RewardError,
    TpuGrpoError,
)
from tpu_grpo.rewards.shipped import SHIPPED
from tpu_grpo.run.inputs import agreed_checkpoint, check_model, open_inputs
from tpu_grpo.run.meshes import build_meshes
from tpu_grpo.run.parts import open_engines, open_task, stop_ids
from tpu_grpo.run.policies import load_inputs

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo_cpu.yaml"
LEFT = r"run\.|hosts\.|model\.path|\[i\]|data\.(path|sources|options|split|subset)|compilation|secrets"
VALUES = {
    "int": ["0", "1", "2", "3", "4", "8", "30", "128", "4096"],
    "float": ["0", "0.1", "0.5", "1", "1.5", "3", "100"],
    "bool": ["true", "false"],
    "str": ["nosuch", "'0'", "question", "(", "greedy/exact_answer"],
    "path": ["nosuch"],
    "mapping": ["{}", "{nosuch: 1}", "{eps: 1.0e-6}", "{cap: 2}", "{momentum: 0.9}"],
    "list": ["[]", "[{match: norm, weight_decay: 0.1}]", "[{match: nosuch}]", "[exact_answer]", "[1, 2]"],
    "unset": ["null"],
}
"""Values of a kind of setting, right ones and wrong ones."""
NAMES = {
    "optimizer.name": ["adam", "adamw", "adamw_8bit", "adafactor", "muon", "lion", "sgd", "nosuch.py:f", "optax:adamw"],
    "algorithm.name": [*ALGORITHMS, "ppo", "nosuch.py:F"],
    "rewards": [f"[{name}]" for name in SHIPPED],
    "model.lora.rank": ["2", "4", "0"],
    "environment.name": ["calculator", "guessing", "nosuch"],
    "rollout.batch_paddings": ["[16]", "[64]", "[8, 64]"],
}


def changed(seed: int, folder: Path) -> list[str]:
    """One to three settings of the demo, changed to something that is their kind, for a model that is hardly taught."""
    draw = random.Random(seed)
    kinds = {name: kind for name, kind, *_ in settings() if not re.search(LEFT, name)}
    words = []
    for name in draw.sample(
        [*kinds, *NAMES, *(name for name in kinds if name.startswith(("optimizer", "algorithm")))], 3
    ):
        options = NAMES.get(name) or [
            value for kind in kinds[name].split(" | ") for value in VALUES.get(kind.split()[0], [kind])
        ]
        words.append(f"{name}={draw.choice(options)}")
    model = tiny()
    return [*words[: draw.randint(1, 3)], f"model.path={model}", f"run.dir={folder}/{seed}", "run.max_steps=4"]


COUNTED = """
from tpu_grpo.algorithms.grpo import Grpo

class Counted(Grpo):
    def __init__(self):
        super().__init__()
        with open(__file__ + ".log", "a") as log:
            log.write("made\\n")
"""


@pytest.mark.full
def test_an_algorithm_of_ones_own_is_made_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(COUNTED)
    config = load_config(DEMO, [f"algorithm.name={tmp_path}/mine.py:Counted", f"run.dir={tmp_path}/run"])
    check(open_inputs(config))
    assert (tmp_path / "mine.py.log").read_text() == "made\n"


def build(config: RunConfig) -> None:
    """Build what a run builds before its first step, but for what is compiled."""
    hosts, algorithm, inputs = Hosts(), open_algorithm(config.algorithm), open_inputs(config)
    config = inputs.config
    checkpoint = agreed_checkpoint(config.model, config.run.seed, hosts, inputs.checkpoint)
    check_model(config, checkpoint)
    meshes = build_meshes(config.meshes, config.model, config.environment, config.row_tokens, checkpoint)
    ids = stop_ids(config.environment, config.data, inputs.tokenizer, checkpoint.directory)
    options = EngineOptions.from_config(config, ids, replicas=meshes.replicas, platform=meshes.platform)
    task = open_task(inputs, algorithm, hosts)
    try:
        open_engines(options, hosts, checkpoint, meshes, config.meshes, config.model.lora, task.environments)
        given = load_inputs(config.model, config.run.seed, checkpoint, meshes, algorithm)
        Learner(config, given, hosts).close()
        open_run_log(config.run_dir, config.run, config.logging, {}, 0).close()
    finally:
        task.close()


def refused_late(seeds: range, folder: Path) -> Iterator[tuple[list[str], TpuGrpoError | None]]:
    """Yield the changes that pass a dry run, with what refuses them afterwards."""
    for seed in seeds:
        words = changed(seed, folder)
        try:
            config = load_config(DEMO, words)
            check(open_inputs(config))
        except TpuGrpoError:
            continue
        try:
            build(config)
        except TpuGrpoError as error:
            yield words, error
        else:
            yield words, None


@pytest.mark.full
@pytest.mark.parametrize(
    "seeds",
    [
        range(12),
        pytest.param(range(1000), marks=[pytest.mark.slow, pytest.mark.timeout(20000)]),
    ],
    ids=str,
)
def test_what_passes_a_dry_run_is_built(seeds: range, tmp_path: Path) -> None:
    found = list(refused_late(seeds, tmp_path))
    assert len(found) >= len(seeds) // 6
    assert [(words, str(error)) for words, error in found if error is not None] == []


def test_a_prompt_that_opens_the_thinking_is_noted(tmp_path: Path) -> None:
    words = ["data.prompt_template='{question}<think>'", "data.chat_template=false", "data.max_prompt_tokens=15"]
    lines = check(open_inputs(load_config(DEMO, [*words, f"run.dir={tmp_path}/run"])))
    notes = [line for line in lines if line.startswith("note")]
    assert notes == [
        "note       builtin:addition: prompts end with <think>, which think_answer and xml_count count as written, and "
        "rewards of answers read what follows </think>"
    ]


ABSURD = [
    *("-1", "1e308", "18446744073709551616", "2147483647", "1" + "0" * 400, "9" * 5000),
    *(
        "/",
        "a" * 5000,
        "~nosuch/x",
        r'"\0"',
        r'"\ud800"',
        "'" + "(" * 2000 + "'",
        "'a{99999999999}'",
        "hf:",
        "x:y",
        "0-99999999999",
    ),
    *("[]", "{}", "[[null]]", "['/']", "{a: " + "9" * 400 + "}", "{" + "9" * 400 + ": 1}"),
]
"""Values that nobody means: numbers, texts and paths that no machine can hold, and other shapes."""
ENTRIES = {
    "rewards": "name: exact_answer",
    "data.sources": "path: builtin:addition",
    "teachers": "path: builtin:addition",
}
"""What an entry of a list of sections needs, by the name of the list."""


def absurd(folder: Path, values: int = len(ABSURD)) -> Iterator[tuple[str, RunConfig]]:
    """Yield what is accepted of every setting with so many absurd values; all else raises ConfigError."""
    for name, *_ in settings():
        section, _, key = name.partition("[i].")
        for value in random.Random(name).sample(ABSURD, values):
            word = f"{section}={value}"
            if key:
                needed = ENTRIES[section]
                word = f"{section}=[{{{needed}, {key}: {value}}}]" if f"{key}:" not in needed else f"{name}=1"
            try:
                config = load_config(DEMO, [f"run.dir={folder}/run", word])
            except ConfigError:
                continue
            yield f"{word[:60]} ({len(word)} characters)", config


@pytest.mark.full
@pytest.mark.parametrize(
    ("values", "most"),
    [(2, 3), pytest.param(len(ABSURD), 10**6, marks=[pytest.mark.slow, pytest.mark.timeout(20000)])],
)
def test_absurd_values_are_refused_or_mean_something(values: int, most: int, tmp_path: Path) -> None:
    accepted = list(absurd(tmp_path, values))
    random.Random(0).shuffle(accepted)
    for word, config in accepted[:most]:
        print(word)  # shown if anything else is raised
        with suppress(ConfigError, CheckpointError, DataError, RewardError, EpisodeError, CallbackError):
            check(open_inputs(config))
