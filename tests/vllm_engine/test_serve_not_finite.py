"""If a request's log-probs are not finite, the server refuses this request with an error and continues to run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from serving import Server, running, served_directory

from sparse_rl.models.directory import save_policy, saved_policy
from sparse_rl.policies import make_policy

pytestmark = pytest.mark.slow
POISON, TOKENS = 63, 40
GOOD = [[5, 6, 7], [8] * 50, [9, 10] * 40]
BAD = [[5, POISON, 7], [*range(3, 60), POISON], [POISON] * 90]


@pytest.fixture(scope="module", params=["gkv", "full"])
def server(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server whose model has a NaN embedding for one token. Greedy sampling never chooses this token."""
    folder = served_directory(tmp_path_factory.mktemp("poisoned"), poison=POISON)
    if request.param == "gkv":
        save_policy(folder, make_policy("gkv", budget=48, window=8, period=16))
    with running(folder, tmp_path_factory.mktemp("server"), "--kv-cache-gb", "0.005") as started:
        yield started


def tokens_of(server: Server, prompt: list[int]) -> tuple[list[int], list[float]]:
    choice = server.complete(prompt, TOKENS, logprobs=1).choices[0]
    return choice.token_ids, choice.logprobs.token_logprobs


def post(server: Server, prompt: list[int], **options: Any) -> httpx.Response:
    fields = {"model": server.model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, **options}
    return httpx.post(f"{server.url}/v1/completions", json=fields, timeout=120)


def test_a_failed_request_does_not_affect_other_requests(server: Server) -> None:
    """It gets status 500, and the log names the reason. Requests beside it or after it get the same answers, to the
    last bit."""
    expected = [tokens_of(server, prompt) for prompt in GOOD]
    beams = [] if saved_policy(server.model) else [{"use_beam_search": True, "n": 2}]
    for options in ({}, {"n": 3, "temperature": 1}, {"logprobs": 2}, {"echo": True}, *beams):
        before = len(server.log.read_text())
        answer = post(server, BAD[0], **options)
        assert answer.status_code == 500, (options, answer.text)
        assert "its log-probabilities are not finite: the model's weights" in server.log.read_text()[before:]
        assert [tokens_of(server, prompt) for prompt in GOOD] == expected
    mixed = [prompt for pair in zip(GOOD, BAD, strict=True) for prompt in pair] * 4
    with ThreadPoolExecutor(len(mixed)) as pool:
        outputs = list(pool.map(lambda p: post(server, p).status_code if POISON in p else tokens_of(server, p), mixed))
    assert [output for output in outputs if output != 500] == expected * 4
    assert outputs.count(500) == 12
    assert [tokens_of(server, prompt) for prompt in GOOD] == expected
    server.idle()


def test_a_stream_ends_with_the_error(server: Server) -> None:
    """A stream ends with the error, before its first token, even if only one of n samples fails."""
    for options in ({}, {"n": 2, "temperature": 1}, {"echo": True}):
        text = post(server, BAD[1], stream=True, **options).text
        assert text.count('"error"') == 1, text
        assert json.loads(text.split("data: ")[-2])["error"]["code"] == 500, text
    assert tokens_of(server, GOOD[0])[0]


def test_other_errors_are_told_apart(server: Server) -> None:
    """Control: the error of a structure that no text can satisfy is another one."""
    before = len(server.log.read_text())
    assert post(server, GOOD[0], structured_outputs={"json": {"$ref": "#"}}).status_code == 500
    assert "not finite" not in server.log.read_text()[before:]
