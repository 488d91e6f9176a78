"""What tunix:NAME takes by Tunix's names, and what is refused before anything is built."""

from pathlib import Path
from typing import Any

import pytest
from tunix.rl.grpo.dapo_learner import DAPOConfig
from tunix.rl.grpo.drgrpo_learner import DrGRPOConfig
from tunix.rl.grpo.grpo_learner import GRPOConfig

from tests.goldens import labelled
from tests.learner.toy import make_config
from tpu_grpo.config import AlgorithmSection
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.run.parts import open_run_algorithm
from tpu_grpo.tunix_loop.tunix_options import open_tunix

LABELLED = Path(__file__).with_name("labelled.txt")


def opened(directory: Path, name: str = "tunix:grpo", options: dict[str, Any] | None = None, **sections: Any) -> Any:
    algorithm = {"name": name, "options": options or {}} | sections.pop("algorithm", {})
    config = make_config(directory, {"algorithm": algorithm, **sections})
    return open_tunix(config.algorithm, config.data, config.optimizer).objective


def test_options_are_tunix_own_with_its_defaults(tmp_path: Path) -> None:
    plain = opened(tmp_path)
    assert type(plain) is GRPOConfig
    assert plain == GRPOConfig(num_generations=2)
    given = {"beta": 1, "num_iterations": 3, "epsilon": 0.1, "epsilon_high": 0.3, "epsilon_c": 4, "kl_loss_mode": "kl"}
    found = opened(tmp_path, options=given)
    assert {name: getattr(found, name) for name in given} == given
    assert make_config(tmp_path, {"algorithm": {"name": "tunix:grpo", "options": given}}).updates_per_step == 3
    config = make_config(tmp_path, {"algorithm": {"name": "tunix:grpo", "options": given}})
    algorithm = open_run_algorithm(config.algorithm, config.data, config.optimizer)
    assert "'epsilon_c': 4.0" in str(vars(algorithm.objective))


def test_dapo_and_dr_grpo_have_configs_of_their_own(tmp_path: Path) -> None:
    dapo, dr_grpo = opened(tmp_path, "tunix:dapo"), opened(tmp_path, "tunix:drgrpo", {"beta": 0.0})
    assert (type(dapo), dapo.epsilon_high, dapo.beta, dapo.policy_loss_fn) == (DAPOConfig, 0.28, 0.0, "grpo")
    assert (type(dr_grpo), dr_grpo.advantage_estimator) == (DrGRPOConfig, "drgrpo")


@pytest.mark.parametrize(("name", "options", "message"), labelled(LABELLED, "refused_options"))
def test_what_tunix_does_not_have_is_refused(tmp_path: Path, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path, name, options)


@pytest.mark.parametrize(("sections", "message"), labelled(LABELLED, "packed_only"))
def test_what_only_the_packed_learner_honours_is_refused(
    tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path, **sections)


def test_no_setting_of_the_section_is_silently_ignored(tmp_path: Path) -> None:
    """Those that are neither honoured nor refused; what has a default that is not plain is set to another value."""
    honoured = {"name", "options", "group_size", "mini_batch_prompts", "micro_batch_prompts", "old_policy", "truncated"}
    others = {"correction_mode": "truncate", "old_policy": "tunix", "kl_in": "reward"}
    for name in AlgorithmSection.model_fields.keys() - honoured - {"preset"}:
        config = make_config(tmp_path, {"algorithm": {"name": "tunix:grpo"}})
        section = config.algorithm.model_copy(update={name: others.get(name, 0.123)})
        with pytest.raises(ConfigError, match=f"algorithm.{name}="):
            open_tunix(section, config.data, config.optimizer)


def test_tunix_old_policy_is_for_tunix(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"algorithm": {"old_policy": "tunix"}})
    with pytest.raises(ConfigError, match="old_policy=tunix needs algorithm.name=tunix:NAME, got grpo"):
        open_run_algorithm(config.algorithm, config.data, config.optimizer)
