"""A few kills of `tests.several.kills`; its command does fifty."""

from pathlib import Path

import pytest

from tests.several.kills import disturbed

TAUGHT = ["algorithm.name=distill", "algorithm.group_size=1", "rewards=[]"]
TAUGHT += ["rollout.partial_extra=0.5", "rollout.max_new_tokens=32"]
AVERAGE = "{hint: 'It is {answer}.', max_prompt_tokens: 48, update_rate: 0.1}"


@pytest.mark.several_hosts
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("hosts", "kills", "changes"),
    [
        (1, 3, []),
        (2, 3, []),
        (1, 4, [*TAUGHT, f"teachers=[{{path: teacher, offload: true}}, {AVERAGE}]"]),
        (2, 6, [*TAUGHT, "teachers=[{path: teacher, mesh: sampler}]", "meshes.layout=split", "algorithm.staleness=1"]),
    ],
    ids=["one host", "two hosts", "teachers", "a teacher of the sampler"],
)
@pytest.mark.slow  # test_signal.py has a kill on two hosts
def test_a_run_that_is_killed_again_and_again_ends_as_an_undisturbed_one(
    tmp_path: Path, hosts: int, kills: int, changes: list[str]
) -> None:
    assert disturbed(tmp_path, hosts, kills, seed=2 if changes else 1, changes=changes) >= kills
