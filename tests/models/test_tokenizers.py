"""A model's tokenizer reads a text as its tokenizer.json does, whatever class tokenizer_config.json names.

transformers rebuilds a tokenizer by that class. A byte-level tokenizer that calls itself LlamaTokenizerFast, as those
of DeepSeek-R1-Distill-Llama do, then loses all spaces.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, AutoTokenizer

from sparse_rl.errors import UserError
from sparse_rl.models.load import PROBE, load_tokenizer, misread_tokenizer, save_tokenizer

TEXT = "x = 12\n  y = 345, the cat sat on the mat"
SPECIAL = ["<s>", "</s>", "<unk>", "<|user|>"]
BOTH = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=letters)
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return tokenizer


def sentence_piece() -> Tokenizer:
    """Return a tokenizer as Llama 2 has it: spaces are replaced by a mark, bytes stand for unknown characters."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    own = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer.train_from_iterator([TEXT] * 4, trainers.BpeTrainer(vocab_size=400, special_tokens=own))
    return tokenizer


def write(folder: Path, tokenizer: Tokenizer, **settings: Any) -> str:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**BOTH, **settings}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return str(folder)


def own_ids(folder: str, text: str) -> list[int]:
    return list(Tokenizer.from_file(f"{folder}/tokenizer.json").encode(text, add_special_tokens=False).ids)


CLASSES = (
    *("LlamaTokenizerFast", "LlamaTokenizer", "Qwen2Tokenizer", "GemmaTokenizerFast", "T5TokenizerFast"),
    *("BertTokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast", "CodeGenTokenizer", "NoSuchTokenizer", None),
)


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.few(11)
def test_every_class_name_reads_as_tokenizer_json(
    name: str | None, make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path / "model", make(), **({} if name is None else {"tokenizer_class": name}))
    with caplog.at_level(logging.WARNING, "sparse_rl"):
        tokenizer = load_tokenizer(folder)
    for text in (*PROBE, TEXT, "a<|user|> b", "  12  "):
        ids = own_ids(folder, text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.padding_side) == ("</s>", "</s>", "left")
    assert (misread_tokenizer(folder) is not None) is any("misreads it" in message for message in caplog.messages)


def test_the_fault_is_transformers_own(tmp_path: Path) -> None:
    """Control: AutoTokenizer loses the spaces, and the warning shows it; under another class it does not."""
    folder = write(tmp_path / "model", byte_level(), tokenizer_class="LlamaTokenizerFast")
    assert AutoTokenizer.from_pretrained(folder).decode(own_ids(folder, "x = 12")) != "x = 12" or (
        AutoTokenizer.from_pretrained(folder).encode("x = 12", add_special_tokens=False) != own_ids(folder, "x = 12")
    )
    assert misread_tokenizer(folder) is not None
    assert misread_tokenizer(write(tmp_path / "right", byte_level(), tokenizer_class="PreTrainedTokenizerFast")) is None


def test_a_saved_tokenizer_has_the_start_models_files_unless_it_was_changed(tmp_path: Path) -> None:
    start = write(
        tmp_path / "model", byte_level(), tokenizer_class="LlamaTokenizerFast", chat_template="{{ messages }}"
    )
    for added in (False, True):
        tokenizer, folder = load_tokenizer(start), tmp_path / f"added_{added}"
        if added:
            tokenizer.add_tokens(["<tool>"])
        folder.mkdir()
        save_tokenizer(tokenizer, folder)
        names = "tokenizer.json", "tokenizer_config.json"
        same = [(folder / name).read_bytes() == (tmp_path / "model" / name).read_bytes() for name in names]
        assert any(same) is all(same) is not added
        again = load_tokenizer(str(folder))
        ours, theirs = (t.encode("x = 12 <tool>", add_special_tokens=False) for t in (again, tokenizer))
        assert ours == theirs
        assert again.chat_template == "{{ messages }}"


def test_the_start_models_directory_may_be_gone(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "model", byte_level()))
    ids = tokenizer.encode(TEXT)
    shutil.rmtree(tmp_path / "model")
    (tmp_path / "new").mkdir()
    save_tokenizer(tokenizer, tmp_path / "new")
    assert AutoTokenizer.from_pretrained(tmp_path / "new").encode(TEXT) == ids


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"model": {"vocab": {}}})])
def test_a_damaged_tokenizer_is_one_line(content: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", byte_level())
    Path(folder, "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match="has no tokenizer that can be read"):
        load_tokenizer(folder)


def test_the_server_gets_a_directory_from_which_vllm_reads_the_right_tokenizer(tmp_path: Path) -> None:
    serve = pytest.importorskip("rollout.vllm.serve")
    flags = {"--load-format"}  # there are no weights here
    for name, misread in (("LlamaTokenizerFast", True), ("PreTrainedTokenizerFast", False)):
        folder = write(tmp_path / name, byte_level(), tokenizer_class=name)
        served = serve._check_files(folder, AutoConfig.from_pretrained(folder), flags)
        assert (served is not None) is misread
        read = AutoTokenizer.from_pretrained(served or folder)
        assert read.encode("x = 12", add_special_tokens=False) == own_ids(folder, "x = 12")
