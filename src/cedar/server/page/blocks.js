// Where a Markdown text can be cut: between blocks, never within a code block. Pure functions.

// Longer pieces would cost more time than one rendering may take while a reply is growing.
const PIECE = 12_000;

/** Ascending positions at which everything before is whole blocks. */
function boundaries(text) {
  const found = [];
  let position = 0;
  let fence = null;
  for (const line of text.split(/(?<=\n)/)) {
    const whole = line.endsWith("\n");
    const mark = /^ {0,3}(`{3,}|~{3,})(.*)$/.exec(line.replace(/\r?\n$/, ""));
    const start = position;
    position += line.length;
    if (fence) {
      if (whole && mark?.[1].startsWith(fence) && !mark[2].trim()) {
        fence = null;
        found.push(position);
      }
    } else if (mark && !(mark[1][0] === "`" && mark[2].includes("`"))) {
      fence = mark[1];
      found.push(start);
    } else if (whole && !line.trim()) {
      found.push(position);
    }
  }
  return found;
}

/** What can be rendered already, whole blocks, and the rest that still grows. */
export function settle(text) {
  const end = boundaries(text).at(-1) ?? 0;
  return { settled: text.slice(0, end), rest: text.slice(end) };
}

/**
 * A text in pieces that can be rendered one by one; the first ones stay the same as it grows. Lists
 * and quotations are kept together, so a piece may be longer than asked.
 */
export function pieces(text, longest = PIECE) {
  const found = [];
  let start = 0;
  let last = 0;
  for (const next of [...boundaries(text), text.length]) {
    if (next - start > longest && last > start) {
      found.push(text.slice(start, last));
      start = last;
    }
    if (!/^(\s|[-*+>]\s|\d+[.)]\s)/.test(text.slice(next, next + 12))) last = next;
  }
  if (start < text.length) found.push(text.slice(start));
  return found;
}
