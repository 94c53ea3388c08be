"""Under `sparse-rl serve --context`, prompts that begin with the context's text continue from its compacted entries."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from serving import Server, free_port, run, served_directory

from rollout import SamplingConfig, make_engine
from rollout.context import PromptCacheConfig
from rollout.context.cache import load_context
from rollout.vllm.serve import _tokens
from sparse_rl.data.tokens import prompt_ids
from sparse_rl.models.directory import save_policy
from sparse_rl.models.load import load_tokenizer
from sparse_rl.policies import make_policy

TEXT = "a1b4c0d2e0f3g3h3;" * 6
CHAT = "{% for m in messages %}[{{ m.role[0] }}:{{ m.content }}]{% endfor %}"
CHAT += "{% if add_generation_prompt %}[a:{% endif %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_directory(tmp_path_factory.mktemp("trained"), CHAT)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def test_a_text_is_compacted_before_the_server_starts(
    model: Path, text: Path, started: list, capfd: pytest.CaptureFixture
) -> None:
    settings = "ratio=0.25,queries=[context, repeat],last=2"
    run(model, "--port", free_port(), "--context", text, "--prompt-cache", settings)
    (words,) = started
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    extra_config = transfer["kv_connector_extra_config"]["sparse_rl"]
    (path,) = extra_config["contexts"]
    context, tokenizer = load_context(path), load_tokenizer(str(model))
    chat_tokens = prompt_ids([{"role": "user", "content": TEXT + "a1?"}], tokenizer)
    assert context.tokens == chat_tokens[: len(context.tokens)]
    assert len(context.tokens) == 3 + len(TEXT)
    # the template's three tokens come before the text and are not compacted
    assert context.entries == 3 + 2 + round(0.25 * (len(TEXT) - 2))
    assert "ContextConnector" in words[words.index("--kv-transfer-config") + 1]
    assert f"context: {context.entries} entries left of {len(context.tokens)} (prefill" in capfd.readouterr().out


def test_tokens_that_the_following_text_changes_are_not_cached() -> None:
    """Here the tokenizer joins the last letter with the text after it."""

    class Joins:
        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [ord(c) for c in text.replace("za", "Z").replace("z ", "Y")]}

    tokens, first, prompts = _tokens("abz", "abz", Joins())
    assert (tokens, first) == ([ord("a"), ord("b")], 0)
    assert bytes(prompts.questions[:6]) == b"z\n\nAsk"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--prompt-cache", "ratio=0.1"], "--prompt-cache: there is no context to compact; name its file: --context"),
        (["--context", "absent.txt"], "absent.txt"),
        (["--context", "raw.txt"], "--context: raw.txt cannot be read: 'utf-8' codec"),
        (["--context", "TEXT", "--max-model-len", "90"], "has 105 tokens, but the model can read only 90"),
        (["--context", "TEXT", "--prompt-cache", "ratio=7"], "--prompt-cache.ratio: expected a number above 0"),
        (["--context", "TEXT", "--prompt-cache", "summary=plain"], "a summary cannot take its place; remove summary"),
        (["--context", "TEXT", "--prompt-cache", "ration=7"], "--prompt-cache.ration: unknown key; did you mean"),
        (["--context", "TEXT", "--cache", "policy=tova,budget=9"], "--context: a compacted context cannot be combined"),
    ],
)
def test_invalid_contexts_are_refused(
    words: list[str],
    says: str,
    model: Path,
    text: Path,
    started: list,
    capfd: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(text.parent)
    Path("raw.txt").write_bytes(b"\xff\xfe\x00")
    assert run(model, "--port", free_port(), *(text if word == "TEXT" else word for word in words)) == 2
    err = capfd.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert says in err, err
    assert not started


def test_a_context_is_refused_if_the_models_policy_evicts(
    model: Path, text: Path, tmp_path: Path, started: list, capfd: pytest.CaptureFixture
) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_policy(tmp_path, make_policy("tova", budget=20))
    assert run(tmp_path, "--port", free_port(), "--context", text) == 2
    assert "with the evicting policy tova; write --cache policy=full" in capfd.readouterr().err


@pytest.mark.slow
def test_messages_that_begin_with_the_context_continue_from_it(model: Path, text: Path, tmp_path: Path) -> None:
    """Other messages get the tokens of a full cache."""
    server = Server(model, tmp_path, "--context", str(text), "--prompt-cache", "ratio=0.1", "--kv-cache-gb", "0.005")
    try:
        server.wait()
        tokenizer, engine = load_tokenizer(str(model)), make_engine("hf", model=model)
        context_tokens, first, prompts = _tokens([{"role": "user", "content": TEXT}], TEXT, tokenizer)
        context = engine.compact(context_tokens, PromptCacheConfig(ratio=0.1, first=first), prompts)
        greedy = SamplingConfig(60, temperature=0, ignore_eos=True)
        for question in ("a1?", "h3g2:4"):
            content = TEXT + question
            question_tokens = prompt_ids([{"role": "user", "content": content}], tokenizer)[len(context_tokens) :]
            (expected,) = engine.generate([question_tokens], greedy, context)
            messages, extra = [{"role": "user", "content": content}], {"return_token_ids": True, "ignore_eos": True}
            answer = server.client.chat.completions.create(
                model=server.model, messages=messages, max_tokens=60, temperature=0, extra_body=extra
            )
            assert answer.choices[0].token_ids == expected.completion_ids
        without_context = engine.generate([context_tokens[:-1]], greedy)[0].completion_ids
        assert (
            server.complete(context_tokens[:-1], 60).choices[0].token_ids == without_context != expected.completion_ids
        )
        reserved = {"vllm_xargs": {"context": ["x", 10, 5]}}  # a client cannot set the field of our engine
        assert server.complete(context_tokens[:-1], 60, extra_body=reserved).choices[0].token_ids == without_context
        prompt = [*context_tokens, *question_tokens]
        with_logprobs = server.complete(prompt, 60, extra_body={"prompt_logprobs": 0}).choices[0]
        # with prompt_logprobs the whole prompt is computed, without the compacted context
        (full,) = engine.generate([prompt], greedy)
        assert with_logprobs.token_ids == full.completion_ids != expected.completion_ids
        assert server.complete(prompt, 60).choices[0].token_ids == expected.completion_ids
        server.idle()
    finally:
        assert server.end(signal.SIGTERM) in (0, 143)
