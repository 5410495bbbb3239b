"""Marian, M2M-100, NLLB, T5 and mT5 from files as published: numbers, languages, markup, and what is wrong in them."""

import json

import published
import pytest
import sentencepiece

from decoder.text import load_tokenizer, tokenizer_from_files
from decoder.text.fast import FastTokenizer
from decoder.text.languages import Languages
from decoder.text.mapped import MappedTokenizer
from decoder.text.pieces import PieceTokenizer

TEXTS = published.texts()
PLAIN = [text for text in TEXTS if not any(markup in text for markup in published.MARKUP)]
FAMILIES = {
  "marian": published.marian, "m2m_100": published.m2m_100, "nllb": published.nllb, "t5": published.t5,
  "mt5": lambda: published.t5(0),
}  # fmt: skip
EOS = {"marian": 0, "m2m_100": 2, "nllb": 2, "t5": 1, "mt5": 1}


@pytest.fixture(scope="module")
def read():
  return {name: tokenizer_from_files(make()) for name, make in FAMILIES.items()}


@pytest.mark.parametrize(("name", "file"), [("marian", "source.spm"), ("m2m_100", "sentencepiece.bpe.model")])
def test_pieces_are_numbered_by_the_vocabulary(read, name, file):
  files = FAMILIES[name]()
  numbers, unknown = json.loads(files["vocab.json"]), 0
  processor = sentencepiece.SentencePieceProcessor(model_proto=files[file])
  for text in PLAIN:
    pieces = processor.encode(text, out_type=str)
    unknown += any(piece not in numbers for piece in pieces)
    ids = read[name].encode(text)
    assert ids == [*(numbers.get(piece, numbers["<unk>"]) for piece in pieces), numbers["</s>"]]
    assert ids[:-1] != processor.encode(text) or not pieces, "negative control: by the SentencePiece model itself"
  assert unknown > 10


def test_nllb_is_numbered_as_fairseq_does(read):
  files, tokenizer = published.nllb(), read["nllb"]
  processor = sentencepiece.SentencePieceProcessor(model_proto=files["sentencepiece.bpe.model"])
  shifted = {0: 3, 1: 0, 2: 2}
  for text in PLAIN:
    assert tokenizer.encode(text) == [*(shifted.get(i, i + 1) for i in processor.encode(text)), 2]
  size = len(processor) + 1
  assert [tokenizer.find(token) for token in published.LANGUAGES] == list(range(size, size + 5))
  assert tokenizer.find("<mask>") == size + 5 == tokenizer.vocab_size - 1
  assert [tokenizer.find(token) for token in ("<s>", "<pad>", "</s>", "<unk>")] == [0, 1, 2, 3]


def test_languages_of_m2m_100_come_after_its_vocabulary(read):
  tokenizer, size = read["m2m_100"], len(json.loads(published.m2m_100()["vocab.json"]))
  assert (tokenizer.find("__af__"), tokenizer.find("__zu__"), tokenizer.vocab_size) == (size, size + 99, size + 100)
  known = Languages.among(tokenizer.token_bytes(i).decode() for i in range(tokenizer.vocab_size))
  assert (len(known.codes), known.code("src", "en")) == (100, tokenizer.find("__en__"))
  files = published.m2m_100()
  del files["special_tokens_map.json"]
  assert tokenizer_from_files(files).find("__zu__") == size + 99, "where no file lists them"
  files["tokenizer_config.json"] = published.as_json({"language_codes": "wmt21"})
  assert tokenizer_from_files(files).find("__de__") == size + 7
  files["added_tokens.json"] = published.as_json({"__en__": size + 3, "__de__": size + 1})
  assert tokenizer_from_files(files).find("__en__") == size + 3, "as a file numbers it"


def test_what_marian_is_to_write_is_named_before_the_text(read):
  tokenizer = read["marian"]
  numbers = json.loads(published.marian()["vocab.json"])
  assert tokenizer.encode(">>fra<< In the light") == [numbers[">>fra<<"], *tokenizer.encode("In the light")]
  assert tokenizer.encode(">>xyz<< In the light") == [numbers["<unk>"], *tokenizer.encode("In the light")]
  assert numbers[">>fra<<"] not in tokenizer.encode("In >>fra<< the light")
  known = Languages.among(tokenizer.token_bytes(i).decode() for i in range(tokenizer.vocab_size))
  assert dict(known.marks) == {"fra": numbers[">>fra<<"], "ron": numbers[">>ron<<"]}


def test_sentinels_of_t5_come_after_its_pieces_the_last_first(read):
  t5, mt5 = read["t5"], read["mt5"]
  assert t5.vocab_size == mt5.vocab_size + 100
  assert [t5.find(f"<extra_id_{n}>") for n in (0, 99, 100)] == [t5.vocab_size - 1, mt5.vocab_size, None]
  ids = t5.encode("the <extra_id_0> light")
  assert ids == [*t5.encode("the")[:-1], t5.find("<extra_id_0>"), *t5.encode("light")]
  assert t5.decode(ids, skip_special=False) == "the<extra_id_0>light</s>"
  files = published.t5()
  del files["special_tokens_map.json"], files["tokenizer_config.json"]
  assert tokenizer_from_files(files).encode("the <extra_id_0> light") == ids, "as for T5 where no file says otherwise"


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_end_with_eos_and_come_back(read, name):
  tokenizer = read[name]
  assert (tokenizer.eos_ids, tokenizer.adds_bos, tokenizer.encode("")) == ((EOS[name],), False, [EOS[name]])
  text = published.KNOWN
  for shown in (text, f"{text}<unk>{text}"):
    assert tokenizer.decode(tokenizer.encode(shown, add_eos=False), skip_special=False) == shown
  assert tokenizer.decode(tokenizer.encode(f"{text}</s>{text}")) == f"{text} {text}"


@pytest.mark.parametrize("name", FAMILIES)
def test_deltas_of_a_stream_are_the_text(read, name):
  for text in TEXTS:
    ids, detokenizer = read[name].encode(text), read[name].detokenizer()
    deltas = [detokenizer.feed([token]) for token in ids]
    assert "".join(deltas) + detokenizer.finish() == read[name].decode(ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_within_others_keeps_its_space_and_gets_none(read, name):
  tokenizer = read[name]
  assert [tokenizer.token_bytes(i) for i in tokenizer.encode_inside(" the")] == [b" the"]
  assert b"".join(map(tokenizer.token_bytes, tokenizer.encode_inside("the"))) == b"the"
  assert len(tokenizer.spellings("the")) == 2


@pytest.mark.parametrize("name", FAMILIES)
def test_files_give_the_same_tokenizer_back(read, name, tmp_path):
  for file, data in read[name].files().items():
    (tmp_path / file).write_bytes(data)
  again = load_tokenizer(tmp_path)
  assert [again.encode(text) for text in TEXTS] == [read[name].encode(text) for text in TEXTS]
  assert (again.vocab_size, again.files()) == (read[name].vocab_size, FAMILIES[name]())


def test_bytes_stand_for_what_is_not_in_the_model():
  model = published.train(published.ENGLISH, 500, byte_fallback=True)
  vocabulary = {piece: n for n, piece in enumerate(reversed(published.pieces(model)))}
  tokenizer = tokenizer_from_files({"source.spm": model, "vocab.json": published.as_json({**vocabulary, "<pad>": 900})})
  assert tokenizer.decode(tokenizer.encode("the 🙂 light")) == "the 🙂 light"


def test_which_file_is_read(read):
  kinds = {name: type(tokenizer) for name, tokenizer in read.items()}
  pieces, mapped = (
    dict.fromkeys(("t5", "mt5"), PieceTokenizer),
    dict.fromkeys(("marian", "m2m_100", "nllb"), MappedTokenizer),
  )
  assert kinds == {**mapped, **pieces}
  words = {"version": "1.0", "model": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0}}}
  for make in FAMILIES.values():
    assert type(tokenizer_from_files({**make(), "tokenizer.json": published.as_json(words)})) is FastTokenizer


SPM, T5 = published.marian()["source.spm"], published.t5()["spiece.model"]


@pytest.mark.parametrize(
  ("make", "changes", "match"),
  [
    (published.marian, {"vocab.json": None}, r"source\.spm is there without vocab\.json"),
    (published.marian, {"source.spm": None}, r"the vocab\.json there is only read beside one of these"),
    (published.marian, {"source.spm": b"?"}, r"source\.spm: not a SentencePiece model"),
    (published.marian, {"vocab.json": b"["}, r"vocab\.json: not JSON"),
    (published.marian, {"vocab.json": b'{"a": 1.5}'}, r"vocab\.json: wanted ids ≥ 0, got 1\.5 for 'a'"),
    (published.marian, {"vocab.json": b'{"a": 1, "b": 1}'}, r"vocab\.json: several tokens have one id"),
    (published.marian, {"vocab.json": b'{"<unk>": 1, "</s>": 0}'}, r"vocab\.json and source\.spm are of different mod"),
    (published.marian, {"target_vocab.json": b"{}"}, r"target_vocab\.json is of a model of two vocabularies"),
    (published.marian, {"tokenizer_config.json": b'{"separate_vocabs": true}'}, "separate_vocabs is of a model of two"),
    (published.marian, {"spiece.model": T5}, r"spiece\.model and source\.spm.*of different models"),
    (published.m2m_100, {"source.spm": SPM}, r"source\.spm and sentencepiece\.bpe\.model.*of different models"),
    (published.m2m_100, {"added_tokens.json": b'{"__en__": 7}'}, "'__en__' is 7 there"),
    (published.m2m_100, {"special_tokens_map.json": None, "tokenizer_config.json": b'{"language_codes": "x"}'},
     "language_codes must be one of m2m100, wmt21, got 'x'"),
    (published.nllb, {"special_tokens_map.json": None, "tokenizer_config.json": b"{}"},
     r"sentencepiece\.bpe\.model is there without vocab\.json.*special_tokens_map\.json"),
    (published.nllb, {"sentencepiece.bpe.model": T5}, r"begins with <pad>, </s>, <unk>, where NLLB's has"),
    (published.t5, {"spiece.model": b""}, r"spiece\.model: a SentencePiece model without pieces"),
    (published.t5, {"tokenizer_config.json": b'{"tokenizer_class": "XLNetTokenizer"}'}, "a XLNetTokenizer's"),
    (published.t5, {"tokenizer_config.json": b'{"extra_ids": 50}'}, "extra_ids is 50, but 100 <extra_id_…> are listed"),
  ],
)  # fmt: skip
def test_what_is_wrong_with_files_names_them(tmp_path, make, changes, match):
  for file, data in {**make(), **changes}.items():
    if data is not None:
      (tmp_path / file).write_bytes(data)
  with pytest.raises(ValueError, match=match):
    load_tokenizer(tmp_path)


def test_a_vocabulary_without_an_unknown_token_is_refused():
  files = published.marian()
  vocabulary = json.loads(files["vocab.json"])
  del vocabulary["<unk>"]
  with pytest.raises(ValueError, match=r"vocab\.json has no '<unk>'"):
    tokenizer_from_files({**files, "vocab.json": published.as_json(vocabulary)})


def test_a_language_before_every_text_is_no_beginning_of_text():
  """NLLB's tokenizer.json puts the language that it was saved with there; which one it is, a request says."""
  model = {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, "eng_Latn": 1, "<go>": 2}}

  def bos_where(token, number):
    before = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    known = {token: {"id": token, "ids": [number], "tokens": [token]}}
    template = {"type": "TemplateProcessing", "single": before, "pair": [], "special_tokens": known}
    source = {"version": "1.0", "model": model, "post_processor": template}
    return tokenizer_from_files({"tokenizer.json": published.as_json(source)}).bos_id

  assert bos_where("eng_Latn", 1) is None
  assert bos_where("<go>", 2) == 2, "negative control"
