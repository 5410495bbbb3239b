"""Random JSON schemas whose every text is bounded: strings, arrays and objects have limits, numbers have few digits."""

import numpy as np

_NAMES = ["name", "age", "ключ", "a b", 'q"uote', "back\\slash", "x/y", "🙂", "", "тег", "id", "items", "_", "0"]
_PATTERNS = ["^[a-c]{1,4}$", "^(ab|cd){2}$", "^[0-9]{3}-[A-Z]$", "^é?漢{1,2}$"]
_CONSTANTS = [None, True, False, 0, -3, 2.5, "", "yes", 'a"b\\c\n', "漢字🙂", [1, "x"], {"k": [None]}]


def random_schema(rng: np.random.Generator, depth: int = 3) -> dict:
  """A schema of at most `depth` levels; now and then with definitions that are referred to."""
  kinds = [*_LEAVES, *(_INNER * 2 if depth > 0 else [])]
  schema = kinds[rng.integers(len(kinds))](rng, depth)
  if depth == 3 and rng.random() < 0.3:
    schema = {
      "$defs": {"part": random_schema(rng, 1)},
      "type": "object",
      "properties": {"first": {"$ref": "#/$defs/part"}, "rest": schema},
      "required": ["first"],
      "additionalProperties": False,
    }
  return schema


def _limits(rng: np.random.Generator, low: str, high: str, most: int) -> dict:
  top = int(rng.integers(0, most + 1))
  return {low: int(rng.integers(0, top + 1)), high: top}


def _string(rng, depth):
  return {"type": "string", **_limits(rng, "minLength", "maxLength", 6)}


def _pattern(rng, depth):
  return {"type": "string", "pattern": _PATTERNS[rng.integers(len(_PATTERNS))]}


def _formatted(rng, depth):
  return {"type": "string", "format": ["date", "uuid", "ipv4"][rng.integers(3)]}


def _integer(rng, depth):
  low = int(rng.integers(-1000, 1000))
  key = ["maximum", "exclusiveMaximum"][rng.integers(2)]
  return {"type": "integer", "minimum": low, key: low + int(rng.integers(1, 2000))}


def _number(rng, depth):
  return {"enum": [round(float(x), 3) for x in rng.normal(size=rng.integers(1, 4)) * 100]}


def _constant(rng, depth):
  count = int(rng.integers(1, 4))
  return {"enum": [_CONSTANTS[i] for i in rng.permutation(len(_CONSTANTS))[:count]]}


def _plain(rng, depth):
  return {"type": ["boolean", "null"][rng.integers(2)]}


def _several(rng, depth):
  return {"type": ["null", "boolean", "string"], "maxLength": 3}


def _array(rng, depth):
  limits = _limits(rng, "minItems", "maxItems", 3)
  return {"type": "array", "items": random_schema(rng, depth - 1), **limits}


def _tuple(rng, depth):
  parts = [random_schema(rng, depth - 1) for _ in range(rng.integers(1, 3))]
  return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _object(rng, depth):
  names = [_NAMES[i] for i in rng.permutation(len(_NAMES))[: rng.integers(0, 4)]]
  required = [name for name in names if rng.random() < 0.6]
  properties = {name: random_schema(rng, depth - 1) for name in names}
  return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _any_of(rng, depth):
  return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.integers(1, 4))]}


_LEAVES = [_string, _pattern, _formatted, _integer, _number, _constant, _plain, _several]
_INNER = [_array, _tuple, _object, _any_of]
