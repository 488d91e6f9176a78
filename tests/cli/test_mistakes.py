"""A hundred mistakes of people who start: each gets one line, with what is wrong, what was given, and what to do."""

import json
import shlex
import shutil
from importlib import import_module
from pathlib import Path

import pytest

from tests.models.test_transformers5 import SAVED

MISTAKES = r"""
run nosuch.yaml
    config file not found: nosuch.yaml; shipped configs: none here
run tabs.yaml
    config file tabs.yaml is not readable YAML: found character .. correct it
run list.yaml
    config file list.yaml must hold sections (run:, model:, ...), got a list
run twice.yaml --print-config
    config file twice.yaml is not readable YAML: 'run' is set .. correct it
run flat.yaml
    run must be a section, got 5; known in run: name, dir, seed, max_steps, epochs
run latin.yaml
    config file latin.yaml is not readable YAML: 'utf-8' codec .. correct it
run train.jsonl
    config file train.jsonl is not readable YAML: expected .. correct it
run --push_to_hub
    --push_to_hub is no flag; a run uploads nothing; after it, scripts/export.py --push OWNER/NAME does
run --epochs 3
    --epochs is no flag; settings are written without dashes: run.epochs=3
run --model hf:Qwen/Qwen3-0.6B
    --model is no flag; settings are written without dashes: model.path=hf:Qwen/Qwen3-0.6B
run --config nosuch.yaml
    --config is no flag; the config is named alone: scripts/run.py CONFIG.yaml
run --num_train_epochs=3
    --num_train_epochs is no flag; settings are written without dashes: run.epochs=3
run --bf16
    --bf16 is no flag; settings are written without dashes: model.dtype=VALUE
run --lr 1e-6
    --lr is no flag; settings are written without dashes: optimizer.learning_rate=1e-6
run run.max_steps 5
    a setting is written with an equals sign: run.max_steps=5, got 'run.max_steps'
run run.max_steps=0
    run.max_steps must be greater than or equal to 1, got 0; `--help run.max_steps` says more
run run.sed=1
    run.sed is not a setting (got 1); did you mean run.seed?
run logging.wandb=true
    logging.wandb must be off, offline or online, got true; `--help all` lists what every setting takes
run push_to_hub=true
    push_to_hub is not a setting (got True); a run uploads nothing; after it, scripts/export.py
run model.dtype=fp16
    model.dtype must be 'float32' or 'bfloat16', got 'fp16'; `--help model.dtype` says more
run optimizer.learning_rate=fast
    optimizer.learning_rate must be a valid number, got 'fast'; `--help optimizer.learning_rate` says more
run rollout.temperature=0
    rollout.temperature must be > 0 for training .. got 0.0 .. greedy completions of a group are all the
run rollout.top_p=2
    rollout.top_p must be less than or equal to 1, got 2; `--help rollout.top_p` says more
run algorithm.group_size=1
    algorithm.group_size must be >= 2, got 1; a group of one has no baseline
run algorithm.clip_low=2
    algorithm.clip_low must be less than 1, got 2; `--help algorithm.clip_low` says more
run data.prompts_per_step=0
    data.prompts_per_step must be greater than or equal to 1, got 0; `--help data.prompts_per_step` says more
run rewards=gsm8k
    rewards must be a list, got 'gsm8k'; write it in brackets: rewards='[...]'
run rewards=[]
    rewards must name at least one reward, got none; add e.g. {name: exact_answer}
run rewards=[{}]
    rewards.0.name: field required, got {}; `--help rewards[i].name` says more
run rewards='[{name: gsm8k, weigth: 1}]'
    rewards.0.weigth is not a setting (got 1); did you mean rewards[i].weight?
run rewards='[{name: gsm8k'
    rewards: the value '[{name: gsm8k' is not YAML .. got '<stream end>' .. put a text in quotes of its own:
run rewards=[exact_answer]
    rewards.0 must be a section, got 'exact_answer'; write {name: exact_answer}
run rewards=[3]
    rewards.0 must be a section .. got 3 .. known in rewards.0: name, label, weight,
run model.lora.rank=8 model.lora.dropout=0.1
    model.lora.dropout is not a setting (got 0.1); leave it out: the engine .. optimizer.weight_decay and algorithm.beta
run model.lora.rank=8 model.train_layers=0-1
    model.train_layers=0-1 and model.lora.rank=8 exclude each .. for adapters in some layers use
run model.lora.targets='('
    model.lora.targets must be a regular expression .. got ' .. an example: attn.(q|v)_proj
run checkpoint.resume=yes
    checkpoint.resume must be 'auto', 'never' or 'require', got 'yes'; `--help checkpoint.resume` says more
run meshes.layout=half
    meshes.layout must be 'shared' or 'split', got 'half'; `--help meshes.layout` says more
run hosts.count=2
    hosts.count=2 needs hosts.coordinator, got none; set it to host:port of process 0
run logging.profile_steps=3
    logging.profile_steps must be a list, got 3; write it in brackets: logging.profile_steps='[...]'
run logging.histograms_every=5
    logging.histograms_every=5 needs logging.tensorboard=true or .. got neither .. set one, or leave it 0
run optimizer.schedule=polynomial
    optimizer.schedule must be 'constant', 'linear', .. got 'polynomial' .. `--help optimizer.schedule` says more
run data.shuffle=maybe
    data.shuffle must be a valid boolean, got 'maybe'; `--help data.shuffle` says more
run run.seed=
    run.seed must be a valid integer, got ''; `--help run.seed` says more
run run=5
    run must be a section, got 5; known in run: name, dir, seed, max_steps, epochs
run rollout.max_new_tokens=1.5
    rollout.max_new_tokens must be a valid integer, got 1.5; `--help rollout.max_new_tokens` says more
run --slice v5e-16
    --slice needs --dry-run, got --slice v5e-16 alone; a run finds its own devices
run run.seed=1 lr 1e-6
    a setting is written with an equals sign: optimizer.learning_rate=1e-6, got 'lr'
run --learning_rate 1e-6
    --learning_rate is no flag; settings are written without dashes: optimizer.learning_rate=1e-6
run --run.max_steps=5
    --run.max_steps is no flag; settings are written without dashes: run.max_steps=5
run --num-generations run.seed=1
    --num-generations is no flag; settings are written without dashes: algorithm.group_size=VALUE
run run.seed=7 configs/demo_cpu.yaml --print-config
    an override must read section.key=value, got 'configs/demo_cpu.yaml'; example: run.seed=1
run --help nope
    --help takes a section, a setting, or all .. got nope .. sections: run, model, data, rollout,
dry model.path=nosuch
    model.path must be a checkpoint directory on .. got nosuch .. correct it, or name a model of the Hugging
dry model.path=Qwen/Qwen3-0.6B
    model.path must be a checkpoint directory on .. got Qwen/Qwen3-0.6B .. did you mean hf:Qwen/Qwen3-0.6B, a model of
dry model.path=builtin:chess
    model.path=builtin:chess is not built in; built in: ['addition', 'wordy_addition', 'calculator', 'guessing']
dry model.path=train.jsonl
    model.path must be a checkpoint directory on .. got train.jsonl .. correct it, or name a model of the Hugging
dry model.path=hf:
    model.path must be text, got {'hf': None}; put a text in quotes of its own: model.path='"..."'
dry data.path=nosuch.jsonl
    data.path: data file not found: nosuch.jsonl .. correct it
dry data.path=train.txt
    data.path must be a .jsonl, .ndjson, .json, .. got train.txt .. did you mean hf:train.txt, a dataset of the
dry data.path=torn.jsonl
    torn.jsonl:2 must be a JSON object, got Invalid control character at at column 17
dry data.path=empty.jsonl
    data.path: empty.jsonl must hold at least one record, got none; write one JSON object a line
dry data.path=list.jsonl
    list.jsonl:1 must be a JSON object with a key per column, got a list
dry data.path=odd.jsonl
    data.prompt_template uses the column 'question', which record .. data.columns={question: NAME} takes the column
dry data.path=builtin:chess
    data.path must name built-in data .. got 'builtin:chess' .. there are builtin:addition,
run algorithm.group_size=1000000000
    data.prompts_per_step x algorithm.group_size must be at most 1048576 completions, .. got 32000000000; lower one
dry rollout.kv_tokens=18446744073709551616
    rollout.kv_tokens must be less than 2147483648, got 18446744073709551616; `--help rollout.kv_tokens`
dry rollout.kv_tokens=2000000000
    rollout.kv_tokens, or .. must be at most 536870912 tokens, got 2000000000; lower it
dry rollout.page_size=18446744073709551616
    rollout.page_size must be less than 2147483648, got 18446744073709551616; `--help rollout.page_size`
dry run.dir=~nosuch/x
    run.dir must be a path that files can have, .. got ~nosuch/x; correct it
dry data.path=/
    data.path=/ must be a Hugging Face dataset with the split 'train', got IndexError: list index out of range
dry data.path=nosuch.py:f
    data.path: data file not found: nosuch.py .. correct it
dry data.path=rewards.py:nosuch
    rewards.py has no function 'nosuch'; functions there: good, column, nothing
dry data.path='*.parquet'
    data.path: the value '*.parquet' is not YAML (expected .. put a text in quotes of its own:
dry data.prompt_template='{nope}'
    data.prompt_template must be text .. got {'nope': None} .. put a text in quotes of its own:
dry data.prompt_template='{question'
    data.prompt_template: the value '{question' is not YAML .. got '<stream end>' .. put a text in quotes of its own:
dry data.max_prompt_tokens=2
    prompts must have at most .. got 23 in record 0 of train.jsonl .. raise data.max_prompt_tokens to 23 or set
dry data.columns='{answer: nope}'
    data.columns names the column 'nope', which record 0 of .. available: question, answer
dry rollout.max_new_tokens=4000
    data.max_prompt_tokens + rollout.max_new_tokens must be <= .. got 64 + 4000 .. shorten one of them
dry rollout.attention=fast
    rollout.attention must be 'auto', 'flash', 'gather' or .. got 'fast' .. `--help rollout.attention` says more
dry rollout.attention=flash
    rollout.attention=flash needs a TPU .. devices are cpu .. use gather (any device) or auto
dry meshes.trainer.tp=3
    meshes.trainer.fsdp x tp must be the number of the trainer's devices, .. x 3; use one of [(
dry data.prompt_template="'{nope}'"
    data.prompt_template uses the column 'nope' .. available: question, answer
dry optimizer.schedule=linear optimizer.warmup_steps=100
    optimizer.warmup_steps must be < run.max_steps
dry optimizer.name=nosuch.py:f
    optimizer file nosuch.py must be readable
dry model.lora.rank=2 model.lora.path=nosuch
    model.lora.path must be a directory with
data data.path=nosuch.jsonl
    data.path: data file not found: nosuch.jsonl
dry rewards='[{name: exact_answe}]'
    'exact_answe' is not a shipped reward; did you mean .. your own: path.py:function or
dry rewards='[{name: nosuch.py:f}]'
    reward file nosuch.py must be readable .. , got FileNotFoundError; correct the path
dry rewards='[{name: rewards.py:nosuch}]'
    rewards.py has no function 'nosuch'; functions there: good, column, nothing
dry rewards='[{name: rewards.py:value}]'
    rewards.py:value must be a function of a batch, got a int; name a function
dry rewards='[{name: rewards.py:nothing}]'
    rewards.py:nothing takes no completions, so it .. got a list .. declare completions (or completion, of one
dry rewards='[{name: rewards.py:column}]'
    reward rewards.py:column requires the parameter 'difficulty', .. available: prompts, completions, question,
dry rewards='[{name: syntax.py:f}]'
    reward file syntax.py failed to import: SyntaxError: invalid syntax (syntax.py, line 1)
dry rewards='[{name: missing_import.py:f}]'
    reward file missing_import.py failed to import: .. pip install no-such-library, or copy what
dry rewards='[{name: exact_answer, options: {x: 1}}]'
    reward exact_answer does not take the options ['x']; it takes: completions, answer
dry optimizer.name=adam
    optimizer.name=adam is not a shipped optimizer; did you mean .. your own: path.py:function or
dry optimizer.options='{nope: 1}'
    optimizer.options must be keyword arguments of adamw .. got {'nope': 1} .. correct them
dry algorithm.name=nosuch.py:A
    algorithm file nosuch.py must be readable .. , got FileNotFoundError; correct the path
dry algorithm.options='{x: 1}'
    algorithm grpo does not take the options ['x']; it takes: none
dry environment.name=nosuch
    'nosuch' is not a shipped environment; did you mean search? .. your own: path.py:Class or
dry evaluation.path=nosuch.jsonl
    evaluation.path: data file not found: nosuch.jsonl .. correct it
dry evaluation.best=pass@3/exact_answer
    evaluation.best must be MODE/REWARD with a mode of .. and a reward of .. got 'pass@3/exact_answer'
dry model.pad_token=nosuch
    model.pad_token must be a token of the tokenizer .. got 'nosuch'
dry model.lora.rank=4 model.lora.targets=lm_head
    model.lora.targets must name modules of the layers .. got 'lm_head' .. leave it out, or train all parameters
dry model.train_layers=7
    model.train_layers must name layers of the model in model, which has 2 (0-1), got 7
dry algorithm.micro_batch_prompts=5
    algorithm.micro_batch_prompts must be <= data.prompts_per_step=2, got 5; lower it
dry algorithm.mini_batch_prompts=5
    algorithm.mini_batch_prompts must divide .. got 5 .. take e.g. 2
dry rollout.kv_tokens=10
    rollout.kv_tokens must hold one whole request: >= .. got 10 .. raise it or shorten prompts or completions
dry logging.callbacks=[nosuch.py:C]
    callback file nosuch.py must be readable .. , got FileNotFoundError; correct the path
dry export.every=best
    export.every=best needs held-out data, got none; set evaluation.path, or use last
dry run.dir=train.jsonl
    run.dir must be a directory this process .. got train.jsonl: train.jsonl is no directory .. name another one
dry model.lora.layers=9 model.lora.rank=2
    model.lora.layers must name layers of the model in model, which has 2 (0-1), got 9
export nosuch --out x
    RUN must be the directory of a run, with its config.yaml, got nosuch; name run.dir
evaluate --checkpoint 5x
    --checkpoint must be initial, latest, best, a step, or a directory .../checkpoints/STEP, got '5x'
plan nosuch.yaml --slice v5e-16
    config file not found: nosuch.yaml; shipped configs: none here
report nosuch
    a report needs the directory of a run (run.dir), which holds .. nosuch is no directory
report .
    a report needs the directory of a run (run.dir), which holds config.yaml and metrics.jsonl; . holds neither
data nosuch.yaml
    config file not found: nosuch.yaml; shipped configs: none here
environment nosuch
    a model must be the directory of a run, also as RUN@best or .. got nosuch .. correct the path
launch create
    --name must say which TPU, got none; give it, or set TPU_NAME
run algorithm.name=tunix:grpo logging.histograms_every=2 logging.tensorboard=true
    logging.histograms_every=2 needs this .. got algorithm.name=tunix:grpo .. leave it 0, or take another
dry data.path=hf:
    data.path must be text, got {'hf': None}; put a text in quotes of its own: data.path='"..."'
dry algorithm.name=ppo
    algorithm.name=ppo is not a shipped algorithm; take grpo, .. your own: path.py:Class or
rewards nosuch.yaml --completions x.jsonl
    config file not found: nosuch.yaml; shipped configs: none here
sample nosuch hello
    a model must be the directory of a run, also as RUN@best or .. got nosuch .. correct the path
""".strip().splitlines()
"""A command, and under it the parts of what it is told; ``dry`` is a dry run of what stands in RIGHT, changed."""
RIGHT = [
    *("model.path=model", "data.path=train.jsonl", "data.max_prompt_tokens=64", "rollout.max_new_tokens=8"),
    *("data.prompts_per_step=2", "algorithm.group_size=2", "rewards=[{name: exact_answer}]", "--dry-run"),
]
REWARDS = """
def good(prompts, completions, **columns): return [0.0] * len(completions)
def column(prompts, completions, difficulty): return [0.0] * len(completions)
def nothing(): return []
value = 3
"""
FILES = {
    "train.jsonl": "".join(json.dumps({"question": f"{a}+1=", "answer": str(a + 1)}) + "\n" for a in range(8)),
    "torn.jsonl": '{"question": "1+1=", "answer": "2"}\n{"question": "1+\n',
    "empty.jsonl": "",
    "list.jsonl": "[1, 2]\n",
    "odd.jsonl": '{"x": "1", "y": "2"}\n' * 8,
    "train.txt": "hello",
    "tabs.yaml": "run:\n\tseed: 1\n",
    "list.yaml": "- a\n- b\n",
    "twice.yaml": "run: {seed: 1}\nrun: {seed: 2}\n",
    "flat.yaml": "run: 5\n",
    "latin.yaml": "run: {name: \xe9}\n",
    "rewards.py": REWARDS,
    "syntax.py": "def f(:\n",
    "missing_import.py": "import no_such_library\ndef f(completions, **k): return [0.0] * len(completions)\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mistakes")
    shutil.copytree(SAVED / "qwen3", directory / "model")
    for name, text in FILES.items():
        (directory / name).write_text(text, encoding="latin-1")
    return directory


def test_they_are_a_hundred() -> None:
    assert len(set(MISTAKES[::2])) >= 100


@pytest.mark.parametrize(("typed", "told"), zip(MISTAKES[::2], MISTAKES[1::2], strict=True))
def test_a_mistake_is_told_in_one_line(
    typed: str, told: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    command, *words = shlex.split(typed)
    module, before = {"dry": ("train", RIGHT), "run": ("train", [])}.get(command, (command, []))
    files = sorted(folder.rglob("*"))
    try:
        code = import_module(f"tpu_grpo.cli.{module}").main([*before, *words])
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    place, parts = 0, [part.strip() for part in told.split(" .. ")]
    for part in parts:
        place = err.find(part, place)
        assert place >= 0, f"{part!r} is missing, in this order, in {err!r}"
    assert [path for path in sorted(folder.rglob("*")) if path not in files and "__pycache__" not in str(path)] == []
