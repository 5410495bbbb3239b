"""Writes verse pairs, Spanish and English, to train a translator on: train.tsv, valid.tsv and test.tsv.

  apt-get download sword-text-web sword-text-sparv        # Debian's packages, 6.7 MB, or from packages.debian.org
  for package in sword-text-*.deb; do dpkg -x $package sword; done
  pip install 'decoder[train]'
  python scripts/bible.py --sword sword/usr/share/sword --out bible

Both texts are in the public domain: the World English Bible, and Reina-Valera of 1909. What is held out is whole books,
since a neighbouring verse, or the same story in another gospel, says half of a verse: Ruth, Jonah, John and James for
the test; Esther, Haggai and Philippians to watch the training by. Takes two minutes.
"""

import collections
from pathlib import Path

import entry
from absl import flags

FLAGS = flags.FLAGS
flags.DEFINE_string("sword", "/usr/share/sword", "Directory of SWORD, with mods.d and both modules in it.")
flags.DEFINE_string("out", None, "Directory to write the three files to.")


def main() -> None:
  if FLAGS.out is None:
    raise ValueError("--out is missing; see --help")
  from decoder.checkpoint.atomic import write_file
  from decoder.training import verses

  found = verses.verses(Path(FLAGS.sword))
  kept = verses.paired(found)
  lines = collections.defaultdict(list)
  for verse in kept:
    lines[verses.set_of(verse)].append(f"{verse.spanish}\t{verse.english}\n")
  out = Path(FLAGS.out)
  out.mkdir(parents=True, exist_ok=True)
  for name in verses.SETS:
    write_file(out / f"{name}.tsv", "".join(lines[name]).encode())
  sizes = ", ".join(f"{name} {len(lines[name])}" for name in verses.SETS)
  print(
    f"{out}: {sizes} pairs; left out {len(found) - len(kept)} of {len(found)}, numbered differently in the two texts"
  )


if __name__ == "__main__":
  entry.run(main)
