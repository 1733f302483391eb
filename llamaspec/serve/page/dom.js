// Makes elements. Strings become text nodes: nothing on this page parses a string as HTML.

export const $ = (id) => document.getElementById(id);

export function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

export function button(label, onClick, className = "") {
  const made = element("button", className, label);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

export function copyButton(text) {
  return button("Copy", async (event) => {
    await copy(text());
    event.target.textContent = "Copied";
    setTimeout(() => (event.target.textContent = "Copy"), 1500);
  });
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea", "", text); // over plain HTTP, pages of other machines have no clipboard
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
