// Formulas in TeX: $…$ and \(…\) in a line, $$…$$ and \[…\] as a block. The library makes MathML elements; a formula that it
// does not understand is shown as it was written.

import { element } from "./dom.js";

const MARKS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];
const LONGEST = 5000; // characters
const LIMITS = { trust: false, throwOnError: true, maxExpand: 1000, maxSize: [50, 50] }; // em

// A plugin for markdown-it.
export function formulas(parser) {
  parser.inline.ruler.before("escape", "formula", parse);
  parser.block.ruler.before("fence", "formula", parseBlock, { alt: ["paragraph", "reference", "blockquote", "list"] });
}

// Returns the formula that begins at a place, {end, source, content, isBlock}; null if there is none.
function find(text, at) {
  for (const [open, close, isBlock] of MARKS) {
    if (!text.startsWith(open, at)) continue;
    const begin = at + open.length;
    const end = closing(text, begin, close);
    if (end < 0 || end - begin > LONGEST) return null;
    const content = text.slice(begin, end);
    if (!content.trim() || (open === "$" && !isFormula(content, text[end + 1]))) return null;
    return { end: end + close.length, source: text.slice(at, end + close.length), content, isBlock };
  }
  return null;
}

function closing(text, from, mark) {
  let end = text.indexOf(mark, from);
  while (mark[0] === "$" && end > 0 && text[end - 1] === "\\") end = text.indexOf(mark, end + 1); // \$ is a dollar
  return end;
}

// Whether what is between two dollars is a formula, and not "$5 and $6": the rule of Pandoc, and no mark of code between them.
const isFormula = (content, next) => !/^\s|\s$|\n\s*\n|`/.test(content) && !/\d/.test(next ?? "");

function parse(state, silent) {
  const found = "$\\".includes(state.src[state.pos]) && find(state.src, state.pos);
  if (!found || found.end > state.posMax) return false;
  if (!silent) push(state, found);
  state.pos = found.end;
  return true;
}

// A block formula may contain lines that would be something else in Markdown, such as "= x".
function parseBlock(state, first, last, silent) {
  const begin = state.bMarks[first] + state.tShift[first];
  const found = /^(\$\$|\\\[)/.test(state.src.slice(begin, begin + 2)) && find(state.src, begin);
  if (!found) return false;
  let line = first;
  while (line < last && state.eMarks[line] < found.end) line++;
  if (line >= last || state.src.slice(found.end, state.eMarks[line]).trim()) return false;
  if (silent) return true;
  state.line = line + 1;
  push(state, found).map = [first, state.line];
  return true;
}

function push(state, { source, content, isBlock }) {
  const token = state.push("formula", "", 0);
  return Object.assign(token, { content, markup: source, block: isBlock });
}

// Returns the element of a formula's token.
export function formula({ content, markup, block }) {
  const made = element("span", block ? "formula block" : "formula");
  try {
    globalThis.temml.render(content, made, { ...LIMITS, displayMode: block });
  } catch {
    made.replaceChildren(element("code", "", markup)); // TeX that the library does not know
  }
  return made;
}
