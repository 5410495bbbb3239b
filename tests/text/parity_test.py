"""Our ids, texts and prompts are those of transformers, recorded by tests/golden/record_tokenizer.py for SmolLM2."""

import json
import lzma
from pathlib import Path

import pytest

from decoder.text import ChatTemplate, load_tokenizer, tokenizer_from_gguf

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def record():
  return json.loads((GOLDEN / "tokenizer_smollm2.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def metadata():
  return json.loads(lzma.decompress((GOLDEN / "smollm2_tokenizer.json.xz").read_bytes()))


@pytest.fixture(scope="module")
def of_gguf(metadata):
  return tokenizer_from_gguf(metadata)


@pytest.fixture(scope="module")
def of_directory(metadata, record, tmp_path_factory):
  """The directory that transformers wrote, put together again from the recorded parts."""
  vocabulary = {text: index for index, text in enumerate(metadata["tokenizer.ggml.tokens"])}
  merges = [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]]
  source = record["frame"] | {"model": record["frame"]["model"] | {"vocab": vocabulary, "merges": merges}}
  directory = tmp_path_factory.mktemp("smollm2")
  (directory / "tokenizer.json").write_text(json.dumps(source), "utf-8")
  (directory / "tokenizer_config.json").write_text(json.dumps(record["tokenizer_config"]), "utf-8")
  (directory / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], "utf-8")
  return load_tokenizer(directory)


def test_ids_of_the_directory_are_those_of_transformers(of_directory, record):
  assert len(record["texts"]) >= 220
  wrong = [text for text, written, _ in record["texts"] if of_directory.encode(text) != written]
  assert wrong == []


def test_ids_of_the_gguf_file_are_those_of_the_published_tokenizer(of_gguf, record):
  wrong = [text for text, _, published in record["texts"] if of_gguf.encode(text) != published]
  assert wrong == []


def test_negative_control_the_published_cut_of_digits_matters(of_directory, record):
  differ = [text for text, _, published in record["texts"] if of_directory.encode(text) != published]
  assert differ
  assert all(any(char.isnumeric() for char in text) for text in differ)


def test_every_text_comes_back(of_gguf, of_directory, record):
  for text, *_ in record["texts"]:
    for tokenizer in (of_gguf, of_directory):
      assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_decoded_texts_are_those_of_transformers(of_gguf, of_directory, record):
  compared = 0
  for ids, shown, skipped in record["decoded"]:
    if "\ufffd" in shown:
      continue  # a truncated character is one U+FFFD there and one per byte here
    compared += 1
    for tokenizer in (of_gguf, of_directory):
      assert tokenizer.decode(ids, skip_special=False) == shown
      assert tokenizer.decode(ids) == skipped
  assert compared > 20


def test_both_ways_know_the_same_tokens(of_gguf, of_directory):
  for name in ("vocab_size", "bos_id", "eos_ids", "adds_bos", "special_tokens", "named_tokens", "chat_template"):
    assert getattr(of_gguf, name) == getattr(of_directory, name)
  assert (of_gguf.vocab_size, of_gguf.bos_id, of_gguf.eos_ids, of_gguf.adds_bos) == (49152, 1, (2,), False)
  assert all(of_gguf.token_bytes(i) == of_directory.token_bytes(i) for i in range(of_gguf.vocab_size))


def test_conversations_are_rendered_as_by_transformers(of_gguf, record):
  template = ChatTemplate(of_gguf.chat_template, of_gguf.named_tokens)
  for rendered, prompt, chat in record["chats"]:
    assert template.render(chat, add_generation_prompt=prompt) == rendered
    assert of_gguf.encode_chat(chat, add_generation_prompt=prompt) == of_gguf.encode(rendered)


def test_template_features_are_rendered_as_by_transformers(of_gguf, record):
  for name, source, chat, rendered in record["templates"]:
    assert ChatTemplate(source, of_gguf.named_tokens).render(chat) == rendered, name


def test_written_files_read_back(of_gguf, record, tmp_path):
  for name, data in of_gguf.files().items():
    (tmp_path / name).write_bytes(data)
  again = load_tokenizer(tmp_path)
  assert [again.encode(text) for text, *_ in record["texts"]] == [of_gguf.encode(text) for text, *_ in record["texts"]]
