"""OpenAI's client gets the engine's samples from `sparse-rl serve`, or a clear message about what is not supported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import Server, running

from rollout import Rollout, SamplingConfig, make_engine
from sparse_rl.data.synthetic import RunningSum
from sparse_rl.models.load import load_tokenizer

pytestmark = pytest.mark.slow

MODEL = Path(__file__).parents[2] / "recipes/quickstart/model"
POLICY = {"policy": "gkv", "budget": 40, "window": 8, "period": 8}
TEXTS = [row["prompt"] for row in RunningSum().rows("calibration", 40, seed=3)]
TOKENS = 60
# with this template, the prompt of a chat is the text of its messages
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "chat.jinja").write_text(PLAIN)
    words = ("--cache", ",".join(f"{key}={value}" for key, value in POLICY.items()), "--kv-cache-gb", "0.05")
    with running(MODEL, folder, *words, "--", "--chat-template", str(folder / "chat.jinja")) as started:
        yield started


ENGINE = cache(lambda: make_engine("hf", model=MODEL, policy=POLICY))
TOKENIZER = cache(lambda: load_tokenizer(MODEL))


def rollout(text: str, **sampling: Any) -> list[Rollout]:
    """Return the reference engine's samples for a prompt."""
    settings = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, **sampling}
    return ENGINE().generate([TOKENIZER()(text)["input_ids"]], SamplingConfig(**settings))


def decoded(ids: list[int]) -> str:
    return TOKENIZER().decode(ids, skip_special_tokens=True)


def tokens_of(answer: Any) -> list[list[int]]:
    return [choice.token_ids for choice in sorted(answer.choices, key=lambda choice: choice.index)]


def test_completions_equal_the_engines_samples(server: Server) -> None:
    """Greedy, for prompts given as text and as tokens."""
    (expected,) = rollout(TEXTS[0])
    for prompt in (TEXTS[0], expected.prompt_ids):
        answer = server.complete(prompt, TOKENS, logprobs=3)
        assert tokens_of(answer) == [expected.completion_ids]
        assert answer.choices[0].text == decoded(expected.completion_ids)
        assert answer.choices[0].logprobs.token_logprobs == pytest.approx(expected.model_logprobs, abs=1e-5)
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(expected.prompt_ids), TOKENS)
    batch = server.client.completions.create(
        model=server.model,
        prompt=TEXTS[:3],
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    assert tokens_of(batch) == [rollout(text)[0].completion_ids for text in TEXTS[:3]]


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 5}, {"temperature": 1.3, "top_p": 0.9, "top_k": 8}]
)
def test_a_seed_gives_the_engines_samples(sampling: dict[str, Any], server: Server) -> None:
    """For each setting of temperature, top-p and top-k. Control: seed 12 gives others."""
    settings = {"temperature": 1.0, "n": 3, "seed": 11, **sampling}
    expected = [completion.completion_ids for completion in rollout(TEXTS[1], **settings)]
    extra = {"top_k": settings.pop("top_k")} if "top_k" in settings else {}
    assert tokens_of(server.complete(TEXTS[1], TOKENS, **settings, extra_body=extra)) == expected
    assert len({tuple(completion) for completion in expected}) > 1
    other = tokens_of(server.complete(TEXTS[1], TOKENS, **{**settings, "seed": 12}, extra_body=extra))
    assert other != expected


def test_chats_equal_the_engines_samples(server: Server) -> None:
    messages: Any = [{"role": "user", "content": TEXTS[2]}]
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5, "n": 2}):
        answer = server.client.chat.completions.create(
            model=server.model,
            messages=messages,
            max_completion_tokens=TOKENS,
            logprobs=True,
            top_logprobs=2,
            extra_body={"ignore_eos": True, "return_token_ids": True},
            **sampling,  # type: ignore[call-overload]
        )
        expected = rollout(TEXTS[2], **sampling)
        assert tokens_of(answer) == [sample.completion_ids for sample in expected]
        for choice, sample in zip(answer.choices, expected, strict=True):
            assert choice.message.content == decoded(sample.completion_ids)
            logprobs = [item.logprob for item in choice.logprobs.content]
            assert logprobs == pytest.approx(sample.model_logprobs, abs=1e-5)


def test_responses_equal_the_engines_samples(server: Server) -> None:
    answer = server.client.responses.create(
        model=server.model, input=TEXTS[3], max_output_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True}
    )
    (expected,) = rollout(TEXTS[3])
    assert answer.output_text == decoded(expected.completion_ids)
    assert answer.usage.output_tokens == TOKENS


def test_the_pieces_of_a_stream_make_the_whole_answer(server: Server) -> None:
    """For completions, chats and responses. The usage comes last."""
    expected = decoded(rollout(TEXTS[4], temperature=1.0, seed=3)[0].completion_ids)
    common: dict[str, Any] = {"model": server.model, "temperature": 1, "seed": 3, "stream": True}
    common |= {"stream_options": {"include_usage": True}, "extra_body": {"ignore_eos": True}}
    pieces = list(server.client.completions.create(prompt=TEXTS[4], max_tokens=TOKENS, **common))
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == expected
    assert pieces[-1].usage.completion_tokens == TOKENS
    messages = [{"role": "user", "content": TEXTS[4]}]
    pieces = list(server.client.chat.completions.create(messages=messages, max_tokens=TOKENS, **common))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == expected
    assert pieces[-1].usage.completion_tokens == TOKENS
    greedy = decoded(rollout(TEXTS[4])[0].completion_ids)
    events = server.client.responses.create(
        model=server.model,
        input=TEXTS[4],
        max_output_tokens=TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == greedy


def test_completions_stop_at_the_end_of_text_a_stop_string_or_a_stop_token(server: Server) -> None:
    (whole,) = rollout(TEXTS[5], ignore_eos=False, max_tokens=200)
    answer = server.complete(TEXTS[5], 200, extra_body={"ignore_eos": False})
    assert tokens_of(answer) == [whole.completion_ids]
    assert answer.choices[0].finish_reason == "stop"
    text = decoded(whole.completion_ids)
    stopped = server.complete(TEXTS[5], 200, stop=[";"])
    assert stopped.choices[0].text == text[: text.index(";")]
    assert stopped.choices[0].finish_reason == "stop"
    token = whole.completion_ids[7]
    at = whole.completion_ids.index(token)
    stopped = server.complete(TEXTS[5], 200, extra_body={"stop_token_ids": [token]})
    assert tokens_of(stopped) == [whole.completion_ids[: at + 1]]


def test_the_prompt_is_echoed(server: Server) -> None:
    (expected,) = rollout(TEXTS[6])
    answer = server.client.completions.create(
        model=server.model,
        prompt=TEXTS[6],
        max_tokens=TOKENS,
        temperature=0,
        echo=True,
        logprobs=1,
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].text == decoded(expected.prompt_ids) + decoded(expected.completion_ids)
    logprobs = answer.choices[0].logprobs.token_logprobs
    assert logprobs[0] is None
    assert len(logprobs) == len(expected.prompt_ids) + TOKENS
    assert logprobs[len(expected.prompt_ids) :] == pytest.approx(expected.model_logprobs, abs=1e-5)


def test_structured_outputs_match_their_structure(server: Server) -> None:
    for structure, form in (
        ({"regex": "[0-9]{7}"}, r"\d{7}"),
        ({"choice": ["a1A1;", "b2B2;"]}, "a1A1;|b2B2;"),
        ({"grammar": 'root ::= "Q" [a-c]+ "?"'}, r"Q[a-c]+\?"),
    ):
        extra = {"structured_outputs": structure, "ignore_eos": False}
        text = server.complete(TEXTS[7], 40, temperature=1, seed=1, extra_body=extra).choices[0].text
        assert re.fullmatch(form, text), text


def test_penalties_and_biases_change_the_tokens(server: Server) -> None:
    """Without them, the tokens are the engine's."""
    prompt = "?c4C4A4"  # a prompt after which the model is uncertain
    plain = rollout(prompt)[0].completion_ids
    assert tokens_of(server.complete(prompt, TOKENS)) == [plain]
    for options in (
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"extra_body": {"repetition_penalty": 2.0}},
        {"extra_body": {"bad_words": [";"]}},
    ):
        assert tokens_of(server.complete(prompt, TOKENS, **options)) != [plain], options
    assert tokens_of(server.complete(prompt, 9, logit_bias={"20": 100})) == [[20] * 9]
    restricted = server.complete(prompt, TOKENS, temperature=1, seed=2, extra_body={"min_p": 1.0})
    assert tokens_of(restricted) == [plain]  # only the best token remains possible


def test_concurrent_requests_get_the_engines_samples(server: Server) -> None:
    """Half of the prompts are given as tokens."""
    requests = [(TEXTS[i % len(TEXTS)], 1 + i % 50, i) for i in range(200)]

    def ask(text: str, length: int, seed: int) -> list[int]:
        prompt = TOKENIZER()(text)["input_ids"] if seed % 2 else text
        return tokens_of(server.complete(prompt, length, temperature=1, seed=seed))[0]

    with ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(lambda request: ask(*request), requests))
    for (text, length, seed), answer in zip(requests, answers, strict=True):
        (expected,) = rollout(text, max_tokens=length, temperature=1.0, seed=seed)
        assert answer == expected.completion_ids


def test_another_model_is_not_found(server: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        server.client.completions.create(model="another", prompt=TEXTS[0])


def test_the_server_answers_correctly_after_all_other_tests(server: Server) -> None:
    assert tokens_of(server.complete(TEXTS[0], TOKENS)) == [rollout(TEXTS[0])[0].completion_ids]
    server.idle()
    assert "Traceback" not in server.log.read_text()
