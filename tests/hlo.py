"""Reads optimised HLO text: what a compiled program writes to main memory, and what its devices send each other."""

import math
import re
from typing import NamedTuple

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2}  # others: 4
# What writes nothing of its own: names for buffers that are there, and the starting of prefetches into fast memory.
NAMING = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "copy-start", "slice-start"}
NAMING |= {"async-start", "async-update"}  # what they bring is seen at their end
IN_PLACE = {"scatter", "dynamic-update-slice"}
COLLECTIVE = r"(all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all|collective-broadcast)(-start)?"
_INSTRUCTION = r"\s+(?:ROOT )?%?\S+ = (.*?) ([\w\-]+)\("


class Sent(NamedTuple):
  """A collective: its operation, what of the program it comes from, and bytes and elements of the largest array that it
  gives a device."""

  operation: str
  source: str
  bytes: float
  elements: int


def written(text: str, least: int) -> list[str]:
  """Instructions that write an array of `least` bytes or more to main memory, but for scatters and slices that update a
  buffer in place (the compiler copies beforehand what it may not overwrite, which is then listed).

  Other memory than the main one is named in a layout: S(1), S(3). What happens within a fusion is never written down.
  """
  lines = text.splitlines()
  fused = {name for line in lines if " fusion(" in line for name in re.findall(r"calls=%?([\w.\-]+)", line)}
  scatters = {name for name, body in bodies(lines).items() if any(re.search(r"ROOT .* scatter\(", x) for x in body)}
  found = []
  for name, body in bodies(lines).items():
    for line in [] if name in fused else body:
      shape, operation = re.match(_INSTRUCTION, line).groups()
      in_place = operation in IN_PLACE or scatters & set(re.findall(r"calls=%?([\w.\-]+)", line))
      main = max((size for size, _, layout in arrays(shape) if "S(" not in layout), default=0)
      if operation not in NAMING and not in_place and main >= least:
        found.append(line.strip())
  return found


def collectives(text: str) -> list[Sent]:
  """All of a program, each once, wherever it stands."""
  found = []
  for body in bodies(text.splitlines()).values():
    for line in body:
      shape, operation = re.match(_INSTRUCTION, line).groups()
      if which := re.fullmatch(COLLECTIVE, operation):
        size, elements, _ = max(arrays(shape))
        source = re.search(r'op_name="([^"]*)"', line)
        found.append(Sent(which[1], source[1] if source else "", size, elements))
  return found


def bodies(lines: list[str]) -> dict[str, list[str]]:
  """The instructions of each computation, by its name."""
  found, current = {}, []
  for line in lines:
    if opening := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
      current = found.setdefault(opening[1], [])
    elif re.match(r"\s+(?:ROOT )?%?\S+ = ", line):
      current.append(line)
  return found


def arrays(shape: str) -> list[tuple[float, int, str]]:
  """(bytes, elements, layout) of the arrays of a shape."""
  found = []
  for kind, sizes, layout in re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", shape):
    elements = math.prod(map(int, filter(None, sizes.split(","))))
    found.append((BYTES.get(kind, 4) * elements, elements, layout))
  return found
