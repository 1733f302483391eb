// Colours code. The library splits it into nested parts with a scope each; this module makes elements of them.

import { element } from "./dom.js";

const LONGEST = 50000; // characters: longer code stays plain, because it is split again whenever it grows

// Returns the nodes of a text in a language, or of one without colours if the language is not known.
export function highlighted(code, language) {
  const { hljs } = globalThis;
  if (!hljs?.getLanguage(language) || code.length > LONGEST) return [code];
  return nodes(hljs.highlight(code, { language, ignoreIllegals: true })._emitter.rootNode);
}

const nodes = ({ children }) => children.map((child) => (typeof child === "string" ? child : part(child)));
const part = (tree) => element("span", tree.scope ? `hl-${tree.scope.split(".")[0].replace(/\W/g, "-")}` : "", ...nodes(tree));
