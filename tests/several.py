"""What each process of `processes_test.py` runs: several texts of a model over a mesh, printed as a JSON object.

Usage: several.py TASK MODEL MESH COORDINATOR PROCESS_ID NUM_PROCESSES; a coordinator '-' for a process that is alone.
"""

import json
import sys
import time

import decoder
from decoder import processes


def texts(lm):
  """Token ids by what was asked: greedy, by a seed, by chance, where time is up, a text that must fit, beams, and with
  guesses."""
  two, twelve = ["ab", "c"], {"max_new_tokens": 12, "ignore_eos": True}
  return {
    "greedy": [one.token_ids for one in lm.generate(two, **twelve)],
    "by seed": [one.token_ids for one in lm.generate(two, temperature=1.0, seed=5, **twelve)],
    "by chance": [one.token_ids for one in lm.generate(two, temperature=1.0, **twelve)],
    "late": [one.token_ids for one in lm.generate(two, max_new_tokens=100, ignore_eos=True, max_time=0.02)],
    "beams": [one.token_ids for one in lm.generate(two, num_beams=3, **twelve)],
    "guessed": [one.token_ids for one in lm.generate(["abab" * 3, "c"], speculate="lookup", **twelve)],
    "fitting": [one.token_ids for one in lm.generate(two, regex="(yes|no){2}")],
  }


def main(task, model, mesh, coordinator, process_id, num_processes):
  given = () if coordinator == "-" else (coordinator, int(process_id), int(num_processes))
  with processes.join(*given) as lead:
    lead.same(processes.facts)
    lm = decoder.load(model, mesh=mesh)
    if task == "texts":
      print(json.dumps(texts(lm)), flush=True)
    while task == "forever":
      lm.generate("ab", max_new_tokens=100, ignore_eos=True)
      print("going", flush=True)
    if task == "idle":
      print("going", flush=True)
      lead.agree(time.sleep(600) if lead.first else None)


if __name__ == "__main__":
  main(*sys.argv[1:])
