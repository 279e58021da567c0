// node write_reference.mjs TOKENIZER_JSON OUTPUT COUNT [SEED]
// Encodes and decodes the generated strings with @huggingface/tokenizers, and writes for each:
//   uint32 bytes, uint32 ids, uint32 decoded bytes, then the string, the ids (int32), the decoded
//   text of the ids. Little endian, behind the magic "NBTOKREF", a uint32 count and a uint32 skip
//   count.
//
// Skipped strings are those where the reference is known to differ from the library that it
// follows (the Rust tokenizers with Oniguruma); tests/tokenizer_reference/README.md says why.
import fs from 'node:fs';
import { createRequire } from 'node:module';
import { make_case } from './strings.mjs';

const [tokenizer_path, output_path, count_text, seed_text] = process.argv.slice(2);
const require = createRequire(process.env.NIBBLE_TOKENIZER_MODULES + '/');
const { Tokenizer } = require('@huggingface/tokenizers');

const json = JSON.parse(fs.readFileSync(tokenizer_path, 'utf8'));
const tokenizer = new Tokenizer(json, { clean_up_tokenization_spaces: false });
const special = json.added_tokens.map((token) => token.content).slice(0, 40);
// invalid UTF-8 as the reference reads it; a BOM at the start is kept
const text_of = (bytes) => new TextDecoder('utf-8', { ignoreBOM: true }).decode(bytes);

export const LONG_S = /'\u017f/;  // (?i:'s) matches it in Oniguruma, not in the reference

const chunks = [];
let written = 0, skipped = 0;
for (let index = 0; written < Number(count_text); ++index) {
  const { bytes } = make_case(Number(seed_text ?? 1), index, special);
  const text = text_of(bytes);
  if (bytes.length === 0) continue;
  if (LONG_S.test(text)) { ++skipped; continue; }
  const ids = tokenizer.encode(text, { add_special_tokens: false }).ids;
  const decoded = ids.length === 0 ? '' : tokenizer.decode(ids, { clean_up_tokenization_spaces: false });
  const decoded_bytes = Buffer.from(decoded, 'utf8');
  const head = Buffer.alloc(12 + bytes.length + 4 * ids.length);
  head.writeUInt32LE(bytes.length, 0);
  head.writeUInt32LE(ids.length, 4);
  head.writeUInt32LE(decoded_bytes.length, 8);
  head.set(bytes, 12);
  ids.forEach((id, i) => head.writeInt32LE(id, 12 + bytes.length + 4 * i));
  chunks.push(head, decoded_bytes);
  ++written;
}
const begin = Buffer.alloc(16);
begin.write('NBTOKREF', 0, 'latin1');
begin.writeUInt32LE(written, 8);
begin.writeUInt32LE(skipped, 12);
fs.writeFileSync(output_path + '.partial', Buffer.concat([begin, ...chunks]));
fs.renameSync(output_path + '.partial', output_path);
console.log(`${output_path}: ${written} strings, ${skipped} skipped`);
