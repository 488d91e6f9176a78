"""Agents as real programs: they ask over HTTP, in every form, and say what an episode was worth."""

import json
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.environments.playing import acted, answer, begun, ended, failure, open_pool
from tests.goldens import labelled
from tpu_grpo.environments.actions import Action, Answered, Ended, Reply, SampledTurn, ToolCall
from tpu_grpo.environments.environment_classes import load_environment
from tpu_grpo.environments.pool import EnvironmentPool
from tpu_grpo.records.episode import Failure

LABELLED = Path(__file__).with_name("labelled.txt")

ASK = """
    import json, os, sys, urllib.error, urllib.request

    def ask(path="/v1/chat/completions", key=None, **body):
        root = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
        headers = {"Authorization": "Bearer " + (key or os.environ["OPENAI_API_KEY"])}
        request = urllib.request.Request(root + path, json.dumps(body).encode() if body else None, headers)
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            return str(error.code) + error.read().decode()

    def user(text):
        return {"role": "user", "content": text}

    task = json.loads(sys.stdin.readline())["task"]
"""
Play = Callable[[str], EnvironmentPool]
OVER = Answered((), done=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the agent's program, in which each test writes its own."""
    return tmp_path_factory.mktemp("agent")


@pytest.fixture(scope="module")
def pool(files: Path) -> Iterator[EnvironmentPool]:
    with open_pool("agent", options={"command": [sys.executable, str(files / "agent.py")]}) as pool:
        yield pool


@pytest.fixture
def play(files: Path, pool: EnvironmentPool) -> Iterator[Play]:
    """A function that begins conversation 0 with a program and returns the pool."""

    def begin(program: str) -> EnvironmentPool:
        (files / "agent.py").write_text(textwrap.dedent(ASK) + textwrap.dedent(program))
        pool.start(0, "", {"question": "q0"}, 1)
        return pool

    yield begin
    pool.drop(0)


def turn(text: str, **more: Any) -> Action:
    return Action(text, text, sampled=SampledTurn((1, 2), (3, 4), (-0.5, -0.25), False), **more)


def requested(reply: Reply) -> dict[str, Any]:
    return json.loads(answer(reply).request or "")


def test_what_kind_of_environment_an_agent_is() -> None:
    loaded = load_environment("agent", {"command": "true"})
    assert (loaded.takes, loaded.is_async, loaded.gives_reward, loaded.gives_turn_rewards) == (
        "answers",
        True,
        True,
        False,
    )


def test_an_episode_of_two_requests(play: Play) -> None:
    pool = play(
        """
        assert "PYTHONPATH" not in os.environ  # it may have another Python and other packages
        first = json.loads(ask(messages=[user(task["question"])], max_tokens=9, temperature=0.3))
        said = first["choices"][0]["message"]
        json.loads(ask(messages=[user(task["question"]), said, user("more")]))
        print("chatter")
        print(0.25)
        """
    )
    first = requested(pool.take(0))
    assert (first["messages"], first["max_tokens"]) == ([{"role": "user", "content": "q0"}], 9)
    second = requested(acted(pool, turn("one")))
    assert [message["content"] for message in second["messages"]] == ["q0", "one", "more"]
    assert acted(pool, turn("two")) == OVER
    assert ended(pool) == Ended(0.25)


FORMS = """
    chat = dict(messages=[user("x")], logprobs=True, return_token_ids=True)
    found = {
        "chat": json.loads(ask(**chat)),
        "stream": ask(**chat, stream=True),
        "completion": json.loads(ask("/v1/completions", prompt="x", logprobs=1, return_token_ids=True)),
        "generate": json.loads(ask("/inference/v1/generate", token_ids=[5], sampling_params={"max_tokens": 3})),
        "sglang": json.loads(
            ask("/generate", input_ids=[5, 6], sampling_params={"max_new_tokens": 4}, return_logprob=True)
        ),
        "several": json.loads(ask(messages=[user("x")], n=2)),
        "models": json.loads(ask("/v1/models")),
        "health": json.loads(ask("/health")),
    }
    ask("/reward", reward=0.75)
    open("FOUND", "w").write(json.dumps(found))
"""


def test_every_form_of_request_and_answer(play: Play, tmp_path: Path) -> None:
    pool = play(FORMS.replace("FOUND", str(tmp_path / "found.json")))
    call = ToolCall("add", {"a": 1})
    requests = [requested(pool.take(0))]
    requests += [requested(acted(pool, said)) for said in (turn("a", calls=(call,)), *map(turn, "bcdef"))]
    assert acted(pool, turn("g")) == OVER
    assert ended(pool) == Ended(0.75)
    prompts = [each["messages"] or each["text"] or each["token_ids"] for each in requests]
    assert prompts[2:5] == ["x", [5], [5, 6]]
    assert prompts[5] == prompts[6] == [{"role": "user", "content": "x"}]
    assert [each["max_tokens"] for each in requests[3:5]] == [3, 4]

    found = json.loads((tmp_path / "found.json").read_text())
    [choice] = found["chat"]["choices"]
    [made] = choice["message"]["tool_calls"]
    assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == ("add", {"a": 1})
    assert (choice["finish_reason"], choice["token_ids"], found["chat"]["prompt_token_ids"]) == (
        "tool_calls",
        [3, 4],
        [1, 2],
    )
    assert [(each["token"], each["logprob"]) for each in choice["logprobs"]["content"]] == [
        ("token_id:3", -0.5),
        ("token_id:4", -0.25),
    ]
    assert found["chat"]["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    *chunks, done = [line.removeprefix("data: ") for line in found["stream"].strip().split("\n\n")]
    assert done == "[DONE]"
    assert "".join(json.loads(each)["choices"][0]["delta"].get("content", "") for each in chunks) == "b"
    assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "stop"
    [choice] = found["completion"]["choices"]
    assert (choice["text"], choice["token_ids"], choice["logprobs"]["token_logprobs"]) == ("c", [3, 4], [-0.5, -0.25])
    [choice] = found["generate"]["choices"]
    assert (choice["token_ids"], choice["logprobs"]["content"][1]["logprob"]) == ([3, 4], -0.25)
    meta = found["sglang"]["meta_info"]
    assert (found["sglang"]["output_ids"], meta["output_token_logprobs"]) == (
        [3, 4],
        [[-0.5, 3, None], [-0.25, 4, None]],
    )
    assert [each["message"]["content"] for each in found["several"]["choices"]] == ["f", "g"]
    assert found["models"]["data"][0]["id"] == "policy"


REFUSED = labelled(LABELLED, "refused_requests")
"""What is asked, the status, and a part of the reason."""
PLAYS_ON = """
    ask(messages=[user("at last")])
    found.append(ask(messages=[user("too late")]))
    open("FOUND", "w").write(json.dumps(found))
    print('{"reward": -1}')
"""


def test_what_cannot_be_honoured_is_refused_with_its_reason(play: Play, tmp_path: Path) -> None:
    asks = "\n    ".join(f"found.append(ask({asked}))" for asked, *_ in REFUSED)
    pool = play(f"\n    found = []\n    {asks}" + PLAYS_ON.replace("FOUND", str(tmp_path / "found.json")))
    assert requested(pool.take(0))["messages"] == [{"role": "user", "content": "at last"}]
    assert requested(acted(pool, turn("yes")))["messages"] == [{"role": "user", "content": "too late"}]
    assert ended(pool) == Ended(-1.0)  # as after the last turn that is allowed
    found = json.loads((tmp_path / "found.json").read_text())
    used_up = ("", 400, "turns or tokens of this episode are used up")
    for said, (_, status, reason) in zip(found, [*REFUSED, used_up], strict=True):
        assert said[:3] == str(status)
        assert not reason or reason in json.loads(said[3:])["error"]["message"]
    assert json.loads(found[-1][3:])["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("program", "kind", "text"),
    [
        ("sys.exit(3)", "raised", "must end with code 0, got 3"),
        ("ask(messages=[user('x')]); print('so so')", "raised", "must be its reward, a number.* got 'so so'"),
        ("ask(messages=[user('x')]); print('1' + 400 * '0')", "raised", "must be its reward, a number"),
        ("ask(messages=[user('x')]); print('x' * 2**21)", "raised", "lines of at most 1048576 bytes"),
        ("import time; time.sleep(60)", "late", "within its timeout of 0.5 s in its constructor and reset"),
        ("ask(messages=[user('x')]); import time; time.sleep(60)", "late", "0.5 s in its next request or its end"),
    ],
)
def test_an_agent_that_fails(
    play: Play, pool: EnvironmentPool, monkeypatch: pytest.MonkeyPatch, program: str, kind: str, text: str
) -> None:
    if program.startswith("import time"):
        monkeypatch.setattr(pool, "_timeout", 0.5)
    reply = play(program).take(0)
    if isinstance(reply, Answered):
        if kind == "late":
            monkeypatch.setattr(pool, "_timeout", 0.5)  # the program has started
        reply = acted(pool, turn("y"))
    if reply == OVER:
        pool.end(0)
        reply = pool.take(0)
    assert failure(reply)[0] == kind
    assert re.search(text, failure(reply)[1])


LASTING = """
    import json, sys, threading, urllib.request

    print("started", file=open("STARTED", "a"))

    def play(asked):
        body = {"messages": [{"role": "user", "content": asked["task"]["question"]}]}
        headers = {"Authorization": "Bearer " + asked["api_key"]}
        url = asked["base_url"] + "/chat/completions"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
            said = json.load(answer)["choices"][0]["message"]["content"]
        result = {"error": "broken"} if said == "bad" else {"reward": 10**400 if said == "huge" else float(said)}
        sys.stdout.write(json.dumps({"session": asked["session"], **result}) + "\\n")  # print writes in two parts
        sys.stdout.flush()
        if said == "0.0":
            import os
            os._exit(5)

    for line in sys.stdin:
        threading.Thread(target=play, args=[json.loads(line)]).start()
"""


@pytest.mark.full
def test_a_lasting_agent_plays_all_episodes_and_is_started_again(tmp_path: Path) -> None:
    program, started = tmp_path / "agent.py", tmp_path / "started"
    program.write_text(textwrap.dedent(LASTING.replace("STARTED", str(started))))
    with open_pool("agent", options={"command": [sys.executable, str(program)], "lasting": True}) as pool:
        for key in range(4):
            pool.start(key, "", {"question": f"q{key}"}, 1)
        assert [requested(pool.take(key))["messages"][0]["content"] for key in range(4)] == ["q0", "q1", "q2", "q3"]
        assert 'must have a number as "reward"' in failure(acted(pool, turn("huge"), 3))[1]
        assert started.read_text() == "started\n"  # one program for all
        for key, said in ((2, "0.5"), (1, "bad")):  # in another order
            pool.act(key, turn(said))
        assert pool.take(2) == OVER
        assert ended(pool, 2) == Ended(0.5)
        assert "the agent says: broken" in failure(pool.take(1))[1]
        acted(pool, turn("0.0"))
        deadline = time.monotonic() + 30
        while isinstance(reply := begun(pool, 7, {"question": "again"}), Failure) and time.monotonic() < deadline:
            pass  # the program's end was not seen yet
        assert requested(reply)["messages"][0]["content"] == "again"


@pytest.mark.full
def test_an_agent_ends_with_its_episode(play: Play, tmp_path: Path) -> None:
    pool = play(
        f"""
        open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
        ask(messages=[user("x")])
        """
    )
    requested(pool.take(0))
    agent = psutil.Process(int((tmp_path / "pid").read_text()))
    pool.drop(0)
    agent.wait(20)
