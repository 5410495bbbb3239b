"""Encoder–decoders behind the façade: a prompt is a text to read, and what is written begins anew.

lm = decoder.load("hf:facebook/nllb-200-distilled-600M")
print(lm.generate("The cat sat on the mat.", src="eng_Latn", tgt="deu_Latn", num_beams=4).text)
"""

import dataclasses
import functools
from typing import Any

from decoder.encoded import EncodedBeamPrograms, EncodedPrograms
from decoder.generate import LM
from decoder.session import Session
from decoder.settings import Settings
from decoder.text.infill import Infill
from decoder.text.languages import Languages


class Translator(LM):
  """An LM whose prompts are read by an encoder, `Result.prompt_ids` among them. context bounds either text.

  What its checkpoint says must always be so, is, unless settings say otherwise: the first token that is written and the
  tokens that never are. Sessions and `score` are for models without an encoder, and refused.
  """

  kinds = (EncodedPrograms, EncodedBeamPrograms)

  @functools.cached_property
  def start_id(self) -> int:
    """The token from which the decoder starts. ValueError where the checkpoint names none."""
    for name in ("decoder_start_token_id", "bos_token_id"):
      found = self._asked(name)
      if found is not None:
        return int(found)
    raise ValueError(f"{self.name} names no decoder_start_token_id; add it to config.json")

  @functools.cached_property
  def languages(self) -> Languages:
    """The languages that have a token of their own: of M2M-100, NLLB and Marian's models of several targets."""
    if self.tokenizer is None:
      return Languages({}, {})
    texts = (self.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in range(self.tokenizer.vocab_size))
    return Languages.among(texts)

  def length(self, text: str, settings: Settings) -> int:
    """Tokens that the encoder reads of a text, those of languages and its end among them; 0 if it has none itself.
    ValueError for a language that is unknown."""
    return len(self._source(text, settings)) if self._has_tokens(text) else 0

  def score(self, prompt: Any, continuation: Any, *, logprobs: int = 0) -> Any:
    raise ValueError(f"score() is not offered for an encoder–decoder such as {self.name}; ask generate() for logprobs")

  def session(self, capacity: int | None = None) -> Session:
    raise ValueError(f"{self.name} reads each text anew, so there is nothing for a session to keep; use generate()")

  def _read(self, prompt: Any, settings: Settings, room: int) -> tuple[Settings, tuple, tuple, str | None]:
    _check(prompt, settings)
    source = self._source(prompt, settings)
    if len(source) > self.context:
      raise ValueError(
        f"the text has {len(source)} tokens, {self.name} reads at most {self.context}; shorten it, or translate it "
        "sentence by sentence"
      )
    return self._with_defaults(settings), (self.start_id,), source, None

  def _source(self, prompt: Any, settings: Settings) -> tuple[int, ...]:
    """The ids that the encoder reads, a token for the language first where the model wants one."""
    if not isinstance(prompt, str):
      if settings.src is not None:
        raise ValueError("src names the language of a text; token ids must begin with its token themselves")
      return self.encode(prompt, settings.add_bos)
    if not self._has_tokens(prompt):
      raise ValueError("the text is empty; there is nothing to read")
    return (*self._language(settings), *self.encode(prompt, settings.add_bos))

  def _has_tokens(self, text: str) -> bool:
    return bool(self._text().encode(text, add_bos=False, add_eos=False))

  def _language(self, settings: Settings) -> tuple[int, ...]:
    """What comes before a text."""
    codes, marks = self.languages
    if codes:
      if settings.src is None:
        raise ValueError(f"{self.name} reads {len(codes)} languages; name one with src={next(iter(codes))!r}, say")
      return (self.languages.code("src", settings.src),)
    if settings.src is not None:
      raise ValueError(f"{self.name} has no tokens for languages, so src says nothing to it; leave it out")
    return (self.languages.mark("tgt", settings.tgt),) if marks and settings.tgt is not None else ()

  def _with_defaults(self, settings: Settings) -> Settings:
    """What the checkpoint asks of every text, where settings say nothing of it."""
    never = [tuple(ids) for ids in self._asked("bad_words_ids") or ()]
    first = self._asked("forced_bos_token_id")
    if settings.tgt is not None and not self.languages.marks:
      if not self.languages.codes:
        raise ValueError(f"{self.name} has no tokens for languages, so tgt says nothing to it; leave it out")
      first = self.languages.code("tgt", settings.tgt)
    if settings.forced_bos is not None:
      first = settings.forced_bos
    if first is None and self.languages.codes:
      codes = self.languages.codes
      raise ValueError(f"{self.name} writes {len(codes)} languages; name one with tgt={next(iter(codes))!r}, say")
    return dataclasses.replace(settings, forced_bos=first, bad_words=[*settings.bad_words, *never])

  def _asked(self, name: str) -> Any:
    """A field of generation_config.json, or of config.json, where older checkpoints have it."""
    found = self.generation.get(name)
    return self.config.get(name) if found is None else found


def _check(prompt: Any, settings: Settings) -> None:
  """ValueError for what is not offered with an encoder."""
  cases = (
    (isinstance(prompt, Infill), "an Infill prompt is for models that continue a text; give the text to read"),
    (settings.speculate != "off", "speculate is not offered with an encoder; set it to 'off'"),
    (settings.guidance_scale != 1, "guidance_scale is not offered with an encoder; set it to 1"),
    (settings.prompt_logprobs, "prompt_logprobs are of tokens that a decoder reads; an encoder has none, leave it off"),
    (settings.truncate is not None, "truncate is not offered with an encoder; shorten the text"),
  )
  for wrong, message in cases:
    if wrong:
      raise ValueError(message)
