// Renders Markdown as elements. The library only parses; this module makes elements from its tokens, so HTML in the source
// stays text. Links may lead to http, https and mailto. Images become links, so nothing is fetched.

import "./vendor/markdown-it.umd.min.js";
import { copyButton, element } from "./dom.js";
import { formula, formulas } from "./formulas.js";
import { highlighted } from "./highlight.js";

const parser = globalThis.markdownit({ html: false, linkify: true, breaks: true }).use(formulas);
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // otherwise "setup.py" would be a link
parser.validateLink = (url) => /^(https?:|mailto:)/i.test(url);

const drawn = new WeakMap(); // place → [{source, type, node}], its top-level blocks

// Shows a text at a place. If the text has grown, only the blocks that changed are replaced.
export function render(place, text) {
  const before = drawn.get(place) ?? [];
  const blocks = topLevel(text);
  let same = 0;
  while (same < blocks.length && before[same]?.source === blocks[same].source) same++;
  blocks.forEach((block, i) => {
    if (i < same) block.node = before[i].node;
    else if (i === same && block.type === "fence" && before[i]?.type === "fence") {
      block.node = before[i].node; // so it keeps its scroll position, and its button the focus
      fill(block.node, block.tokens[0]);
    } else {
      block.node = element("div");
      build(block.tokens, block.node);
      block.node = block.node.firstChild;
      if (before[i]) before[i].node.replaceWith(block.node);
      else place.append(block.node);
    }
  });
  for (const { node } of before.slice(blocks.length)) node.remove();
  drawn.set(place, blocks);
}

function topLevel(text) {
  const lines = text.split("\n");
  const blocks = [];
  for (const token of parser.parse(text, {})) {
    if (token.level === 0 && token.nesting >= 0) {
      blocks.push({ source: lines.slice(...token.map).join("\n"), type: token.type, tokens: [] });
    }
    blocks.at(-1).tokens.push(token);
  }
  return blocks;
}

function build(tokens, root) {
  const open = [root];
  for (const token of tokens) {
    if (token.hidden) continue; // the paragraphs of a tight list
    if (token.type === "inline") build(token.children, open.at(-1));
    else if (token.nesting === 1) open.push(begin(token, open.at(-1)));
    else if (token.nesting === -1) open.pop();
    else open.at(-1).append(leaf(token));
  }
}

function begin(token, parent) {
  const made = token.tag === "a" ? link(token.attrGet("href")) : element(token.tag);
  if (token.attrGet("start")) made.start = token.attrGet("start");
  if (token.attrGet("style")) made.style.textAlign = token.attrGet("style").replace("text-align:", "");
  parent.append(made);
  return made;
}

function leaf(token) {
  if (token.type === "fence" || token.type === "code_block") return fill(codeBlock(), token);
  if (token.type === "formula") return formula(token);
  if (token.type === "code_inline") return element("code", "", token.content);
  if (token.type === "image") return link(token.attrGet("src"), `image: ${token.content || token.attrGet("src")}`);
  if (token.type === "hardbreak" || token.type === "softbreak") return element("br");
  return token.type === "hr" ? element("hr") : token.content;
}

function link(href, ...children) {
  const made = element("a", "", ...children);
  Object.assign(made, { href, title: href, target: "_blank", rel: "noopener noreferrer" });
  return made;
}

function codeBlock() {
  const code = element("code");
  const pre = element("pre", "", code);
  pre.tabIndex = 0; // so that the keyboard can scroll it
  return element("figure", "code", element("figcaption", "", element("span"), copyButton(() => code.textContent)), pre);
}

function fill(figure, token) {
  const language = token.info.trim().split(/\s/)[0];
  figure.querySelector("figcaption span").textContent = language || "text";
  figure.querySelector("code").replaceChildren(...highlighted(token.content, language));
  return figure;
}
