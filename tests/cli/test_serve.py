"""A served model: the same request gets the same tokens, whatever else is asked; and what is refused."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tpu_grpo.cli.naming import named_models
from tpu_grpo.cli.serve import main
from tpu_grpo.run.answering import Speaker
from tpu_grpo.run.serving import Server


@pytest.fixture(scope="module")
def server(unstarted: Path) -> Iterator[str]:
    """The address of a server that needs the key "k"; here another thread samples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(unstarted)
        [model] = named_models(["run@initial"], [])
        speaker = Speaker(model.config, model.which, samples=8, context=40)
        with Server(speaker, model.name, "127.0.0.1", 0, "k") as serving:
            speaker.start()
            sampling = threading.Thread(target=serving.serve, args=[8])
            sampling.start()
            yield serving.address
            serving.stop()
            sampling.join()


def ask(server: str, path: str, body: Any = None, key: str = "k") -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server + path, data, {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=240) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]["message"]


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "return_token_ids": True, "logprobs": True, **more}


def tokens(answer: Any) -> list[Any]:
    return [
        (choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]])
        for choice in answer["choices"]
    ]


def test_tokens_depend_on_the_request_alone(server: str) -> None:
    """Thirty requests in two orders at once, and the first alone; a text in place of its tokens is the same prompt."""
    bodies = [chat(f"{n}+1=", n=1 + n % 3, seed=n, max_tokens=1 + n % 6) for n in range(30)]
    with ThreadPoolExecutor(30) as pool:
        first = list(pool.map(lambda body: tokens(ask(server, "/v1/chat/completions", body)), bodies))
        order = random.Random(0).sample(range(30), 30)
        again = dict(
            zip(order, pool.map(lambda n: tokens(ask(server, "/v1/chat/completions", bodies[n])), order), strict=True)
        )
    assert [len(found) for found in first] == [1 + n % 3 for n in range(30)]
    assert [[ids for ids, _ in found] for found in first] == [[ids for ids, _ in again[n]] for n in range(30)]
    alone = ask(server, "/v1/chat/completions", bodies[5])
    assert [ids for ids, _ in tokens(alone)] == [ids for ids, _ in first[5]]
    assert first[5][0][0] != first[5][1][0]  # the choices differ
    prompt = alone["prompt_token_ids"]
    form = {"token_ids": prompt, "sampling_params": {"max_tokens": 6, "seed": 5}}
    assert ask(server, "/inference/v1/generate", form)["choices"][0]["token_ids"] == first[5][0][0]
    sglang = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 6, "seed": 5}, "return_logprob": True}
    given = ask(server, "/generate", sglang)["meta_info"]["output_token_logprobs"]
    assert [number for _, number, _ in given] == first[5][0][0]
    assert [logprob for logprob, _, _ in given] == pytest.approx(first[5][0][1], abs=1e-5)


def test_what_a_server_refuses(server: str) -> None:
    path = "/v1/chat/completions"
    assert ask(server, path, chat("1+1="), key="other")[0] == 401
    code, said = ask(server, path, chat("1" * 60 + "="))
    assert (code, "a prompt must have 1 to 39 tokens here" in said) == (400, True)
    code, said = ask(server, "/v1/completions", {"prompt": [10**6]})
    assert (code, "token ids must be from 0 to" in said) == (400, True)
    assert ask(server, path, chat("1+1=", temperature=0.0))["choices"]  # and goes on


@pytest.mark.slow  # a process that imports and compiles everything anew
def test_a_server_ends_with_code_0(unstarted: Path) -> None:
    command = [sys.executable, "-m", "tpu_grpo", "serve", "run@initial", "--port=0", "--rows=8", "--context=40"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, cwd=unstarted, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        while not (found := re.search(r"serving run@initial at (http://127\.0\.0\.1:\d+)", said)):
            line = process.stderr.readline()
            assert line, said
            said += line
        assert ask(found[1], "/health", key="any") == {"status": "ok"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_an_address_that_cannot_be_had(unstarted: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(unstarted)
    monkeypatch.delenv("TPU_GRPO_SERVE_KEY", raising=False)
    assert main(["run@initial", "--host", "0.0.0.0"]) == 2
    assert "must be an address of loopback unless requests have to show a key" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["run@initial", "--port", str(taken.getsockname()[1])]) == 2
    assert "must be an address of this machine that is free" in capsys.readouterr().err
