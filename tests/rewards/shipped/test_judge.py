"""The judge asks an endpoint of the test's own: it scores, retries, caches, keeps limits and fails."""

import http.server
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.rewards.conftest import make_rollout, scored
from tpu_grpo.config import RewardSpec
from tpu_grpo.records.errors import RewardError
from tpu_grpo.records.stages import Prompt, PromptBatch, Scores
from tpu_grpo.rewards import open_rewards


class Endpoint(http.server.ThreadingHTTPServer):
    """Grades an answer by its length; fails and dawdles when told to."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.questions: list[dict[str, Any]] = []
        self.failures: list[int] = []
        self.seconds, self.running, self.most, self.reply = 0.0, 0, 0, "I say {}"
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.running += 1
            self.server.most = max(self.server.most, self.server.running)
            failure = self.server.failures.pop() if self.server.failures else None
        time.sleep(self.server.seconds)
        with self.server.lock:
            self.server.running -= 1
            self.server.questions.append(body)
        if failure is not None:
            self.send_error(failure)
            return
        answer = body["messages"][-1]["content"].rpartition("A:")[2]
        message = {"role": "assistant", "content": self.server.reply.format(len(answer))}
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
        reply["choices"] = [{"index": 0, "finish_reason": "stop", "message": message}]  # pyrefly: ignore[bad-assignment]
        payload = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


TEXTS = ["a", "bb", "ccc", "ccc"]


def score(endpoint: Endpoint, texts: list[str] = TEXTS, spec: dict[str, Any] | None = None, **options: Any) -> Scores:
    options = {"url": endpoint.url, "model": "m", "template": "Q:{prompt} {answer} A:{completion}"} | options
    judge = RewardSpec(name="judge", options=options, **(dict[str, Any](workers=0) | (spec or {})))
    return scored(make_rollout(["p"], texts, [{"answer": "x"}]), judge)


def test_scores_and_questions(endpoint: Endpoint):
    scores = score(endpoint, system="Be strict.", parameters={"max_tokens": 8})
    np.testing.assert_allclose(scores.total, [0.1, 0.2, 0.3, 0.3])
    assert len(endpoint.questions) == 3  # the same question once
    first = min(endpoint.questions, key=lambda q: len(q["messages"][-1]["content"]))
    assert first["messages"] == [{"role": "system", "content": "Be strict."}, {"role": "user", "content": "Q:p x A:a"}]
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("m", 0.0, 8)


def test_the_judge_reads_what_the_user_says_and_on_request_what_the_model_saw(endpoint: Endpoint):
    prompt = Prompt("<user>2+3<model>", (1,), {}, messages=[{"role": "user", "content": "2+3"}])
    rollout = replace(make_rollout(["p"], ["5"]), batch=PromptBatch(1, (prompt,)))
    endpoint.reply = "5"
    for template, asked in (
        ("{prompt} {completion}", "2+3 5"),
        ("{rendered_prompt} {completion}", "<user>2+3<model> 5"),
    ):
        options = {"url": endpoint.url, "model": "m", "template": template}
        scored(rollout, RewardSpec(name="judge", workers=0, options=options))
        assert endpoint.questions[-1]["messages"] == [{"role": "user", "content": asked}]


@pytest.mark.full
def test_failures_of_the_server_are_tried_again(endpoint: Endpoint):
    endpoint.failures = [503, 429, 500]
    np.testing.assert_allclose(score(endpoint, concurrency=1).total, [0.1, 0.2, 0.3, 0.3])
    assert len(endpoint.questions) == 3 + 3


def test_a_server_that_keeps_failing_and_one_that_is_wrong(endpoint: Endpoint):
    endpoint.failures = [500] * 100
    with pytest.raises(RewardError, match=r"judge raised InternalServerError.*for row 0"):
        score(endpoint, retries=0)
    endpoint.failures = []
    endpoint.reply = "no grade"
    scores = score(endpoint)  # a completion can bring the judge to that
    assert np.isnan(scores.by_name["judge"]).all()
    assert scores.figures["rewards/judge/ungraded"].value == 1.0


def test_a_slow_server_meets_the_deadline(endpoint: Endpoint):
    endpoint.seconds = 5.0
    started = time.perf_counter()
    scores = score(endpoint, spec={"timeout": 1.0, "on_error": "value", "error_value": 0.5})
    assert time.perf_counter() - started < 4.0
    np.testing.assert_array_equal(scores.total, [0.5] * 4)
    assert scores.figures["rewards/judge/timeouts"].value == 4


@pytest.mark.full
def test_the_cache_outlives_the_process(endpoint: Endpoint, tmp_path: Any):
    path = str(tmp_path / "cache.jsonl")
    first = score(endpoint, cache=path, spec={"workers": 1})
    again = score(endpoint, cache=path)
    np.testing.assert_array_equal(first.total, again.total)
    assert len(endpoint.questions) == 3
    score(endpoint, cache=path, out_of=20)  # another question
    assert len(endpoint.questions) == 6


def test_limits_on_rate_and_concurrency(endpoint: Endpoint):
    endpoint.seconds = 0.05
    texts: list[str] = ["x" * n for n in range(1, 9)]
    score(endpoint, texts, concurrency=3)
    assert 1 < endpoint.most <= 3
    started = time.perf_counter()
    score(endpoint, texts[:4], per_minute=600)
    assert time.perf_counter() - started >= 0.3  # three pauses of 0.1 s


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "{prompt}"}, r"template must name \{completion\}"),
        ({"concurrency": 0}, "concurrency must be >= 1, got 0"),
        ({"colour": "red"}, r"does not take the options \['colour'\]"),
        ({"model": None}, "requires the parameter 'model'"),
    ],
)
def test_options_are_judged_before_the_run(options: dict[str, Any], message: str):
    given = {"url": "http://127.0.0.1:1", "model": "m"} | options
    given = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(RewardError, match=message):
        open_rewards([RewardSpec(name="judge", options=given)], ["answer"])
