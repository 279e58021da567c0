// The test strings: generated, so that the same seed gives the same strings on every machine.
// Only code points that Unicode 14 assigns are used: PCRE2 10.42 knows Unicode 14, node 20 knows
// Unicode 15 and 17, ICU 72 knows 15; a character that one of them does not know yet cannot be
// compared.

export function random_source(seed) {
  let state = BigInt(seed) * 0x9e3779b97f4a7c15n + 1n;
  const mask = (1n << 64n) - 1n;
  const next = () => {
    state = (state + 0x9e3779b97f4a7c15n) & mask;
    let z = state;
    z = ((z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n) & mask;
    z = ((z ^ (z >> 27n)) * 0x94d049bb133111ebn) & mask;
    return Number((z ^ (z >> 31n)) >> 32n);
  };
  return {
    below: (n) => next() % n,
    pick: (list) => list[next() % list.length],
  };
}

// Blocks that have been fully or mostly assigned for long; [first, last], checked by \p{Assigned}
// of the running engine and by the list of later additions below.
const RANGES = {
  ascii: [[0x00, 0x7f]],
  latin: [[0x80, 0x24f], [0x1e00, 0x1eff]],
  ipa_marks: [[0x250, 0x36f]],
  greek: [[0x370, 0x3ff], [0x1f00, 0x1fff]],
  cyrillic: [[0x400, 0x52f]],
  armenian: [[0x531, 0x58a]],
  hebrew: [[0x591, 0x5f4]],
  arabic: [[0x600, 0x6ff], [0x750, 0x77f]],
  syriac: [[0x700, 0x74a]],
  devanagari: [[0x900, 0x97f]],
  bengali: [[0x980, 0x9fe]],
  gurmukhi: [[0xa01, 0xa76]],
  gujarati: [[0xa81, 0xaff]],
  oriya: [[0xb01, 0xb77]],
  tamil: [[0xb82, 0xbfa]],
  telugu: [[0xc00, 0xc7f]],
  kannada: [[0xc80, 0xcf2]],
  malayalam: [[0xd00, 0xd7f]],
  sinhala: [[0xd81, 0xdf4]],
  thai: [[0xe01, 0xe5b]],
  lao: [[0xe81, 0xedf]],
  tibetan: [[0xf00, 0xfda]],
  myanmar: [[0x1000, 0x109f]],
  georgian: [[0x10a0, 0x10ff]],
  hangul: [[0x1100, 0x11ff], [0xac00, 0xd7a3], [0x3131, 0x318e]],
  ethiopic: [[0x1200, 0x137c]],
  cherokee: [[0x13a0, 0x13fd]],
  khmer: [[0x1780, 0x17f9]],
  mongolian: [[0x1800, 0x18aa]],
  punctuation: [[0x2000, 0x206f], [0x2e00, 0x2e52]],
  sub_super: [[0x2070, 0x209c]],
  currency: [[0x20a0, 0x20bf]],
  letterlike: [[0x2100, 0x218b]],
  arrows_math: [[0x2190, 0x23ff]],
  enclosed: [[0x2460, 0x24ff], [0x3200, 0x33ff]],
  boxes: [[0x2500, 0x27bf]],
  cjk_signs: [[0x3000, 0x303f]],
  kana: [[0x3041, 0x30ff], [0xff66, 0xff9d]],
  han: [[0x4e00, 0x9fff]],
  han_ext: [[0x3400, 0x4dbf], [0x20000, 0x2a6dd]],
  compat: [[0xf900, 0xfad9], [0x2f800, 0x2fa1d]],
  presentation: [[0xfb00, 0xfb4f], [0xfe10, 0xfe19], [0xfe30, 0xfe6b]],
  halfwidth: [[0xff01, 0xffee]],
  private: [[0xe000, 0xe0ff]],
  gothic: [[0x10330, 0x1034a]],
  music: [[0x1d100, 0x1d1e8]],
  math_letters: [[0x1d400, 0x1d7ff]],
  emoji: [[0x1f300, 0x1f64f], [0x1f680, 0x1f6d7], [0x1f900, 0x1f9ff]],
  tags: [[0xe0020, 0xe007f]],
};
// Inside of the ranges above, assigned only in Unicode 15 or later.
const TOO_NEW = [[0x0cf3, 0x0cf3], [0x0ece, 0x0ece], [0x1f6dc, 0x1f6dc], [0x1f774, 0x1f776],
  [0x1c89, 0x1c8a], [0x2427, 0x2429], [0x31e4, 0x31ef], [0x2ffc, 0x2fff], [0x20c1, 0x20c1],
  [0x1d1e9, 0x1d1ff], [0x0c5c, 0x0c5c], [0x0cdc, 0x0cdc], [0x088f, 0x088f]];
const ASSIGNED = /^[\p{Assigned}\p{Co}]$/u;
const usable = (c) => !(c >= 0xd800 && c <= 0xdfff) && ASSIGNED.test(String.fromCodePoint(c)) &&
  !TOO_NEW.some(([low, high]) => c >= low && c <= high);
const ALPHABETS = Object.fromEntries(Object.entries(RANGES).map(([name, ranges]) => [name,
  ranges.flatMap(([low, high]) => Array.from({ length: high - low + 1 }, (_, i) => low + i))
    .filter(usable).map((c) => String.fromCodePoint(c))]));
const NAMES = Object.keys(ALPHABETS);

const PROSE = [
  'The ferry left at seven, and nobody on the pier waved.', "I'm sure they've said it's John's; we'll see, you'd think.",
  "DON'T PANIC: IT'S ONLY A TEST, WE'RE FINE, YOU'LL SEE!", 'A list: apples, pears; (plums) [figs] {dates} <nuts>.',
  'In 1987 it cost $1,234.56 -- about 12% more than in 1986.', 'e-mail: someone@example.org, see https://example.org/a?b=c&d=%20#e',
  'He said: "No." She said: \u201cYes\u201d \u2026 and that\u2019s that \u2014 \u2018fine\u2019.', 'na\u00efve caf\u00e9 Z\u00fcrich \u20ac100 \u00a35 \u00bd \u00b2',
];
const CODE = [
  'def f(x):\n    return x**2 + 1\n', 'for (int i = 0; i < n; ++i) { a[i] += b[i] * 2.0f; }\n', '#include <vector>\n\ntemplate <typename T>\nclass Box {\n public:\n  T value_;\n};\n',
  'SELECT name, COUNT(*) FROM users WHERE age >= 21 GROUP BY name;', 'const x = async (a, ...b) => ({ a, b: b?.[0] ?? null });\n', '\tif err != nil {\n\t\treturn fmt.Errorf("open %q: %w", path, err)\n\t}\n',
  '<div class="a b" id=\'c\'>&nbsp;&lt;&#x27;</div>', '{"key": [1, 2.5e-3, true, null], "s": "\\u00e9\\n"}', 'fn main() -> Result<(), Box<dyn Error>> { println!("{:?}", 0x1F_u8); Ok(()) }',
  'x86_64-linux-gnu $HOME/.config && make -j8 2>&1 | tee log.txt', '\\begin{equation} \\frac{a_1^2}{\\sqrt{b}} \\end{equation}', '/* ======== */ // ---------- TODO_list ##### @@@@ ~~~~',
];
const SCRIPTS = [
  'Доброе утро, мир! Как дела?', 'Καλημέρα κόσμε, τι κάνεις;', 'שלום עולם, מה שלומך?', 'صباح الخير يا عالم، كيف الحال؟', 'सुप्रभात दुनिया, आप कैसे हैं?', 'শুভ সকাল, কেমন আছেন?',
  'ਸ਼ੁਭ ਸਵੇਰ ਦੁਨੀਆ', 'સુપ્રભાત દુનિયા', 'காலை வணக்கம் உலகமே', 'శుభోదయం ప్రపంచం', 'ಶುಭೋದಯ ಪ್ರಪಂಚ', 'സുപ്രഭാതം ലോകം', 'සුබ උදෑසනක්', 'สวัสดีชาวโลก สบายดีไหม', 'ສະບາຍດີ ໂລກ',
  'བཀྲ་ཤིས་བདེ་ལེགས།', 'မင်္ဂလာပါ ကမ္ဘာ', 'გამარჯობა მსოფლიო', 'እንደምን አደራችሁ', 'អរុណសួស្តី ពិភពលោក', 'Сайн байна уу', '早上好，世界！今天天气很好。', 'おはよう、世界。カタカナもひらがなも。',
  '안녕하세요, 세계! 잘 지내세요?', 'Բարի լույս աշխարհ', 'Chào buổi sáng thế giới', 'Günaydın dünya, İSTANBUL ılık', 'Dzień dobry, świecie! Zażółć gęślą jaźń', 'ᏏᏲ ᎡᎶᎯ', '中文和English混排123以及，标点。',
];
const EMOJI = ['😀', '🚀', '👩‍👩‍👧‍👦', '👍🏽', '🏳️‍🌈', '🇩🇪', '🇯🇵🇧🇷', '❤️', '1️⃣', '☕︎', '🧑🏿‍🚀', '🏴󠁧󠁢󠁳󠁣󠁴󠁿', '✨', '🤦🏼‍♂️'];
const SPACES = [' ', '  ', '   ', '\t', '\t\t', '\n', '\r\n', '\n\n', '\r', '\u00a0', '\u2003', '\u3000', '\u2028', '\u0085', '\u180e', '\ufeff', '\u200b', '\u200d', '\u202f', ' \n', '\n ', ' \r\n\t', '\v', '\f', '\u001c'];
const WORDS = ['the', 'The', 'THE', ' and', 'of', 'Hello', 'world', "'s", "'S", "'ll", "'Re", "'t", "don't", 'iPhone', 'camelCase', 'snake_case', 'e.g.', '\u00e9t\u00e9', 'e\u0301te\u0301', '\u00c5', 'A\u030a', '\u212b', 'ǅ', 'ﬁ', '½', '²', '٣', '९', '三'];

const join = (random, list, n) => Array.from({ length: n }, () => random.pick(list)).join('');

function from_alphabets(random, names, n) {
  let text = '';
  for (let i = 0; i < n; ++i) {
    text += random.pick(ALPHABETS[random.pick(names)]);
    if (random.below(6) === 0) text += random.pick(SPACES);
  }
  return text;
}

function random_bytes(random, n) {
  const bytes = new Uint8Array(n);
  const mostly_text = random.below(2) === 0;
  for (let i = 0; i < n; ++i) bytes[i] = mostly_text && random.below(4) > 0 ? 32 + random.below(95) : random.below(256);
  return bytes;
}

function cut_utf8(random, text) {
  const bytes = new TextEncoder().encode(text);
  const begin = random.below(Math.max(1, Math.min(4, bytes.length)));
  return bytes.slice(begin, bytes.length - random.below(3));
}

// One string of class `kind`; bytes instead of a string where UTF-8 is to be broken.
function make(random, kind, special) {
  switch (kind) {
    case 0: return join(random, [...PROSE.map((s) => s + ' '), ...SPACES, ...WORDS], 1 + random.below(4));
    case 1: return join(random, [...CODE, '    ', '\n', '\t'], 1 + random.below(4));
    case 2: return join(random, [...SCRIPTS, ...SCRIPTS, ' ', ...EMOJI], 1 + random.below(4));
    case 3: return join(random, [...EMOJI, ...WORDS, ' '], 1 + random.below(8));
    case 4: return join(random, [...SPACES, ...SPACES, ...WORDS], 1 + random.below(12));
    case 5: { // digits, with separators and letters
      const digits = ['0', '12', '345', '6789', '1234567', '٣٤', '९०', '½', '²', 'Ⅷ', '①', ',', '.', ' ', 'a', '-'];
      return join(random, digits, 1 + random.below(10));
    }
    case 6: return join(random, [...special, ...special, ...WORDS, ' ', '\n', ...SCRIPTS, '<', '|', '<|', '|>'], 1 + random.below(7));
    case 7: return random_bytes(random, 1 + random.below(60));
    case 8: return cut_utf8(random, join(random, [...SCRIPTS, ...EMOJI], 1 + random.below(3)));
    case 9: { // long runs of one thing
      const unit = random.pick(['a', 'ab', ' ', '\n', 'ha', '=', '-', '0', '9', '字', 'あ', '😀', 'é', '\t', 'A', '\r\n', '.', 'e\u0301', 'ки', '  \n']);
      return unit.repeat(1 + random.below(random.below(10) === 0 ? 1500 : 80));
    }
    case 10: return from_alphabets(random, [random.pick(NAMES)], 1 + random.below(30));
    case 11: return from_alphabets(random, NAMES, 1 + random.below(30));
    case 12: return from_alphabets(random, [random.pick(NAMES), 'ascii', 'latin', 'ipa_marks'], 1 + random.below(30));
    default: { // a slice of everything glued together without care for words
      const all = join(random, [...PROSE, ...CODE, ...SCRIPTS, ...EMOJI, ...SPACES], 3);
      const points = Array.from(all);
      const begin = random.below(points.length);
      return points.slice(begin, begin + 1 + random.below(40)).join('');
    }
  }
}

export const KINDS = ['prose', 'code', 'scripts', 'emoji', 'whitespace', 'digits', 'special tokens',
  'random bytes', 'cut UTF-8', 'runs', 'one alphabet', 'all alphabets', 'marks', 'slices'];

// { kind, bytes } for string number `index`.
export function make_case(seed, index, special) {
  const random = random_source(seed * 1000003 + index);
  const kind = index % KINDS.length;
  const made = make(random, kind, special);
  return { kind, bytes: typeof made === 'string' ? new TextEncoder().encode(made) : made };
}
