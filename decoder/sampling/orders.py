"""Transforms by name, the orders they come in, and the chain that settings of such an order stand for.

Any order has two chains. The short one has what plain requests use and compiles fast; the full one has every
transform of the order, those in a row that are rarely used skipped together, so that whatever its requests set, a
server compiles no other. What both can do they do alike, up to the rounding of two compilations.
"""

import difflib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from decoder.sampling import masks, penalties, repeats, rules, temperature, truncation
from decoder.sampling.mirostat import mirostat
from decoder.sampling.transforms import Added, Filter, LogitTransform, Skipped, skipped_together


class Link(NamedTuple):
  """make: what builds the transform. settings: those that are its arguments, in order; the first turns it on."""

  make: Callable[..., LogitTransform]
  settings: tuple[str, ...]


def _fixed_temperature(value: float, spread: float) -> LogitTransform:
  """The temperature where no dynamic one takes its place."""
  return temperature.temperature(value) if spread == 0 else temperature.replaced_temperature()


def _dynamic_temperature(spread: float, exponent: float, value: float) -> LogitTransform:
  return temperature.dynamic_temperature(value, spread, exponent)


def _length_decay(setting: tuple[int, float] | None) -> LogitTransform:
  return masks.length_decay(*(setting or ()))


LINKS = {
  "allowed_tokens": Link(masks.allowed_tokens, ("allowed_tokens",)),
  "logit_bias": Link(masks.logit_bias, ("logit_bias",)),
  "sequence_bias": Link(masks.sequence_bias, ("sequence_bias",)),
  "bad_words": Link(masks.bad_words, ("bad_words",)),
  "bad_words_in_output": Link(rules.bad_words_in_output, ("bad_words",)),
  "suppress": Link(masks.suppress, ("suppress_tokens",)),
  "begin_suppress": Link(masks.begin_suppress, ("begin_suppress_tokens",)),
  "no_repeat_ngram": Link(repeats.no_repeat_ngram, ("no_repeat_ngram_size",)),
  "min_new_tokens": Link(masks.min_new_tokens, ("min_new_tokens",)),
  "repetition": Link(penalties.repetition, ("repetition_penalty", "repetition_scope")),
  "presence": Link(penalties.presence, ("presence_penalty", "penalty_scope")),
  "frequency": Link(penalties.frequency, ("frequency_penalty", "penalty_scope")),
  "dry": Link(
    repeats.dry, ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_scope", "dry_breakers")
  ),
  "length_decay": Link(_length_decay, ("length_decay",)),
  "forced_bos": Link(masks.forced_bos, ("forced_bos",)),
  "forced_eos": Link(masks.forced_eos, ("forced_eos",)),
  "temperature": Link(_fixed_temperature, ("temperature", "dynatemp_range")),
  "temperature_clamped": Link(rules.temperature_clamped, ("temperature",)),
  "dynamic_temperature": Link(_dynamic_temperature, ("dynatemp_range", "dynatemp_exponent", "temperature")),
  "top_k": Link(truncation.top_k, ("top_k",)),
  "top_k_with_ties": Link(rules.top_k_with_ties, ("top_k",)),
  "top_p": Link(truncation.top_p, ("top_p",)),
  "top_p_or_one": Link(rules.top_p_or_one, ("top_p",)),
  "top_p_from_below": Link(rules.top_p_from_below, ("top_p",)),
  "top_p_with_ties": Link(rules.top_p_with_ties, ("top_p",)),
  "min_p": Link(truncation.min_p, ("min_p",)),
  "typical": Link(truncation.typical, ("typical_p",)),
  "typical_with_ties": Link(rules.typical_with_ties, ("typical_p",)),
  "typical_beyond": Link(rules.typical_beyond, ("typical_p",)),
  "epsilon": Link(truncation.epsilon, ("epsilon_cutoff",)),
  "eta": Link(truncation.eta, ("eta_cutoff",)),
  "top_n_sigma": Link(truncation.top_n_sigma, ("top_n_sigma",)),
  "xtc": Link(truncation.xtc, ("xtc_probability", "xtc_threshold")),
  "xtc_above": Link(rules.xtc_above, ("xtc_probability", "xtc_threshold")),
  "mirostat": Link(mirostat, ("mirostat_tau", "mirostat_eta")),
}  # fmt: skip

ORDER = (
  "allowed_tokens", "logit_bias", "sequence_bias", "bad_words", "suppress", "begin_suppress", "min_new_tokens",
  "no_repeat_ngram", "repetition", "presence", "frequency", "dry", "length_decay", "forced_bos", "forced_eos",
  "dynamic_temperature", "temperature", "top_k", "top_p", "min_p", "typical", "epsilon", "eta", "top_n_sigma", "xtc",
  "mirostat",
)  # fmt: skip

# Those that change how probable the possible tokens are; the others forbid or force.
SHAPING = (
  "logit_bias", "sequence_bias", "repetition", "presence", "frequency", "dry", "length_decay", "dynamic_temperature",
  "temperature", "temperature_clamped",
)  # fmt: skip
_PLAIN = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")


def build(order: Sequence[str], settings: Mapping[str, Any], full: bool) -> list[LogitTransform]:
  """The links of this order with these settings' numbers: all of them, or those of plain requests only."""
  links: list[LogitTransform] = []
  chosen = [name for name in order if full or _is_plain(name)]
  for alone, run in itertools.groupby(
    chosen, lambda name: _is_plain(name) or isinstance(made(name, settings).update, Filter)
  ):
    transforms = [made(name, settings) for name in run]
    links += transforms if alone else [skipped_together(*transforms)]
  return links


def made(name: str, settings: Mapping[str, Any]) -> LogitTransform:
  """The transform of this name, with its settings' numbers. ValueError for numbers that make no sense."""
  return LINKS[name].make(*(settings[setting] for setting in LINKS[name].settings))


def used(order: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
  """Names of the transforms that these settings turn on."""
  return [name for name in order if _is_on(made(name, settings))]


def needs_full(order: Sequence[str], settings: Mapping[str, Any]) -> bool:
  """Whether the short chain cannot do what is asked."""
  return not all(map(_is_plain, used(order, settings)))


def check_order(order: Sequence[str], what: str, settings: Mapping[str, Any]) -> None:
  """ValueError for an order of unknown or repeated names, or one that leaves out what a setting turns on."""
  unknown = [name for name in order if name not in LINKS]
  if unknown:
    near = difflib.get_close_matches(str(unknown[0]), LINKS, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(LINKS)}"
    raise ValueError(f"{what} has an unknown transform {unknown[0]!r}; {hint}")
  governing = [LINKS[name].settings[0] for name in order]
  for setting in governing:
    if governing.count(setting) > 1:
      raise ValueError(f"{what} obeys {setting} twice; leave one of the transforms out")
  missing = [name for name in ORDER if LINKS[name].settings[0] not in governing]
  for name in used(missing, settings):
    raise ValueError(f"{what} has no transform for {LINKS[name].settings[0]}, which is set; add {name!r} or unset it")


def _is_plain(name: str) -> bool:
  return LINKS[name].settings[0] in _PLAIN


def _is_on(link: LogitTransform) -> bool:
  return not isinstance(link.update, Skipped | Added | Filter) or bool(link.update.active(link.init()))
