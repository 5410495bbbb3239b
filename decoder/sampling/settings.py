"""What may be asked of the draw: the part of a request's settings that becomes a chain of transforms."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

from decoder.sampling.orders import LINKS, build, check_order, needs_full, used
from decoder.sampling.penalties import Scope
from decoder.sampling.presets import PRESETS
from decoder.sampling.transforms import LogitTransform, chain

_A_WORD = (0,)  # stands for one that is given as text, where only its being there matters
_FILTERS = ("top_k", "top_p", "min_p", "typical", "epsilon", "eta", "top_n_sigma", "xtc")


@dataclasses.dataclass(frozen=True)
class SamplingSettings:
  """How tokens are drawn. Every number and list is data to the compiled step; the order of the transforms is not.

  temperature: 0 takes the most probable token, after all masks, biases and penalties; dynatemp_range > 0 moves it with
  the law's entropy, to the power dynatemp_exponent. Filters, each on what the one before left: top_k (None, 0, −1:
  off), top_p and typical_p (None, 1: off), min_p, epsilon_cutoff, eta_cutoff, top_n_sigma (None, 0: off),
  xtc_probability (0: off) with xtc_threshold, mirostat_tau (bits; None: off) with mirostat_eta, instead of all others.
  Penalties: repetition_penalty on tokens of the prompt or output, once each (1: off); presence_penalty and
  frequency_penalty on those of the output (0: off); repetition_scope and penalty_scope change where they look: 'all',
  'output' or a number of last tokens. dry_multiplier (0: off) with dry_base, dry_allowed_length, dry_scope and
  dry_breakers (ids, or texts of one token); no_repeat_ngram_size (None, 0: off).
  By id: logit_bias {id: number} and sequence_bias {(id, …): number}, or pairs; bad_words [[id, …], …], or texts, as the
  tokenizer writes them with and without a space before; allowed_tokens (None: all); suppress_tokens;
  begin_suppress_tokens, for the first token only; min_new_tokens before any end id; forced_bos, the first token;
  forced_eos, the last before the limit; length_decay (tokens, factor), which makes ends likelier.
  order: names of `decoder.sampling.orders.LINKS`, in another order than ours; preset: 'hf', 'vllm', 'llamacpp' or
  'mlx', the order and the rules of that library. One compilation each.
  transforms: LogitTransforms of your own, applied first, on the model's float32 logits; make them once, since programs
  are compiled for each new function.
  """

  temperature: float = 0.0
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  typical_p: float | None = None
  epsilon_cutoff: float | None = None
  eta_cutoff: float | None = None
  top_n_sigma: float | None = None
  xtc_probability: float = 0.0
  xtc_threshold: float = 0.1
  mirostat_tau: float | None = None
  mirostat_eta: float = 0.1
  dynatemp_range: float = 0.0
  dynatemp_exponent: float = 1.0
  repetition_penalty: float = 1.0
  repetition_scope: Scope | None = None
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  penalty_scope: Scope | None = None
  dry_multiplier: float = 0.0
  dry_base: float = 1.75
  dry_allowed_length: int = 2
  dry_scope: Scope = "all"
  dry_breakers: Sequence[int | str] = ()
  no_repeat_ngram_size: int | None = None
  logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
  sequence_bias: Mapping[Sequence[int], float] = dataclasses.field(default_factory=dict)
  bad_words: Sequence[Sequence[int] | str] = ()
  allowed_tokens: Sequence[int] | None = None
  suppress_tokens: Sequence[int] = ()
  begin_suppress_tokens: Sequence[int] = ()
  min_new_tokens: int = 0
  forced_bos: int | None = None
  forced_eos: int | None = None
  length_decay: tuple[int, float] | None = None
  order: Sequence[str] | None = None
  preset: str | None = None
  transforms: tuple[LogitTransform, ...] = ()

  may_hold_texts: ClassVar[tuple[str, ...]] = ("bad_words", "dry_breakers")

  def __post_init__(self) -> None:
    self._freeze()
    if not isinstance(self.preset, str | None) or self.preset not in PRESETS:
      known = ", ".join(repr(name) for name in PRESETS if name)
      raise ValueError(f"preset must be one of {known}, or None for our own order, got {self.preset!r}")
    if self.order is not None and self.preset is not None:
      raise ValueError(
        f"order and preset both say in which order transforms come; drop one, got preset={self.preset!r}"
      )
    check_order(self.names, f"preset {self.preset!r}" if self.order is None else "order", self.numbers())
    self._contradictions()

  @property
  def names(self) -> tuple[str, ...]:
    """The order of the full chain."""
    return PRESETS[self.preset].order if self.order is None else tuple(self.order)

  @property
  def needs_full(self) -> bool:
    """Whether these settings turn on what the short chain lacks."""
    return needs_full(self.names, self.numbers())

  @property
  def structure(self) -> tuple:
    """What chains must have in common to share programs, besides being short or full."""
    return self.names, tuple((link.update, link.observe) for link in self.transforms)

  def numbers(self) -> dict[str, Any]:
    """The transforms' settings by name, with the preset's scopes where none was named."""
    preset = PRESETS[self.preset]
    known = {setting: getattr(self, setting) for link in LINKS.values() for setting in link.settings}
    for scope in ("repetition_scope", "penalty_scope"):
      known[scope] = getattr(preset, scope) if known[scope] is None else known[scope]
    known["bad_words"] = tuple(_A_WORD if isinstance(word, str) else word for word in self.bad_words)
    known["dry_breakers"] = tuple(one for one in self.dry_breakers if not isinstance(one, str))
    return known

  @property
  def has_texts(self) -> bool:
    """Whether something is given as text where a model has ids; `encoded` makes them."""
    return any(isinstance(one, str) for name in self.may_hold_texts for one in getattr(self, name) or ())

  def encoded(self, spell: Callable[[str, str], Sequence[tuple[int, ...]]]) -> Self:
    """With ids in place of texts. spell: (name of a setting, text) -> the ids of its spellings."""
    words: list[tuple[int, ...]] = []
    for word in self.bad_words:
      words += spell("bad_words", word) if isinstance(word, str) else [word]
    breakers: list[int] = []
    for one in self.dry_breakers:
      ways = spell("dry_breakers", one) if isinstance(one, str) else [(one,)]
      single = [ids[0] for ids in ways if len(ids) == 1]
      if not single:
        raise ValueError(f"dry_breakers must be single tokens, got {one!r}, which has {len(ways[0])}; give its parts")
      breakers += single
    return dataclasses.replace(self, bad_words=words, dry_breakers=breakers)

  def chain(self, full: bool | None = None) -> LogitTransform:
    """The chain of transforms these settings stand for: the short or the full one (None: as they need). Where both can
    do what is asked they draw the same tokens: their logits differ by the rounding of two compilations at most."""
    if self.has_texts:
      listed = " or ".join(self.may_hold_texts)
      raise ValueError(f"{listed} hold texts, which a model's tokenizer writes as ids; see `encoded`")
    full = self.needs_full if full is None else full
    return chain(*self.transforms, *build(self.names, self.numbers(), full))

  def describe_chain(self) -> list[dict[str, Any]]:
    """The transforms that are on, in their order, each with its numbers; plain data."""
    numbers, own = self.numbers(), [{"name": "transform"} for _ in self.transforms]
    on = used(self.names, numbers)
    numbers |= {"bad_words": self.bad_words, "dry_breakers": self.dry_breakers}
    return own + [{"name": name, **{s: plain(numbers[s]) for s in LINKS[name].settings}} for name in on]

  def check_vocabulary(self, size: int) -> None:
    """ValueError for ids that a model with so many tokens cannot draw."""
    listed = {
      **{name: getattr(self, name) or () for name in ("allowed_tokens", "suppress_tokens", "begin_suppress_tokens")},
      "dry_breakers": self.numbers()["dry_breakers"],
      "logit_bias": self.logit_bias,
      "bad_words": [token for word in self.bad_words if not isinstance(word, str) for token in word],
      "sequence_bias": [token for sequence in self.sequence_bias for token in sequence],
      **{name: [t for t in (getattr(self, name),) if t is not None] for name in ("forced_bos", "forced_eos")},
    }
    for name, ids in listed.items():
      beyond = [token for token in ids if token >= size]
      if beyond:
        raise ValueError(f"{name} has token {beyond[0]}, but the model's tokens are 0 … {size - 1}")

  def _freeze(self) -> None:
    """Copies of what the caller could still change; ValueError for what is no list or mapping."""
    for name in ("dry_breakers", "allowed_tokens", "suppress_tokens", "begin_suppress_tokens", "order", "bad_words"):
      value = getattr(self, name)
      if value is not None or name not in ("allowed_tokens", "order"):
        object.__setattr__(self, name, tuple(_listed(name, value)))
    if self.order is not None and not all(isinstance(name, str) for name in self.order):
      raise ValueError(f"order must be a list of names of transforms, got {self.order!r}")
    words = tuple(word if isinstance(word, str) else tuple(_listed("bad_words", word)) for word in self.bad_words)
    object.__setattr__(self, "bad_words", words)
    for name in ("bad_words", "dry_breakers"):
      if "" in getattr(self, name):
        raise ValueError(f"{name} must hold texts of at least one character, or ids, got ''")
    object.__setattr__(self, "logit_bias", dict(_pairs("logit_bias", self.logit_bias)))
    pairs = _pairs("sequence_bias", self.sequence_bias)
    object.__setattr__(self, "sequence_bias", {tuple(_listed("sequence_bias", one)): number for one, number in pairs})
    decay = self.length_decay
    if decay is not None and (not isinstance(decay, list | tuple) or len(decay) != 2):
      raise ValueError(f"length_decay must be (tokens, factor) or None, got {decay!r}")
    links = self.transforms
    if not isinstance(links, list | tuple) or not all(isinstance(link, LogitTransform) for link in links):
      raise ValueError(f"transforms must be a list of decoder.sampling.LogitTransform, got {links!r}")
    object.__setattr__(self, "transforms", tuple(links))

  def _contradictions(self) -> None:
    on = used(self.names, self.numbers())
    others = [name for name in on if name.startswith(_FILTERS)]
    if "mirostat" in on and others:
      named = ", ".join(LINKS[name].settings[0] for name in others)
      raise ValueError(f"mirostat_tau chooses how many tokens may be drawn, and so would {named}; unset one of them")
    if self.temperature == 0 and (self.dynatemp_range or self.mirostat_tau):
      name = "dynatemp_range" if self.dynatemp_range else "mirostat_tau"
      raise ValueError(f"{name} steers a random draw, but temperature=0 draws none; set temperature above 0")
    if self.temperature == 0 and self.preset == "mlx" and self.xtc_probability:
      raise ValueError("xtc_probability has no effect at temperature 0 in MLX; set temperature above 0")
    allowed = set(self.allowed_tokens or ())
    banned = {
      *self.suppress_tokens,
      *(word[0] for word in self.bad_words if len(word) == 1 and not isinstance(word, str)),
    }
    if allowed and allowed <= banned:
      raise ValueError("allowed_tokens leaves no token that suppress_tokens and bad_words do not forbid")


def plain(value: Any) -> Any:
  """A setting as plain data, for JSON."""
  if isinstance(value, Mapping):
    named = all(isinstance(key, str) for key in value)  # JSON has no others
    return dict(value) if named else [[plain(key), number] for key, number in value.items()]
  return [plain(one) for one in value] if isinstance(value, tuple) else value


def _pairs(name: str, value: Any) -> list[tuple[Any, Any]]:
  pairs = list(value.items()) if isinstance(value, Mapping) else value
  if not isinstance(pairs, list | tuple) or not all(isinstance(one, list | tuple) and len(one) == 2 for one in pairs):
    raise ValueError(f"{name} must be a mapping to numbers, or a list of pairs, got {value!r}")
  return list(pairs)


def _listed(name: str, value: Any) -> Sequence:
  if not isinstance(value, list | tuple | set | frozenset | range):
    raise ValueError(f"{name} must be a list, got {value!r}")
  return sorted(value) if isinstance(value, set | frozenset) else value
