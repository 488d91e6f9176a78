from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from tunix.rl.rollout.base_rollout import RolloutConfig

from tests.learner.toy import EOS, PAD, RecordingEngine, Tokenizer, make_mesh, make_model, model_logps
from tpu_grpo.config import RunConfig
from tpu_grpo.hosts import Hosts
from tpu_grpo.models.tokenizers import build_byte_tokenizer
from tpu_grpo.records.errors import DataError
from tpu_grpo.records.stages import Completion, Request, SampleKey
from tpu_grpo.run.engines import SyncedEngines
from tpu_grpo.tunix_loop.adapter import RolloutAdapter, SampledTexts, TextEngines, rollout_engine

SETTINGS = RolloutConfig(max_prompt_length=6, max_tokens_to_generate=5, temperature=0.7)


def make_adapter(engine: Any, actor: Any = None) -> RolloutAdapter:
    return rollout_engine(engine, pad_id=PAD, eos_id=EOS)(
        rollout_actor=actor, tokenizer=Tokenizer(), mesh=make_mesh(), rollout_config=SETTINGS
    )


def test_generate_hands_on_what_the_engine_sampled() -> None:
    engine = RecordingEngine()
    adapter = make_adapter(engine)
    output = adapter.generate(["abc", "z"], SETTINGS)
    assert output.left_padded_prompt_tokens.tolist() == [[0, 0, 0, 3, 4, 5], [0, 0, 0, 0, 0, 28]]
    (sampled,) = engine.answers
    assert output.logprobs is not None
    for tokens, logprobs, completion in zip(output.tokens, output.logprobs, sampled.completions, strict=True):
        assert tokens.tolist() == completion.token_ids.tolist()
        assert logprobs.dtype == np.float32
        assert logprobs.tolist() == completion.logprobs.tolist()
    assert output.text == list(sampled.texts)
    assert adapter.take_completions() == list(sampled.completions)
    assert adapter.take_completions() == []
    with pytest.raises(DataError, match="prompts must have 1 to 6 tokens, got 7 in row 1; raise max_prompt_length"):
        adapter.generate(["a", "abcdefg"], SETTINGS)


def test_too_few_completions_are_refused() -> None:
    class Short(RecordingEngine):
        def generate_texts(self, prompts: Any, config: Any) -> SampledTexts:
            return super().generate_texts(prompts[:1], config)

    with pytest.raises(DataError, match="answer 2 prompts with as many completions, got 1"):
        make_adapter(Short()).generate(["a", "b"], SETTINGS)


@pytest.mark.full
def test_logps_are_the_actors_at_the_temperature(tmp_path: Path) -> None:
    model = make_model(make_mesh(1))
    prompt, completion = [7, 8], [9, 10, EOS]
    with make_mesh(1):
        rows = np.array([[0] * 4 + prompt]), np.array([[*completion, 0, 0]])
        found = make_adapter(RecordingEngine(), model).get_per_token_logps(*rows)
    (expected,) = model_logps(model, [prompt], [completion], temperature=0.7)
    # two programs of other shapes: float32 next to -17.5 has steps of 1.9e-6, and two of them were seen
    np.testing.assert_array_max_ulp(np.asarray(found)[0, :3], np.asarray(expected, np.float32), maxulp=4)


@pytest.mark.full
def test_all_parameters_are_installed_whatever_transfers_that_takes() -> None:
    class Transferring(RecordingEngine):
        def install(self, params: Any) -> None:
            super().install(params)
            np.asarray(jax.tree.leaves(params)[0] + np.ones(()))

    engine, model = Transferring(), make_model(make_mesh(1))
    adapter = make_adapter(engine, model)
    adapter.generate(["abc"], SETTINGS)
    with jax.transfer_guard("disallow_explicit"):
        adapter.update_params(None, filter_types=("ignored",))
    assert adapter.take_completions() == []  # Tunix's own learner never takes them
    assert len(jax.tree.leaves(engine.installed[0])) == len(jax.tree.leaves(nnx.state(model)))


def test_tunix_finds_no_shared_weights() -> None:
    adapter = make_adapter(RecordingEngine())
    assert adapter.model() is None
    assert (adapter.pad_id(), adapter.eos_id()) == (PAD, EOS)


class RecordingReplicas:
    """Notes the keys of the requests, and answers each with one token."""

    def __init__(self) -> None:
        self.keys: list[list[SampleKey]] = []

    def generate(self, asked: Sequence[Request]) -> list[Completion]:
        self.keys.append([request.key for request in asked])
        return [Completion(np.array([65], np.int32), np.zeros(1, np.float32), "stop", 0) for _ in asked]


def test_no_two_rows_of_tunixs_loop_draw_the_same_numbers() -> None:
    replicas: Any = RecordingReplicas()
    config = RunConfig()
    synced = SyncedEngines(replicas, (), config.meshes, 16.0, Hosts())
    engines = TextEngines(synced, build_byte_tokenizer(), config.rollout, 0)
    for _ in range(3):
        assert engines.generate_texts(["1+1=", "1+1="], SETTINGS).texts == ("A", "A")
    keys = [key for call in replicas.keys for key in call]
    assert len(set(keys)) == len(keys) == 6
