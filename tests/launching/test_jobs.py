"""Arguments arrive as they are, secrets unseen."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.launching.driving import SMALL, Launch, ended, started
from tests.launching.stand_in import StandIn
from tpu_grpo.cli.launch import main

ARGUMENTS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40), max_size=8
)


@pytest.mark.full
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=ARGUMENTS)
def test_any_argument_arrives_unchanged(ready: StandIn, config: Path, words: list[str]) -> None:
    before = len(list(ready.home(1).glob("started*")))
    assert main(["run", "--how", "vm", *SMALL, str(config), "--", *words]) == 0
    assert started(ready, 1, before)["argv"][2:] == words
    ended(ready)


NASTY = [
    *("a b", "it's", '"', "$HOME", "`id`", "$(id)", "\n", "a\\", "\\n", "*", "~", "#", "!", "&&", "é漢😀"),
    *("", "-x", "--", "%q", "\t"),
]


def test_arguments_that_shells_care_about_arrive_unchanged(ready: StandIn, config: Path, launch: Launch) -> None:
    assert launch("run", *SMALL, "--env", f"V={''.join(NASTY)}", str(config), "--", *NASTY)[0] == 0
    seen = started(ready, 0)
    assert seen["argv"][2:] == NASTY
    assert seen["environment"]["V"] == "".join(NASTY)


def test_secrets_reach_the_run_and_nothing_else(
    ready: StandIn, config: Path, monkeypatch: pytest.MonkeyPatch, launch: Launch, tmp_path: Path
) -> None:
    """They are looked for in what is printed, in the words of every process, and on disk once the run is started."""
    secrets = {"WANDB_API_KEY": "w4ndb'$secret\n2", "HF_TOKEN": "hf_s3cret", "MINE": "m1ne secret"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    code, out, err = launch("run", *SMALL, "--secret", "MINE", str(config), "seconds=5")
    assert code == 0
    own = set()
    for worker in (0, 1):
        environment = started(ready, worker)["environment"]
        assert {name: environment[name] for name in secrets} == secrets
        own.add(environment["TPU_GRPO_SECRET"])
    assert "passing on WANDB_API_KEY, HF_TOKEN, MINE, TPU_GRPO_SECRET, by a file" in err
    command_lines = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in ready.processes())
    assert b"program.py" in command_lines
    (ready.home(0) / "started0").unlink()  # the program's own note of its environment
    (ready.home(1) / "started0").unlink()
    kept = b"".join(path.read_bytes() for path in ready.root.rglob("*") if path.is_file())
    printed = (out + err + json.dumps(ready.calls())).encode()
    for value in ("w4ndb", "s3cret", "m1ne"):
        assert value.encode() not in command_lines + kept + printed
    copied = [call for call in ready.calls() if any(word.endswith("secrets.sh") for word in call)]
    assert len(copied) == 1


@pytest.mark.full
def test_secrets_are_readable_for_their_owner_only_and_removed_also_when_the_start_fails(
    ready: StandIn, config: Path, monkeypatch: pytest.MonkeyPatch, launch: Launch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_s3cret")
    note = ready.root / "modes"
    (ready.root / "worker_bin" / "mv").write_text(  # called before the secrets are read
        f'#!/bin/bash\nstat -c %a "$HOME/.tpu_grpo/secrets.sh" >> {note}\nexit 1\n'
    )
    (ready.root / "worker_bin" / "mv").chmod(0o755)
    code, _, err = launch("run", *SMALL, str(config))
    assert code == 1
    assert "the config has not been copied here" in err
    assert note.read_text().split() == ["600", "600"]
    assert list(ready.root.rglob("secrets.sh")) == []
