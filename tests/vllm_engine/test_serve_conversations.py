"""`sparse-rl serve` under an evicting policy with kept turns, asked by OpenAI's client: the next turn of a chat goes on
from the cache that the last one left."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from serving import Server

from rollout import SamplingConfig, make_engine
from rollout.engine import Turn
from sparse_rl.models.load import load_tokenizer

pytestmark = pytest.mark.slow

MODEL = Path(__file__).parents[2] / "recipes/turns/model"
POLICY = {"policy": "streaming", "sinks": 1, "budget": 32, "period": 8}
TOKENS = 20
SOURCES = "local_compute", "external_kv_transfer"
ENGINE = cache(lambda: make_engine("hf", model=MODEL, policy=POLICY))
TOKENIZER = cache(lambda: load_tokenizer(str(MODEL)))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    words = "--cache", ",".join(f"{key}={value}" for key, value in POLICY.items()), "--kv-cache-gb", "0.05"
    started = Server(MODEL, tmp_path_factory.mktemp("served"), *words, "--", "--api-key", "one", "two")
    started.headers = {"Authorization": "Bearer one"}
    started.client.api_key = "one"
    try:
        started.wait()
        yield started
    finally:
        if started.process.poll() is None:
            assert started.end(signal.SIGTERM) in (0, 143)


def chat(server: Server, messages: list[Any], key: str = "one", **options: Any) -> Any:
    extra = {"return_token_ids": True, **options.pop("extra_body", {})}
    client = OpenAI(base_url=f"{server.url}/v1", api_key=key, timeout=300)
    return client.chat.completions.create(
        model=server.model, messages=messages, max_tokens=TOKENS, **{"temperature": 0, **options}, extra_body=extra
    )


def prompt_tokens(server: Server) -> list[int]:
    """Return how many tokens of prompts the server has read, and how many it need not read."""
    text = httpx.get(f"{server.url}/metrics", headers=server.headers).text
    pattern = r'^vllm:prompt_tokens_by_source_total\{.*source="%s".*\} (\S+)$'
    return [int(float(re.findall(pattern % source, text, re.MULTILINE)[0])) for source in SOURCES]


@pytest.mark.parametrize("seed", [None, 3])
def test_three_turns_of_a_chat_equal_converse(seed: int | None, server: Server) -> None:
    """Greedy and seeded. The server reads the new tokens only. Control: another key's request is prefilled, with other
    tokens, which are those of a whole prompt."""
    before, messages, held = prompt_tokens(server), [{"role": "user", "content": "abcd" * 5}], None
    sampling: dict[str, Any] = {} if seed is None else {"temperature": 1.0, "seed": seed}
    settings, tokens, read = SamplingConfig(TOKENS, **{"temperature": 0.0, **sampling}), list[int](), [0, 0]
    for content in ("efgh" * 6, "hgfe" * 7, None):
        answer = chat(server, messages, **sampling)
        prompt, sampled = answer.prompt_token_ids, answer.choices[0].token_ids
        assert prompt[: len(tokens)] == tokens
        ((rollout, held),) = ENGINE().converse([Turn(prompt[len(tokens) :], TOKENS, held)], settings)
        assert rollout.completion_ids[-len(sampled) :] == sampled
        kept = max(len(tokens) - 1, 0)
        read, tokens = [read[0] + len(prompt) - kept, read[1] + kept], prompt + sampled
        if content is not None:
            text = TOKENIZER().decode(sampled, skip_special_tokens=True)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": content}]
    after = prompt_tokens(server)
    assert [a - b for a, b in zip(after, before, strict=True)] == read
    other = chat(server, messages, key="two", **sampling).choices[0].token_ids
    (whole,) = ENGINE().generate([prompt], settings)
    assert other == whole.completion_ids != sampled
    salted = chat(server, messages, **sampling, extra_body={"cache_salt": "x"}).choices[0].token_ids
    assert salted == other
    assert prompt_tokens(server) == [after[0] + 2 * len(prompt), after[1]]
    assert chat(server, messages, **sampling).choices[0].token_ids == sampled
    server.idle()


def test_a_stream_goes_on_as_a_whole_answer_does(server: Server) -> None:
    prompt = [3 + i % 40 for i in range(50)]
    (first,) = server.complete(prompt, 30, extra_body={"ignore_eos": True}).choices
    begun = [*prompt, *first.token_ids, 5, 6, 7]
    expected = server.complete(begun, 30).choices[0].token_ids
    stream = server.complete(begun, 30, stream=True)
    assert [token for piece in stream for token in piece.choices[0].token_ids or ()] == expected
