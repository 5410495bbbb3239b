"""What a caller may ask of a generation."""

import dataclasses
import difflib
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from decoder.beam_settings import BeamSettings
from decoder.generation_config import read_generation_config
from decoder.sampling import plain
from decoder.strategies.speculative import SIZES
from decoder.text.constraints import Spec, read_spec

MOST_ALTERNATIVES = 1000  # that can be asked for with a log-prob
MOST_NODES = 15  # of a tree of guesses: a step over 16 tokens is the largest that costs little more than one


@dataclasses.dataclass(frozen=True)
class Settings(BeamSettings):
  """All settings of a request; every number is data to the compiled step, so changing one compiles nothing.

  max_new_tokens: most tokens to write; 0 reads the prompt only, None goes on until the context is full.
  How tokens are drawn, from temperature to transforms: see `decoder.sampling.SamplingSettings`; from num_beams to
  continuations: see `decoder.beam_settings.BeamSettings`.
  seed: of every draw, 0 … 2³² − 1; None takes a fresh one, which the result reports. n: samples of one prompt, each
  with its own draws; of a search with beams, its n best hypotheses.
  guidance_scale: above 1 leads away from what the model would write after negative_prompt (of any kind; None is
  the prompt's last token); 1 is off. It takes two rows of cache a sample.
  json_schema (a mapping or its JSON text), regex, grammar (Lark or GBNF), choice (a list of texts): what the text must
  fit, at most one of them; it may end where it fits, and does where nothing can follow.
  stop: strings that end the text; stop_token_ids: tokens that do, besides the model's own end tokens. Both are left out
  of the text, or kept with include_stop; end tokens never are. stop_at_dedent: ends it before a line that begins left
  of the prompt's last line (of the first line written, if that one is empty). ignore_eos: go on past the model's end
  tokens. max_time: seconds from the call after which the text ends as it is, compilation not counted; None: no limit.
  It is looked at between device calls, which get shorter towards it, so it is passed by about one step or prompt chunk.
  detokenize: False leaves the text empty and the tokens as they are; stop strings cannot be found then.
  add_bos: None does as the model wants. truncate: 'left' or 'middle' drops tokens of a prompt that does not fit;
  None refuses it. capacity: tokens the cache has room for; None chooses it.
  speculate: guesses ahead and judges all guesses in one pass, for fewer steps, also where the text must fit something;
  not with beams or guidance. 'lookup' guesses what followed when the same tokens stood there before: the same text;
  'head' has a head guess that was trained for the model, 'head:NAME' another one, 'draft:NAME' a smaller model: the
  same law, and at temperature 0 the same text; 'off'. draft_tokens: most guesses a step, 1, 3 or 7. draft_tree: with a
  head or a draft model, how many guesses for each of the next tokens, as (3, 2, 2): none is made by chance, so the text
  is the same; () guesses one for each.
  src, tgt: the languages of the text and of its translation, by their codes in the model's vocabulary; only for models
  that have such.
  logprobs: number of alternatives to report with each token's log-prob and rank, 0 for none but its own; None reports
  nothing. logprobs_mode: 'raw', by the model's logits, or 'processed', by what was drawn from. prompt_logprobs: also
  for the prompt's tokens, always raw. best_of: draw so many samples and give the n with the highest mean raw log-prob
  of what was drawn, end token included, best first. explain: tell for each token what each transform did.

  Raises ValueError for a value that makes no sense, at construction.
  """

  max_new_tokens: int | None = 256
  seed: int | None = None
  n: int = 1
  guidance_scale: float = 1.0
  negative_prompt: Any = None
  json_schema: Mapping[str, Any] | str | None = None
  regex: str | None = None
  grammar: str | None = None
  choice: Sequence[str] | None = None
  stop: tuple[str, ...] = ()
  stop_token_ids: tuple[int, ...] = ()
  include_stop: bool = False
  stop_at_dedent: bool = False
  ignore_eos: bool = False
  max_time: float | None = None
  detokenize: bool = True
  add_bos: bool | None = None
  truncate: str | None = None
  capacity: int | None = None
  speculate: str = "off"
  draft_tokens: int = 7
  draft_tree: tuple[int, ...] = ()
  src: str | None = None
  tgt: str | None = None
  logprobs: int | None = None
  logprobs_mode: str = "raw"
  prompt_logprobs: bool = False
  best_of: int | None = None
  explain: bool = False

  def __post_init__(self) -> None:
    _whole("max_new_tokens", self.max_new_tokens, 0, None)
    _whole("seed", self.seed, 0, 2**32 - 1)
    _whole("n", self.n, 1, 1024)  # rows of one batch; more is a slip, and would not end
    _whole("capacity", self.capacity, 1, None)
    super().__post_init__()
    if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
      raise ValueError(f"min_new_tokens {self.min_new_tokens} > max_new_tokens {self.max_new_tokens}; lower one")
    _whole("logprobs", self.logprobs, 0, MOST_ALTERNATIVES)
    _whole("best_of", self.best_of, self.n, 1024)
    self._check_beams(self.n)
    if self.samples > 1 and self.temperature == 0 and not self.searches:
      name = "n" if self.best_of is None else "best_of"
      raise ValueError(f"{name}={self.samples} samples at temperature 0 would all be the same; set temperature above 0")
    stop = (self.stop,) if isinstance(self.stop, str) else self.stop
    if not isinstance(stop, list | tuple) or not all(isinstance(s, str) and s for s in stop):
      raise ValueError(f"stop must be a list of non-empty strings, got {self.stop!r}")
    object.__setattr__(self, "stop", tuple(stop))
    object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
    for name in ("include_stop", "stop_at_dedent", "ignore_eos", "detokenize", "prompt_logprobs", "explain", "add_bos"):
      value = getattr(self, name)
      if not isinstance(value, bool) and not (value is None and name == "add_bos"):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    if (self.stop or self.stop_at_dedent) and not self.detokenize:
      asked = f"stop strings {self.stop!r} are" if self.stop else "stop_at_dedent is"
      raise ValueError(f"{asked} found in text; leave detokenize on, or give stop_token_ids")
    if self.max_time is not None and not (_is_number(self.max_time) and 0 < self.max_time < math.inf):
      raise ValueError(f"max_time must be a number of seconds above 0, or None, got {self.max_time!r}")
    if self.logprobs_mode not in ("raw", "processed"):
      raise ValueError(f"logprobs_mode must be 'raw' or 'processed', got {self.logprobs_mode!r}")
    for name in ("src", "tgt"):
      if not isinstance(getattr(self, name), str | None):
        raise ValueError(f"{name} must be the code of a language, or None, got {getattr(self, name)!r}")
    if self.truncate not in (None, "left", "middle"):
      raise ValueError(f"truncate must be 'left', 'middle' or None, got {self.truncate!r}")
    scale = self.guidance_scale
    if not isinstance(scale, numbers.Real) or not 0 <= scale <= 1e6:
      raise ValueError(f"guidance_scale must be a number from 0 to 10⁶ (1 is off), got {scale!r}")
    if self.negative_prompt is not None and scale == 1:
      raise ValueError("negative_prompt does nothing at guidance_scale 1; set guidance_scale, to 1.5 say")
    if self.prompt_logprobs and scale != 1:
      raise ValueError("prompt_logprobs are of the model without guidance; set guidance_scale to 1, or use score()")
    _drafter("speculate", self.speculate)
    if self.draft_tokens not in SIZES or isinstance(self.draft_tokens, bool):
      raise ValueError(f"draft_tokens must be 1, 3 or 7, one less than a block, got {self.draft_tokens!r}")
    self._check_tree()
    self.constraint()  # refuses one that is malformed
    if self.speculate != "off" and (self.searches or scale != 1):
      other = "beams" if self.searches else "guidance_scale"
      raise ValueError(f"speculate is not offered together with {other}; set speculate to 'off'")
    if self.searches:
      self._check_search()

  def _check_tree(self) -> None:
    tree = self.draft_tree
    if not isinstance(tree, list | tuple) or not all(type(width) is int and width >= 1 for width in tree):
      raise ValueError(f"draft_tree must be a list of numbers of guesses, from 1, as (3, 2, 2), got {tree!r}")
    object.__setattr__(self, "draft_tree", tuple(tree))
    if sum(tree) > MOST_NODES:
      raise ValueError(
        f"draft_tree {tuple(tree)} has {sum(tree)} guesses a step; more than {MOST_NODES} cost a step each"
      )
    if tree and self.speculate in ("off", "lookup"):
      raise ValueError(f"draft_tree is for a head or a draft model, and speculate is {self.speculate!r}")
    if tree and self.constraint() is not None:
      raise ValueError("draft_tree is not offered together with a schema, regex, grammar or choice; leave it out")

  def _check_search(self) -> None:
    """ValueError for what needs a text that is known while it is written."""
    unknown = "is looked for while a text is written, and beams write several; "
    cases = (
      (self.stop or self.stop_at_dedent, f"stop {unknown}use stop_token_ids"),
      (self.constraint() is not None, f"a schema, regex, grammar or choice {unknown}use continuations"),
      (self.guidance_scale != 1, "guidance_scale is not offered with num_beams; set it to 1"),
      (self.best_of is not None, "best_of draws samples, num_beams searches; use n with one of them"),
      (self.prompt_logprobs, "prompt_logprobs are not offered with num_beams; use score()"),
      (self.explain, "explain tells of draws, and a search draws none; ask for logprobs"),
    )
    for wrong, message in cases:
      if wrong:
        raise ValueError(message)

  def constraint(self) -> Spec | None:
    """What the text must fit, if anything."""
    return read_spec(self.json_schema, self.regex, self.grammar, self.choice)

  @property
  def structure(self) -> tuple:
    return (*super().structure, self.speculate != "off" and (self.speculate, self.draft_tokens, self.draft_tree))

  @classmethod
  def from_generation_config(cls, config: Mapping[str, Any]) -> "Settings":
    """What a checkpoint's generation_config.json asks for; the rest is as here. ValueError where that is unknown, not
    offered or contradicts itself, see `generation_config.read_generation_config`."""
    return gather_settings(None, read_generation_config(config))

  @property
  def samples(self) -> int:
    """How many are drawn of one prompt."""
    return self.n if self.best_of is None else self.best_of

  def describe(self) -> dict[str, Any]:
    """The settings as plain data, for JSON; `chain` lists the transforms that are on, as they come."""
    asked = {f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
    return {**asked, "transforms": len(self.transforms), "chain": self.describe_chain()}


def gather_settings(settings: Settings | None, changes: dict[str, Any]) -> Settings:
  """`settings` with keyword changes. An unknown keyword is a ValueError that names the nearest one."""
  known = [f.name for f in dataclasses.fields(Settings)]
  for name in changes:
    if name not in known:
      near = difflib.get_close_matches(name, known, 1)
      hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
      raise ValueError(f"unknown setting {name!r}; {hint}")
  if settings is not None and not isinstance(settings, Settings):
    raise ValueError(f"settings must be decoder.Settings, got {settings!r}; or give them by keyword, temperature=0.7")
  return dataclasses.replace(Settings() if settings is None else settings, **changes)


def _is_number(value: Any) -> bool:
  return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _ids(name: str, value: Any) -> tuple[int, ...]:
  """Token ids: a list of integers ≥ 0."""
  good = isinstance(value, list | tuple) and all(
    isinstance(i, numbers.Integral) and not isinstance(i, bool) and 0 <= i < 2**31 for i in value
  )
  if not good:
    raise ValueError(f"{name} must be a list of token ids, integers ≥ 0, got {value!r}")
  return tuple(int(i) for i in value)


def _drafter(name: str, value: Any) -> None:
  """Who guesses ahead: 'off', 'lookup', 'head', or KIND:NAME."""
  kind, _, named = value.partition(":") if isinstance(value, str) else ("", "", "")
  if value not in ("off", "lookup", "head") and (kind not in ("head", "draft") or not named):
    raise ValueError(f"{name} must be 'off', 'lookup', 'head', 'head:NAME' or 'draft:NAME', got {value!r}")


def _whole(name: str, value: Any, low: int, high: int | None) -> None:
  if value is None and name != "n":
    return
  whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
  if not whole or value < low or (high is not None and value > high):
    reach = f"{low} … {high}" if high is not None else f"≥ {low}"
    raise ValueError(f"{name} must be an integer {reach}{'' if name == 'n' else ' or None'}, got {value!r}")
