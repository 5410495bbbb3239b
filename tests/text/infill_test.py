"""Prompts for the middle: each family's own marks, in its own order, with the spaces that its tokenizer puts."""

import pytest

from decoder.text import Infill, tokenizer_from_files
from decoder.text.infill import FAMILIES, find_family, infill_ends, infill_ids

CONTROL, USER_DEFINED = 3, 4


def with_marks(make, family, **changes):
  """A tokenizer that also has a family's marks and ends."""
  tail = [(text, CONTROL) for text in (*family[:3], *family.ends) if text is not None]
  return make(tail=tail, **changes)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_found_by_its_marks_and_laid_out_its_way(make_pieces, name):
  family = FAMILIES[name]
  tokenizer = with_marks(make_pieces, family)
  assert find_family(tokenizer) is family
  ids = infill_ids(tokenizer, Infill("he", "re"))
  marks = {tokenizer.find(text) for text in family[:3] if text is not None}
  order = [tokenizer.token_bytes(i).decode() for i in ids if i in marks]
  middle_last = ["".join(text.replace("▁", " ")) for text in family[:3] if text]
  assert ids[0] == tokenizer.bos_id
  assert ids.count(tokenizer.bos_id) == 1
  assert [text.replace("▁", " ") for text in order] == (middle_last if family.middle else middle_last[::-1])
  assert set(infill_ends(tokenizer)) == marks | {tokenizer.find(text) for text in family.ends}


def test_code_llama_reads_the_prefix_as_a_text_and_the_suffix_as_going_on(make_pieces):
  """Rozière et al. 2023 (arXiv:2308.12950): `▁<PRE> prefix ▁<SUF>suffix ▁<MID>`."""
  tokenizer = with_marks(make_pieces, FAMILIES["Code Llama"])
  pre, suf, mid = (tokenizer.find(f"▁<{name}>") for name in ("PRE", "SUF", "MID"))
  spaced, plain = tokenizer.find("▁x"), tokenizer.find("x")
  assert infill_ids(tokenizer, Infill("x", "x")) == [tokenizer.bos_id, pre, spaced, suf, plain, mid]


def test_bos_is_the_models_or_the_callers_choice(make_pieces):
  tokenizer = with_marks(make_pieces, FAMILIES["StarCoder, Granite"], **{"ggml.add_bos_token": False})
  prompt = Infill("", "")
  assert len(infill_ids(tokenizer, prompt)) == 3
  assert infill_ids(tokenizer, prompt, add_bos=True)[0] == tokenizer.bos_id
  tokenizer.bos_id = None
  with pytest.raises(ValueError, match="no BOS"):
    infill_ids(tokenizer, prompt, add_bos=True)


def test_marks_need_not_be_special(make_pieces):
  """Qwen2.5-Coder's are added tokens that are not."""
  tokenizer = make_pieces(tail=[(text, USER_DEFINED) for text in FAMILIES["Qwen2.5-Coder, CodeGemma"][:3]])
  first, second, third = (tokenizer.find(f"<|fim_{part}|>") for part in ("prefix", "suffix", "middle"))
  assert infill_ids(tokenizer, Infill("", ""), add_bos=False) == [first, second, third]


def test_a_model_without_the_tokens_is_told_which_were_looked_for(spm_tok, byte_tok, word_tok, make_pieces):
  half = make_pieces(tail=[("<fim_prefix>", CONTROL), ("<fim_suffix>", CONTROL)])
  for tokenizer in (spm_tok, byte_tok, word_tok, half):
    with pytest.raises(ValueError, match="no tokens for filling in") as error:
      infill_ids(tokenizer, Infill("a", "b"))
    for family in FAMILIES.values():
      assert family.prefix in str(error.value)


@pytest.mark.parametrize("prompt", [Infill(3, "a"), Infill("a", None), Infill("a", b"b")])
def test_parts_that_are_no_text_are_refused(make_pieces, prompt):
  with pytest.raises(ValueError, match="wanted a string"):
    infill_ids(with_marks(make_pieces, FAMILIES["Code Llama"]), prompt)


def test_text_that_goes_on_has_no_space_of_the_tokenizers(any_tok, json_tok, spm_tok):
  for text in ("he", " he", "x I", "", "漢"):
    ids = any_tok.encode_inside(text)
    assert len(ids) <= len(any_tok.encode(text, add_bos=False)) + 1
  assert json_tok.encode_inside("te")[0] == json_tok.find("te")
  assert json_tok.encode("te", add_bos=False)[0] == json_tok.find("▁te")  # negative control
  before = spm_tok.encode("he", add_bos=False)
  assert spm_tok.decode(before + spm_tok.encode_inside("re")) == "here"
  assert spm_tok.decode(before + spm_tok.encode("re", add_bos=False)) == "he re"  # negative control


def test_a_token_is_found_by_its_text(any_tok, json_tok):
  assert any_tok.find("no such token") is None
  assert json_tok.find("▁he") == tokenizer_from_files(json_tok.files()).find("▁he")
  assert json_tok.find("<s>") == json_tok.bos_id
