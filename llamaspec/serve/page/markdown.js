// The little of Markdown that answers use, as nodes: text is never read as HTML, links are not followed.

function inline(text) {
  const nodes = [];
  const pattern = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\n]+)\*/g;
  let at = 0;
  for (const match of text.matchAll(pattern)) {
    nodes.push(document.createTextNode(text.slice(at, match.index)));
    const tag = match[1] !== undefined ? "code" : match[2] !== undefined ? "strong" : "em";
    nodes.push(block(tag, [document.createTextNode(match[1] ?? match[2] ?? match[3])]));
    at = match.index + match[0].length;
  }
  nodes.push(document.createTextNode(text.slice(at)));
  return nodes;
}

function block(tag, children) {
  const made = document.createElement(tag);
  made.append(...children);
  return made;
}

export function format(text) {
  const nodes = [];
  let paragraph = [];
  let list = null;
  let code = null;
  const finish = () => {
    if (paragraph.length) nodes.push(block("p", inline(paragraph.join("\n"))));
    paragraph = [];
    list = null;
  };
  for (const line of text.split("\n")) {
    if (/^\s*```/.test(line)) {
      finish();
      if (code === null) code = [];
      else {
        nodes.push(block("pre", [block("code", [document.createTextNode(code.join("\n"))])]));
        code = null;
      }
      continue;
    }
    if (code !== null) {
      code.push(line);
      continue;
    }
    const heading = /^#{1,6}\s+(.*)/.exec(line);
    const item = /^\s*(?:[-*+]|(\d+)[.)])\s+(.*)/.exec(line);
    if (heading) {
      finish();
      nodes.push(block("h3", inline(heading[1])));
    } else if (item) {
      const tag = item[1] ? "ol" : "ul";
      if (list?.localName !== tag) {
        finish();
        nodes.push((list = block(tag, [])));
      }
      list.append(block("li", inline(item[2])));
    } else if (!line.trim()) finish();
    else {
      if (list) finish();
      paragraph.push(line);
    }
  }
  finish();
  if (code !== null) nodes.push(block("pre", [block("code", [document.createTextNode(code.join("\n"))])]));
  return nodes;
}
