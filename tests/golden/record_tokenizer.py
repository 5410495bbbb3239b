"""Records what transformers makes of SmolLM2's tokenizer, as reference values for tests/text/parity_test.py.

Usage: python tests/golden/record_tokenizer.py --gguf q4_1.gguf --hf hf   (needs transformers, jinja2 and gguf; seconds)

`--hf` is the directory transformers writes from the GGUF file. Writes beside this file
  smollm2_tokenizer.json.xz  the tokenizer.* metadata of the GGUF file
  tokenizer_smollm2.json     for each text the ids of the directory as it is ("written"), the ids with the pre-tokenizer
                             that SmolLM2 was published with ("published"), decoded texts, rendered conversations
The two kinds of ids differ: transformers' conversion from GGUF drops the published rule that cuts digits apart first.
"""

import argparse
import json
import lzma
import random
from pathlib import Path

HERE = Path(__file__).parent

WORDS = [
  "Hello, world!",
  "The quick brown fox jumps over the lazy dog.",
  "naïve café déjà vu",
  "don't can't I'll we've she'd it's",
  "DON'T CAN'T I'LL",
  "antidisestablishmentarianism",
  "a" * 200,
  "Donaudampfschifffahrtsgesellschaftskapitän",
  "ﬁne ﬂow",
  "ß ẞ ſ",
  "Iñtërnâtiônàlizætiøn",
  "e\u0301 vs é",
  "A\u030a Å Å",
  "x",
  " ",
  "",
  ".",
  "...",
  "?!?!",
  "—–-‐‑",
  "“quoted” ‘single’",
  "§¶†‡",
]
CODE = [
  "def f(x):\n  return x ** 2\n",
  "for (int i = 0; i < n; ++i) { a[i] += b[i]; }",
  "#include <stdio.h>\n\nint main(void) {\n\treturn 0;\n}\n",
  "SELECT * FROM t WHERE a != 'b';",
  '<div class="x">&amp;</div>',
  '{"a": [1, 2.5, null], "b": {"c": true}}',
  "x = lambda *a, **k: None",
  "    indented\n        twice\n",
  "\tif x:\n\t\tpass",
  "a\\nb\\t\\\\",
  "#!/bin/sh\nset -e\n",
  "// comment\n/* block */",
  "std::vector<std::pair<int, int>>",
  "print(f'{x!r:>{w}}')",
  "https://example.com/a?b=c&d=e#f",
  "user@example.com",
  "/usr/local/bin:/bin",
  "C:\\Users\\x",
  "$HOME/${VAR}",
  "`code` ```py\nx\n```",
]
EMOJI = [
  "🙂",
  "👍🏽",
  "👨‍👩‍👧‍👦",
  "🏳️‍🌈",
  "🇫🇷🇩🇪",
  "❤️ ❤",
  "☕︎☕️",
  "a🙂b 🙂 c",
  "🙂🙂🙂",
  "👩🏿‍🚀",
  "1️⃣2️⃣",
  "🫠🪿",
  "∑∫√∞≠≤",
  "→⇒⟶",
  "𝒜𝔅𝕔",
  "𐍈𒀀𓀀",
]
SCRIPTS = [
  "漢字",
  "日本語のテキスト。",
  "中文，标点！",
  "한국어 문장입니다.",
  "ひらがなカタカナ",
  "مرحبا بالعالم",
  "السلام عليكم ١٢٣",
  "שלום עולם",
  "हिन्दी पाठ",
  "ไทยไม่มีช่องว่าง",
  "Привет, мир",
  "Ελληνικά",
  "ქართული",
  "Հայերեն",
  "አማርኛ",
  "தமிழ்",
  "বাংলা",
  "မြန်မာ",
  "ខ្មែរ",
  "Tiếng Việt",
  "İstanbul ıI",
  "ǅ ǈ",
  "é🙂漢字",
  "漢 字",
  " 漢",
]
SPACES = [
  " a",
  "  a",
  "   a",
  "a ",
  "a  ",
  "a   ",
  "a  b",
  "a   b",
  " a b ",
  "\t",
  "\t\t",
  "\ta",
  "a\tb",
  "a \tb",
  "\n",
  "\n\n",
  "\n\n\n",
  "a\nb",
  "a\n\nb",
  "a \nb",
  "a\n b",
  "\r\n",
  "a\r\nb",
  "a\r\n\r\nb",
  "\r",
  "a\rb",
  " \n ",
  "\n \n",
  "  \n\t ",
  "a\u00a0b",
  "\u00a0",
  "\u2003a",
  "\u3000a",
  "a\u200bb",
  "\u200f\u200e",
  "\ufeffa",
  "\u2028a\u2029",
  "\x0b\x0c",
  "\x85a",
  " " * 17,
  "a" + " " * 64 + "b",
  "\n" * 20,
  "\t" * 9 + "x",
  " \t \t",
]
NUMBERS = [
  "1",
  "12",
  "123",
  "1234567890",
  " 1",
  "  12",
  "   123",
  "1 2",
  "1  2",
  "3.14159",
  "1,000,000",
  "-5",
  "+5e-10",
  "0x1F",
  "1st 2nd",
  "2024-01-31T12:00:00Z",
  "a1b2c3",
  "1a2b",
  "v1.2.3",
  "100%",
  "$5.00",
  "٣٤",
  "१२",
  "½ ²³ Ⅷ",
  "①②",
  "x  42  y",
  "\n1\n2",
  "\t1",
  "12:30",
  "1/2",
  "999999999999999999999",
  "  0",
  "a    7",
]
MARKUP = [
  "<|im_start|>",
  "<|im_end|>",
  "<|im_start|>user\nHi<|im_end|>\n",
  "<|endoftext|>",
  "a<|im_end|>b",
  "a <|im_end|> b",
  "<|im_end|><|im_end|>",
  "<|im_start",
  "|im_end|>",
  "<|IM_END|>",
  "<repo_name>x<file_sep>y",
  "<s>",
  "</s>",
  "<pad>",
  "<|im_end|>\n<|im_start|>assistant\n",
  "<jupyter_code>1<empty_output>",
  "<| im_end |>",
  "<<|im_end|>>",
  "<|im_start|><|im_start|>",
  "[INST] x [/INST]",
]
ODD = [
  "\x00",
  "a\x00b",
  "\x01\x02\x1f",
  "\x7f\x80\x9f",
  "\ufffd",
  "a\ufffdb",
  "\ufffe\uffff",
  "\U0010ffff",
  "\ue000",
  "\u0301",
  "\u0301a",
  "z͑ͫ̓ͪ̂ͫ̽͏̴a̵lgo",
  "ĠĊ",
  "Ġa",
  "Ã©",
  "▁a",
  "<0xE4>",
  "##a",
  "a" + "\u0300" * 30,
  "\u202eabc",
  "\x1b[31mred\x1b[0m",
  "'s",
  "'S",
  " 's",
  "''s",
  "'re're",
  "_",
  "__init__",
  "snake_case_name",
  "camelCaseName",
  "ALLCAPS",
  "MiXeD",
  "!@#$%^&*()",
  "((((((",
  "=====",
  "-----",
  "a-b-c",
  "a.b.c",
  "~~~",
  "\\\\\\",
  "•◦▪",
  "™®©",
  "€£¥",
  "°C",
  "µm",
  "10µF",
  "C++",
  "C#",
  "F#",
  ".NET",
  "e.g.",
  "i.e.,",
]
TEXTS = [text for group in (WORDS, CODE, EMOJI, SCRIPTS, SPACES, NUMBERS, MARKUP, ODD) for text in group]

CONVERSATIONS = [
  [{"role": "user", "content": "Hi"}],
  [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}],
  [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": " two  spaces \n"},
  ],
  [{"role": "system", "content": ""}, {"role": "user", "content": ""}],
  [{"role": "user", "content": '<b>&amp;</b> 🙂 漢字 "q" <|im_end|>'}],
]
TEMPLATES = {
  "controls": "{%- for m in messages %}\n  {%- if m.role == 'system' %}{% continue %}{% endif %}\n"
  "{{ bos_token if loop.first }}[{{ m.role }}] {{ m.content | trim }}\n"
  "{% if loop.index > 2 %}{% break %}{% endif %}\n{% endfor %}\n{% if add_generation_prompt %}>{% endif %}",
  "json": "{{ messages | tojson }}\n"
  "{{ messages[0] | tojson(indent=2) }}{{ tools is none }}{{ documents is none }}{{ undefined_name }}",
  "generation": "{% for m in messages %}{% if m.role == 'assistant' %}"
  "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}\n{% else %}\n"
  "    {# comment #}\n    {{ m.content }}|\n  {% endif %}{% endfor %}",
  "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}"
  "{% endfor %}{{ ns.n }} {{ eos_token }}{{ pad_token }}",
}


def random_ids(size: int) -> list[list[int]]:
  draw = random.Random(0)
  return [[draw.randrange(size) for _ in range(draw.randrange(1, 12))] for _ in range(40)]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--gguf", required=True)
  parser.add_argument("--hf", required=True)
  flags = parser.parse_args()
  import gguf
  import transformers
  from tokenizers import pre_tokenizers

  fields = gguf.GGUFReader(flags.gguf).fields
  metadata = {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}
  packed = lzma.compress(
    json.dumps(metadata, ensure_ascii=False, separators=(",", ":")).encode(), preset=9 | lzma.PRESET_EXTREME
  )
  (HERE / "smollm2_tokenizer.json.xz").write_bytes(packed)

  source = json.loads((Path(flags.hf) / "tokenizer.json").read_text("utf-8"))
  model = source.pop("model")
  assert model.pop("vocab") == {text: index for index, text in enumerate(metadata["tokenizer.ggml.tokens"])}
  assert [list(pair) for pair in model.pop("merges")] == [
    merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]
  ]
  tokenizer = transformers.AutoTokenizer.from_pretrained(flags.hf)
  written = [tokenizer.encode(text) for text in TEXTS]
  ids = random_ids(len(tokenizer))
  record = {
    "made_by": f"transformers {transformers.__version__}",
    "frame": {**source, "model": model},
    "tokenizer_config": json.loads((Path(flags.hf) / "tokenizer_config.json").read_text("utf-8")),
    "decoded": [
      [row, tokenizer.decode(row, skip_special_tokens=False), tokenizer.decode(row, skip_special_tokens=True)]
      for row in ids
    ],
    "chats": [
      [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt), prompt, chat]
      for chat in CONVERSATIONS
      for prompt in (True, False)
    ],
    "templates": [
      [
        name,
        template,
        chat,
        tokenizer.apply_chat_template(chat, tokenize=False, chat_template=template, add_generation_prompt=True),
      ]
      for name, template in TEMPLATES.items()
      for chat in CONVERSATIONS
    ],
  }
  backend = tokenizer.backend_tokenizer
  backend.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
  )
  published = [tokenizer.encode(text) for text in TEXTS]
  record["texts"] = [list(row) for row in zip(TEXTS, written, published)]
  (HERE / "tokenizer_smollm2.json").write_text(
    json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n", "utf-8"
  )
  differ = sum(a != b for a, b in zip(written, published))
  print(f"{len(TEXTS)} texts, {differ} of them differ, {len(packed)} bytes of metadata")


if __name__ == "__main__":
  main()
