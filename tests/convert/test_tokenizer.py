"""Tokenizers and chat templates as folders have them: accepted ones work, others are refused when engines are built."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.cli import done, refused
from support.models import ASSETS
from tokenizers.pre_tokenizers import ByteLevel

from glmspec.convert.tokenizer import has_tokenizer, load_tokenizer
from glmspec.core.errors import CheckpointError
from glmspec.runtime.text import Tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
BOM = b"\xef\xbb\xbf"


@pytest.fixture
def folder(tmp_path) -> Path:
    return shutil.copytree(ASSETS / "tiny-verifier", tmp_path / "hf")


def change(folder: Path, name: str = "tokenizer_config.json", **values: object) -> None:
    said = json.loads((folder / name).read_text()) | values
    (folder / name).write_text(json.dumps(said))


def spoil_model(folder: Path) -> None:
    change(folder, "tokenizer.json", model={"type": "SomethingNew", "vocab": {}})


def spoil_normalizer(folder: Path) -> None:
    change(folder, "tokenizer.json", normalizer={"type": "OfTomorrow"})


def leave_slow(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").write_text("")


def leave_sentencepiece(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"\x0a\x01\x02")


def cut(folder: Path) -> None:
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text()[:900])


def ask_for_code(folder: Path) -> None:
    change(folder, auto_map={"AutoTokenizer": ["tokenization_x.Tok", None]}, tokenizer_class="Tok")
    (folder / "tokenization_x.py").write_text("raise SystemExit('code ran')\n")


def break_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}")


def name_no_default(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    change(folder, chat_template=[{"name": "tool_use", "template": "x"}])


def break_a_named_one(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ messages | no_such_filter }}")


def no_text(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text('{"chat_template": ["a"]}')


SPOILT = {
    spoil_model: "transformers can load (Exception: data did not match",
    spoil_normalizer: "not a tokenizer that transformers can load",
    leave_slow: "not a tokenizer that transformers can load",
    leave_sentencepiece: "not a tokenizer that transformers can load",
    cut: "not a tokenizer that transformers can load",
    ask_for_code: "it asks for code of its own, which is never run",
    break_template: "chat template default: line 1",
    name_no_default: "chat templates: found tool_use, expected one that is called default",
    break_a_named_one: "chat template rag: line 1: No filter named 'no_such_filter'",
    no_text: "chat_template.json: chat_template: found a list, expected a text",
}


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
def test_what_cannot_be_used_is_refused_by_engine_and_noted_by_convert(folder, tmp_path, spoil):
    spoil(folder)
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(folder)
    assert str(caught.value).startswith(str(folder)) and SPOILT[spoil] in str(caught.value)
    if spoil in (spoil_model, leave_slow, break_template):
        engine = ("engine", "--target", "cpu", "--no-validate", "-o", tmp_path / "engines")
        assert SPOILT[spoil][:40] in refused(1, *engine, "--verifier", folder)
        assert (
            "note: engines of this checkpoint will be refused" in done("convert", folder, "-o", tmp_path / "ck").stderr
        )
        assert SPOILT[spoil][:40] in refused(1, *engine, "--verifier", tmp_path / "ck")
        assert not (tmp_path / "engines").exists()


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_a_vocabulary_and_merges_are_enough_where_transformers_makes_a_tokenizer_of_them(tmp_path, kind):
    vocabulary = {text: at for at, text in enumerate([*sorted(ByteLevel.alphabet()), "ab"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    assert has_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("abc") == [256, vocabulary["c"]] and tokenizer.decode([256]) == "ab"


def test_the_model_s_config_does_not_change_what_is_read(folder):
    """An engine's tokenizer folder has none."""
    (folder / "config.json").write_text("no JSON at all")
    assert Tokenizer(folder).encode("ab") == [97, 98]


def test_a_byte_order_mark_does_not_reach_prompts(folder):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes(BOM + (folder / name).read_bytes())
    assert Tokenizer(folder).chat(MESSAGES) == Tokenizer(ASSETS / "tiny-verifier").chat(MESSAGES)


def test_templates_are_taken_from_the_first_place_that_has_one(folder):
    (folder / "chat_template.json").write_text('{"chat_template": "legacy"}')
    change(folder, chat_template=[{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "x"}])
    (folder / "chat_template.jinja").write_text("file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("named")
    assert Tokenizer(folder).chat(MESSAGES) == "file"
    shutil.rmtree(folder / "additional_chat_templates")
    (folder / "chat_template.jinja").unlink()
    assert Tokenizer(folder).chat(MESSAGES) == "listed"
    change(folder, chat_template=None)
    assert Tokenizer(folder).chat(MESSAGES) == "legacy"


def test_templates_are_used_by_engines_from_wherever_they_are(folder, tmp_path):
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text('{"chat_template": "legacy"}')
    done("engine", "--verifier", folder, "--target", "cpu", "--no-validate", "-o", tmp_path / "engines")
    assert Tokenizer(tmp_path / "engines" / "tokenizer").chat(MESSAGES) == "legacy"


def test_a_template_that_refuses_this_conversation_is_one(folder):
    (folder / "chat_template.jinja").write_text("{{ raise_exception('a system prompt is needed') }}")
    assert load_tokenizer(folder).chat_template


def test_a_folder_without_a_vocabulary_has_no_tokenizer(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{%")
    assert not has_tokenizer(tmp_path)
