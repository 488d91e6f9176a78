"""A served model: the same request gets the same tokens, whatever else is asked; and what is refused."""

import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tpu_grpo.cli.naming import named_model
from tpu_grpo.cli.serve import main
from tpu_grpo.serving.served_policy import ServedPolicy
from tpu_grpo.serving.server import Server


@pytest.fixture(scope="module")
def server(unstarted: Path) -> Iterator[str]:
    """The address of a server that needs the key "k"; here another thread samples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(unstarted)
        model = named_model("run@initial", [])
        speaker = ServedPolicy(model.config, model.which, samples=8, context=40)
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


@pytest.mark.full
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


@pytest.mark.full
def test_what_openais_client_gets(server: str) -> None:
    """The usage chunk, the likeliest tokens by text and bytes, several prompts, and the model by its name."""
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="k", max_retries=0)
    asked: dict[str, Any] = {"model": "run@initial", "seed": 3, "max_tokens": 4, "temperature": 0.9}
    chats, texts = client.chat.completions, client.completions
    messages: list[Any] = [{"role": "user", "content": "1+1="}]
    plain = chats.create(messages=messages, **asked)
    for usage in (True, False):
        stream = chats.create(messages=messages, stream=True, stream_options={"include_usage": usage}, **asked)
        *chunks, last = [(chunk.choices, chunk.usage) for chunk in stream]
        assert "".join(choices[0].delta.content or "" for choices, _ in chunks) == plain.choices[0].message.content
        assert [used for _, used in chunks] == [None] * len(chunks)
        assert last == ([], plain.usage) if usage else last[0][0].finish_reason == plain.choices[0].finish_reason

    named = chats.create(messages=messages, logprobs=True, top_logprobs=20, **asked).choices[0]
    assert named.message.content == plain.choices[0].message.content  # another program, and the same tokens
    assert named.logprobs is not None
    assert named.logprobs.content is not None
    for token in named.logprobs.content:
        values = [each.logprob for each in token.top_logprobs]
        assert (len(values), values) == (20, sorted(values, reverse=True))
        assert 0.0 < sum(map(math.exp, values)) <= 1.0 + 1e-5
        for each in token.top_logprobs:
            assert each.token.removeprefix("bytes:") == bytes(each.bytes or ()).decode(errors="backslashreplace")
        same = [each.logprob for each in token.top_logprobs if each.bytes == token.bytes]
        assert same == pytest.approx([token.logprob] * len(same), abs=1e-6)

    prompts = ["1+1=", "22+3="]
    alone = [texts.create(prompt=prompt, n=2, **asked) for prompt in prompts]
    both = texts.create(prompt=prompts, n=2, **asked)
    assert [choice.text for choice in both.choices] == [choice.text for each in alone for choice in each.choices]
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.usage is not None
    assert both.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in alone if each.usage)
    assert client.models.retrieve("run@initial") == client.models.list().data[0]
    with pytest.raises(openai.NotFoundError, match="the model must be run@initial, got 'gpt/5'"):
        client.models.retrieve("gpt/5")
    with pytest.raises(openai.BadRequestError, match="response_format must be"):
        chats.create(messages=messages, response_format={"type": "json_object"}, **asked)


GIANT = 250_000


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/chat/completions", chat("x" * 2**20, n=64), "at most 262144 bytes for a prompt, got 1"),
        ("/v1/chat/completions", chat("x" * GIANT, n=64), "at most 39 tokens here, got far more"),
        ("/v1/chat/completions", chat("<|im_end|>" * (GIANT // 10)), "at most 39 tokens here, got far more"),
        ("/v1/completions", {"prompt": "x" * GIANT}, "at most 39 tokens here, got far more"),
        ("/v1/completions", {"prompt": ["x" * GIANT] * 16}, "at most 39 tokens here, got far more"),
        ("/v1/completions", {"prompt": [5] * 60_000}, "1 to 39 tokens here, got 60000"),
    ],
)
def test_a_giant_prompt_is_refused_before_it_is_tokenized(server: str, path: str, body: Any, said: str) -> None:
    """Of 64 turns of 1 MiB, each was tokenized, and everybody waited for 100 seconds."""
    began = time.monotonic()
    code, message = ask(server, path, body)
    assert (code, said in message) == (400, True), message
    assert time.monotonic() - began < 10.0


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
